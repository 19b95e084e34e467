# SPDX-License-Identifier: Apache-2.0
"""Tests of failures found by exploration that were not the connector's fault.

Each is attributed to its true cause, and known by name.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvconform.config.target import Target
from kvconform.contract.loader import explained, load_spec
from kvconform.contract.references import Mark
from kvconform.dev.sweep import target_of
from kvconform.explore.outcome import outcome
from kvconform.explore.workload import Data, Workload, make
from kvconform.observe.observer import Observer
from kvconform.run.case import run_and_judge

SPEC = load_spec()
TARGET = Target("kvconform.refimpl.connector:ReferenceConnector", {"store": "{tmp}"})
AGAIN: list[Data] = [
    {"add": {"req": "a", "prompt": 15, "max_tokens": 1}},
    {"run": {}},
    {"drop-local": {}},
]


def mended(
    steps: list[Data], engine: str = "reference", scheduling: str = "sync", **more: Any
) -> Workload:
    return Workload(
        make("mended", "Found by exploration.", steps, engine=engine, scheduling=scheduling, **more)
    )


def failing(name: str, positions: object = "all", **more: object) -> list[Data]:
    return [
        {"add": {"req": name, "prompt": {"same": "a"}, "max_tokens": 2, **more}},
        {"fail-load": {"req": name, "positions": positions}},
    ]


DRAFTS = [
    *AGAIN,
    *failing("b", [0, 7], drafts=[1]),
    {"land": 3},
    {"schedule": 1},
    {"land": 3},
    {"run": {}},
]
RESET: list[Data] = [
    {"add": {"req": "a", "prompt": 9, "max_tokens": 4}},
    {"step": 3},
    {"reset": {"running": True, "connector": True}},
    {"run": {}},
]
HALF = [*AGAIN, *failing("b"), {"step": 1}, {"idle": 1}, {"preempt": "b"}, {"run": {}}]
SKIPS: list[Data] = [
    {"add": {"req": "a", "prompt": 9, "max_tokens": 2, "skip_reading_prefix_cache": True}},
    {"run": {}},
]


@pytest.mark.parametrize(
    ("steps", "config", "scheduling", "broken"),
    [
        (
            DRAFTS,
            {"spec_tokens": 3, "budget": 5},
            "async",
            {"engine.real-is-known", "engine.rejections-rolled-back"},
        ),
        (RESET, {}, "async", {"engine.reset-returns"}),
        # its last block is computed to three quarters
        (HALF, {"budget": 11}, "sync", {"engine.failed-not-served"}),
        (SKIPS, {"stats": True}, "sync", {"engine.queries-counted"}),
    ],
)
def test_what_vllm_breaks_is_known_by_name(
    steps: list[Data], config: Data, scheduling: str, broken: set[str], tmp_path: Path
) -> None:
    relations = ["no-connector"]
    workload = mended(
        steps, engine="vllm", scheduling=scheduling, config=config, relations=relations
    )
    found = outcome(workload, TARGET, SPEC, tmp_path / "run")
    assert found.error is None and not found.failures
    assert broken <= set(found.broken_guarantees) <= set(explained(SPEC))
    assert found.unknown == []


def test_a_known_bug_is_known_by_its_mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by its symptom alone: without the event that begins it, another bug broke it."""
    [known] = explained(SPEC)["engine.reset-returns"]
    assert known.mark is not None
    assert known.mark.event == "cache.reset"
    other = known.model_copy(update={"mark": Mark(event="transfer.failed")})
    bugs = {"engine.reset-returns": [other]}
    monkeypatch.setattr("kvconform.judge.known._known", lambda: bugs)
    workload = mended(
        RESET, engine="vllm", scheduling="async", config={}, relations=["no-connector"]
    )
    found = outcome(workload, TARGET, SPEC, tmp_path / "run")
    assert [each.requirement for each in found.unknown] == ["engine.reset-returns"]


def test_who_makes_kv_up_has_nothing_to_forget(tmp_path: Path) -> None:
    """`reset.forgets` was wrongly reported.

    The claim begins with a token that was computed before the reset.
    """
    steps: list[Data] = [
        {"add": {"req": "a", "prompt": 3, "max_tokens": 1}},
        {"run": {}},
        {"reset": {"running": True, "connector": True}},
        {"add": {"req": "b", "prompt": {"of": "a", "tokens": 1, "then": 5}, "max_tokens": 4}},
        {"run": {}},
    ]
    workload = mended(steps)
    assert not outcome(workload, target_of("zeros"), SPEC, tmp_path / "run").failures


