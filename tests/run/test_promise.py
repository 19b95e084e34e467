# SPDX-License-Identifier: Apache-2.0
"""Tests of the tokens that a connector promises to load again, declared or learned.

The promises are learned from the plainest runs.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvconform.config.target import Target
from kvconform.contract.capabilities import complete
from kvconform.contract.case import Case
from kvconform.contract.loader import load_spec
from kvconform.errors import UsageError
from kvconform.kv.provenance import Identity
from kvconform.refimpl.connector import Lookup, ReferenceConnector
from kvconform.refimpl.variants.peer import Peer
from kvconform.run.calibration import profile_of
from kvconform.run.case import run_and_judge
from kvconform.run.promises import Crowd, Plain, Promises

CAPS = complete({"store": True, "saves": "all", "chunk_tokens": 4})
EXAMPLE = "vllm.distributed.kv_transfer.kv_connector.v1.example_connector:ExampleConnector"


def promised(
    known: int,
    wanted: int,
    *,
    prompt: int = 10,
    common: int = 99,
    final: int | None = 99,
    back: int | None = None,
    shared: int = 0,
    **caps: Any,
) -> int:
    """Return the promise for a request for `wanted` tokens.

    The source has `known` tokens and computed `final` positions. The first `common` tokens of both
    are the same.
    """
    asked = []

    def calibrate(plain: Plain, block_size: int) -> int:
        asked.append((plain, block_size))
        assert back is not None
        return back

    source = SimpleNamespace(all_token_ids=list(range(known)))
    request = SimpleNamespace(all_token_ids=[t if t < common else -t for t in range(wanted)])
    found = Promises({**CAPS, **caps}, back is None, calibrate).promised(
        source, list(range(prompt)), request, 4, final
    )
    if asked:
        assert asked == [(Plain(prompt, known - prompt, shared, wanted), 4)]
    return found


@pytest.mark.parametrize(
    ("arguments", "tokens"),
    [
        # the last token's KV may be in flight at the finish: 29 are certain
        ({"known": 30, "wanted": 40}, 28),
        ({"known": 29, "wanted": 40}, 28),
        ({"known": 28, "wanted": 40}, 24),
        ({"known": 30, "wanted": 17}, 16),
        ({"known": 30, "wanted": 16}, 12),  # one must be left to compute
        ({"known": 30, "wanted": 40, "common": 15}, 12),
        ({"known": 30, "wanted": 40, "final": 11}, 8),
        ({"known": 30, "wanted": 40, "saves": "prompt"}, 8),
        ({"known": 30, "wanted": 40, "saves": "none"}, 0),
        ({"known": 30, "wanted": 40, "store": False}, 0),
        ({"known": 30, "wanted": 40, "final": None}, 0),
        ({"known": 30, "wanted": 40, "chunk_tokens": 16}, 16),
        ({"known": 30, "wanted": 40, "chunk_tokens": 1}, 29),
        # whole blocks of whole chunks
        ({"known": 30, "wanted": 40, "final": 11, "chunk_tokens": 3}, 8),
        ({"known": 9, "wanted": 40, "chunk_tokens": 6}, 4),
        ({"known": 30, "wanted": 40, "common": 0}, 0),
        # calibrated, with as much in common as was final
        ({"known": 30, "wanted": 40, "back": 20, "shared": 29}, 20),
        ({"known": 30, "wanted": 40, "back": 99, "shared": 29}, 29),
        ({"known": 30, "wanted": 40, "common": 15, "back": 12, "shared": 15}, 12),
        ({"known": 30, "wanted": 40, "back": 20, "saves": "prompt", "shared": 10}, 10),
        ({"known": 30, "wanted": 1, "back": 20}, 0),
    ],
)
def test_promised_tokens(arguments: dict[str, Any], tokens: int) -> None:
    assert promised(**arguments) == tokens


CAT: dict[str, Any] = {"at": 9, "length": 4, "id": "cat"}


@pytest.mark.parametrize(
    ("theirs", "own", "tokens"),
    [
        (Identity.of("s"), Identity.of("s"), 28),
        (Identity.of("s"), Identity.of("t"), 0),
        (Identity.of("s"), Identity.of(), 0),
        (Identity.of(items=[CAT]), Identity.of(items=[CAT]), 28),
        (Identity.of(items=[CAT]), Identity.of(), 8),  # the image begins at token 9
        (Identity.of(items=[CAT]), Identity.of(items=[{**CAT, "at": 14}]), 8),
        (Identity.of(items=[CAT]), Identity.of(items=[CAT, {**CAT, "at": 21}]), 20),
    ],
)
def test_requests_have_in_common_what_is_before_they_differ(
    theirs: Identity, own: Identity, tokens: int
) -> None:
    source = SimpleNamespace(all_token_ids=list(range(30)))
    request = SimpleNamespace(all_token_ids=list(range(40)))
    promises = Promises(CAPS, True, lambda plain, size: 0)
    found = promises.promised(source, list(range(10)), request, 4, 99, identities=(theirs, own))
    assert found == tokens


@pytest.mark.parametrize(
    ("found", "whole", "back", "tokens", "runs"),
    [
        (29, False, 20, 29, 0),  # all that could be promised: a plain run can only promise less
        (30, False, 20, 29, 0),
        (28, True, 20, 28, 2),  # all whole blocks, and it is seen to store nothing else
        (28, False, 20, 20, 3),
        (28, False, 99, 29, 3),
        (0, True, 99, 29, 1),
    ],
)
def test_a_plain_run_is_made_if_its_outcome_matters(
    found: int, whole: bool, back: int, tokens: int, runs: int
) -> None:
    asked = []

    def calibrate(plain: Plain, block_size: int) -> int:
        asked.append(plain)
        if plain.prompt == 10:
            return back
        assert plain in (Plain(32, 1, 32, 32), Plain(40, 1, 40, 40))
        return plain.prompt - (4 if whole else 1)

    promises = Promises(CAPS, False, calibrate)
    source = SimpleNamespace(all_token_ids=list(range(30)))
    request = SimpleNamespace(all_token_ids=list(range(40)))
    for _ in range(2):
        assert promises.promised(source, list(range(10)), request, 4, 99, found=found) == tokens
        assert len(set(asked)) == runs


@pytest.mark.parametrize(
    ("slices", "splits", "tokens"), [(1, False, 28), (2, True, 28), (2, False, 8)]
)
def test_where_ranks_split_blocks_the_formula_holds_if_that_is_declared(
    slices: int, splits: bool, tokens: int
) -> None:
    """Else a plain run of the same kind says what comes back."""

    def calibrate(plain: Plain, block_size: int) -> int:
        assert plain.context_parallel == 2
        return 8

    promises = Promises(CAPS, True, calibrate, splits=splits)
    source = SimpleNamespace(all_token_ids=list(range(30)))
    request = SimpleNamespace(all_token_ids=list(range(40)))
    found = promises.promised(source, list(range(10)), request, 4, 99, context_parallel=slices)
    assert found == tokens


class DoesNotSplit(ReferenceConnector):
    """Finds nothing where ranks split blocks."""

    kvconform_capabilities = None  # type: ignore[assignment]

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Lookup:
        if self._vllm_config.parallel_config.decode_context_parallel_size > 1:
            return 0, False
        return super().get_num_new_matched_tokens(request, num_computed_tokens)


@pytest.mark.parametrize("declared", [True, False])
def test_who_declares_context_parallelism_must_bring_back_what_was_saved(
    declared: bool, tmp_path: Path
) -> None:
    variant = load_spec().cases["ranks.degrees"].variants(["reference"])[0]
    caps = {"store": True, "saves": "all", "async_load": False, "transfer": False}
    if declared:
        caps["context_parallel"] = True
    target = Target(f"{__name__}:DoesNotSplit", {"store": "{tmp}"}, capabilities=caps)
    report = run_and_judge(variant, target, load_spec(), seed=0, tmp=tmp_path, brief=True)
    failed = {row.requirement for row in report.rows if row.verdict == "FAIL"}
    assert ("save.completeness" in failed) == declared


@pytest.mark.parametrize("size", [4, 16])
def test_only_whole_blocks_are_taken_for_whole_blocks(size: int) -> None:
    """Of all sizes of chunks up to a few blocks, and of a connector that saves every token."""
    found = set()
    for chunk in range(1, 3 * size):
        promises = Promises(
            CAPS, False, lambda plain, _, chunk=chunk: (plain.prompt - 1) // chunk * chunk
        )
        if promises._only_whole_blocks(size):
            found.add(chunk)
    assert found == {size, 2 * size}


# -- what is learned


class Undeclared(ReferenceConnector):
    """The reference connector, which says nothing about itself."""

    kvconform_capabilities = None  # type: ignore[assignment]


class StoresNothing(Undeclared):
    """Finds nothing, ever."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Lookup:
        return 0, False


