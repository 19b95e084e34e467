# SPDX-License-Identifier: Apache-2.0
"""Tests of several KV cache groups: whose bytes are whose, what a load owes, who is judged."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from pydantic import ValidationError
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.single_type_kv_cache_manager import ChunkedLocalAttentionManager

from access_rig import foreign
from kvconform.config.target import Target
from kvconform.contract.case import Case, Config
from kvconform.contract.loader import load_spec
from kvconform.kernels.codes import CodeBook
from kvconform.kv.cache import PagedCache, Slice, groups_of
from kvconform.kv.content import Content
from kvconform.kv.oracle import Grant
from kvconform.refimpl.variants.hybrid import HybridConnector
from kvconform.run.case import run_and_judge

SPEC = load_spec()
HYBRID = "kvconform.refimpl.variants.hybrid:HybridConnector"
CASES = [case.id for case in SPEC.cases.values() if case.area == "groups"]
TWO_LAYERS: dict[str, int] = {"layers": 2, "block_size": 4, "heads": 2, "window": 6}
GROUPS = groups_of(["full", "wide", "private"], layers=3, block_size=4, heads=2, window=6)


def cache() -> PagedCache:
    return PagedCache(CodeBook(3, 2, 16), 6, 4, groups=GROUPS)


def test_the_layers_of_all_groups_lie_on_the_same_bytes() -> None:
    made = cache()
    full, wide, private = made.tensors
    assert (full.shape, wide.shape) == ((6, 2, 4, 32), (6, 1, 8, 32))
    full[3] = 7.0
    assert (wide[3] == 7.0).all() and (private[3] == 7.0).all() and not wide[2].any()


def test_what_changed_is_a_change_of_the_layer_whose_block_it_is() -> None:
    made = cache()
    made.group_of[3] = 1
    # Written as if it were layer 0's: head 0, token 2 of 4. With one head and 8 tokens it is the
    # same token.
    made.tensors[0][3, 0, 2] = 1.0
    assert foreign(made) == [[], [3 * 8 + 2], []]
    assert foreign(made) == [[], [], []]


def test_every_layer_reads_back_what_was_written_to_its_block() -> None:
    made = cache()
    content = Content.of(made.book, np.array([11, 12], dtype=np.uint64))
    for layer, block in enumerate((1, 2, 3)):
        made.group_of[block] = layer
        slots = np.array([block * 8 + 1, block * 8 + 3])
        made.write(layer, slots, content)
        assert made.mismatches(layer, slots, content).tolist() == []
    assert foreign(made) == [[], [], []]
    assert made.mismatches(0, np.array([9]), content, np.array([1])).tolist() == [0]


def test_what_follows_a_state_in_its_block_is_no_change_of_the_next_owner() -> None:
    groups = groups_of(["full", "state"], layers=2, block_size=4, heads=2, window=6)
    made = PagedCache(CodeBook(2, 2, 16), 6, 4, groups=groups)
    made.group_of[3] = 1
    made.tensors[0][3] = 1.0  # a load of the whole page
    assert foreign(made) == [[], [3 * 4]]
    made.group_of[3] = 0
    assert foreign(made) == [[], []]


@pytest.mark.parametrize("group, slots", [(0, [8, 9, 10, 11]), (1, [8])], ids=["full", "state"])
def test_a_copied_block_has_the_content_and_the_group_of_its_source(
    group: int, slots: list[int]
) -> None:
    groups = groups_of(["full", "state"], layers=2, block_size=4, heads=2, window=6)
    made = PagedCache(CodeBook(2, 2, 16), 6, 4, groups=groups)
    content = Content.of(made.book, np.arange(11, 11 + len(slots), dtype=np.uint64), 5)
    made.group_of[1] = group
    source = np.array(slots) - 4
    made.write(group, source, content)
    assert made.copy_block(1, 2).tolist() == [source.tolist(), slots]
    assert made.group_of[2] == group
    assert made.mismatches(group, np.array(slots), content).tolist() == []
    assert foreign(made) == [[], []]


def test_with_one_group_all_is_computed_again_from_the_first_reported_block_on() -> None:
    grant = Grant("t", "a", 0, 4, 16, False, [[1, 2, 3, 4]], groups_of([], **TWO_LAYERS))
    grant.written[:] = True
    assert not grant.covered_by({2})  # nothing is missing
    grant.written[0, 4:] = False  # positions 8-15: blocks 3 and 4
    assert grant.covered_by({3, 4}) and grant.covered_by({3}) and grant.covered_by({2})
    assert not grant.covered_by({4}) and not grant.covered_by({1}) and not grant.covered_by(set())
    assert grant.named({1, 4}) == [12, 13, 14, 15]
    several = Grant("t", "a", 0, 0, 16, False, [[1, 2, 3, 4], [0, 5], [6, 7, 8, 9]], GROUPS)
    assert several.covered_by(several.lacking()) and not several.covered_by({1})


def test_a_grant_wants_nothing_before_the_window_and_nothing_of_a_group_that_is_kept_back() -> None:
    grant = Grant("t", "a", 0, 0, 16, False, [[1, 2, 3, 4], [0, 5], [6, 7, 8, 9]], GROUPS)
    assert grant.blocks == {1, 2, 3, 4, 5}
    assert grant.missing() == list(range(16))
    grant.written[0] = True
    assert grant.missing() == list(range(8, 16)) and grant.lacking() == {5}
    assert grant.position(1, 5 * 8 + 2) == 10 and grant.position(2, 6 * 8) is None
    grant.written[1] = True
    assert grant.missing() == [] and grant.kept_back == {6, 7, 8, 9}


def test_a_chunk_of_local_attention_begins_where_vllm_lets_it_begin() -> None:
    manager = ChunkedLocalAttentionManager.__new__(ChunkedLocalAttentionManager)
    manager.attention_chunk_size = 12
    [_, local] = groups_of(["full", "local"], layers=2, block_size=4, heads=2, window=12)
    for start in range(40):
        assert local.first_read(start) == manager.get_num_skipped_tokens(start)
    assert [local.reach(start) for start in (0, 11, 12, 14)] == [1, 12, 1, 3]


def test_a_grant_with_local_attention_wants_the_blocks_of_the_last_chunk() -> None:
    groups = groups_of(["full", "local"], layers=2, block_size=4, heads=2, window=8)
    grant = Grant("t", "a", 0, 0, 13, False, [[1, 2, 3, 4], [0, 0, 5, 6]], groups)
    assert grant.blocks == {1, 2, 3, 4, 5, 6}
    grant.written[0] = True
    assert grant.missing() == list(range(8, 13))


def test_a_grant_with_one_group_wants_every_position() -> None:
    grant = Grant(
        "t",
        "a",
        0,
        4,
        10,
        False,
        [[1, 2, 3]],
        groups_of([], layers=2, block_size=4, heads=2, window=8),
    )
    assert (grant.shared, grant.blocks) == ({1}, {2, 3})
    grant.written[0] = True
    assert grant.missing() == list(range(4, 10))


def test_a_block_counts_completely_and_as_often_as_it_was_written() -> None:
    grant = Grant("t", "a", 0, 0, 10, False, [[1, 2, 3], [4, 5], [6, 7, 8]], GROUPS)
    grant.written[0, 8:] = grant.written[1, 8] = True
    grant.times[0, 8:] = 1
    grant.times[1, 8] = 2
    assert [grant.received(layer) for layer in range(3)] == [2, 1, 0]
    assert [grant.received_in_blocks(layer) for layer in range(3)] == [4, 16, 0]


def test_a_rank_that_holds_every_second_token_has_half_a_block() -> None:
    groups = groups_of([], layers=1, block_size=4, heads=2, window=8)
    grant = Grant("t", "a", 0, 0, 3, False, [[1]], groups, Slice(1, 2))
    grant.written[0, 1] = True
    grant.times[0, 1] = 1
    assert (grant.received(0), grant.received_in_blocks(0)) == (1, 2)


def test_a_grant_has_the_blocks_of_all_ranks() -> None:
    """Of 13 tokens, the last is alone in its block, and on the first of two ranks."""
    groups = groups_of([], layers=1, block_size=4, heads=2, window=8)
    ranks = [Grant("t", "a", 0, 0, 13, False, [[1, 2, 3, 4]], groups, Slice(n, 2)) for n in (0, 1)]
    assert [grant.blocks for grant in ranks] == [{1, 2, 3, 4}] * 2


@pytest.mark.parametrize("load", ["sync", "async"])
@pytest.mark.parametrize("case", CASES)
def test_a_connector_for_several_groups_fails_nothing(case: str, load: str, tmp_path: Path) -> None:
    target = Target(HYBRID, {"store": "{tmp}/store", "load": load})
    runs = [
        run_and_judge(each, target, SPEC, seed=0, tmp=tmp_path / each.id)
        for each in SPEC.cases[case].variants()[0 if load == "sync" else -1 :]
    ]
    assert [run.harness_error for run in runs] == [None] * len(runs)
    assert [
        row.requirement
        for run in runs
        for row in run.rows
        if row.verdict in ("FAIL", "ERROR", "BLOCKED")
    ] == []
    assert [sentence for run in runs for sentence in run.unmet] == []
    assert load == "sync" or any(row.verdict == "PASS" for row in runs[0].rows)


class Told(HybridConnector):
    """Notes what the engine core has resolved before it constructs a connector."""

    what: ClassVar[list[tuple[Any, ...]]] = []

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        for each in (kv_cache_config, vllm_config.cache_config):
            self.what.append((each.hash_block_size, each.cache_hit_alignment_tokens))


@pytest.mark.skipif(
    not hasattr(kv_cache_utils, "resolve_cache_hit_alignment_tokens"), reason="not in this vLLM"
)
@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("groups.inside-block", (2, 2)),  # a state: hits end at any block hash
        ("groups.sizes", (4, 8)),  # blocks of 4 and 8 tokens
        ("lifecycle.last-token", (4, 4)),
    ],
)
def test_both_halves_are_told_where_hits_may_end(
    name: str, told: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Told, "what", [])
    variant = SPEC.cases[name].variants(["vllm"])[0]
    target = Target(f"{__name__}:Told", {"store": "{tmp}/store"}, capabilities={"store": True})
    assert run_and_judge(variant, target, SPEC, seed=0, tmp=tmp_path).harness_error is None
    # Twice by each half, in the judged run and in plain ones.
    assert Told.what.count(told) >= 4 and Told.what[::2] == Told.what[1::2]


def test_a_connector_for_one_group_is_not_judged_by_these_cases(tmp_path: Path) -> None:
    variant = SPEC.cases["groups.reload"].variants()[0]
    report = run_and_judge(
        variant,
        Target("kvconform.refimpl.connector:ReferenceConnector", {"store": "{tmp}/s"}),
        SPEC,
        seed=0,
        tmp=tmp_path,
    )
    assert {row.verdict for row in report.rows} == {"UNSUPPORTED"}
    assert "hma" in (report.rows[0].message or "")


def test_a_connector_may_refuse_a_window(tmp_path: Path) -> None:
    variant = SPEC.cases["groups.only-a-window"].variants()[0]
    target = Target("kvconform.refimpl.connector:ReferenceConnector", {"store": "{tmp}/s"})
    report = run_and_judge(variant, target, SPEC, seed=0, tmp=tmp_path)
    assert {row.verdict for row in report.rows} == {"UNSUPPORTED"}
    assert "sliding windows are not supported" in (report.rows[0].message or "")


@pytest.mark.parametrize(
    "config",
    [
        {"block_size": 10, "kernel_block_size": 4},
        {"groups": ["full", "sliding"], "kernel_block_size": 2},
        {"groups": ["full", "local"], "window": 6},
        {"groups": ["full", "local", "wide"]},
        {"groups": ["full", "local"], "drafter": True, "spec_tokens": 2},
        {"layout": "BLHNC", "kernel_block_size": 2},
        {"drafter": True},
        {"layers": [2, 0]},
        {"layers": [5, 9], "pipeline_parallel": 2},
        {"tensor_parallel": 4},
        {"groups": ["latent"], "tensor_parallel": 4, "context_parallel": 3, "block_size": 12},
        {"groups": ["latent"], "tensor_parallel": 3, "context_parallel": 3, "block_size": 8},
    ],
    ids=str,
)
def test_configurations_that_vllm_does_not_start_are_no_case(config: dict[str, Any]) -> None:
    case = SPEC.cases["groups.reload"].model_dump(exclude_unset=True, by_alias=True)
    with pytest.raises(ValidationError, match="config: "):
        Case.model_validate(case | {"config": config, "engines": ["vllm"]})


def test_vllm_does_not_start_one_that_claims_otherwise(tmp_path: Path) -> None:
    variant = SPEC.cases["groups.reload"].variants(["vllm"])[0]
    target = Target(
        "kvconform.refimpl.connector:ReferenceConnector",
        {"store": "{tmp}/s"},
        capabilities={"hma": True},
    )
    report = run_and_judge(variant, target, SPEC, seed=0, tmp=tmp_path)
    assert "lifecycle.constructs" in {
        row.requirement for row in report.rows if row.verdict == "FAIL"
    }


@pytest.mark.parametrize("groups", [["sliding", "full"], ["full", "latent"], ["wide"], ["local"]])
def test_groups_that_no_engine_has_are_no_case(groups: list[str]) -> None:
    case = SPEC.cases["groups.reload"].model_dump(exclude_unset=True, by_alias=True)
    with pytest.raises(ValidationError, match="config: (with several groups|a single group)"):
        type(SPEC.cases["groups.reload"]).model_validate(
            {**case, "config": {**Config().model_dump(), "groups": groups}}, strict=False
        )
