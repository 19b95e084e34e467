# SPDX-License-Identifier: Apache-2.0
"""The report on the terminal: a header, the verdicts or the failures, and the overall verdict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.text import Text

from kvconform import __version__
from kvconform.adapters.registry import titles
from kvconform.compat.installed import RUNNER_V2
from kvconform.config.settings import REFERENCE, Settings
from kvconform.contract.loader import Spec
from kvconform.errors import UsageError
from kvconform.judge.aggregate import Aggregate, mismatches, unasked
from kvconform.judge.records import CaseReport, Row, Verdict
from kvconform.report.collector import Collector
from kvconform.report.explain import cases_about, defects_of
from kvconform.report.jsonl import read
from kvconform.report.layout import make_console, paragraph, wrapped
from kvconform.report.roots import roots
from kvconform.report.sections import print_failures
from kvconform.report.tables import print_lines, print_tables, verdict_name
from kvconform.report.timeline import fit
from kvconform.words import listed, many

__all__ = ["header", "make_console", "report"]

ANSWER = {
    "conformant": "bold green",
    "partial": "bold yellow",
    "nonconformant": "bold red",
    "error": "bold magenta",
}
SCREEN, HEADER = 60, 10
"""Number of lines of a report with one root cause, unless -v is given, and those of its header.

