# SPDX-License-Identifier: Apache-2.0
"""Merges the reports of a run's shards into the report of the unsplit run, and gives the verdict.

A shard reports what failed in it. What did not happen in one shard may happen in another. Hence
only the merged report can state that an expected failure did not occur, that a claimed capability
was never shown, that nothing was exercised, or that runs are missing.
"""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, date, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from rich.console import Console

from kvconform import __version__
from kvconform.config.selection import part, select, suite_digest
from kvconform.config.settings import Settings, Shard, parse
from kvconform.contract.loader import Spec, load_spec
from kvconform.errors import EnvironmentProblem, UsageError
from kvconform.files import check_writable
from kvconform.judge.records import CaseReport, Row, Verdict
from kvconform.report import jsonl, statement, summary, terminal
from kvconform.report.collector import Collector
from kvconform.report.html import page
from kvconform.report.jsonl import FooterLine, HeaderLine, Report, read

JUNIT = "junit.xml"


def merge(
    folders: Sequence[str],
    report_dir: str,
    console: Console,
    *,
    verbose: bool = False,
    full: bool = False,
) -> int:
    """Write the merged report to `report_dir`, print it, and return the unsplit run's exit code.

    `verbose` and `full` are those of `kvconform run`. Raises UsageError, and writes nothing, if the
    reports do not belong together.
    """
    out = Path(report_dir)
    if any(out.resolve() == Path(folder).resolve() for folder in folders):
        raise UsageError(
            f"--report-dir {report_dir} is the report of a shard: name another directory"
        )
    check_writable("--report-dir", out)
    reports = sorted((read_shard(Path(folder)) for folder in folders), key=shard_of)
    check(reports)
    spec = load_spec()
    collector, warnings = collect(reports, spec)
    collector.settings.verbose = verbose
    collector.settings.full = full
    rows, found = collector.finish(date.today(), complete=not collector.missing())
    code = collector.exit_code(found)
    seconds = [_seconds(_folder(report)) for report in reports]
    footer = FooterLine(counts=found.counts, verdict=found.verdict, exit_code=code)
    try:
        out.mkdir(parents=True, exist_ok=True)
        header = jsonl.header_of(collector, warnings)
        jsonl.rewrite(out / jsonl.NAME, header, rows, collector.ordered_reports(), footer)
        started = datetime.now(UTC).isoformat(timespec="seconds")
        totals = summary.write(
            out, collector, found, seconds=sum(seconds), started=started, exit_code=code
        )
        page.write(out, page.make(collector, header, totals, rows))
        statement.write(out, statement.make(collector, found, judged=date.today()))
        _join_junit([_folder(report) / JUNIT for report in reports], out / JUNIT)
    except OSError as error:
        raise EnvironmentProblem(
            f"the report cannot be written to {report_dir}: {error.strerror or error}"
        ) from None
    terminal.header(console, collector, warnings, joined=len(reports))
    terminal.report(console, collector, rows, found, where=str(out), seconds=sum(seconds))
    return code


def read_shard(folder: Path) -> Report:
    """Return a shard's report.

    Raises UsageError if it is cut off, damaged, or not the report of a shard.
    """
    report = read(folder)
    _check_header(report.path, report.header)
    if report.footer is None:
        which = report.header.extra["shard"]
        raise UsageError(f"{report.path} has no end: shard {which} was cut short; run it again")
    _check_rows(report, report.footer)
    return report


def shard_of(report: Report) -> Shard:
    """Return the shard that a report belongs to."""
    return parse(report.header.extra["shard"])


def _folder(report: Report) -> Path:
    return report.path.parent


def _check_header(path: Path, header: HeaderLine) -> None:
    """Raise UsageError unless this is the header of a shard."""
    if "shard" not in header.extra:
        raise UsageError(
            f"{path.parent} is the report of a whole run, not of a shard (kvconform run --shard)"
        )
    try:
        parse(header.extra["shard"])
        settings = header.extra["settings"]
        digest = header.extra["digest"]
        whole = isinstance(settings, dict) and isinstance(digest, str)
    except (KeyError, TypeError, ValueError):
        whole = False
    if not whole:
        raise UsageError(f"{path}:1: the header does not name its shard; the file is damaged")


def _check_rows(report: Report, footer: FooterLine) -> None:
    """Raise UsageError unless the footer counts the same number of rows per verdict."""
    counts = Counter(row.verdict for row in report.rows.values())
    for verdict in sorted(Verdict):
        expected = footer.counts.get(verdict, 0)
        if counts[verdict] != expected:
            raise UsageError(
                f"{report.path} has {counts[verdict]} rows with verdict {verdict}, and its end"
                f" counts {expected}; the file is damaged"
            )


