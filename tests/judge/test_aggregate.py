# SPDX-License-Identifier: Apache-2.0
"""Tests of how verdicts are combined: status per requirement, overall verdict, waivers.

Expected failures are covered too.
"""

from __future__ import annotations

from datetime import date
from typing import Any

import pytest

from kvconform.contract.profile import Expected, Waiver, unknown_requirements
from kvconform.judge.aggregate import aggregate, apply_expected, apply_waivers
from kvconform.judge.records import Row, Verdict
from kvconform.judge.verdict import CRASH
from verdict_rig import AXES

TODAY = date(2026, 6, 1)


def row(name: str, verdict: Verdict, case: str = "c.one", **more: Any) -> Row:
    return Row(requirement=name, case=case, verdict=verdict, **{**AXES, **more})


def test_the_status_of_a_requirement_is_its_worst() -> None:
    found = aggregate(
        [
            row("a", Verdict.PASS),
            row("a", Verdict.FAIL, "c.two"),
            row("b", Verdict.NOT_EXERCISED),
            row("b", Verdict.PASS, "c.two"),
            row("c", Verdict.UNOBSERVABLE),
            row("c", Verdict.NOT_EXERCISED, "c.two"),
            row("d", Verdict.BLOCKED),
            row("d", Verdict.PASS, "c.two"),
        ]
    )
    assert found.status == {
        "a": Verdict.FAIL,
        "b": Verdict.PASS,
        "c": Verdict.NOT_EXERCISED,
        "d": Verdict.BLOCKED,
    }
    assert (found.total, found.exercised, found.cases, found.failed) == (4, 3, 2, ["a"])
    assert (
        found.counts[Verdict.PASS] == 3
        and found.counts[Verdict.XPASS] == 0
        and sum(found.counts.values()) == 8
    )


@pytest.mark.parametrize(
    ("rows", "overall"),
    [
        ([], "error"),
        ([row("a", Verdict.PASS)], "conformant"),
        (
            [
                row("a", Verdict.PASS),
                row("b", Verdict.NOT_EXERCISED),
                row("c", Verdict.UNSUPPORTED),
                row("d", Verdict.UNOBSERVABLE),
            ],
            "conformant",
        ),
        ([row("a", Verdict.PASS), row("b", Verdict.FAIL)], "nonconformant"),
        (
            [row("a", Verdict.PASS), row("b", Verdict.FAIL, gating=False, level="SHOULD")],
            "conformant",
        ),
        (
            [row("a", Verdict.PASS), row("b", Verdict.FAIL, gating=False, kind="guarantee")],
            "conformant",
        ),
        ([row("a", Verdict.PASS), row("b", Verdict.XPASS)], "nonconformant"),
        ([row("a", Verdict.PASS), row("b", Verdict.BLOCKED, blocked_by=CRASH)], "nonconformant"),
        (
            [
                row("a", Verdict.PASS),
                row("b", Verdict.BLOCKED, blocked_by="c"),
                row("c", Verdict.XFAIL),
            ],
            "partial",
        ),
        (
            [
                row("a", Verdict.PASS),
                row("b", Verdict.BLOCKED, blocked_by="c"),
                row("c", Verdict.XFAIL, "c.two"),
            ],
            "nonconformant",
        ),
        (
            [
                row("a", Verdict.PASS),
                row("b", Verdict.BLOCKED, blocked_by="g"),
                row("g", Verdict.FAIL, kind="guarantee", gating=False),
            ],
            "partial",
        ),
        ([row("a", Verdict.PASS), row("b", Verdict.XFAIL)], "partial"),
        ([row("a", Verdict.PASS), row("b", Verdict.DISABLED)], "partial"),
        ([row("a", Verdict.NOT_EXERCISED)], "partial"),
        ([row("a", Verdict.FAIL), row("b", Verdict.ERROR)], "error"),
    ],
)
def test_the_overall_verdict(rows: list[Row], overall: str) -> None:
    found = aggregate(rows)
    assert found.verdict == overall and bool(found.reasons) is (overall != "conformant")


def test_a_wrong_expectation_is_an_error() -> None:
    assert aggregate([row("a", Verdict.PASS)], problems=["it matches nothing"]).verdict == "error"


def expect(requirement: str, **more: Any) -> Expected:
    return Expected(requirement=requirement, reason="known", **more)