The header has two lines of progress.
"""
MORE = " (report.html has all of it; -v prints it here)"
LISTED = 4
"""Number of runs, cases or tracebacks that are listed by name."""
UNREACHED = 2
"""Number of runs that are listed with the situation that they did not reach."""


def header(
    console: Console,
    collector: Collector,
    warnings: Sequence[str],
    *,
    joined: int = 0,
    hint: str = "",
) -> None:
    """Print what is about to be judged; `joined` is the number of merged shards."""
    settings = collector.settings
    selection = collector.selection
    console.print(f"[bold]kvconform {__version__}[/]  vLLM {collector.vllm}")
    named = f" ({escape(settings.catalogue)})" if settings.catalogue else ""
    if settings.connector == REFERENCE:
        named = " (the suite's own, which is judged where none is named)"
    console.print(f"connector   [bold]{escape(settings.connector)}[/]{named}", soft_wrap=True)
    axes = f"engines {', '.join(settings.engines)} · scheduling {', '.join(settings.schedulings)}"
    axes += f" · profile {settings.profile} · seed {settings.seed}"
    paragraph(console, "axes", axes, indent=12)
    if settings.slows is not None:
        where = "CUDA, emulated on the CPU" if settings.emulate_cuda else "CUDA"
        slow = f" · slow: {', then '.join(settings.slows)}" if settings.slows else ""
        console.print(f"device      {where}{slow}")
    if settings.engine == "live":
        text = (
            "the complete vLLM with a tiny, randomly initialised model;"
            " asynchronous scheduling stays on where vLLM turns it off"
        )
        paragraph(console, "engine", text, indent=12)
    for title in titles(settings.adapters):
        text = f"{title}: what it does wrong is not the connector's fault"
        paragraph(console, "adapter", text, indent=12)
    counts = (
        (len(selection.order()), "case"),
        (len(selection.variants), "run"),
        (len(selection.shown), "requirement"),
    )
    runs = ", ".join(many(number, word) for number, word in counts)
    shard = f" (shard {selection.shard} of the selection)" if selection.shard else ""
    source = many(joined, "shard") if joined else many(settings.workers, "worker")
    paragraph(console, "selection", f"{runs}{shard} · {source}", indent=12)
    cases, requirements = selection.beyond
    if cases:
        text = f"cases that this vLLM cannot run: {', '.join(cases)}"
        paragraph(console, "not run", text, indent=12)
    if selection.without:
        text = (
            f"{many(selection.without, 'run')} on model runner V2,"
            f" which does not support connectors before vLLM {RUNNER_V2}"
        )
        paragraph(console, "not run", text, indent=12)
    if selection.runless:
        text = f"cases without a run with these options: {', '.join(selection.runless)}"
        paragraph(console, "not run", text, indent=12)
    if selection.beyond_profile:
        text = f"{many(selection.beyond_profile, 'more run')} with --profile full"
        paragraph(console, "not run", text, indent=12)
    if requirements and not selection.narrowed:
        text = (
            f"{many(len(requirements), 'requirement')} of other vLLM releases"
            " (docs/supported-versions.md)"
        )
        paragraph(console, "not judged", text, indent=12)
    if settings.file:
        console.print(f"settings    {escape(settings.file)}", soft_wrap=True)
    for warning in warnings:
        paragraph(console, "warning", warning, indent=12)
    if hint:
        console.print(f"hint        {escape(hint)}", soft_wrap=True)


def hint_of(collector: Collector) -> str:
    """Return which cases are enough if -k names only requirements, which all cases are judged by.

    It is empty otherwise. It looks at the last report in the directory of this one.
    """
    named = collector.settings.select
    if not named or any(name not in collector.spec.requirements for name in named):
        return ""
    which = "in which it failed last time"
    cases = _failed_last(collector.settings, named)
    if not cases:
        which = "about it"
        cases = _cases_about(collector.spec, named)
    if not cases:
        return ""
    shown = ",".join(cases[:LISTED])
    if len(cases) > LISTED:
        shown += f" (and {len(cases) - LISTED} more)"
    return f"a requirement is judged on every case; to run only the cases {which}: -k {shown}"


def _failed_last(settings: Settings, named: Sequence[str]) -> list[str]:
    """Return the cases in which the requirements `named` failed, by the last report here."""
    try:
        last = read(settings.report_dir)
    except UsageError:
        return []
    if last.header.connector != settings.connector:
        return []
    failed = (
        row.case
        for row in last.rows.values()
        if row.requirement in named and row.verdict is Verdict.FAIL
    )
    return list(dict.fromkeys(failed))


def _cases_about(spec: Spec, named: Sequence[str]) -> list[str]:
    """Return the cases about the requirements `named`.

    Cases in which a planted defect breaks one of the requirements come first.
    """
    broken = [
        case
        for name in named
        for defect in defects_of(spec, name)
        for case in defect.get("cases", ())
    ]
    about = [case for name in named for case in cases_about(spec, spec.requirements[name])]
    return list(dict.fromkeys([*broken, *about]))


def report(
    console: Console,
    collector: Collector,
    rows: Sequence[Row],
    found: Aggregate,
    *,
    where: str,
    seconds: float,
) -> None:
    """Print the report of a finished run; `where` is the directory of the other reports."""
    reports = collector.ordered_reports()
    verbose = collector.settings.verbose
    _traces(console, reports)
    failures = roots(rows)
    if verbose:
        _capabilities(console, collector)
    if verbose or not found.failed:
        _doubts(console, collector)
    if verbose:
        print_tables(console, collector, rows, found)
    elif not any(root.counts or root.row.kind == "guarantee" for root in failures):
        print_lines(console, collector, found)

    def print_the_rest() -> None:
        _errors(console, rows, reports, collector.settings.debug)
        _unmet(console, reports, found, brief=bool(found.failed) and not verbose)
        if found.failed and not verbose:  # of which it may be a consequence
            _doubts(console, collector, before="\n")
        _answer(console, rows, found, where, seconds, part=_part(collector), verbose=verbose)

    with console.capture() as rest:
        print_the_rest()
    room = SCREEN - HEADER - rest.get().count("\n")
    print_failures(console, collector, failures, verbose=verbose, room=room)
    print_the_rest()


def _traces(console: Console, reports: Iterable[CaseReport]) -> None:
    """Print the traces that the settings asked for."""
    for report in reports:
        if report.printed:
            console.rule(escape(report.variant), align="left", style="dim")
            for line in fit(report.printed, console.width):
                console.print(Text(line), soft_wrap=True)


def _capabilities(console: Console, collector: Collector) -> None:
    """Print all capabilities that were declared or found."""
    if not collector.capabilities:
        return
    parts = []
    for name, value in sorted(collector.capabilities.items()):
        source = collector.sources.get(name, "default")
        if source != "default":
            parts.append(f"{name}={_plain(value)} ({source})")
    text = ", ".join(parts) or "none declared, none found"
    paragraph(console, "\ncapabilities", text, indent=14)


def _doubts(console: Console, collector: Collector, *, before: str = "") -> None:
    """Print what is doubtful about the capabilities, after the text `before`."""
    if not collector.capabilities:
        return
    sentences = [("mismatch", each) for each in mismatches(collector.sources, collector.doubts)]
    sentences += [
        ("not judged", each)
        for each in unasked(collector.capabilities, collector.sources, collector.doubts)
    ]
    for number, (title, sentence) in enumerate(sentences):
        paragraph(console, title if number else f"{before}{title}", sentence)


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return ",".join(value)
    return str(value)


def _errors(
    console: Console, rows: Sequence[Row], reports: Sequence[CaseReport], debug: bool
) -> None:
    """Print what went wrong in the harness, one line per message; with --debug, tracebacks."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if row.verdict is Verdict.ERROR:
            text = (row.message or "unknown").strip().splitlines()[-1]
            groups.setdefault(text, []).append(row)
    if not groups:
        return
    console.print()
    console.rule("[bold]Errors of the harness or the environment", align="left")
    for text, where in list(groups.items())[: None if debug else LISTED]:
        runs = list(dict.fromkeys(row.run for row in where))
        names = {row.requirement for row in where}
        text = f"{min(names)}: {text}" if len(names) == 1 else text
        console.print(
            f"[magenta]ERROR[/]  {escape(text)}"
            f"  [dim]{many(len(runs), 'run')}, first {escape(runs[0])}[/]"
        )
    if len(groups) > LISTED and not debug:
        console.print(f"[magenta]ERROR[/]  {len(groups) - LISTED} more kinds (--debug)")
    errors = [report.harness_error for report in reports if report.harness_error]
    for error in errors[:LISTED] if debug else ():
        console.print(Text(error), soft_wrap=True)