class InMemory(Undeclared):
    """One store for the whole process, whatever the configuration says."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        vllm_config.kv_transfer_config.kv_connector_extra_config["store"] = "memory:test-promise"
        super().__init__(vllm_config, role, kv_cache_config)


class CrashesLater(Undeclared):
    """Claims, and then cannot load."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self._metadata().loads:
            raise OSError("gone")


def learned(
    cls: str | type, tmp_path: Path, extra: dict[str, Any] | None = None, **declared: Any
) -> Any:
    name = cls if isinstance(cls, str) else f"{__name__}:{cls.__name__}"
    return profile_of(
        Target(name, extra if extra is not None else {"store": "{tmp}"}, capabilities=declared),
        tmp_path,
    )


def test_vllms_example_connector_saves_prompts(tmp_path: Path) -> None:
    profile = learned(EXAMPLE, tmp_path, {"shared_storage_path": "{tmp}"})
    assert (profile.caps["store"], profile.caps["saves"], profile.caps["async_load"]) == (
        True,
        "prompt",
        False,
    )
    assert (profile.sources["store"], profile.sources["saves"], profile.sources["lossy"]) == (
        "inferred",
        "inferred",
        "default",
    )
    assert not profile.promises.declared


@pytest.mark.parametrize(
    ("options", "saves", "is_async"),
    [
        ({}, "all", False),
        ({"load": "async"}, "all", True),
        ({"save_decode": False}, "prompt", False),
        ({"chunk_tokens": 8}, "all", False),
    ],
)
def test_what_the_reference_connector_would_be_taken_for(
    options: dict[str, Any], saves: str, is_async: bool, tmp_path: Path
) -> None:
    profile = learned(Undeclared, tmp_path, {"store": "{tmp}", **options})
    assert (profile.caps["store"], profile.caps["saves"], profile.caps["async_load"]) == (
        True,
        saves,
        is_async,
    )
    assert profile.caps["fault_injection"] is True and profile.caps["hma"] is False


