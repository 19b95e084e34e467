# SPDX-License-Identifier: Apache-2.0
"""Tests that failures with one cause are shown once, and causes before their consequences."""

from __future__ import annotations

from kvconform.judge.records import FAILED_LOAD, Row, Verdict
from kvconform.report.causes import SHOWN, by_cause, other_runs, usual_causes


def risk(requirement: str, cause: str, case: str) -> Row:
    found = row(requirement, cause, case)
    found.gating, found.beyond = False, ("reuse-freed-first",)
    return found


def row(requirement: str, cause: str, case: str = "c") -> Row:
    return Row(requirement, case, "vllm", "sync", "v1", 1, 4, Verdict.FAIL, cause=(cause,))


def test_the_message_does_not_make_a_cause() -> None:
    rows = [row("hook.no-raise", "a", "one"), row("hook.no-raise", "b", "two")]
    rows += [row("hook.no-raise", "a", "three"), row("hook.no-block", "a", "four")]
    rows[0].message, rows[2].message = "raised KeyError: alpha", "something else"
    rows[1].message = rows[0].message
    assert [[r.case for r in group] for group in by_cause(rows)] == [
        ["one", "three"],
        ["two"],
        ["four"],
    ]


def test_groups_of_a_requirement_stay_together_and_are_few() -> None:
    words = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta"]
    rows = [row("r.one", f"raised {word}") for word in words] + [
        row("r.two", "raised alpha"),
        row("r.one", "raised alpha"),
    ]
    groups = by_cause(rows)
    assert [g[0].requirement for g in groups] == ["r.one"] * SHOWN + ["r.two"]
    assert sum(len(g) for g in groups) == len(rows)


def test_what_happened_first_in_a_run_comes_first() -> None:
    rows = [
        row("hook.no-raise", "raised"),
        row("meta.returned", "returned None"),
        row("events.complete", "0"),
        row("reset.forgets", "16"),
    ]
    for one, event in zip(rows, (40, 12, 3, 3), strict=True):
        one.event = event
    assert [group[0].requirement for group in by_cause(rows)] == [
        "reset.forgets",
        "meta.returned",
        "hook.no-raise",
        "events.complete",
    ]
    mixed = [row("c.c", "x", "one"), row("b.b", "y", "two"), row("a.a", "z", "one")]
    for one, event in zip(mixed, (50, 7, 10), strict=True):
        one.event = event
    assert [group[0].requirement for group in by_cause(mixed)] == ["a.a", "c.c", "b.b"], (
        "whatever lies between"
    )
    rows[1].case = "elsewhere"  # another run's time is another
    assert [group[0].requirement for group in by_cause(rows[:2])] == [
        "hook.no-raise",
        "meta.returned",
    ]


def test_the_run_that_is_easiest_to_read_shows_a_cause() -> None:
    rows = [row("load.position", "x", case) for case in ("long", "short", "other", "told")]
    rows.append(risk("load.position", "x", "risk"))
    for one, event in zip(rows, (90, 30, 20, 50, 10), strict=True):
        one.event = event
    rows[2].engine, rows[3].side = "another", "load"
    assert by_cause(rows)[0][0].case == "told", "where the bytes come from counts most"
    rows[3].side = None
    ((first, *rest),) = by_cause(rows)
    assert first.case == "short", "of those on one engine that count"
    assert [each.case for each in rest] == ["long", "other", "told", "risk"], "the others stay"
    for name, value in (("scheduling", "async"), ("runner", "v2"), ("depth", 3), ("slow", "all")):
        rows[2].engine, before = rows[0].engine, getattr(rows[2], name)
        assert by_cause(rows)[0][0].case == "other"
        setattr(rows[2], name, value)
        assert by_cause(rows)[0][0].case == "short", f"another {name}"
        setattr(rows[2], name, before)


def test_a_cause_is_not_shown_by_one_that_joins_it() -> None:
    rows = [row("load.position", word) for word in ("a", "b", "c", "d", "e")]
    for one, event in zip(rows, (5, 6, 7, 8, 1), strict=True):
        one.event = event
    assert len(rows) == SHOWN + 1
    assert [group[0].cause for group in by_cause(rows)] == [one.cause for one in rows[:SHOWN]]
    mixed = [row("identity.content", "x", case) for case in ("two", "one")]
    mixed[0].differs, mixed[1].differs = ("salt", "adapter"), ("salt",)
    mixed[0].event, mixed[1].event = 1, 9
    assert by_cause(mixed)[0][0].case == "one", "few differences say more than an early failure"


def test_a_cause_is_not_shown_by_one_that_joins_it_as_a_risk() -> None:
    rows = [row("load.position", "x", "counts"), risk("load.position", "x", "risk")]
    rows[0].event, rows[1].event = 9, 1
    assert by_cause(rows)[0][0].case == "counts"


def test_a_risk_with_the_cause_of_a_failure_is_shown_with_the_failure() -> None:
    rows = [
        risk("save.owned", "a", "risk-1"),
        row("save.owned", "a", "one"),
        risk("save.owned", "b", "risk-2"),
        row("save.owned", "a", "two"),
        risk("save.owned", "a", "risk-3"),
    ]
    groups = by_cause(rows)
    assert [[each.case for each in group] for group in groups] == [
        ["one", "two", "risk-1", "risk-3"],
        ["risk-2"],
    ]
    alike, risks = other_runs(groups[0])
    assert (alike, risks) == ([rows[3].run], [rows[0].run, rows[4].run])
    assert other_runs(groups[1]) == ([], [])
    assert other_runs([rows[0], rows[4]]) == ([rows[4].run], []), "a risk's own runs"


def test_a_failure_is_never_shown_as_a_risk() -> None:
    rows = [risk("r.one", f"cause {number}", f"risk-{number}") for number in range(SHOWN + 1)]
    rows += [row("r.one", f"cause {number}", f"f-{number}") for number in range(SHOWN + 2)]
    groups = by_cause(rows)
    assert [group[0].gating for group in groups] == [True] * SHOWN
    assert sum(map(len, groups)) == len(rows)


def test_a_save_upon_a_failed_load_has_no_usual_cause() -> None:
    wrong = "Saves blocks before they are computed."
    found = row("save.confirmed", "x")
    assert usual_causes(found, wrong) == wrong
    found.cause += (FAILED_LOAD,)
    assert usual_causes(found, wrong) == ""


def test_usual_causes_of_what_a_hook_raised_fit_its_error() -> None:
    wrong = "Counts too far (an IndexError); or forgets a request (a KeyError)."
    found = row("hook.no-raise", "IndexError")
    found.hook = "build_connector_meta"
    assert usual_causes(found, wrong) == "Counts too far (an IndexError)."
    assert usual_causes(row("save.owned", "IndexError"), wrong) == wrong