def _unmet(
    console: Console, reports: Iterable[CaseReport], found: Aggregate, *, brief: bool
) -> None:
    """Print which runs did not reach the situation that they test, and what they are about.

    With `brief`, print only their number: next to failures, of which they may be consequences.
    """
    unmet = [report for report in reports if report.unmet]
    if not unmet:
        return
    whose = "it tests" if len(unmet) == 1 else "they test"
    text = f"{many(len(unmet), 'run')} did not reach the situation {whose}"
    if brief:
        console.print(f"\n[dim]{text} (report.html names them).[/]", soft_wrap=True)
        return
    text += ". This is no failure: little may be stored, or late, or prompts only"
    if found.unreached:
        text += f". They did not exercise {listed(list(found.unreached), UNREACHED)}"
    console.print()
    lines = wrapped(text, console.width)
    for report in unmet[:UNREACHED]:
        lines += wrapped(f"{report.variant}: {report.unmet[0]}", console.width, "  ", "    ")
    if len(unmet) > UNREACHED:
        lines.append(f"  and {len(unmet) - UNREACHED} more (report.html names all)")
    for line in lines:
        console.print(Text(line, style="dim"), soft_wrap=True)


def _answer(
    console: Console,
    rows: Sequence[Row],
    found: Aggregate,
    where: str,
    seconds: float,
    *,
    part: str,
    verbose: bool,
) -> None:
    """Print the counts, the place of the reports, and the overall verdict with its reasons."""
    console.print()
    if verbose:
        excused = " (not counted)" if not found.failed else ""
        counts = ", ".join(
            f"{count} {verdict_name(name)}" + (excused if name is Verdict.FAIL else "")
            for name, count in found.counts.items()
            if count
        )
        paragraph(console, "verdicts", counts, "dim")
    guarantees = {row.requirement for row in rows if row.kind == "guarantee"}
    by_status = Counter(_status(name, found, guarantees) for name in found.status)
    per = ", ".join(f"{count} {status}" for status, count in by_status.most_common())
    text = f"{found.exercised} of {many(found.total, 'requirement')}: {per}"
    paragraph(console, "exercised", text, "dim")
    more = "" if verbose or not (found.failed or found.risks or found.advisory) else MORE
    paragraph(console, "reports", f"{where}{more}", "dim")
    style = ANSWER[found.verdict]
    console.print(f"[{style}]{found.title}[/]{part}  in {seconds:.1f} s")
    reasons = list(found.reasons)
    if found.risks:
        reasons.append(f"risks, where vLLM does not go today: {', '.join(found.risks)}")
    reasons += _broken(found)
    for reason in reasons:
        for line in wrapped(reason, console.width, "  ", "    "):
            console.print(Text(line), soft_wrap=True)


def _broken(found: Aggregate) -> list[str]:
    """Return a sentence about the guarantees that a known bug of vLLM breaks, and about others."""
    known = [name for name in found.engine_failed if name not in found.unexplained]
    said = {
        "guarantees that the engine broke, as a known bug does (docs/engine-findings.md)": known,
        "guarantees of the engine that did not hold, explained by no finding": found.unexplained,
    }
    return [f"{text}: {', '.join(names)}" for text, names in said.items() if names]


def _status(name: str, found: Aggregate, guarantees: Collection[str]) -> str:
    """Return the status of requirement `name` in words; if it is bad, also whether it counts."""
    status = found.status[name]
    if status in (Verdict.FAIL, Verdict.BLOCKED) and name in guarantees:
        return f"{verdict_name(status)} (engine's)"
    if status is Verdict.FAIL and name in found.risks:
        return "fail (risk)"
    if status is Verdict.FAIL and name in found.advisory and name not in found.failed:
        return "fail (recommended only)"
    return verdict_name(status)


def _part(collector: Collector) -> str:
    """Return which part of the suite the verdict is about; empty for all of it."""
    if collector.selection.shard is not None:
        return f" in shard {collector.selection.shard}; kvconform merge gives the verdict"
    if collector.selection.narrowed:
        return " in what was selected"
    profile = collector.settings.profile
    is_whole = profile in (Settings.model_fields["profile"].default, "full")
    return "" if is_whole else f" with profile {profile}"