@pytest.mark.parametrize("name", ["WorthLoading", "OneLoadPerStep", "SaveBudget"])
def test_who_does_less_in_a_crowd_does_its_best(name: str, tmp_path: Path) -> None:
    profile = learned(f"kvconform.refimpl.variants.frugal:{name}", tmp_path)
    assert (profile.caps["best_effort"], profile.sources["best_effort"]) == (True, "inferred")
    full = learned(Undeclared, tmp_path / "full")
    assert (full.caps["best_effort"], full.sources["best_effort"]) == (False, "inferred")
    alone, alongside = Plain(41, 1, 41, 41), Plain(41, 1, 41, 41, Crowd(alongside=(41,)))
    assert [full.promises.calibrate(plain, 4) for plain in (alone, alongside)] == [40, 40]
    if name == "SaveBudget":
        assert [profile.promises.calibrate(plain, 4) for plain in (alone, alongside)] == [8, 0]


class RaisesInACrowd(Undeclared):
    def build_connector_meta(self, scheduler_output: Any) -> Any:
        if len(scheduler_output.num_scheduled_tokens) > 1:
            raise RuntimeError("one at a time")
        return super().build_connector_meta(scheduler_output)


def test_a_best_effort_that_a_broken_run_suggests_is_doubted(tmp_path: Path) -> None:
    """Less is judged then, and the report says why."""
    profile = learned(RaisesInACrowd, tmp_path)
    assert (profile.caps["best_effort"], profile.sources["best_effort"]) == (True, "inferred")
    assert "from a plain run that broke off" in profile.doubts["best_effort"]
    assert "one at a time" in profile.doubts["best_effort"]
    name = "kvconform.refimpl.variants.frugal:WorthLoading"
    assert "best_effort" not in learned(name, tmp_path / "frugal").doubts


def test_what_expires_is_not_promised_after_many_steps(tmp_path: Path) -> None:
    profile = learned("kvconform.refimpl.variants.frugal:Expiring", tmp_path)
    full = learned(Undeclared, tmp_path / "full")
    soon, late = Plain(41, 1, 41, 41), Plain(41, 1, 41, 41, Crowd(steps=12))
    assert [profile.promises.calibrate(plain, 4) for plain in (soon, late)] == [40, 0]
    assert full.promises.calibrate(late, 4) == 40


def test_a_promise_for_one_group_is_none_for_several(tmp_path: Path) -> None:
    one, several = Plain(41, 1, 41, 41), Plain(41, 1, 41, 41, groups=("full", "sliding"), window=6)
    for name, promised in (("OneGroupOnly", [40, 0]), ("HybridConnector", [40, 40])):
        profile = learned(f"kvconform.refimpl.variants.hybrid:{name}", tmp_path / name)
        assert [profile.promises.calibrate(plain, 4) for plain in (one, several)] == promised


def test_who_says_that_it_does_its_best_is_not_held_to_a_formula(tmp_path: Path) -> None:
    profile = learned(Undeclared, tmp_path, saves="all", chunk_tokens=4, best_effort=True)
    assert not profile.promises.declared


@pytest.mark.parametrize(
    ("cls", "store", "saves"), [(StoresNothing, False, "none"), (CrashesLater, True, "prompt")]
)
def test_who_brings_nothing_back_promises_nothing(
    cls: type, store: bool, saves: str, tmp_path: Path
) -> None:
    """Who has claimed something is asked about it all the same."""
    profile = learned(cls, tmp_path)
    assert (profile.caps["store"], profile.caps["saves"]) == (store, saves)
    source, request = (
        SimpleNamespace(all_token_ids=list(range(30))),
        SimpleNamespace(all_token_ids=list(range(30))),
    )
    assert profile.promises.promised(source, list(range(10)), request, 4, 29) == 0


