# SPDX-License-Identifier: Apache-2.0
"""Tests of the report on the terminal: how long it is, and what it shows first."""

from __future__ import annotations

import io
from datetime import date

import pytest
from rich.console import Console

from kvconform.config.selection import select
from kvconform.config.settings import REFERENCE, Settings
from kvconform.contract.loader import load_spec
from kvconform.errors import Place
from kvconform.judge.records import MUST, CaseReport, Row, Verdict
from kvconform.judge.verdict import rows_for
from kvconform.report import sections, terminal
from kvconform.report.collector import Collector
from kvconform.report.roots import roots

SPEC = load_spec()
LINE = "   3  plan        save a [0, 8) after_forward with a long text that has to be wrapped here"


def collector(verbose: bool = False, runs: int = 2) -> Collector:
    settings = Settings(connector="pkg.mod:Conn", verbose=verbose)
    found = Collector(SPEC, settings, select(SPEC, settings, "0.32.0"), "0.32.0")
    made = [variant for variant in found.selection.variants if not variant.beyond]
    found.only({variant.id for variant in made[:runs]})
    return found


def judged(found: Collector, *failing: Row, works_aside: bool = False) -> None:
    """Add a report per run in which all holds but `failing`."""
    for variant in found.selection.variants:
        requirements = [SPEC.requirements[name] for name in found.selection.judged]
        rows = rows_for(requirements, variant, Verdict.PASS, "", strict=False)
        report = CaseReport(variant.id, rows=rows, works_aside=works_aside)
        for row in rows:
            row.exercised, row.message = 1, None
            like = next((each for each in failing if each.requirement == row.requirement), None)
            if like is not None:
                row.verdict, row.message, row.headline = like.verdict, like.message, like.headline
                row.blocked_by, row.check = like.blocked_by, like.check
                row.place = like.place
                report.timelines[row.requirement] = [*[LINE] * 17, "> " + LINE[2:], LINE]
        found.add(report)


def failure(name: str, message: str = "m", headline: str | None = None) -> Row:
    row = Row(name, "c", "vllm", "sync", "v1", 1, 4, Verdict.FAIL, message=message)
    row.headline = headline
    return row


def printed(found: Collector, width: int = 80) -> list[str]:
    out = io.StringIO()
    console = Console(file=out, width=width)
    rows, verdict = found.finish(date(2026, 1, 1), complete=True)
    terminal.header(console, found, [])
    terminal.report(console, found, rows, verdict, where="kvconform-report", seconds=1.0)
    return out.getvalue().splitlines()


SAVE = failure("save.owned", "the save; and its story", "a save read too late")
LOAD = failure("load.position", "the load; a wrong guess")
NULL = failure("compose.null-effect")
NULL.verdict, NULL.blocked_by = Verdict.BLOCKED, "load.position"


@pytest.mark.parametrize(
    ("profile", "text"),
    [("core", "CONFORMANT  in"), ("smoke", "CONFORMANT with profile smoke  in")],
)
def test_a_verdict_names_a_profile_that_leaves_cases_out(profile: str, text: str) -> None:
    found = collector()
    judged(found)
    found.selection.narrowed = False
    found.settings.profile = profile
    assert printed(found)[-1].startswith(text)


def test_success_is_a_line_per_area_and_the_verdict() -> None:
    found = collector()
    judged(found)
    lines = printed(found)
    assert len(lines) <= 40 and max(map(len, lines)) <= 80
    assert lines[-1].startswith("CONFORMANT in what was selected")
    count = sum(r.area == "save" and r.kind == "requirement" for r in SPEC.requirements.values())
    assert f"save          {count} pass" in lines
    assert not any("save.owned" in line for line in lines)


def test_areas_in_which_nothing_was_judged_share_a_line() -> None:
    found = collector()
    judged(found)
    for report in found.reports.values():
        for row in report.rows:
            if SPEC.requirements[row.requirement].area in ("groups", "transfer"):
                row.verdict = Verdict.UNSUPPORTED
    lines = printed(found)
    text = " ".join(" ".join(lines).split())
    assert "no verdict groups, transfer: the requirements of these areas did not come up" in text
    assert not any(line.startswith(("groups ", "transfer ")) for line in lines)


