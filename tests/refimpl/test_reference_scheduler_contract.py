# SPDX-License-Identifier: Apache-2.0
"""Tests of the reference scheduler: what it refuses, its own checks, and its optional liberties."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from vllm.v1.core.kv_cache_utils import get_group_id
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheGroupSpec,
    MambaSpec,
)
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from kvconform.contract.situation import policies
from kvconform.refimpl.errors import EngineAssertion, IntegrityError
from kvconform.refimpl.scheduler import ReferenceScheduler
from scheduler_rig import Ask, Rig, Setup, build, configs

PROMPT = tuple(range(12))


def rig(
    setup: Setup | None = None,
    *asks: Ask,
    policies: tuple[str, ...] = (),
    engine: str = "reference",
) -> Rig:
    made = Rig(engine, setup or Setup(), frozenset(policies))
    for ask in asks:
        made.add(ask)
    return made


@pytest.mark.parametrize(
    ("answer", "rule"),
    [
        ((16, False), "R022"),
        ((13, True), "R022"),
        ((12, False), "R023"),
        ((0, True), "R026"),
        (4, "R029"),
        ((4.0, False), "R029"),
        ((4, False, 0), "R029"),
        (None, "R029"),
    ],
)
def test_an_illegal_answer_to_a_lookup_ends_the_engine(answer: Any, rule: str) -> None:
    ask = Ask("r0", PROMPT, answers=(("raw", answer),)) if isinstance(answer, tuple) else None
    ours = rig(None, Ask("r0", PROMPT))
    theirs = rig(None, Ask("r0", PROMPT), engine="vllm")
    for one in (ours, theirs):
        one.asks["r0"] = ask or one.asks["r0"]
        if ask is None:
            one.connector.get_num_new_matched_tokens = lambda *_: answer  # type: ignore[union-attr,method-assign]
    with pytest.raises(EngineAssertion) as raised:
        ours.step()
    assert raised.value.rule == rule
    assert "r0" in str(raised.value)
    with pytest.raises((AssertionError, TypeError, ValueError)):
        theirs.step()


@pytest.mark.parametrize(
    ("report", "when", "rule"),
    [
        ({"finished_sending": {"r0"}}, "running", "R146"),
        ({"finished_sending": {"nobody"}}, "running", "R146"),
        ({"finished_recving": {"nobody"}}, "running", "R146"),
        ({"finished_recving": {"r0"}}, "running", "R079"),
        ({"finished_sending": {"r0"}}, "finished", "R146"),
    ],
)
@pytest.mark.parametrize("engine", ["reference", "vllm"])
def test_a_report_that_nobody_waits_for_ends_the_engine(
    report: dict[str, set[str]], when: str, rule: str, engine: str
) -> None:
    made = rig(None, Ask("r0", PROMPT, max_tokens=20 if when == "running" else 1), engine=engine)
    made.step()
    output, result = made.schedule()
    result.kv_connector_output = KVConnectorOutput(**report)  # type: ignore[arg-type]
    with pytest.raises(AssertionError) as raised:
        made.land(output, result)
    if engine == "reference":
        assert isinstance(raised.value, EngineAssertion)
        assert raised.value.rule == rule


def test_one_hold_only() -> None:
    """R127: an aborted load that was also taken over is freed by the first report.

    The second report has no effect.
    """
    made = rig(None, Ask("r0", PROMPT, answers=((8, True),), load_steps=9))
    made.step()
    made.abort("r0")
    output, result = made.schedule()
    result.kv_connector_output = KVConnectorOutput(finished_recving={"r0"}, finished_sending={"r0"})
    with pytest.raises(EngineAssertion, match="already freed"):
        made.land(output, result)


def test_an_id_in_use_is_refused() -> None:
    made = rig(None, Ask("r0", PROMPT))
    with pytest.raises(EngineAssertion, match="duplicate request id r0"):
        made.add(Ask("r0", PROMPT))


def test_failed_blocks_of_several_groups_end_the_engine() -> None:
    """R131: their ids do not say which request has them."""
    setup = Setup(connector="ScriptedHMAConnector", windows=(0, 6))
    for engine, raised in (("reference", EngineAssertion), ("vllm", RuntimeError)):
        made = rig(setup, Ask("r0", PROMPT), engine=engine)
        output, result = made.schedule()
        assert result.kv_connector_output is not None
        result.kv_connector_output.invalid_block_ids = {1}
        with pytest.raises(raised, match="with (several|multiple)"):
            made.land(output, result)


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        (
            MambaSpec(block_size=4, shapes=((4,),), dtypes=(torch.float32,)),
            "KV cache groups of MambaSpec",
        ),
        (
            ChunkedLocalAttentionSpec(
                block_size=4,
                num_kv_heads=1,
                head_size=64,
                dtype=torch.float32,
                attention_chunk_size=6,
            ),
            "chunks of local attention that are not whole blocks",
        ),
        (
            FullAttentionSpec(block_size=8, num_kv_heads=1, head_size=64, dtype=torch.float32),
            "KV cache groups with unlike block sizes",
        ),
    ],
)
def test_groups_that_are_not_supported_are_refused(spec: Any, problem: str) -> None:
    config, cache = configs(Setup(connector=""))
    groups = [*cache.kv_cache_groups, KVCacheGroupSpec(["other"], spec)]
    cache = replace(cache, kv_cache_groups=groups)
    with pytest.raises(ValueError, match=f"does not support {problem}"):
        ReferenceScheduler(config, cache, None, block_size=4, async_scheduling=False)


def test_where_prompts_part_is_where_all_full_attention_has_cached_them() -> None:
    """The window there is kept in the prefix cache, so that a third such prompt finds it."""
    found = []
    for engine in ("reference", "vllm"):
        made = rig(Setup(windows=(0, 0, 6), retention=0, connector=""), engine=engine)
        prompt = tuple(range(30))
        made.add(Ask("r0", prompt, 1))
        made.run()
        pool = made.s.kv_cache_manager.block_pool
        ours = [block for block in pool.blocks if block.block_hash is not None]
        last = [block for block in ours if get_group_id(block.block_hash) == 1][-1]
        pool.evict_blocks({last.block_id})
        request = made.add(Ask("r1", (*prompt[:28], *range(900, 910)), 1))
        made.step()
        found.append((request.shared_prefix_boundary, request.num_computed_tokens))
    assert found == [(24, 38), (24, 38)]


def test_a_failed_request_of_a_window_may_be_kept_until_it_is_sent() -> None:
    """It has no blocks before what its load was granted, and needs none."""
    ask = Ask("r0", tuple(range(24)), answers=((16, False),), send_steps=4)
    made = rig(Setup(windows=(5,), failure="fail"), ask)
    output, result = made.schedule()
    table = made.s.kv_cache_manager.get_block_ids("r0")[0]
    assert table[0] == 0 and result.kv_connector_output is not None
    result.kv_connector_output.invalid_block_ids = {table[3]}
    made.land(output, result)
    assert made.requests["r0"].is_finished() and "r0" in made.s.requests
    made.run()
    assert not made.s.requests


def test_what_is_not_supported_is_said() -> None:
    with pytest.raises(ValueError, match="unknown policies"):
        build("reference", Setup(), frozenset({"be-nice"}))
    with pytest.raises(ValueError, match="runner 'v3'"):
        build("reference", Setup(runner="v3"))


def test_block_state_is_gone_after_the_hook() -> None:
    made = rig(None, Ask("r0", PROMPT))
    output, _ = made.schedule()
    assert output.kv_connector_block_state is None
    tables = next(dict(values)["tables"] for name, _, values in made.trace[-1][1] if name == "meta")
    assert tables == {"r0": ([1, 2, 3],)}


OTHERS = {"late-workers", "late-threads"}
"""Policies that are not the scheduler's."""