def test_a_store_that_outlives_its_run_is_not_taken_for_a_better_one(tmp_path: Path) -> None:
    """Every calibration uses new tokens; otherwise the second would find what the first stored."""
    profile = learned(InMemory, tmp_path, {"save_decode": False})
    assert profile.caps["saves"] == "prompt"
    assert [profile.promises.calibrate(Plain(41, outputs, 64, 66), 4) for outputs in (24, 25)] == [
        40,
        40,
    ]


def test_declared_capabilities_override_what_would_be_learned(tmp_path: Path) -> None:
    profile = learned(
        Undeclared,
        tmp_path,
        saves="prompt",
        chunk_tokens=8,
        store=True,
        persistent=True,
        async_load=False,
    )
    assert (profile.caps["saves"], profile.sources["saves"]) == ("prompt", "declared")
    assert profile.promises.declared
    # nothing was left to find out but how large chunks are, and whether it hands over
    assert sorted(each.name for each in tmp_path.iterdir()) == ["calibration-0", "hand-over"]
    only = learned(Undeclared, tmp_path, saves="none")
    assert (only.caps["saves"], only.caps["store"], only.sources["store"]) == (
        "none",
        True,
        "inferred",
    )
    assert only.promises.declared, "nothing is promised"


@pytest.mark.parametrize(("chunk", "learned_chunk"), [(64, 64), (256, 256), (8, 0)])
def test_large_chunks_are_found_where_only_the_saves_are_declared(
    chunk: int, learned_chunk: int, tmp_path: Path
) -> None:
    options = {"store": "{tmp}", "chunk_tokens": chunk, "whole_blocks": False}
    profile = learned(Undeclared, tmp_path, options, store=True, saves="prompt", async_load=False)
    source = "inferred" if learned_chunk else "default"
    assert (profile.caps["chunk_tokens"], profile.sources["chunk_tokens"]) == (
        learned_chunk,
        source,
    )


class MinPrompt(Undeclared):
    """Stores only long prompts, block by block."""

    def _worth_saving(self, request: Any, end: int) -> int:
        return super()._worth_saving(request, end) if request.num_prompt_tokens >= 200 else 0


def test_who_leaves_short_prompts_out_has_no_large_chunks(tmp_path: Path) -> None:
    options = {"store": "{tmp}"}
    profile = learned(MinPrompt, tmp_path, options, store=True, saves="prompt", async_load=False)
    assert profile.sources["chunk_tokens"] == "default"
    assert (profile.caps["best_effort"], profile.sources["best_effort"]) == (True, "inferred")


def test_a_request_that_reads_no_cache_is_promised_no_repair(tmp_path: Path) -> None:
    """Its source computed again what a load had lost, and the connector honours the flag."""
    case = (
        load_spec()
        .cases["lifecycle.fail-asked-again"]
        .model_dump(by_alias=True, exclude_unset=True)
    )
    last = next(step["add"] for step in case["steps"] if step.get("add", {}).get("req") == "c")
    last["skip_reading_prefix_cache"] = True
    variant = Case.model_validate({**case, "expect": []}, strict=False).variants(["reference"])[0]
    target = Target(
        "kvconform.refimpl.variants.loading:HonoursSkip",
        {"store": "{tmp}/store"},
        capabilities={"store": True, "saves": "all"},
    )
    report = run_and_judge(variant, target, load_spec(), seed=0, tmp=tmp_path)
    assert not [row for row in report.rows if row.verdict == "FAIL"]


def test_impossible_declarations_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        learned(Undeclared, tmp_path, saves="everything")
    with pytest.raises(UsageError):
        learned(Undeclared, tmp_path, no_such_capability=True)


class UndeclaredPeer(Peer):
    """Hands KV over, and says nothing about itself."""

    kvconform_capabilities = None  # type: ignore[assignment]


def test_a_hand_over_is_found(tmp_path: Path) -> None:
    """Whoever returns parameters to a proxy is judged as a producer and consumer."""
    found = learned(UndeclaredPeer, tmp_path / "peer", {})
    assert (found.caps["transfer"], found.sources["transfer"]) == (True, "inferred")
    assert set(found.caps["roles"]) == {"kv_both", "kv_producer", "kv_consumer"}
    store = learned(Undeclared, tmp_path / "store")
    assert not store.caps["transfer"]
    assert tuple(store.caps["roles"]) == ("kv_both",)
    only = learned(UndeclaredPeer, tmp_path / "only", {}, roles=["kv_both"])
    assert not only.caps["transfer"]
