# SPDX-License-Identifier: Apache-2.0
"""Tests of declared capabilities that a run contradicts or never shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvconform.config.target import Target
from kvconform.contract.expression import compile_capability
from kvconform.contract.loader import load_spec
from kvconform.judge.aggregate import claimed, mismatches, reasons, unasked, void
from kvconform.judge.records import Row, Verdict
from kvconform.refimpl.connector import Lookup, ReferenceConnector
from kvconform.run.calibration import profile_of

SPEC = load_spec()
DECLARED = {name: "declared" for name in ("store", "saves", "async_load", "kv_events", "lossy")}


class Undeclared(ReferenceConnector):
    """Says nothing about itself."""

    kvconform_capabilities = None  # type: ignore[assignment]


def row(requirement: str, case: str, verdict: Verdict) -> Row:
    return Row(requirement, case, "reference", "sync", "v1", 1, 4, verdict)


@pytest.mark.parametrize(
    ("condition", "name", "does"),
    [
        ("store and saves", "store", True),
        ("!lossy and store", "lossy", False),
        ("not cap.lossy", "lossy", False),
        ("'kv_producer' in cap.roles", "roles", True),
        ("async_load", "load", False),
        ("core", "store", False),
    ],
)
def test_whether_a_condition_asks_for_a_capability(condition: str, name: str, does: bool) -> None:
    assert (name in compile_capability(condition).wanted) is does


def test_only_what_the_connector_says_itself_is_a_claim() -> None:
    caps = {"store": True, "saves": "none", "async_load": True, "kv_events": False, "lossy": 0.1}
    assert sorted(claimed(caps, DECLARED)) == ["async_load", "lossy", "store"]
    assert claimed(caps, dict.fromkeys(DECLARED, "inferred")) == []


@pytest.mark.parametrize(
    "verdict", [Verdict.NOT_EXERCISED, Verdict.UNSUPPORTED, Verdict.DISABLED, Verdict.UNOBSERVABLE]
)
def test_a_claim_whose_cases_are_skipped_is_void(verdict: Verdict) -> None:
    caps = {"async_load": True, "lossy": 0.1}
    rows = [
        row("recv.completes", "lifecycle.async-load", verdict),
        row("load.content", "chunked.abort", Verdict.PASS),
    ]
    both = ["lossy", "async_load"]
    assert void(caps, DECLARED, rows, SPEC) == (both, [])
    assert void(caps, dict.fromkeys(DECLARED, "inferred"), rows, SPEC) == ([], [])
    # a profile without any case that asks for it did not look at it
    unseen = void(caps, DECLARED, rows, SPEC, selected=["chunked.abort"])
    assert unseen == ([], both)
    looked = void(caps, DECLARED, rows, SPEC, selected=["lifecycle.async-load"])
    assert looked == (["async_load"], ["lossy"])


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("kv_events", ("events.complete", "chunked.abort")),
        ("async_load", ("recv.completes", "chunked.abort")),
        ("lossy", ("load.content", "cache.stored-again")),
    ],
)
def test_one_requirement_or_one_case_shows_it(name: str, shown: tuple[str, str]) -> None:
    assert void({name: True}, DECLARED, [row(*shown, Verdict.PASS)], SPEC) == ([], [])
    assert void(
        {name: True}, DECLARED, [row("load.content", "chunked.abort", Verdict.PASS)], SPEC
    ) == ([name], [])


def test_a_case_of_asynchronous_loads_shows_none_by_itself() -> None:
    rows = [row("load.content", "lifecycle.async-load", Verdict.PASS)]
    caps = {"async_load": True}
    assert void(caps, DECLARED, rows, SPEC) == (["async_load"], [])
    # where it cannot be seen whether a load is asynchronous, its cases have to do
    rows += [row("recv.completes", "lifecycle.async-load", Verdict.UNOBSERVABLE)]
    assert void(caps, DECLARED, rows, SPEC) == ([], [])


def test_every_capability_that_can_be_claimed_alone_is_asked_for_somewhere() -> None:
    conditions = [r.capability_expr for r in SPEC.requirements.values() if r.kind == "requirement"]
    conditions += [case.needs_expr for case in SPEC.cases.values()]
    for name in (
        "store",
        "saves",
        "async_load",
        "hma",
        "fault_injection",
        "kv_events",
        "transfer",
        "roles",
    ):
        assert any(name in condition.wanted for condition in conditions), name


def test_reasons_are_one_sentence() -> None:
    assert reasons([]) == []
    assert reasons(["hma", "kv_events"])[0].endswith(": hma, kv_events")


@pytest.mark.parametrize(
    ("declared", "name", "says"),
    [
        ({"hma": True}, "hma", "was not seen"),
        ({"saves": "prompt"}, "saves", "seen to be all and not prompt"),
        ({"store": False}, "store", "was seen"),
        ({"async_load": True}, "async_load", "was not seen"),
        ({"best_effort": True}, "best_effort", ""),
        ({"saves": "all"}, "saves", ""),
        (
            {"chunk_tokens": 16},
            "chunk_tokens",
            "40 of 41 tokens came back, more than whole chunks of 16",
        ),
        ({"chunk_tokens": 4}, "chunk_tokens", ""),
    ],
)
def test_what_is_seen_to_be_otherwise_is_said(
    declared: dict[str, Any], name: str, says: str, tmp_path: Path
) -> None:
    profile = profile_of(
        Target(f"{__name__}:Undeclared", {"store": "{tmp}/store"}, capabilities=declared), tmp_path
    )
    assert profile.caps[name] == declared[name]
    assert profile.sources[name] == "declared"
    assert mismatches(profile.sources, profile.doubts) == (
        [f"{name} is declared, but {says}"] if says else []
    )


def test_a_store_that_keeps_nothing_may_be_a_server_that_is_not_there(tmp_path: Path) -> None:
    target = Target(
        f"{__name__}:Undeclared",
        {"store": "http://127.0.0.1:1", "patience": 0.2},
        capabilities={"store": True},
    )
    profile = profile_of(target, tmp_path)
    assert profile.doubts["store"] == (
        "but was not seen (no KV came back in plain runs; if a server has it, is that there?)"
    )


class Breaks(Undeclared):
    """Dies of its first save."""

    def wait_for_save(self) -> None:
        raise RuntimeError("no space")


def test_what_a_run_that_broke_off_says_is_not_taken_for_silence(tmp_path: Path) -> None:
    profile = profile_of(Target(f"{__name__}:Breaks", {"store": "{tmp}"}), tmp_path)
    assert profile.caps["store"] is False
    assert mismatches(profile.sources, profile.doubts) == [
        "store is inferred, from a plain run that broke off: RuntimeError: no space"
    ]
    told = {"store": True, "saves": "all"}
    target = Target(f"{__name__}:Breaks", {"store": "{tmp}"}, capabilities=told)
    profile = profile_of(target, tmp_path)
    assert mismatches(profile.sources, profile.doubts) == [
        "store is declared, but a plain run broke off: RuntimeError: no space"
    ]


class NeverComes(Undeclared):
    """Announces asynchronous loads, and never says that one is over."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Lookup:
        tokens, _ = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return tokens, bool(tokens)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return None, None