def test_what_a_load_lost_is_promised_to_nobody_while_its_failure_is_under_way(
    tmp_path: Path,
) -> None:
    """`save.completeness` was wrongly reported.

    The chunk was gone, and the failure of the load that noticed it was not reported yet.
    """
    steps: list[Data] = [
        {"add": {"req": "a", "prompt": 6, "max_tokens": 9}},
        {"run": {}},
        {"drop-local": {}},
        *failing("b", [0, 3], reloads="a"),
        {"step": 2},
        {"add": {"req": "c", "prompt": {"same": "a"}, "max_tokens": 7, "reloads": "a"}},
        {"run": {}},
    ]
    workload = mended(steps, config={"num_blocks": 13})
    found = outcome(workload, target_of("delayed"), SPEC, tmp_path / "run")
    assert found.error is None and found.failures == [] and "load" in found.reached


def test_a_lookup_after_a_reset_may_find_less_than_before(tmp_path: Path) -> None:
    """`lookup.repeatable` was wrongly reported.

    The store had been emptied between a lookup and its repetition, without a step.
    """
    steps: list[Data] = [
        {"add": {"req": "a", "prompt": 14, "max_tokens": 2}},
        {"run": {}},
        {"drop-local": {}},
        {"add": {"req": "b", "prompt": {"same": "a"}, "max_tokens": 1}},
        {"step": 1},
        {"reset": {"running": False, "connector": True}},
        {"run": {}},
    ]
    variant = mended(steps, policies=["deny-first-alloc"]).variant()
    report = run_and_judge(variant, TARGET, SPEC, seed=0, tmp=tmp_path / "run", strict=True)
    lookups = [event for event in report.trace if event["kind"] == "lookup" and event["req"] == "b"]
    assert lookups[1]["tokens"] < lookups[0]["tokens"]
    assert (
        lookups[1]["repeat"]
        and [row.requirement for row in report.rows if row.verdict == "FAIL"] == []
    )


def test_a_load_that_fails_on_every_rank_has_failed_once(tmp_path: Path) -> None:
    """`lookup.broken-claim-not-repeated` was wrongly reported at the first retry."""
    steps: list[Data] = [*AGAIN, {"add": {"req": "b", "prompt": {"same": "a"}, "max_tokens": 2}}]
    workload = mended([*steps, {"run": {}}], config={"tensor_parallel": 4, "groups": ["latent"]})
    found = outcome(workload, target_of("stumbles"), SPEC, tmp_path / "run", strict=True)
    assert found.error is None and found.failures == [] and "load" in found.reached


def test_who_waits_behind_a_starved_request_has_an_answer_to_come(tmp_path: Path) -> None:
    """`lookup.answers-eventually` was wrongly reported.

    The lookup of `e` had answered None in the step before the engine ceased to admit `d`, which is
    ahead of it: it never asked again.
    """
    steps: list[Data] = [
        {"add": {"req": "a", "prompt": 7, "max_tokens": 9}},
        {"run": {}},
        {"drop-local": {}},
        *failing("d"),
        {"add": {"req": "e", "prompt": {"same": "d"}, "max_tokens": 9}},
        {"run": {}},
    ]
    config = {"budget": 5, "num_blocks": 7, "prefix_caching": False, "spec_tokens": 3}
    workload = mended(steps, "vllm", config=config)
    target = Target("undecided_again:UndecidedAgain", {"store": "{tmp}", "load": "async"})
    found = outcome(workload, target, SPEC, tmp_path / "run", strict=True)
    assert found.error is None and found.failures == []
    assert "engine.retry-admitted" in found.broken_guarantees


def test_a_lookup_of_an_aborted_request_is_no_miss_of_the_next_with_its_id(tmp_path: Path) -> None:
    """`stats.true` was wrongly reported.

    The first request was looked up and never admitted; the second one, which took its id, skips the
    lookup, so that it misses nothing.
    """
    steps: list[Data] = [
        {"add": {"req": "a", "prompt": 17, "max_tokens": 2}},
        {"step": 1},
        {"abort": "a"},
        {
            "add": {
                "req": "b",
                "prompt": {"same": "a"},
                "max_tokens": 2,
                "skip_reading_prefix_cache": True,
                "id": "a",
            }
        },
        {"run": {}},
    ]
    workload = mended(steps, policies=["deny-first-alloc"])
    found = outcome(workload, target_of("metered"), SPEC, tmp_path / "run", strict=True)
    assert found.error is None and found.failures == []


