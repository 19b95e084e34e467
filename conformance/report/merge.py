# SPDX-License-Identifier: Apache-2.0
"""Joins the reports of a run's shards into the report that the unsplit run would have written, and gives the answer.

A shard says what failed in it. What did not happen in it may happen in another one, so only the joint report can say that an expected
failure did not come, that a claim was never shown, that nothing was exercised, or that runs are missing.
"""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from rich.console import Console

from kvconform import __version__
from kvconform.config.selection import part, select, suite_digest
from kvconform.config.settings import Settings, Shard, parse
from kvconform.contract.loader import Spec, load_spec
from kvconform.errors import EnvironmentProblem, UsageError
from kvconform.judge.verdict import Row, Verdict
from kvconform.report import jsonl, statement, summary, terminal
from kvconform.report.collector import CaseNotes, Collector
from kvconform.report.html import page
from kvconform.report.models import FooterLine, HeaderLine, ReportLine, RowLine, Summary

LINES: TypeAdapter[Any] = TypeAdapter(ReportLine)
JUNIT = "junit.xml"


@dataclass
class Report:
    """One shard's report as it was read from `folder`."""

    folder: Path
    header: HeaderLine
    rows: list[Row] = field(default_factory=list)
    notes: list[CaseNotes] = field(default_factory=list)

    @property
    def shard(self) -> Shard:
        return parse(self.header.extra["shard"])


def merge(folders: Sequence[str], report_dir: str, console: Console) -> int:
    """Write the joint report to `report_dir` and print it; returns the exit code of the unsplit run. UsageError for what does not belong
    together, and then nothing is written."""
    out = Path(report_dir)
    if any(out.resolve() == Path(folder).resolve() for folder in folders):
        raise UsageError(
            f"--report-dir {report_dir} is the report of a shard: name another directory"
        )
    reports = sorted((read(Path(folder)) for folder in folders), key=lambda report: report.shard)
    check(reports)
    spec = load_spec()
    collector, warnings = collect(reports, spec)
    rows, found = collector.finish(date.today(), complete=not collector.missing())
    code = collector.exit_code(found)
    seconds = [_summary(report.folder) for report in reports]
    footer = FooterLine(counts=found.counts, verdict=found.verdict)  # type: ignore[arg-type]
    try:
        out.mkdir(parents=True, exist_ok=True)
        header = jsonl.header_of(collector, warnings)
        jsonl.rewrite(out / jsonl.NAME, header, rows, collector.ordered_notes(), footer)
        started = datetime.now(UTC).isoformat(timespec="seconds")
        told = summary.write(
            out, collector, found, seconds=sum(seconds), started=started, exit_code=code
        )
        page.write(out, page.make(collector, header, told, rows))
        statement.write(out, statement.make(collector, found, judged=date.today()))
        _join_junit([report.folder / JUNIT for report in reports], out / JUNIT)
    except OSError as error:
        raise EnvironmentProblem(
            f"the report cannot be written to {report_dir}: {error.strerror or error}"
        ) from None
    terminal.header(console, collector, warnings, joined=len(reports))
    terminal.report(console, collector, rows, found, where=str(out), seconds=sum(seconds))
    return code


def read(folder: Path) -> Report:
    """A shard's report. UsageError for what is not there, not complete, not a report, or not of a shard."""
    path = folder / jsonl.NAME
    try:
        lines = (
            path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
        )  # other line ends may be in a text
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{folder} has no readable {jsonl.NAME}: {getattr(error, 'strerror', None) or error}"
        ) from None
    found: Report | None = None
    ended = False
    for number, text in enumerate(lines, 1):
        line = _line(path, number, text)
        if ended or (found is None) != isinstance(line, HeaderLine):
            raise UsageError(
                f"{path}:{number}: a {line.type} line does not belong there; the file is damaged"
            )
        if isinstance(line, HeaderLine):
            found = Report(folder, line)
            _check_header(path, line)
        elif isinstance(line, FooterLine):
            ended = True
            _check_rows(path, found, line)
        elif found is not None and isinstance(line, RowLine):
            found.rows.append(Row.from_dict(line.model_dump()))
        elif found is not None:
            found.notes.append(
                CaseNotes(
                    line.variant, line.provoked, line.timeline, [], line.harness_error, line.story
                )
            )
    if found is None or not ended:
        which = f"shard {found.header.extra['shard']}" if found else "the shard"
        raise UsageError(f"{path} has no end: {which} was cut short; run it again")
    return found


