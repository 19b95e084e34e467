# SPDX-License-Identifier: Apache-2.0
"""Progress while the run goes on: a line that changes on a terminal, a line now and then elsewhere.

The report on the terminal: what was judged, a table per area, each failure once with its evidence, and the answer.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence
from typing import IO, Any

from rich.box import SIMPLE
from rich.console import Console, Group, RenderableType
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
from kvconform.judge.verdict import Row, Verdict
from kvconform.report import repro
from kvconform.report.causes import by_cause
from kvconform.report.collector import CaseNotes, Collector
from kvconform.report.explain import cases_about, defects_of

EVERY = 15.0


class Progress:
    """`done` counts one run. Quiet before `start` and after `stop`."""

    def __init__(self, console: Console, total: int) -> None:
        self.console, self.total, self.count = console, total, 0
        self.failing: set[str] = set()
        self._bar: Bar | None = None
        self._last = time.monotonic()

    def start(self) -> None:
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
        self.count += 1
        self.failing |= {
            row.requirement for row in rows if row.verdict is Verdict.FAIL and row.gating
        }
        number = len(self.failing)
        bad = (
            "no failures"
            if not number
            else "1 requirement fails"
            if number == 1
            else f"{number} requirements fail"
        )
        if self._bar is not None:
            self._bar.update(
                self._task, completed=self.count, now=f"{bad} · {variant.partition('[')[0]}"
            )
        elif time.monotonic() - self._last > EVERY:
            self._last = time.monotonic()
            self.console.print(f"{self.count}/{self.total} runs, {bad}", highlight=False)

    def stop(self) -> None:
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
"""Statuses whose requirements are only counted in the tables; errors have a section of their own."""
LISTED = 4
WIDTH = 130


def make_console(file: IO[str] | None = None) -> Console:
    """A console; wide enough for a table where the width is unknown."""
    console = Console(
        file=file or sys.stdout, highlight=False
    )  # now, not when it is used: session.py redirects sys.stdout
    if not console.is_terminal:
        console.width = WIDTH
    return console


def header(
    console: Console, collector: Collector, warnings: Sequence[str], *, joined: int = 0
) -> None:
    """What is about to be judged; `joined`: the number of shards whose reports were joined."""
    settings, selection = collector.settings, collector.selection
    console.print(f"[bold]kvconform {__version__}[/]  vLLM {collector.vllm}")
    by = f" ({escape(settings.catalogue)})" if settings.catalogue else ""
    console.print(f"connector   [bold]{escape(settings.connector)}[/]{by}")
    axes = f"engines {', '.join(settings.engines)} · scheduling {', '.join(settings.schedulings)}"
    console.print(f"axes        {axes} · profile {settings.profile} · seed {settings.seed}")
    if settings.slows is not None:
        where = "CUDA, emulated on the CPU" if settings.emulate_cuda else "CUDA"
        slow = f" · slow: {', then '.join(settings.slows)}" if settings.slows else ""
        console.print(f"device      {where}{slow}")
    if settings.engine == "live":
        console.print(
            "engine      all of vLLM, a tiny model with random weights; asynchronous scheduling kept on where vLLM turns it off"
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
    by = (
        f"{joined} shards"
        if joined
        else f"{settings.workers} worker{'s' if settings.workers > 1 else ''}"
    )
    console.print(f"selection   {runs}{shard} · {by}")
    cases, requirements = selection.beyond
    if cases:
        console.print(f"not run     this vLLM cannot be brought to: {', '.join(cases)}")
    if selection.without:
        console.print(
            f"not run     {selection.without} runs on model runner V2, which knows no connectors before vLLM {RUNNER_V2}"
        )
    if requirements and not selection.narrowed:
        console.print(
            f"not judged  {len(requirements)} requirements that do not hold in this vLLM (docs/supported-versions.md)"
        )
    if settings.file:
        console.print(f"settings    {escape(settings.file)}")
    for warning in warnings:
        console.print(f"[yellow]warning[/]     {escape(warning)}")
    about = _cases_about(collector)
    if about:
        shown = ",".join(about[:LISTED]) + (
            f" (and {len(about) - LISTED} more: kvconform explain)" if len(about) > LISTED else ""
        )
        console.print(
            f"hint        a requirement is judged on every case; on those that are about it only: -k {escape(shown)}",
            soft_wrap=True,
        )


def _cases_about(collector: Collector) -> list[str]:
    """If -k names requirements and nothing else: the cases about them, those first in which a planted defect breaks them."""
    spec, named = collector.spec, collector.settings.select
    if not named or any(name not in spec.requirements for name in named):
        return []
    broken = [
        case
        for name in named
        for defect in defects_of(spec, name)
        for case in defect.get("cases", ())
    ]
    return list(
        dict.fromkeys(
            [
                *broken,
                *(case for name in named for case in cases_about(spec, spec.requirements[name])),
            ]
        )
    )


def report(
    console: Console,
    collector: Collector,
    rows: Sequence[Row],
    found: Aggregate,
    *,
    where: str,
    seconds: float,
) -> None:
    """Everything after the run."""
    notes = {note.variant: note for note in collector.ordered_notes()}
    _traces(console, notes.values())
    _capabilities(console, collector)
    _tables(console, collector, rows, found)
    failures = [row for row in rows if row.verdict is Verdict.FAIL]
    mine = [row for row in failures if row.kind == "requirement"]
    _section(console, collector, "Failures", [row for row in mine if row.gating], notes)
    _section(
        console,
        collector,
        "Recommendations not followed (they count with --strict)",
        [row for row in mine if not row.gating],
        notes,
    )
    _section(
        console,
        collector,
        "Guarantees that the engine broke (not the connector's fault)",
        _only(failures, "guarantee"),
        notes,
    )
    _errors(console, rows, notes, collector.settings.debug)
    _unmet(console, notes.values())
    _answer(console, found, where, seconds, part=_part(collector))


def _only(rows: Iterable[Row], kind: str) -> list[Row]:
    return [row for row in rows if row.kind == kind]


def _traces(console: Console, notes: Iterable[CaseNotes]) -> None:
    for note in notes:
        if note.trace:
            console.rule(escape(note.variant), align="left", style="dim")
            for line in note.trace:
                console.print(Text(line), soft_wrap=True)


def _capabilities(console: Console, collector: Collector) -> None:
    if not collector.capabilities:
        return
    parts = []
    for name, value in sorted(collector.capabilities.items()):
        source = collector.sources.get(name, "default")
        if source != "default":
            parts.append(f"{name}={_plain(value)} ({source.partition(',')[0]})")
    console.print(f"\ncapabilities  {escape(', '.join(parts) or 'none declared, none found')}")
    for sentence in mismatches(collector.sources):
        console.print(f"mismatch      {escape(sentence)}")
    for sentence in unasked(collector.capabilities, collector.sources):
        console.print(f"not judged    {escape(sentence)}")


def _plain(value: Any) -> str:
    return (
        {True: "yes", False: "no"}[value]
        if isinstance(value, bool)
        else ",".join(value)
        if isinstance(value, (list, tuple))
        else str(value)
    )


def _tables(console: Console, collector: Collector, rows: Sequence[Row], found: Aggregate) -> None:
    """One table per area: every requirement with its status; those that were nowhere exercised only as a count."""
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
        areas.setdefault(requirement.area if requirement else name.partition(".")[0], []).append(
            name
        )
    for area in sorted(areas):
        table = Table(
            box=SIMPLE,
            title=area,
            title_justify="left",
            title_style="bold",
            pad_edge=False,
            show_edge=False,
        )
        for column, justify in (
            ("requirement", "left"),
            ("level", "left"),
            ("verdict", "left"),
            ("exercised in", "right"),
        ):
            table.add_column(column, justify=justify, no_wrap=True)  # type: ignore[arg-type]
        silent: dict[str, int] = {}
        for name in sorted(areas[area]):
            status, requirement = found.status[name], collector.spec.requirements.get(name)
            if (
                status is Verdict.PASS
                and requirement is not None
                and requirement.kind == "guarantee"
            ):
                silent["guarantees of the engine held"] = (
                    silent.get("guarantees of the engine held", 0) + 1
                )
                continue
            if status in COUNTED:
                silent[status] = silent.get(status, 0) + 1
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
    if requirement is None:
        return "MUST NOT"
    return (
        requirement.level if requirement.kind == "requirement" else f"{requirement.level} (engine)"
    )


def _words(verdict: str) -> str:
    return verdict.lower().replace("_", " ")


def _section(
    console: Console,
    collector: Collector,
    title: str,
    rows: Sequence[Row],
    notes: dict[str, CaseNotes],
) -> None:
    """A panel per requirement and root cause, about its first failing run; the others are listed by name."""
    groups = by_cause(rows)
    if groups:
        console.print()
        console.rule(f"[bold]{title}", align="left")
    for group in groups:
        title_text = f"[bold red]{escape(group[0].requirement)}"
        console.print(
            Panel(
                _failure(collector, group, notes),
                title=title_text,
                title_align="left",
                border_style="red",
            )
        )


def _failure(
    collector: Collector, group: Sequence[Row], notes: dict[str, CaseNotes]
) -> RenderableType:
    first = group[0]
    requirement = collector.spec.requirements.get(first.requirement)
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")

    def line(name: str, text: str | None, style: str = "") -> None:
        if text:
            grid.add_row(name, Text(text, style=style))

    line(
        "rule",
        " ".join(requirement.text.split())
        if requirement
        else "A connector MUST NOT end the process that it runs in.",
        "bold",
    )
    line("found", first.message)
    variant = first.run
    where = [
        variant,
        f"step {first.step}" if first.step is not None else "",
        f"request {first.req}" if first.req else "",
    ]
    line("where", ", ".join(part for part in where if part))
    line("evidence", first.evidence)
    line("why", " ".join(requirement.why.split()) if requirement and requirement.why else None)
    line(
        "usual cause",
        " ".join(requirement.wrong.split()) if requirement and requirement.wrong else None,
    )
    if len(group) > 1:
        others = list(dict.fromkeys(row.run for row in group[1:]))
        more = f" and {len(others) - LISTED} more" if len(others) > LISTED else ""
        line(
            "also in",
            f"{len(others)} more run{'s' if len(others) > 1 else ''}: {', '.join(others[:LISTED])}{more}",
        )
    parts: list[RenderableType] = [grid]
    lines = notes[variant].timelines.get(first.requirement, []) if variant in notes else []
    if lines:
        parts += [
            Text("\nstep  event", style="dim"),
            *(Text(text, style="bold" if text.startswith(">") else "") for text in lines),
        ]
    parts.append(Text.assemble(("\nreproduce: ", "dim"), (repro.of(collector, first), "cyan")))
    return Group(*parts)


def _errors(
    console: Console, rows: Sequence[Row], notes: dict[str, CaseNotes], debug: bool
) -> None:
    """What went wrong with the harness, one line per message; tracebacks with --debug."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if row.verdict is Verdict.ERROR:
            text = (row.message or "unknown").strip().splitlines()[-1]
            groups.setdefault(text, []).append(row)
    if not groups:
        return
    console.print()
    console.rule("[bold]Errors of the harness or the environment", align="left")
    shown = [note.harness_error for note in notes.values() if note.harness_error] if debug else []
    for text, where in groups.items():
        runs = list(dict.fromkeys(row.run for row in where))
        names = {row.requirement for row in where}
        text = f"{min(names)}: {text}" if len(names) == 1 else text
        console.print(
            f"[magenta]ERROR[/]  {escape(text)}  [dim]{len(runs)} runs, first {escape(runs[0])}[/]"
        )
    for error in shown[:LISTED]:
        console.print(Text(error), soft_wrap=True)