def test_what_was_computed_upon_a_failed_load_is_not_the_connectors_when_the_engine_serves_it(
    tmp_path: Path,
) -> None:
    """`compose.null-effect` was wrongly reported.

    The engine's own cache served a block to the preempted request that the step with the failed
    load had computed upon it; only blocks of the load itself were looked for.
    """
    steps: list[Data] = [
        {"add": {"req": "a", "prompt": 13, "max_tokens": 1}},
        {"run": {}},
        {"drop-local": {}},
        {"add": {"req": "b", "prompt": {"same": "a"}, "max_tokens": 2}},
        {"fail-load": {"req": "b", "positions": "all"}},
        {"step": 3},
        {"preempt": "b"},
        {"run": {}},
    ]
    config = {"budget": 5, "max_seqs": 1, "num_blocks": 14}
    workload = mended(steps, "vllm", config=config)
    target = Target(TARGET.connector, {"store": "{tmp}", "chunk_tokens": 8, "save_decode": False})
    found = outcome(workload, target, SPEC, tmp_path / "run", strict=True)
    assert found.error is None and found.failures == []
    assert "engine.failed-not-served" in found.broken_guarantees


def test_what_another_engine_stores_when_it_is_polled_comes_back(tmp_path: Path) -> None:
    """`shared.found` was wrongly reported: only the engine that asked had steps to be polled in."""
    steps: list[Data] = [
        {"add": {"req": "a", "prompt": 13, "max_tokens": 4}},
        {"step": 2},
        {"preempt": "a"},
        {"run": {}},
        {"on": "d"},
        {
            "add": {
                "req": "b",
                "prompt": {"of": "a", "then": 5, "outputs": True},
                "max_tokens": 2,
                "reloads": "a",
            }
        },
        {"run": {}},
    ]
    config = {"engines": {"p": "kv_producer", "d": "kv_consumer"}}
    workload = mended(steps, "vllm", config=config)
    target = target_of("fenced")
    target = replace(target, capabilities={**target.capabilities, "store": True, "saves": "all"})
    found = outcome(workload, target, SPEC, tmp_path / "run", strict=True)
    assert found.error is None and found.failures == []
    assert "load" in found.reached


def test_local_hits_after_a_reset_are_not_promised_where_last_tokens_are_left_out(
    tmp_path: Path,
) -> None:
    """`save.completeness` was wrongly reported.

    A connector that leaves local hits alone after a reset relies on the request that computed them;
    that one had left the block out, because its last tokens were in it.
    """
    steps: list[Data] = [
        {"reset": {"running": True, "connector": True}},
        {"add": {"req": "d", "prompt": 4, "max_tokens": 1}},
        {"run": {}},
        {"add": {"req": "e", "prompt": {"of": "d", "then": 1}, "max_tokens": 7}},
        {"run": {}},
        {"drop-local": {}},
        {"add": {"req": "f", "prompt": {"same": "e"}, "max_tokens": 2, "reloads": "e"}},
        {"run": {}},
    ]
    target = target_of("selective")
    target = replace(target, capabilities={**target.capabilities, "store": True, "saves": "all"})
    found = outcome(mended(steps), target, SPEC, tmp_path / "run", strict=True)
    assert found.error is None and found.failures == []


def test_what_was_loaded_with_a_loss_may_be_stored_and_loaded_again(tmp_path: Path) -> None:
    """`load.content` was wrongly reported.

    The tolerance is that of one pass. A request behind a local hit on loaded blocks saves them in a
    chunk of its own, and loads them back after a second pass.
    """
    steps: list[Data] = [
        {"add": {"req": "a", "prompt": 17, "max_tokens": 2}},
        {"run": {}},
        {"drop-local": {}},
        {"add": {"req": "b", "prompt": {"of": "a", "tokens": 5}, "max_tokens": 7, "reloads": "a"}},
        {"run": {}},
        {"add": {"req": "c", "prompt": {"same": "a"}, "max_tokens": 4, "reloads": "a"}},
        {"run": {}},
        {"drop-local": {}},
        {"add": {"req": "d", "prompt": {"of": "c", "outputs": True, "then": 1}, "max_tokens": 2}},
        {"add": {"req": "e", "prompt": {"of": "b", "then": 2}, "max_tokens": 4, "reloads": "b"}},
        {"run": {}},
        {"drop-local": {}},
        {"add": {"req": "f", "prompt": {"same": "e"}, "max_tokens": 2, "reloads": "e"}},
        {"run": {}},
    ]
    config = {"budget": 5, "max_seqs": 2, "num_blocks": 9}
    found = outcome(
        mended(steps, config=config), target_of("int4"), SPEC, tmp_path / "run", strict=True
    )
    assert found.error is None and found.failures == []
    assert "load" in found.reached