@pytest.mark.parametrize("policy", sorted({*policies()} - OTHERS))
@pytest.mark.parametrize("scheduling", ["sync", "async"])
def test_liberties_do_not_change_the_output(policy: str, scheduling: str) -> None:
    """Whatever liberty the engine takes, clients see the same tokens, and all blocks come back."""
    setup = Setup(scheduling=scheduling, num_blocks=9, budget=16, max_seqs=2)
    asks = [
        Ask(
            f"r{i}",
            tuple(range(50 * (i // 2), 50 * (i // 2) + 10 + i)),
            6,
            answers=((4, bool(i % 2)),),
            load_steps=2,
        )
        for i in range(5)
    ]
    plain, liberal = rig(setup, *asks), rig(setup, *asks, policies=(policy,))
    for made in (plain, liberal):
        made.run()
        assert not made.s.has_requests()
        pool = made.s.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == len(pool.blocks) - 1
    tokens = [
        {req: list(request.output_token_ids) for req, request in made.requests.items()}
        for made in (plain, liberal)
    ]
    assert tokens[0] == tokens[1]
    assert plain.story != liberal.story


def lines(made: Rig, kind: str) -> list[str]:
    return [line for line in made.story if line.split()[1] == kind]


def test_deny_first_alloc_repeats_every_lookup_once() -> None:
    made = rig(
        None, Ask("r0", PROMPT, 2, answers=((8, False),)), policies=("deny-first-alloc",)
    ).run()
    assert [line.split()[0] for line in lines(made, "match")] == ["1", "2"]
    assert len(lines(made, "alloc")) == 1


def test_ignore_hits_grants_nothing() -> None:
    made = rig(None, Ask("r0", PROMPT, 2, answers=((8, False),)), policies=("ignore-hits",)).run()
    assert lines(made, "alloc") == ["1 alloc r0 C0 external0 [1,2,3]"]


def test_permute_blocks_breaks_ascending_runs() -> None:
    made = rig(None, Ask("r0", PROMPT, 2), policies=("permute-blocks",)).run()
    assert lines(made, "alloc") == ["1 alloc r0 C0 external0 [3,2,1]"]


def test_reuse_freed_first_hands_out_what_was_just_freed() -> None:
    made = rig(None, Ask("a", PROMPT, 1), policies=("reuse-freed-first",)).run()
    made.add(Ask("b", tuple(range(100, 112)), 1))
    made.run()
    assert lines(made, "alloc")[1].endswith("[3,2,1]")


def test_split_prefill_cuts_inside_blocks() -> None:
    made = rig(None, Ask("r0", PROMPT, 2), policies=("split-prefill",)).run()
    assert [line.split()[3] for line in made.story if line.split()[1] in ("new", "cached")][:4] == [
        "C0+3",
        "C3+3",
        "C6+3",
        "C9+3",
    ]


def test_reverse_batch_lists_a_step_backwards() -> None:
    made = rig(None, Ask("a", PROMPT, 2), Ask("b", PROMPT, 2), policies=("reverse-batch",)).run()
    assert [line.split()[2] for line in lines(made, "new")] == ["b", "a"]
    assert [line.split()[2] for line in lines(made, "cached")] == ["b", "a"]


def test_forced_preemption_is_a_preemption() -> None:
    made = rig(None, Ask("a", PROMPT, 4), Ask("b", tuple(range(50, 62)), 4))
    made.step()
    assert made.s.preempt("a")
    made.s.check_integrity()
    made.step()
    assert lines(made, "step")[1] == "2 step 1 tokens finished[] preempted['a'] sync_loads=False"
    made.run()
    assert len(lines(made, "resumed")) == 1
    assert {req: request.num_output_tokens for req, request in made.requests.items()} == {
        "a": 4,
        "b": 4,
    }
    assert not made.s.preempt("a")


def test_forced_preemption_waits_for_a_step_in_flight_of_a_consumer() -> None:
    """R160."""
    made = rig(Setup(scheduling="async"), Ask("a", PROMPT, 4))
    made.step()
    assert not made.s.preempt("a")
    made.run()
    assert made.requests["a"].num_output_tokens == 4


@pytest.mark.parametrize("engine", ["reference", "vllm"])
def test_abort_of_everything(engine: str) -> None:
    waiting, loading = (
        Ask("c", tuple(range(80, 92))),
        Ask("b", tuple(range(50, 62)), answers=((8, True),), load_steps=2),
    )
    made = rig(Setup(max_seqs=1), Ask("a", PROMPT), loading, waiting, engine=engine)
    made.step()
    made.s.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    made.look("abort")
    assert sorted(line.split()[1] for line in made.story if line.startswith("end")) == [
        "a",
        "b",
        "c",
    ]
    made.run()
    assert not made.s.has_requests()


def test_pause_levels() -> None:
    made = rig(None, Ask("a", PROMPT, 3))
    made.step()
    made.pause(1)
    made.add(Ask("b", tuple(range(50, 62)), 1))
    made.step()
    assert made.requests["b"].status.name == "WAITING"
    made.pause(2)
    assert made.s.get_num_unfinished_requests() == 0
    assert made.schedule()[0].total_num_scheduled_tokens == 0
    made.pause(0)
    made.run()
    assert not made.s.has_requests()


@pytest.mark.parametrize(
    ("spoil", "subject"),
    [
        (
            lambda s: (
                s.kv_cache_manager.block_pool.touch([s.kv_cache_manager.block_pool.blocks[9]])
                or _release(s, 9)
            ),
            "block 9",
        ),
        (lambda s: setattr(s.kv_cache_manager.block_pool.blocks[1], "ref_cnt", 0), "block 1"),
        (
            lambda s: _group(s).tables["r0"].append(s.kv_cache_manager.block_pool.blocks[9]),
            "block 9",
        ),
        (lambda s: _group(s).tables["r0"].append(_group(s).tables["r0"][0]), "block 1"),
        (lambda s: _group(s).tables["r0"].pop(), "request r0"),
        (lambda s: _group(s).tables["r0"].__setitem__(0, _null(s)), "request r0"),
        (lambda s: _group(s).tables.update(ghost=[]), "request ghost"),
        (lambda s: s.running.clear(), "request r0"),
        (lambda s: s.waiting.append(s.requests["r0"]), "request r0"),
        (lambda s: setattr(s.requests["r0"], "num_output_placeholders", -1), "request r0"),
        (lambda s: _group(s).num_cached.update(r0=9), "request r0"),
        (
            lambda s: s.kv_cache_manager.block_pool.cached_block_hash_to_block._cache.clear(),
            "block 1",
        ),
    ],
)
def test_broken_books_are_noticed(spoil: Any, subject: str) -> None:
    made = rig(None, Ask("r0", PROMPT, 4))
    made.step()
    spoil(made.s)
    with pytest.raises(IntegrityError) as raised:
        made.s.check_integrity()
    assert raised.value.subject == subject


def _group(scheduler: Any) -> Any:
    (group,) = scheduler.kv_cache_manager.groups
    return group


def _null(scheduler: Any) -> Any:
    return scheduler.kv_cache_manager.block_pool.null_block


def _release(scheduler: Any, block_id: int) -> None:
    """Leave a held block without a holder."""
    scheduler.kv_cache_manager.block_pool.blocks[block_id].ref_cnt = 0