def _unmet(console: Console, notes: Iterable[CaseNotes]) -> None:
    silent = [note for note in notes if note.unmet]
    if silent:
        first = f"{silent[0].variant}: {silent[0].unmet[0]}"
        runs, they = (
            ("1 run", "it is for, so it says")
            if len(silent) == 1
            else (f"{len(silent)} runs", "they are for, so they say")
        )
        text = f"\n{runs} did not bring about the situation that {they} less (first: {first})"
        console.print(Text(text, style="dim"), soft_wrap=True)


def _answer(console: Console, found: Aggregate, where: str, seconds: float, *, part: str) -> None:
    numbers = {_words(name): count for name, count in found.counts.items() if count}
    if numbers.get("fail") and not found.failed:
        numbers = {
            "fail (engine's or recommended only)" if name == "fail" else name: count
            for name, count in numbers.items()
        }
    counts = ", ".join(f"{count} {name}" for name, count in numbers.items())
    console.print()
    console.print(f"verdicts    {counts}", highlight=False, style="dim")
    by_status: dict[str, int] = {}
    for name, status in found.status.items():
        whose = (
            " (engine's)"
            if name in found.engine_failed
            else " (recommended only)"
            if name in found.advisory
            else ""
        )
        told = _words(status) + (whose if status is Verdict.FAIL else "")
        by_status[told] = by_status.get(told, 0) + 1
    per = ", ".join(
        f"{count} {told}" for told, count in sorted(by_status.items(), key=lambda item: -item[1])
    )
    console.print(
        f"exercised   {found.exercised} of {found.total} requirements: {per}",
        highlight=False,
        style="dim",
    )
    console.print(f"reports     {escape(where)}", highlight=False, style="dim")
    word, style = found.answer, ANSWER[found.verdict]
    console.print(f"[{style}]{word}[/]{part}  in {seconds:.1f} s")
    for reason in found.reasons:
        console.print(f"  {escape(reason)}")


def _part(collector: Collector) -> str:
    """What the answer is about, if not the whole."""
    if collector.selection.shard is not None:
        return f" in shard {collector.selection.shard}; kvconform merge gives the answer"
    return " in what was selected" if collector.selection.narrowed else ""