def test_a_hit_that_vllm_goes_back_from_is_not_taken_for_local(tmp_path: Path) -> None:
    """`engine.alloc-whole-table` was wrongly reported.

    The connector was asked behind a hit of the full attention only, and had nothing there.
    """
    steps: list[Data] = [
        {"add": {"req": "a", "prompt": 19, "max_tokens": 9, "drafts": [1, 1]}},
        {"run": {}},
        {"drop-local": {}},
        {"add": {"req": "b", "prompt": {"of": "a", "outputs": True, "then": 1}, "max_tokens": 1}},
        {"step": 1},
        {"add": {"req": "c", "prompt": {"of": "a", "tokens": 13, "then": 1}, "max_tokens": 3}},
        {"run": {}},
    ]
    config = {
        "groups": ["full", "state"],
        "spec_tokens": 1,
        "budget": 9,
        "max_seqs": 2,
        "retention_interval": None,
    }
    workload = mended(steps, "vllm", "async", depth=3, config=config)
    found = outcome(workload, target_of("divergent"), SPEC, tmp_path / "run", strict=True)
    assert found.error is None and found.failures == [] and found.unknown == []
    assert "engine.alloc-whole-table" not in found.broken_guarantees


def test_a_chunk_that_a_load_began_may_be_stored_when_it_is_complete(tmp_path: Path) -> None:
    """`load.content` was wrongly reported: the load and the save were of one step."""
    drop: list[Data] = [{"run": {}}, {"drop-local": {}}]
    steps: list[Data] = [{"add": {"req": "a", "prompt": 9, "max_tokens": 1}}, *drop]
    for name, before in ("ba", "cb", "dc"):
        prompt = {"of": before, "then": 8}
        steps += [{"add": {"req": name, "prompt": prompt, "max_tokens": 1}}, *drop]
    steps += [{"add": {"req": "e", "prompt": {"of": "d", "then": 1}, "max_tokens": 1}}, {"run": {}}]
    options = {"codec": "int4", "chunk_tokens": 6, "whole_blocks": False, "store": "{tmp}"}
    target = Target("kvconform.refimpl.variants.unfull:KeepsUnfullChunk", options)
    found = outcome(mended(steps), target, SPEC, tmp_path / "run", strict=True)
    assert found.error is None and found.failures == []
    assert "load" in found.reached


def test_the_next_turn_of_a_session_that_was_preempted_is_new(tmp_path: Path) -> None:
    """`engine.resume-protocol` was wrongly reported of vLLM."""
    steps: list[Data] = [
        {"add": {"req": "a", "prompt": 1, "max_tokens": 1, "session": True}},
        {"continue": {"req": "a", "then": 32, "max_tokens": 4}},
        {"step": 2},
        {"continue": {"req": "a", "then": 29, "max_tokens": 3}},
        {"preempt": "a"},
        {"continue": {"req": "a", "then": 0}},
        {"run": {}},
    ]
    found = outcome(mended(steps, "vllm"), target_of("sync"), SPEC, tmp_path / "run", strict=True)
    assert found.error is None and found.failures == [] and found.unknown == []
    assert "preemption" in found.reached


def test_a_saver_that_is_polled_has_steps_after_an_abort(tmp_path: Path) -> None:
    """`save.as-plain` was wrongly reported: the engine was not idle, but had nothing to do."""
    steps: list[Data] = [
        {"add": {"req": "c", "prompt": 7, "max_tokens": 2}},
        {"run": {}},
        {"add": {"req": "d", "prompt": 9, "max_tokens": 1}},
        {"lookup-only": "d"},
        {"abort": "d"},
        {"add": {"req": "e", "prompt": {"of": "c", "outputs": True, "then": 1}, "reloads": "c"}},
        {"lookup-only": "e"},
        {"abort": "e"},
    ]
    found = outcome(mended(steps), target_of("fenced"), SPEC, tmp_path / "run", strict=True)
    assert found.error is None and found.failures == []