def test_loads_that_are_announced_and_never_come_are_judged(tmp_path: Path) -> None:
    """Loads are judged even if the connector's bug ends the plain run early."""
    profile = profile_of(
        Target(f"{__name__}:NeverComes", {"store": "{tmp}"}, stall_seconds=0.1), tmp_path
    )
    assert (profile.caps["store"], profile.caps["async_load"], profile.caps["saves"]) == (
        True,
        True,
        "prompt",
    )
    assert mismatches(profile.sources, profile.doubts) == [
        "store is inferred, from a plain run that broke off: nothing went on"
    ]


def test_what_is_not_asked_is_told() -> None:
    caps = {"store": False, "transfer": False, "synthesises_kv": False, "fault_injection": False}
    (silent,) = unasked(caps, {"store": "inferred"}, {})
    assert "declare `store = true`" in silent
    doubts = {"store": "from a plain run that broke off: OSError"}
    for other, sources, doubtful in (
        (caps, {"store": "declared"}, {}),
        (caps, {"store": "inferred"}, doubts),
        (caps | {"store": True, "fault_injection": True}, {"store": "inferred"}, {}),
        (caps | {"transfer": True, "fault_injection": True}, {"store": "inferred"}, {}),
        ({}, {}, {}),
    ):
        assert unasked(other, sources, doubtful) == []
    (unjudged,) = unasked(caps | {"store": True}, {"store": "declared"}, {})
    assert "kvconform_fail_load" in unjudged


@pytest.mark.parametrize(
    ("loses", "source", "said"),
    [(True, "inferred", True), (False, "inferred", False), (True, "declared", False)],
)
def test_a_loss_that_is_taken_for_best_effort_is_told(loses: bool, source: str, said: bool) -> None:
    caps = {"store": True, "fault_injection": True, "best_effort": loses}
    sources = {"store": "declared", "best_effort": source}
    told = any("declare `best_effort = false`" in text for text in unasked(caps, sources, {}))
    assert told is said
    assert unasked(caps, sources, {"best_effort": "from a plain run that broke off"}) == []
