# SPDX-License-Identifier: Apache-2.0
"""The report on the terminal, and the progress display during the run.

The report has a header, a table per area, a panel per cause of failure, and the overall verdict.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import IO, Any

from rich.box import SIMPLE
from rich.console import Console, Group, JustifyMethod, RenderableType
from rich.markup import escape
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.table import Table
from rich.text import Text

from kvconform import __version__
from kvconform.adapters.registry import titles
from kvconform.compat.installed import RUNNER_V2
from kvconform.contract.requirement import Requirement
from kvconform.judge.aggregate import Aggregate, mismatches, unasked
from kvconform.judge.records import CaseReport, Row, Verdict
from kvconform.report.causes import (
    NO_VLLM,
    PROCESS_RULE,
    beyond,
    by_cause,
    other_runs,
    reproduction,
)
from kvconform.report.collector import Collector
from kvconform.report.explain import cases_about, defects_of

EVERY = 15.0
"""Seconds between two lines of progress where there is no terminal."""


class Progress:
    """Progress display: a bar on a terminal, a line every EVERY seconds elsewhere.

    Prints nothing before `start` and after `stop`.
    """

    def __init__(self, console: Console, total: int) -> None:
        self.console = console
        self.total = total
        self.count = 0
        self.failing: set[str] = set()
        self._bar: Bar | None = None
        self._last = time.monotonic()

    def start(self) -> None:
        """Show the bar, or print the first line."""
        if self.console.is_terminal:
            now = TextColumn("{task.fields[now]}")
            self._bar = Bar(
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                now,
                console=self.console,
                transient=True,
            )
            self._bar.start()
            self._task = self._bar.add_task(
                "running", total=self.total, now="importing vLLM (6-10 s)"
            )
        else:
            self.console.print(
                f"running {self.total} run{'s' if self.total > 1 else ''} ...", highlight=False
            )

    def done(self, variant: str, rows: Sequence[Row]) -> None:
        """Count the run of a variant as done, and its failures."""
        self.count += 1
        self.failing |= {
            row.requirement for row in rows if row.verdict is Verdict.FAIL and row.gating
        }
        if self._bar is not None:
            case = variant.partition("[")[0]
            self._bar.update(self._task, completed=self.count, now=f"{self._failures()} · {case}")
        elif time.monotonic() - self._last > EVERY:
            self._last = time.monotonic()
            self.console.print(
                f"{self.count}/{self.total} runs, {self._failures()}", highlight=False
            )

    def _failures(self) -> str:
        number = len(self.failing)
        if number == 0:
            return "no failures"
        return "1 requirement fails" if number == 1 else f"{number} requirements fail"

    def stop(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


STYLE = {
    Verdict.PASS: "green",
    Verdict.FAIL: "bold red",
    Verdict.ERROR: "bold magenta",
    Verdict.XFAIL: "yellow",
    Verdict.XPASS: "bold red",
    Verdict.BLOCKED: "red",
    Verdict.DISABLED: "yellow",
}
ANSWER = {
    "conformant": "bold green",
    "partial": "bold yellow",
    "nonconformant": "bold red",
    "error": "bold magenta",
}
COUNTED = {
    Verdict.ERROR,
    Verdict.NOT_EXERCISED,
    Verdict.UNSUPPORTED,
    Verdict.UNOBSERVABLE,
    Verdict.DISABLED,
}
"""Statuses that the tables only count. Errors have a section of their own."""
COLUMNS: tuple[tuple[str, JustifyMethod], ...] = (
    ("requirement", "left"),
    ("level", "left"),
    ("verdict", "left"),
    ("exercised in", "right"),
)
LISTED = 4
"""Number of runs, cases or tracebacks that are listed by name."""
WIDTH = 130
"""Width of the report where there is no terminal."""


def make_console(file: IO[str] | None = None) -> Console:
    """Return a console that writes to `file` or to the present sys.stdout.

    The stream is resolved now, because kvconform.session.launch redirects sys.stdout later.
    """
    console = Console(file=file or sys.stdout, highlight=False)
    if not console.is_terminal:
        console.width = WIDTH
    return console


def header(
    console: Console, collector: Collector, warnings: Sequence[str], *, joined: int = 0
) -> None:
    """Print what is about to be judged; `joined` is the number of merged shards."""
    settings = collector.settings
    selection = collector.selection
    console.print(f"[bold]kvconform {__version__}[/]  vLLM {collector.vllm}")
    named = f" ({escape(settings.catalogue)})" if settings.catalogue else ""
    console.print(f"connector   [bold]{escape(settings.connector)}[/]{named}")
    axes = f"engines {', '.join(settings.engines)} · scheduling {', '.join(settings.schedulings)}"
    console.print(f"axes        {axes} · profile {settings.profile} · seed {settings.seed}")
    if settings.slows is not None:
        where = "CUDA, emulated on the CPU" if settings.emulate_cuda else "CUDA"
        slow = f" · slow: {', then '.join(settings.slows)}" if settings.slows else ""
        console.print(f"device      {where}{slow}")
    if settings.engine == "live":
        console.print(
            "engine      the complete vLLM with a tiny, randomly initialised model;"
            " asynchronous scheduling stays on where vLLM turns it off"
        )
    for title in titles(settings.adapters):
        console.print(
            f"adapter     {escape(title)}: what it does wrong is not the connector's fault"
        )
    counts = (
        (len(selection.order()), "case"),
        (len(selection.variants), "run"),
        (len(selection.shown), "requirement"),
    )
    runs = ", ".join(f"{number} {word}{'' if number == 1 else 's'}" for number, word in counts)
    shard = f" (shard {selection.shard} of the selection)" if selection.shard else ""
    workers = f"{settings.workers} worker{'s' if settings.workers > 1 else ''}"
    source = f"{joined} shards" if joined else workers
    console.print(f"selection   {runs}{shard} · {source}")
    cases, requirements = selection.beyond
    if cases:
        console.print(f"not run     cases that this vLLM cannot run: {', '.join(cases)}")
    if selection.without:
        console.print(
            f"not run     {selection.without} runs on model runner V2,"
            f" which does not support connectors before vLLM {RUNNER_V2}"
        )
    if requirements and not selection.narrowed:
        console.print(
            f"not judged  {len(requirements)} requirements that do not hold in this vLLM"
            " (docs/supported-versions.md)"
        )
    if settings.file:
        console.print(f"settings    {escape(settings.file)}")
    for warning in warnings:
        console.print(f"[yellow]warning[/]     {escape(warning)}")
    about = _cases_about(collector)
    if about:
        shown = ",".join(about[:LISTED])
        if len(about) > LISTED:
            shown += f" (and {len(about) - LISTED} more: kvconform explain)"
        console.print(
            "hint        a requirement is judged on every case;"
            f" to run only the cases about it: -k {escape(shown)}",
            soft_wrap=True,
        )


def _cases_about(collector: Collector) -> list[str]:
    """Return the cases about the requirements that -k names; none if it names anything else.

    Cases in which a planted defect breaks one of the requirements come first.
    """
    spec = collector.spec
    named = collector.settings.select
    if not named or any(name not in spec.requirements for name in named):
        return []
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
    reports = {report.variant: report for report in collector.ordered_reports()}
    _traces(console, reports.values())
    _capabilities(console, collector)
    _tables(console, collector, rows, found)
    groups = by_cause([row for row in rows if row.verdict is Verdict.FAIL])
    mine = [group for group in groups if group[0].kind == "requirement"]
    _section(console, collector, "Failures", [one for one in mine if one[0].gating], reports)
    _section(
        console,
        collector,
        "Risks, where the contract allows what this vLLM never does (they count with --strict)",
        [one for one in mine if one[0].risk],
        reports,
    )
    _section(
        console,
        collector,
        "Recommendations not followed (they count with --strict)",
        [one for one in mine if not one[0].gating and not one[0].risk],
        reports,
    )
    _section(
        console,
        collector,
        "Guarantees that the engine broke (not the connector's fault)",
        [one for one in groups if one[0].kind == "guarantee"],
        reports,
    )
    _errors(console, rows, reports, collector.settings.debug)
    _unmet(console, reports.values())
    _answer(console, found, where, seconds, part=_part(collector))


def _traces(console: Console, reports: Iterable[CaseReport]) -> None:
    """Print the traces that the settings asked for."""
    for report in reports:
        if report.printed:
            console.rule(escape(report.variant), align="left", style="dim")
            for line in report.printed:
                console.print(Text(line), soft_wrap=True)


def _capabilities(console: Console, collector: Collector) -> None:
    if not collector.capabilities:
        return
    parts = []
    for name, value in sorted(collector.capabilities.items()):
        source = collector.sources.get(name, "default")
        if source != "default":
            parts.append(f"{name}={_plain(value)} ({source})")
    console.print(f"\ncapabilities  {escape(', '.join(parts) or 'none declared, none found')}")
    for sentence in mismatches(collector.sources, collector.doubts):
        console.print(f"mismatch      {escape(sentence)}")
    for sentence in unasked(collector.capabilities, collector.sources, collector.doubts):
        console.print(f"not judged    {escape(sentence)}")


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return ",".join(value)
    return str(value)


def _tables(console: Console, collector: Collector, rows: Sequence[Row], found: Aggregate) -> None:
    """Print a table per area: each requirement with its status.

    Statuses in COUNTED, and guarantees that hold, are only counted below the table.
    """
    exercised: dict[str, int] = {}
    failing: dict[str, int] = {}
    for row in rows:
        exercised[row.requirement] = exercised.get(row.requirement, 0) + (row.exercised > 0)
        failing[row.requirement] = failing.get(row.requirement, 0) + (
            row.verdict in (Verdict.FAIL, Verdict.XFAIL)
        )
    areas: dict[str, list[str]] = {}
    for name in found.status:
        requirement = collector.spec.requirements.get(name)
        area = requirement.area if requirement else name.partition(".")[0]
        areas.setdefault(area, []).append(name)
    for area in sorted(areas):
        table = Table(
            box=SIMPLE,
            title=area,
            title_justify="left",
            title_style="bold",
            pad_edge=False,
            show_edge=False,
        )
        for column, justify in COLUMNS:
            table.add_column(column, justify=justify, no_wrap=True)
        silent: Counter[str] = Counter()
        for name in sorted(areas[area]):
            status = found.status[name]
            requirement = collector.spec.requirements.get(name)
            guarantee = requirement is not None and requirement.kind == "guarantee"
            if guarantee and status is Verdict.PASS:
                silent["guarantees of the engine held"] += 1
                continue
            if status in COUNTED:
                silent[status] += 1
                continue
            text = f"{status} in {failing[name]}" if failing[name] else str(status)
            table.add_row(
                name,
                _level(requirement),
                Text(text, style=STYLE[status]),
                f"{exercised[name]} runs",
            )
        rest = ", ".join(f"{count} {_words(name)}" for name, count in silent.items())
        console.print()
        if table.row_count:
            console.print(table)
            console.print(f"[dim]{rest}[/]" if rest else "", end="\n" if rest else "")
        else:
            console.print(f"[bold]{area}[/]  [dim]{rest}[/]")


def _level(requirement: Requirement | None) -> str:
    """Return the level in words; a row without a requirement is about a process that died."""
    if requirement is None:
        return "MUST NOT"
    if requirement.kind == "guarantee":
        return f"{requirement.level} (engine)"
    return requirement.level


def _words(verdict: str) -> str:
    return verdict.lower().replace("_", " ")


def _section(
    console: Console,
    collector: Collector,
    title: str,
    groups: Sequence[Sequence[Row]],
    reports: dict[str, CaseReport],
) -> None:
    """Print a panel per requirement and cause: its first failing run, and the names of others."""
    if groups:
        console.print()
        console.rule(f"[bold]{title}", align="left")
    for group in groups:
        console.print(
            Panel(
                _failure(collector, group, reports),
                title=f"[bold red]{escape(group[0].requirement)}",
                title_align="left",
                border_style="red",
            )
        )


def _failure(
    collector: Collector, group: Sequence[Row], reports: dict[str, CaseReport]
) -> RenderableType:
    """Return the content of a panel about one cause; `group` contains its rows."""
    first = group[0]
    requirement = collector.spec.requirements.get(first.requirement)
    rule = PROCESS_RULE
    why = ""
    wrong = ""
    if requirement is not None:
        rule = " ".join(requirement.text.split())
        why = " ".join((requirement.why or "").split())
        wrong = " ".join((requirement.wrong or "").split())
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")

    def line(name: str, text: str | None, style: str = "") -> None:
        if text:
            grid.add_row(name, Text(text, style=style))

    line("rule", rule, "bold")
    line("found", first.message)
    line("check", first.check)
    where = [first.run]
    if first.step is not None:
        where.append(f"step {first.step}")
    if first.req:
        where.append(f"request {first.req}")
    line("where", ", ".join(where))
    for sentence in beyond(first):
        line("situation", sentence)
    line("evidence", first.evidence)
    line("why", why)
    line("usual cause", wrong)
    alike, risks = other_runs(group)
    line("also in", _listed(alike, "more run"))
    line("also in", _listed(risks, "run", f" that {NO_VLLM}"))
    parts: list[RenderableType] = [grid]
    lines = reports[first.run].timelines.get(first.requirement, [])
    if lines:
        parts += [
            Text("\nstep  event", style="dim"),
            *(Text(text, style="bold" if text.startswith(">") else "") for text in lines),
        ]
    parts.append(Text.assemble(("\nreproduce: ", "dim"), (reproduction(collector, first), "cyan")))
    return Group(*parts)


def _listed(runs: Sequence[str], what: str, which: str = "") -> str:
    """Return the number of runs, and the first LISTED of them; empty if there are none."""
    if not runs:
        return ""
    more = f" and {len(runs) - LISTED} more" if len(runs) > LISTED else ""
    plural = "s" if len(runs) > 1 else ""
    return f"{len(runs)} {what}{plural}{which}: {', '.join(runs[:LISTED])}{more}"


def _errors(
    console: Console, rows: Sequence[Row], reports: dict[str, CaseReport], debug: bool
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
    for text, where in groups.items():
        runs = list(dict.fromkeys(row.run for row in where))
        names = {row.requirement for row in where}
        text = f"{min(names)}: {text}" if len(names) == 1 else text
        console.print(
            f"[magenta]ERROR[/]  {escape(text)}  [dim]{len(runs)} runs, first {escape(runs[0])}[/]"
        )
    errors = [report.harness_error for report in reports.values() if report.harness_error]
    for error in errors[:LISTED] if debug else ():
        console.print(Text(error), soft_wrap=True)


def _unmet(console: Console, reports: Iterable[CaseReport]) -> None:
    """Print how many runs did not reach the situation that they test."""
    unmet = [report for report in reports if report.unmet]
    if not unmet:
        return
    first = f"{unmet[0].variant}: {unmet[0].unmet[0]}"
    if len(unmet) == 1:
        text = "1 run did not reach the situation it tests"
    else:
        text = f"{len(unmet)} runs did not reach the situation they test"
    text += "; a store that is small, not persistent or written late is one reason"
    console.print(Text(f"\n{text} (first: {first})", style="dim"), soft_wrap=True)


def _answer(console: Console, found: Aggregate, where: str, seconds: float, *, part: str) -> None:
    """Print the counts, the place of the reports, and the overall verdict with its reasons."""
    excused = " (engine's or recommended only)" if not found.failed else ""
    counts = ", ".join(
        f"{count} {_words(name)}" + (excused if name is Verdict.FAIL else "")
        for name, count in found.counts.items()
        if count
    )
    console.print()
    console.print(f"verdicts    {counts}", highlight=False, style="dim")
    by_status = Counter(_status(name, found) for name in found.status)
    per = ", ".join(f"{count} {status}" for status, count in by_status.most_common())
    console.print(
        f"exercised   {found.exercised} of {found.total} requirements: {per}",
        highlight=False,
        style="dim",
    )
    console.print(f"reports     {escape(where)}", highlight=False, style="dim")
    style = ANSWER[found.verdict]
    console.print(f"[{style}]{found.title}[/]{part}  in {seconds:.1f} s")
    for reason in found.reasons:
        console.print(f"  {escape(reason)}")
    if found.risks:
        console.print(f"  risks, where vLLM does not go today: {', '.join(found.risks)}")
    if found.engine_failed:
        broken = ", ".join(found.engine_failed)
        console.print(f"  guarantees that the engine broke, known by no waiver: {broken}")


def _status(name: str, found: Aggregate) -> str:
    """Return the status of requirement `name` in words; for a FAIL, also whether it counts."""
    status = found.status[name]
    if status is Verdict.FAIL and name in found.engine_failed:
        return "fail (engine's)"
    if status is Verdict.FAIL and name in found.risks:
        return "fail (risk)"
    if status is Verdict.FAIL and name in found.advisory and name not in found.failed:
        return "fail (recommended only)"
    return _words(status)


def _part(collector: Collector) -> str:
    """Return which part of the suite the verdict is about; empty for all of it."""
    if collector.selection.shard is not None:
        return f" in shard {collector.selection.shard}; kvconform merge gives the verdict"
    return " in what was selected" if collector.selection.narrowed else ""