FAILS: list[Data] = [
    {"add": {"req": "a", "prompt": 48, "max_tokens": 9}},
    {"step": 1},
    {"land": 1},
    {"abort": "a"},
    {"add": {"req": "b", "prompt": {"same": "a"}, "max_tokens": 2}},
    {"run": {}},
]
NOT_CHOSEN: list[Data] = [
    {"add": {"req": "a", "prompt": 48, "max_tokens": 1}},
    {"run": {}},
    {"restart": "process"},
    {"add": {"req": "b", "prompt": {"same": "a"}, "max_tokens": 20}},
    {"step": 14},
    {"preempt": "b"},
    {"run": {}},
]


@pytest.mark.parametrize(
    ("variant", "steps", "more"),
    [
        ("foresees-failures", FAILS, {"multi": ["self", "fetcher"], "budget": 17}),
        ("async", NOT_CHOSEN, {"multi": ["fetcher", "self"]}),
    ],
)
def test_what_a_sibling_loads_is_no_report_too_many(
    variant: str, steps: list[Data], more: Data, tmp_path: Path
) -> None:
    """`ranks.no-more-report` was wrongly reported: what a sibling is granted is no hold.

    This connector's own load had failed, or it had claimed KV and was not chosen.
    """
    config = {"block_size": 16, "prefix_caching": False, "tensor_parallel": 2, **more}
    workload = mended(steps, "vllm", config=config)
    found = outcome(workload, target_of(variant), SPEC, tmp_path / "run", strict=True)
    assert found.error is None and found.failures == []
    assert "load" in found.reached


def test_eight_bits_save_nothing_where_the_engine_has_no_more(tmp_path: Path) -> None:
    """`lossy.smaller` was wrongly reported."""
    steps: list[Data] = [
        {"add": {"req": "a", "prompt": 32, "max_tokens": 1}},
        {"run": {}},
        {"drop-local": {}},
        {"add": {"req": "b", "prompt": {"of": "a", "then": 2}, "max_tokens": 1}},
        {"run": {}},
    ]
    found = {}
    for dtype in ("fp8", "auto"):
        workload = mended(steps, "vllm", config={"block_size": 16, "cache_dtype": dtype})
        found[dtype] = outcome(workload, target_of("int8"), SPEC, tmp_path / dtype, strict=True)
        assert found[dtype].error is None and found[dtype].failures == []
        assert "load" in found[dtype].reached
    exercised = [{what for what, _ in each.pairs} for each in found.values()]
    assert ["lossy.smaller" in each for each in exercised] == [False, True]


def test_an_assertion_of_vllm_is_known_by_its_text(tmp_path: Path) -> None:
    steps: list[Data] = [
        {"add": {"req": "a", "prompt": 9, "max_tokens": 30}},
        {"step": 4},
        {"add": {"req": "b", "prompt": {"of": "a", "tokens": 9}, "max_tokens": 2}},
        {"run": {}},
    ]
    config = {"spec_tokens": 3, "budget": 9, "long_prefill_threshold": 3}
    found = outcome(mended(steps, "vllm", config=config), TARGET, SPEC, tmp_path / "run")
    assert (found.error, found.failures, found.unknown) == (None, [], [])
    assert found.broken_guarantees == ["engine.survives"]


def test_a_session_that_vllm_forgot_is_no_fault_of_the_connector(tmp_path: Path) -> None:
    """Its turn ends by a token that was in flight when it was preempted."""
    steps: list[Data] = [
        {"add": {"req": "s", "prompt": 13, "max_tokens": 2, "session": True}},
        {"schedule": 2},
        {"land": 1},
        {"preempt": "s"},
        {"land": 1},
        {"continue": {"req": "s", "then": 5, "max_tokens": 4}},
        {"step": 6},
        {"continue": {"req": "s", "then": 0}},
        {"run": {}},
    ]
    workload = mended(steps, "vllm", "async", config={"role": "kv_producer"})
    found = outcome(workload, TARGET, SPEC, tmp_path / "run")
    assert (found.error, found.failures, found.unknown) == (None, [], [])
    assert found.broken_guarantees == ["engine.session-goes-on"]