def check(reports: Sequence[Report]) -> None:
    """Raise UsageError unless these are all shards of one run, each once.

    This kvconform must have written them: the digests of the suite are compared.
    """
    for one, other in pairwise(reports):
        for name, mine, theirs in _differences(one.header, other.header):
            raise UsageError(
                f"{_folder(one)} and {_folder(other)} do not belong together:"
                f" {name} is {mine} in one and {theirs} in the other"
            )
    count = shard_of(reports[0]).count
    seen: dict[int, Report] = {}
    for report in reports:
        shard = shard_of(report)
        if shard.number in seen:
            twice = f"{_folder(seen[shard.number])} and {_folder(report)}"
            raise UsageError(f"shard {shard} is there twice: {twice}")
        seen[shard.number] = report
    missing = [str(Shard(number, count)) for number in range(1, count + 1) if number not in seen]
    if len(missing) == 1:
        raise UsageError(f"shard {missing[0]} is missing")
    if missing:
        raise UsageError(f"shards {', '.join(missing)} are missing")
    header = reports[0].header
    written_by = f"{header.suite} ({header.extra['digest']})"
    this = f"{__version__} ({suite_digest()})"
    if written_by != this:
        raise UsageError(
            f"the shards were made by kvconform {written_by}, and this is {this}:"
            " merge with the same one"
        )


def _differences(one: HeaderLine, other: HeaderLine) -> list[tuple[str, Any, Any]]:
    """Return (name, value, other value) of everything that must agree between shards and does not.

    The differences that are easiest to understand come first.
    """
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
    mine = one.extra["settings"]
    theirs = other.extra["settings"]
    # The words of the command name paths, which differ between machines; the rest is compared.
    names = sorted({*mine, *theirs} - {"arguments"})
    pairs += [(name, mine.get(name), theirs.get(name)) for name in names]
    # A shard without capabilities completed no run.
    if one.capabilities and other.capabilities:
        pairs += [
            (f"the capability {name}", one.capabilities.get(name), other.capabilities.get(name))
            for name in sorted({*one.capabilities, *other.capabilities})
        ]
    return [
        (name, value, other_value) for name, value, other_value in pairs if value != other_value
    ]


def collect(reports: Sequence[Report], spec: Spec) -> tuple[Collector, list[str]]:
    """Return a collector in the final state of the unsplit run's, and the warnings of all shards.

    Raises UsageError for a run that is not part of its shard. Changes the rows of the reports:
    XFAIL becomes FAIL again.
    """
    header = reports[0].header
    try:
        settings = Settings.model_validate(header.extra["settings"])
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        where = ".".join(map(str, problem["loc"]))
        raise UsageError(f"{_folder(reports[0])}: settings: {where}: {problem['msg']}") from None
    vllm = header.vllm or "unknown"
    selection = select(spec, settings, vllm)
    collector = Collector(spec, settings, selection, vllm)
    shown = next((report.header for report in reports if report.header.capabilities), header)
    collector.capabilities = shown.capabilities
    collector.sources = shown.capability_sources
    collector.doubts = shown.capability_doubts
    collector.places = shown.extra.get("places", {})
    for report in reports:
        mine = {variant.id for variant in part(selection.variants, shard_of(report))}
        mine |= {variant.id for variant in selection.switched_off}
        by_variant: dict[str, list[Row]] = {}
        for row in report.rows.values():
            if row.verdict is Verdict.XFAIL:
                # `Collector.finish` applies the expected failures to all shards together.
                row.verdict = Verdict.FAIL
            by_variant.setdefault(row.run, []).append(row)
        for name, rows in by_variant.items():
            if name not in collector.variants:
                raise UsageError(
                    f"{_folder(report)} has a run that its settings do not select: {name}"
                )
            if name not in mine:
                raise UsageError(
                    f"{_folder(report)} has a run that is not in shard {shard_of(report)}: {name}"
                )
            case = report.cases.get(name) or CaseReport(name)
            case.rows = rows
            collector.add(case)
    warnings = [warning for report in reports for warning in report.header.warnings]
    return collector, list(dict.fromkeys(warnings))


def _seconds(folder: Path) -> float:
    """Return the seconds that a shard took; 0 if its summary.json is missing or damaged."""
    found = summary.read(folder)
    return 0.0 if found is None else found.seconds


def _join_junit(paths: Sequence[Path], out: Path) -> None:
    """Write one JUnit file for all shards; none if a shard has no readable JUnit file."""
    out.unlink(missing_ok=True)
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