@pytest.mark.parametrize(
    ("number", "named", "more"),
    [(1, 1, None), (2, 2, None), (3, 2, "and 1 more"), (5, 2, "and 3 more")],
)
def test_runs_that_did_not_reach_their_situation(number: int, named: int, more: str | None) -> None:
    found = collector(runs=6)
    judged(found)
    for report in list(found.ordered_reports())[:number]:
        report.unmet = ["a was not preempted"]
    lines = printed(found, width=100)
    start = next(n for n, line in enumerate(lines) if "not reach the situation" in line)
    assert lines[start].startswith("1 run" if number == 1 else f"{number} runs")
    runs = [line for line in lines[start:] if line.endswith("]: a was not preempted")]
    assert [line.strip().partition(": ")[0] for line in runs] == [
        report.variant for report in found.ordered_reports()
    ][:named]
    assert [line.strip() for line in lines if line.startswith("  and ")] == (
        [] if more is None else [f"{more} (report.html names all)"]
    )


def test_blocked_guarantees_are_told_from_requirements() -> None:
    found = collector()
    hidden = failure(next(r.id for r in SPEC.requirements.values() if r.kind == "guarantee"))
    hidden.verdict, hidden.blocked_by = Verdict.BLOCKED, "load.position"
    judged(found, LOAD, NULL, hidden)
    text = " ".join(" ".join(printed(found)).split())
    assert "1 blocked, 1 blocked (engine's), 1 fail" in text


def test_a_root_cause_names_eight_consequences_unless_verbose() -> None:
    found = collector()
    names = [
        r.id
        for r in SPEC.requirements.values()
        if r.kind == "requirement" and r.id in found.selection.judged and r.id != "save.owned"
    ]
    blocked = [failure(name) for name in names[:30]]
    for each in blocked:
        each.verdict, each.blocked_by = Verdict.BLOCKED, "save.owned"
    judged(found, SAVE, *blocked)
    text = " ".join(" ".join(printed(found)).split())
    named = text.partition("30 consequences: ")[2].partition(", and 22 more ")[0]
    assert named.count("(blocked)") == 8
    found.settings.verbose = True
    text = " ".join(" ".join(printed(found)).split())
    assert all(f"{name} (blocked)" in text for name in names[:30])


def test_of_many_consequences_four_are_described() -> None:
    found = collector()
    names = ["load.position", "load.only-grant", "load.complete-or-failed", "load.errors"]
    names += ["layout.halves", "layout.heads", "load.failed-while-loading"]
    made = [name for name in names if name in found.selection.judged]
    judged(found, SAVE, *(failure(name) for name in made))
    lines = printed(found)
    assert len(made) > sections.CONSEQUENCES
    assert f"             and {len(made) - sections.CONSEQUENCES} more (-v)" in lines


def test_four_kinds_of_errors_are_listed_unless_debugged() -> None:
    found = collector(runs=6)
    judged(found)
    for number, report in enumerate(found.reports.values()):
        for row in report.rows:
            row.verdict, row.message = Verdict.ERROR, f"broken {number}"
        report.harness_error = f"Traceback {number}"
    lines = printed(found)
    assert sum(line.startswith("ERROR  broken") for line in lines) == 4
    assert "ERROR  2 more kinds (--debug)" in lines
    found.settings.debug = True
    lines = printed(found)
    assert sum(line.startswith("ERROR  broken") for line in lines) == 6
    assert sum(line.startswith("Traceback ") for line in lines) == 4


def test_verbose_prints_every_requirement() -> None:
    found = collector(verbose=True)
    judged(found)
    assert any(line.split()[:3] == ["save.owned", "MUST", "PASS"] for line in printed(found))


@pytest.mark.parametrize("width", [80, 100])
def test_one_root_cause_fits_a_screen(width: int) -> None:
    found = collector()
    judged(found, LOAD, SAVE, NULL)
    lines = printed(found, width)
    assert len(lines) <= (60 if width == 80 else 55), "\n".join(lines)
    assert max(map(len, lines)) <= width
    text = " ".join(" ".join(lines).split())
    assert (
        "1. save.owned: a save read too late. 2 consequences: load.position,"
        " compose.null-effect (blocked)"
    ) in text
    titles = [line for line in lines if line.startswith("── ")]
    assert [title.split()[1:3] for title in titles] == [["1.", "save.owned"]]
    assert "follows load.position: the load" in text and "a wrong guess" not in text