def test_who_waits_for_itself_after_a_sibling_failed_is_starved_by_vllm(tmp_path: Path) -> None:
    """`run.quiesces` was wrongly reported: the load that failed was the sibling's."""
    steps: list[Data] = [
        {"add": {"req": "a", "prompt": 49, "max_tokens": 1}},
        {"run": {}},
        {"drop-local": {}},
        {"add": {"req": "d", "prompt": {"same": "a"}, "max_tokens": 4}},
        {"run": {}},
    ]
    config = {"block_size": 16, "num_blocks": 7, "multi": ["failer", "self"]}
    found = outcome(mended(steps, "vllm", config=config), target_of("async"), SPEC, tmp_path)
    assert (found.error, found.failures, found.unknown) == (None, [], [])
    assert found.broken_guarantees == ["engine.retry-admitted"]


def test_a_sibling_does_not_serve_what_this_connector_failed_to_load(tmp_path: Path) -> None:
    """`save.confirmed` was wrongly reported: the sibling had saved it, before the engine heard."""
    steps: list[Data] = [
        {"add": {"req": "a", "prompt": 9, "max_tokens": 2, "skip_reading_prefix_cache": True}},
        {"run": {}},
        {"add": {"req": "b", "prompt": {"of": "a", "tokens": 4, "then": 5}, "max_tokens": 9}},
        {"step": 2},
        {"preempt": "b"},
        {"run": {}},
        {"drop-local": {}},
        {"add": {"req": "d", "prompt": {"same": "b"}, "max_tokens": 1}},
        {"step": 4},
        {"preempt": "d"},
        {"add": {"req": "e", "prompt": {"of": "d", "tokens": 8, "then": 2}, "max_tokens": 9}},
        {"run": {}},
    ]
    config: Data = {"budget": 4, "max_seqs": 2, "prefix_caching": False, "num_blocks": 8}
    config["multi"] = ["fetcher", "self"]
    workload = mended(steps, scheduling="async", config=config)
    found = outcome(workload, target_of("unreliable"), SPEC, tmp_path)
    assert (found.error, found.failures, found.unknown) == (None, [], [])
    assert {"load", "preemption"} <= set(found.reached)


def test_a_chunk_within_an_image_is_not_found_at_its_beginning(tmp_path: Path) -> None:
    """`blending` loaded the KV of an image for the text that stands before the same image."""
    image: Data = {"at": 3, "length": 5, "id": "cat"}
    shifted = {"parts": [{"of": "a", "from": 4, "tokens": 4}], "then": 4}
    steps: list[Data] = [
        {"add": {"req": "a", "prompt": 12, "max_tokens": 1, "mm": [image]}},
        {"run": {}},
        {"add": {"req": "b", "prompt": shifted, "max_tokens": 1, "mm": [image]}},
        {"run": {}},
    ]
    workload = mended(steps, config={"prefix_caching": False})
    found = outcome(workload, target_of("blending"), SPEC, tmp_path)
    assert (found.error, found.failures, found.unknown) == (None, [], [])


def test_what_is_stored_again_in_the_background_gets_its_time(tmp_path: Path) -> None:
    """`save.again` was wrongly reported: threads had no time before the prompt came back."""
    plain: Data = {"max_tokens": 7, "drafts": [2]}
    steps: list[Data] = [
        {"add": {"req": "a", "prompt": 14, **plain}},
        {"add": {"req": "b", "prompt": 16, "max_tokens": 1, "salt": "s"}},
        {"add": {"req": "c", "prompt": {"same": "a"}, **plain}},
        {"add": {"req": "d", "prompt": 13, **plain}},
        {"run": {}},
        {"add": {"req": "e", "prompt": {"same": "d"}, "max_tokens": 2, "stop_at": 1}},
        {"fail-load": {"req": "e", "positions": "all"}},
        {"run": {}},
        {"drop-local": {}},
        {"add": {"req": "f", "prompt": {"same": "e"}, "max_tokens": 9, "reloads": "e"}},
        {"run": {}},
    ]
    config: Data = {"budget": 7, "max_seqs": 1, "spec_tokens": 2, "prefix_caching": False}
    workload = mended(steps, config={**config, "num_blocks": 14}, policies=["late-threads"])
    target = replace(target_of("fenced"), capabilities={"store": True, "saves": "all"})
    found = outcome(workload, target, SPEC, tmp_path / "run", strict=True)
    assert (found.error, found.failures, found.unknown) == (None, [], [])