def _check_header(path: Path, header: HeaderLine) -> None:
    """UsageError unless it is the header of a shard."""
    if "shard" not in header.extra:
        raise UsageError(
            f"{path.parent} is the report of a whole run, not of a shard (kvconform run --shard)"
        )
    try:
        parse(header.extra["shard"])
        whole = isinstance(header.extra["settings"], dict) and isinstance(
            header.extra["digest"], str
        )
    except (KeyError, TypeError, ValueError):
        whole = False
    if not whole:
        raise UsageError(
            f"{path}:1: the header does not say which shard of what it is; the file is damaged"
        )


def _check_rows(path: Path, found: Report | None, footer: FooterLine) -> None:
    """UsageError unless the rows are those that the end of the report counts, each once."""
    rows = found.rows if found is not None else []
    counts = Counter(row.verdict.value for row in rows)
    for name in sorted({*counts, *footer.counts}):
        if counts[name] != footer.counts.get(name, 0):  # type: ignore[call-overload]
            told = footer.counts.get(name, 0)  # type: ignore[call-overload]
            raise UsageError(
                f"{path} has {counts[name]} rows with verdict {name}, and its end counts {told}; the file is damaged"
            )
    twice = next(
        (key for key, n in Counter((row.run, row.requirement) for row in rows).items() if n > 1),
        None,
    )
    if twice is not None:
        raise UsageError(
            f"{path} has the verdict of {twice[1]} on {twice[0]} twice; the file is damaged"
        )


def _line(path: Path, number: int, text: str) -> Any:
    try:
        return LINES.validate_json(text)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in problem["loc"])
        raise UsageError(
            f"{path}:{number}: not a line of a report: {where + ': ' if where else ''}{problem['msg']}"
        ) from None


def check(reports: Sequence[Report]) -> None:
    """UsageError unless these are the shards of one run, each of them once, made by this very kvconform."""
    for one, other in pairwise(reports):
        for name, mine, theirs in _differences(one.header, other.header):
            raise UsageError(
                f"{one.folder} and {other.folder} do not belong together: {name} is {mine} in one and {theirs} in the other"
            )
    count = reports[0].shard.count
    seen: dict[int, Report] = {}
    for report in reports:
        if report.shard.number in seen:
            raise UsageError(
                f"shard {report.shard} is there twice: {seen[report.shard.number].folder} and {report.folder}"
            )
        seen[report.shard.number] = report
    missing = [str(Shard(number, count)) for number in range(1, count + 1) if number not in seen]
    if missing:
        raise UsageError(
            f"shard{'s' * (len(missing) > 1)} {', '.join(missing)} {'are' if len(missing) > 1 else 'is'} missing"
        )
    header = reports[0].header
    made_by, mine = (
        f"{header.suite} ({header.extra['digest']})",
        f"{__version__} ({suite_digest()})",
    )
    if made_by != mine:
        raise UsageError(
            f"the shards were made by kvconform {made_by}, and this is {mine}: merge with the same one"
        )