@pytest.mark.parametrize("length", [1, 12])
def test_the_excerpt_gets_what_its_section_leaves(length: int) -> None:
    """The longer what was found is, the shorter is the excerpt; 60 lines are enough for both."""
    long = failure("save.owned", "; ".join(["what was found with all of its particulars"] * length))
    found = collector()
    judged(found, long)
    for report in found.reports.values():
        report.timelines["save.owned"] = [*["   3  plan        a"] * 40, "> " + LINE[2:]]
    lines = printed(found)
    start = lines.index("step  event")
    excerpt = sum(line.startswith(("   3 ", ">  3 ")) for line in lines[start:])
    assert sections.LEAST - 3 <= excerpt <= sections.MOST
    assert (excerpt < sections.MOST - 3) == (length > 1)
    assert len(lines) <= 58, "two lines of progress come on top"
    assert not any(line.startswith("why ") for line in lines)
    found.settings.verbose = True
    lines = printed(found)
    assert sum(line == "   3  plan        a" for line in lines) == 40
    assert any(line.startswith("why ") for line in lines)


@pytest.mark.parametrize("length", [1, 18])
def test_what_follows_is_shortened_only_where_there_is_no_room(length: int) -> None:
    long = failure("save.owned", "; ".join(["what was found with all of its particulars"] * length))
    told = "a load did something that takes two lines to say, of which this is the last word"
    names = ("load.position", "load.only-grant", "load.complete-or-failed")
    found = collector()
    judged(found, long, *(failure(name, "all of it", told) for name in names), NULL)
    lines = printed(found)
    assert len(lines) <= 58, "two lines of progress come on top"
    text = " ".join(" ".join(lines).split())
    assert text.count("last word") == (3 if length == 1 else 0)
    cut = [line for line in lines if line.endswith(" ...") and "load." in line]
    assert len(cut) == (0 if length == 1 else 3)


def test_a_failure_of_a_connector_with_threads_may_not_come_again_at_once() -> None:
    found = collector()
    judged(found, SAVE)
    assert not any(line.startswith("timing ") for line in printed(found))
    found = collector()
    judged(found, SAVE, works_aside=True)
    assert sum(line.startswith("timing ") for line in printed(found)) == 1


def test_runs_without_their_situation_are_only_counted_next_to_failures() -> None:
    found = collector()
    judged(found, SAVE)
    for report in found.reports.values():
        report.unmet = ["a was not preempted"]
    brief = "2 runs did not reach the situation they test (report.html names them)."
    assert brief in printed(found)
    found.settings.verbose = True
    lines = printed(found)
    assert brief not in lines and any("a was not preempted" in line for line in lines)


def test_the_line_that_raised_tells_two_causes_of_one_hook_apart() -> None:
    first = failure("hook.no-raise", "raised", "build_connector_meta raised KeyError")
    first.place = Place("conn.py", 12, "plan", "self.x[y]")
    found = collector()
    judged(found, first)
    assert any("raised KeyError (conn.py:12, in plan)" in line for line in printed(found))


def test_the_suites_own_connector_is_said_to_be_that() -> None:
    found = collector()
    judged(found)
    assert not any("the suite's own" in line for line in printed(found))
    found.settings.connector = REFERENCE
    assert any("the suite's own" in line for line in printed(found))


def test_verbose_shows_all_of_a_consequence_and_names_its_root() -> None:
    found = collector(verbose=True)
    judged(found, LOAD, SAVE, NULL)
    lines = printed(found)
    assert any(line.startswith("── load.position, a consequence of save.owned ─") for line in lines)
    assert "a wrong guess" in " ".join(lines)


def test_further_root_causes_are_folded_to_what_differs() -> None:
    found = collector()
    judged(found, SAVE, failure("stats.fresh", "kept; twice"))
    lines = printed(found)
    start = next(n for n, line in enumerate(lines) if line.startswith("── 2. stats.fresh ─"))
    names = [line.split()[0] for line in lines[start + 1 :] if line[:1].strip()]
    assert names[:5] == ["found", "usual", "where", "also", "reproduce"]
    assert "kept; twice" in lines[start + 1]


def test_several_root_causes_fit_in_100_lines_and_the_first_ones_are_explained() -> None:
    found = collector()
    names = [
        req.id
        for req in SPEC.requirements.values()
        if req.kind == "requirement" and req.level in MUST and req.wrong
        if req.id in found.selection.judged and req.id.startswith(("stats.", "finish.", "hook."))
    ][:5]
    long = "what was found, with all the particulars of a typical failure of this kind, that is"
    failures = [failure(name, f"{long}; two lines") for name in names]
    for each in failures:
        each.check = "`e.x == 0` is false: e.x=1"
    judged(found, *failures)
    lines = printed(found)
    assert max(map(len, lines)) <= 80
    titles = [n for n, line in enumerate(lines) if line.startswith("── ")]
    assert len(titles) == 5
    assert len(lines) <= 105, "\n".join(lines)
    assert sum(line.startswith("check  ") for line in lines) == 5
    assert sum(line.startswith("usual cause  ") for line in lines) == 5