def test_expected_failures() -> None:
    rows = [
        row("a", Verdict.FAIL),
        row("a", Verdict.PASS, "c.two"),
        row("b", Verdict.PASS),
        row("c", Verdict.FAIL),
        row("d", Verdict.BLOCKED),
    ]
    assert apply_expected(rows, [expect("a"), expect("b"), expect("d")], today=TODAY) == []
    assert [r.verdict for r in rows] == [
        Verdict.XFAIL,
        Verdict.PASS,
        Verdict.XPASS,
        Verdict.FAIL,
        Verdict.BLOCKED,
    ]
    assert rows[2].message == "was expected to fail: known"


def test_expected_failures_of_one_case() -> None:
    rows = [row("a", Verdict.FAIL), row("a", Verdict.FAIL, "c.two")]
    assert apply_expected(rows, [expect("a", case="*.two")], today=TODAY) == []
    assert [r.verdict for r in rows] == [Verdict.FAIL, Verdict.XFAIL]


def test_entries_that_match_nothing_or_have_expired() -> None:
    rows = [row("a", Verdict.FAIL)]
    assert apply_expected(rows, [expect("z")], today=TODAY) == [
        "expected failure of z on * matches nothing"
    ]
    assert apply_expected(rows, [expect("z")], today=TODAY, complete=False) == []
    assert apply_expected(rows, [expect("a", expires="2026-05-31")], today=TODAY) == [
        "expected failure of a on * expired on 2026-05-31"
    ]
    assert rows[0].verdict is Verdict.FAIL
    assert (
        apply_expected(rows, [expect("a", expires="2026-06-01")], today=TODAY) == []
        and rows[0].verdict is Verdict.XFAIL
    )
    assert unknown_requirements([expect("a*"), expect("zz")], ["a.b"]) == ["zz"]
    with pytest.raises(ValueError, match="expires"):
        expect("a", expires="tomorrow")


def test_an_expired_waiver_changes_nothing_and_is_told() -> None:
    rows = [row("g", Verdict.FAIL, kind="guarantee", engine="vllm")]
    told = apply_waivers(
        rows,
        [Waiver(requirement="g", reason="known", expires="2026-05-31")],
        vllm="0.32.0",
        today=TODAY,
    )
    assert told == ["waiver of g expired on 2026-05-31"] and rows[0].verdict is Verdict.FAIL


def test_waivers_concern_guarantees_of_an_engine_and_a_version() -> None:
    waiver = Waiver(requirement="g", reason="known", vllm=">=0.32,<0.33", scheduling=["async"])

    def settled(vllm: str, **more: Any) -> Verdict:
        rows = [
            row(
                "g",
                Verdict.FAIL,
                **{"kind": "guarantee", "engine": "vllm", "scheduling": "async", **more},
            )
        ]
        assert apply_waivers(rows, [waiver], vllm=vllm, today=TODAY) == []
        return rows[0].verdict

    assert settled("0.32.0") is Verdict.XFAIL
    assert settled("0.33.0") is Verdict.FAIL
    assert settled("0.32.0", engine="reference") is Verdict.FAIL
    assert settled("0.32.0", scheduling="sync") is Verdict.FAIL
    assert settled("0.32.0", kind="requirement") is Verdict.FAIL


def test_a_requirement_is_named_once_by_its_worst_verdict() -> None:
    fail, blocked = (
        row("a.one", Verdict.FAIL),
        row("a.one", Verdict.BLOCKED, case="c.two", blocked_by="a.two"),
    )
    found = aggregate([fail, blocked, row("a.two", Verdict.BLOCKED, blocked_by="a.one")])
    assert found.reasons == ["FAIL: a.one", "BLOCKED: a.two"]


def test_why_nothing_counts_is_said() -> None:
    nothing = "no requirement that counts was exercised"
    needs = [row(name, Verdict.UNSUPPORTED, message="the case needs async_load") for name in "ab"]
    assert aggregate(needs).reasons == [f"{nothing}: the case needs async_load"]
    risky = row("a", Verdict.PASS, gating=False, beyond=["damage"])
    (reason,) = aggregate([risky]).reasons
    assert reason.startswith(nothing) and "this vLLM does not bring about" in reason
    assert aggregate([row("a", Verdict.NOT_EXERCISED)]).reasons == [nothing]