def _differences(one: HeaderLine, other: HeaderLine) -> list[tuple[str, Any, Any]]:
    """(what, in one, in the other) of everything that must be the same in all shards, the plainest first."""
    pairs: list[tuple[str, Any, Any]] = [
        ("the connector", one.connector, other.connector),
        (
            "kvconform",
            f"{one.suite} ({one.extra['digest']})",
            f"{other.suite} ({other.extra['digest']})",
        ),
        ("vLLM", one.vllm, other.vllm),
        ("the seed", one.seed, other.seed),
        ("the profile", one.profile, other.profile),
        (
            "the number of shards",
            parse(one.extra["shard"]).count,
            parse(other.extra["shard"]).count,
        ),
    ]
    mine, theirs = one.extra["settings"], other.extra["settings"]
    pairs += [(name, mine.get(name), theirs.get(name)) for name in sorted({*mine, *theirs})]
    both = one.capabilities and other.capabilities  # a shard without any made no run to its end
    pairs += [
        (f"the capability {name}", one.capabilities.get(name), other.capabilities.get(name))
        for name in sorted({*one.capabilities, *other.capabilities} if both else ())
    ]
    return [pair for pair in pairs if pair[1] != pair[2]]


def collect(reports: Sequence[Report], spec: Spec) -> tuple[Collector, list[str]]:
    """(a collector that knows what the unsplit run's would know at its end, the warnings of the shards)."""
    header = reports[0].header
    try:
        settings = Settings.model_validate(header.extra["settings"])
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        raise UsageError(
            f"{reports[0].folder}: settings: {'.'.join(map(str, problem['loc']))}: {problem['msg']}"
        ) from None
    vllm = header.vllm or "unknown"
    selection = select(spec, settings, vllm)
    collector = Collector(spec, settings, selection, vllm)
    shown = next((report.header for report in reports if report.header.capabilities), header)
    collector.capabilities, collector.sources = shown.capabilities, shown.capability_sources
    collector.places = shown.extra.get("places", {})
    for report in reports:
        for row in report.rows:
            if row.verdict is Verdict.XFAIL:  # what is expected is decided once, for all of them
                row.verdict = Verdict.FAIL
        by_variant: dict[str, list[Row]] = {}
        for row in report.rows:
            by_variant.setdefault(row.run, []).append(row)
        unknown = next((name for name in by_variant if name not in collector.variants), None)
        if unknown is not None:
            raise UsageError(
                f"{report.folder} has a run that its settings do not select: {unknown}"
            )
        mine = {variant.id for variant in part(selection.variants, report.shard)}
        mine |= {variant.id for variant in selection.switched_off}
        stray = next((name for name in by_variant if name not in mine), None)
        if stray is not None:
            raise UsageError(
                f"{report.folder} has a run that is not in shard {report.shard}: {stray}"
            )
        for variant, rows in by_variant.items():
            collector.put(variant, rows)
        collector.notes |= {note.variant: note for note in report.notes}
    return collector, list(
        dict.fromkeys(warning for report in reports for warning in report.header.warnings)
    )


def _summary(folder: Path) -> float:
    """How many seconds a shard took; 0 if it does not say."""
    try:
        return Summary.model_validate_json(
            (folder / summary.NAME).read_text(encoding="utf-8")
        ).seconds
    except (OSError, ValidationError):
        return 0.0


def _join_junit(paths: Sequence[Path], out: Path) -> None:
    """One JUnit file of all, for CI systems that show it; none where one of the shards has none."""
    suites = []
    for path in paths:
        try:
            suites += list(ElementTree.parse(path).getroot().iter("testsuite"))
        except (OSError, ElementTree.ParseError):
            return
    if not suites:
        return
    joint = ElementTree.Element("testsuite", dict(suites[0].attrib))
    for name in ("tests", "errors", "failures", "skipped"):
        joint.set(name, str(sum(int(suite.get(name, "0")) for suite in suites)))
    joint.set("time", f"{sum(float(suite.get('time', '0')) for suite in suites):.3f}")
    joint.extend(case for suite in suites for case in suite)
    root = ElementTree.Element("testsuites")
    root.append(joint)
    ElementTree.ElementTree(root).write(out, encoding="utf-8", xml_declaration=True)