def test_advice_alone_is_one_line_below_the_areas() -> None:
    found = collector()
    judged(found, failure("save.as-plain", "less came back; of all"))
    lines = printed(found)
    assert "1. save.as-plain: less came back. [recommended only; it counts with --strict]" in lines
    assert not any(line.startswith("── ") for line in lines)
    assert any(line.startswith("load ") for line in lines) and len(lines) <= 40
    [place] = [line for line in lines if line.startswith("   where: ")]
    assert place in [f"   where: {run}, and 1 more run" for run in found.reports]
    area = SPEC.requirements["save.as-plain"].area
    assert any(line.startswith(f"{area} ") and "1 recommendation" in line for line in lines)
    assert not any(" fail" in line for line in lines if line.startswith(f"{area} "))


def test_next_to_failures_only_the_first_recommendations_are_named() -> None:
    found = collector()
    names = [name for name in found.selection.judged if SPEC.requirements[name].level == "SHOULD"]
    judged(found, SAVE, *(failure(name) for name in names))
    rows, _ = found.finish(date(2026, 1, 1), complete=True)
    rest = sum(not root.counts for root in roots(rows)) - sections.ADVICE
    lines = printed(found)
    assert rest > 9 and f"and {rest} more recommendations or risks (-v)" in lines
    assert sum(line.startswith("   where: ") for line in lines) == sections.ADVICE
    few = collector()
    judged(few, SAVE, *(failure(name) for name in names[: sections.ADVICE + 1]))
    assert sum(line.startswith("   where: ") for line in printed(few)) == sections.ADVICE + 1
    found.settings.verbose = True
    assert not any("more recommendations" in line for line in printed(found))


def test_doubts_about_capabilities_come_after_the_failures_that_may_cause_them() -> None:
    found = collector()
    found.capabilities, found.sources = {"best_effort": True}, {"best_effort": "observed"}
    found.doubts = {"best_effort": "from a run that broke off"}
    judged(found)
    lines = printed(found)
    doubt = next(n for n, line in enumerate(lines) if "a run that broke off" in line)
    assert doubt < next(n for n, line in enumerate(lines) if line.startswith("load "))
    judged(found, SAVE)
    lines = printed(found)
    doubt = next(n for n, line in enumerate(lines) if "a run that broke off" in line)
    assert doubt > next(n for n, line in enumerate(lines) if line.startswith("── 1. save.owned"))
    assert lines[doubt - 1] == ""


def test_what_only_profile_full_runs_is_one_line_of_the_header() -> None:
    found = collector()
    judged(found)
    count = found.selection.beyond_profile
    assert f"not run     {count} more runs with --profile full" in printed(found)


def test_a_named_case_without_a_run_is_one_line_of_the_header() -> None:
    found = collector()
    judged(found)
    found.selection.runless = ["identity.two-salts"]
    line = "not run     cases without a run with these options: identity.two-salts"
    assert line in printed(found)


def test_places_are_below_their_root_cause_with_any_number_of_these() -> None:
    found = collector()
    names = [name for name in found.selection.judged if SPEC.requirements[name].level == "SHOULD"]
    judged(found, *(failure(name) for name in names))
    lines = printed(found)
    for number, indent in ((9, 3), (10, 4)):
        at = next(n for n, line in enumerate(lines) if line.startswith(f"{number}. "))
        place = next(line for line in lines[at:] if line.lstrip().startswith("where: "))
        assert place.index("where") == indent, "in line with the name of the requirement"


def test_a_broken_guarantee_has_a_section_of_its_own() -> None:
    found = collector()
    judged(found, failure("engine.relays-reports", "a report was lost"))
    lines = printed(found)
    assert any(line.startswith("── 1. engine.relays-reports ─") for line in lines)
    assert "[the engine's, not the connector's fault]" in " ".join(" ".join(lines).split())


def test_what_only_shows_at_the_end_is_blamed_on_neither_the_engine_nor_the_connector() -> None:
    found = collector()
    judged(found, failure("case.expected", "computed is 12, not 8"))
    text = " ".join(" ".join(printed(found)).split())
    assert "[no requirement names the cause: the engine's or the connector's fault]" in text
    assert "not the connector's fault" not in text