def test_a_chunk_that_is_stored_again_is_read_again(tmp_path: Path) -> None:
    """`blending` remembered a damaged chunk as empty, and served less than it had announced."""
    steps: list[Data] = [
        {"add": {"req": "a", "prompt": 13, "max_tokens": 2}},
        {"run": {}},
        {"drop-local": {}},
        {"damage": {"files": "garbage"}},
        {"add": {"req": "b", "prompt": {"same": "a"}, "max_tokens": 3}},
        {"add": {"req": "c", "prompt": {"of": "a", "then": 3}, "max_tokens": 2}},
        {"run": {}},
        {"drop-local": {}},
        {"add": {"req": "d", "prompt": {"same": "a"}, "max_tokens": 2}},
        {"run": {}},
    ]
    config: Data = {"load_failure_policy": "fail", "num_blocks": 64}
    workload = mended(steps, config=config, policies=["deny-first-alloc"])
    found = outcome(workload, target_of("blending"), SPEC, tmp_path, strict=True)
    assert (found.error, found.failures, found.unknown) == (None, [], [])


@pytest.mark.parametrize("damaged", [False, True])
def test_what_a_case_has_damaged_may_be_found_gone_at_any_time(damaged: bool) -> None:
    """`lookup.repeatable` was wrongly reported: a thread removed a chunk between two lookups."""
    observer: Any = SimpleNamespace(
        outage=False, activity=3, trace=SimpleNamespace(damaged=damaged)
    )
    previous: Any = SimpleNamespace(activity=3, local=0)
    assert Observer._may_have_shrunk(observer, previous, 0) is damaged


@pytest.mark.parametrize("name", ["prompt", "whole-chunks", "unfull-chunk"])
def test_after_a_reset_the_rest_of_a_chunk_may_stay_local(name: str, tmp_path: Path) -> None:
    """`shared.found` was wrongly reported: the first request had left it out, as no whole chunk."""
    steps: list[Data] = [
        {"add": {"req": "a", "prompt": 14, "max_tokens": 7}},
        {"reset": {"running": False, "connector": True}},
        {"run": {}},
        {"add": {"req": "b", "prompt": {"of": "a", "then": 5}, "max_tokens": 7}},
        {"run": {}},
        {"on": "d"},
        {"add": {"req": "c", "prompt": {"same": "b"}, "max_tokens": 1, "reloads": "b"}},
        {"run": {}},
    ]
    config: Data = {"budget": 4, "engines": {"p": "kv_producer", "d": "kv_consumer"}}
    config["num_blocks"] = 64
    workload = mended(steps, config=config, needs="store")
    found = outcome(workload, target_of(name), SPEC, tmp_path, strict=True)
    assert (found.error, found.failures, found.unknown) == (None, [], [])


def test_the_last_saves_of_a_request_take_room_from_others(tmp_path: Path) -> None:
    """`lookup.repeatable` was wrongly reported: nothing but such a save was under way."""
    image = {"at": 9, "length": 5, "id": "dog", "alike": {"id": "cat", "first": 32}}
    again: Data = {"prompt": {"same": "b"}, "max_tokens": 9}
    steps: list[Data] = [
        {"add": {"req": "a", "prompt": 16, "max_tokens": 4}},
        {"run": {"loaded": "a"}},
        {"preempt": "a"},
        {"add": {"req": "b", "prompt": {"same": "a"}, "max_tokens": 4, "salt": "t"}},
        {"step": 4},
        {"preempt": "b"},
        {"run": {}},
        {
            "add": {
                "req": "c",
                "prompt": {"parts": [{"of": "a", "from": 12, "tokens": 4}], "then": 1},
            }
        },
        {"step": 2},
        {"abort": "c"},
        {"run": {}},
        {"add": {"req": "d", **again, "mm": [image]}},
        {"drop-local": {}},
        {"add": {"req": "e", **again, "salt": "t", "skip_reading_prefix_cache": True}},
        {"add": {"req": "f", "prompt": {"same": "e"}, "max_tokens": 2}},
        {"run": {}},
    ]
    config = {"budget": 5, "max_seqs": 1, "num_blocks": 9}
    workload = mended(steps, "vllm", "async", config=config, policies=["late-threads"])
    found = outcome(workload, target_of("int8"), SPEC, tmp_path, strict=True)
    assert (found.error, found.failures, found.unknown) == (None, [], [])
