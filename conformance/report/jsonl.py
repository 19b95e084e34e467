# SPDX-License-Identifier: Apache-2.0
"""The file report.jsonl: written line by line while a run goes on, and read back.

Verdicts without findings share one line per run (kvconform.report.compact), unless the settings ask
for a `full` report.
"""

from __future__ import annotations

import fcntl
import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import IO, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from kvconform import __version__, files
from kvconform.adapters.registry import titles
from kvconform.config.selection import suite_digest
from kvconform.contract.case import Device
from kvconform.errors import UsageError
from kvconform.judge.aggregate import EXERCISED, called, unasked
from kvconform.judge.records import LINE, CaseReport, Overall, Row, Verdict
from kvconform.report.collector import Collector
from kvconform.report.compact import Judged, RunLine, judged_of, line_for, rows_of

NAME = "report.jsonl"
NOT_JUDGED_BY = {
    "workers",
    "report_dir",
    "trace",
    "debug",
    "verbose",
    "full",
    "setup",
    "teardown",
    "setup_timeout",
    "env",
    "pythonpath",
    "file",
    "shard",
}
"""Settings of the machine, which do not affect verdicts; the environment may contain secrets."""


Counts = dict[Verdict, int]


class Part(BaseModel):
    """A part of a report file; no field may be unknown."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)


class HeaderLine(Part):
    """The first line of a report: the connector and the settings of the run."""

    type: Literal["header"] = "header"
    suite: str = Field(description="version of kvconform")
    vllm: str | None
    connector: str | None = Field(
        description="package.module:Class, a registered name, or null for no connector"
    )
    engines: list[str]
    scheduling: list[str]
    device: Device = Field(
        default="cpu", description="where the KV cache is; emulated: CUDA, on the CPU"
    )
    adapters: list[str] = Field(
        default=[], description="stand-ins that were active (docs/adapters.md)"
    )
    seed: int
    profile: str
    capabilities: dict[str, Any] = Field(
        default={}, description="value per capability; empty until the first run has ended"
    )
    capability_sources: dict[str, str] = Field(
        default={}, description="declared, inferred or default, per capability"
    )
    capability_doubts: dict[str, str] = Field(
        default={}, description="what contradicts a capability, if anything does"
    )
    cases: int | None = None
    requirements: int | None = None
    judged: list[Judged] = Field(
        default=[],
        description="id, kind and level of each requirement; lines of type run name positions",
    )
    warnings: list[str] = []
    extra: dict[str, Any] = {}


class FooterLine(Part):
    """The last line of a complete report."""

    type: Literal["footer"] = "footer"
    counts: Counts
    verdict: Overall
    exit_code: int | None = Field(default=None, description="status with which the command ended")
    seconds: float | None = None


ReportLine = Annotated[
    HeaderLine | RunLine | Row | CaseReport | FooterLine, Field(discriminator="type")
]


class Stream:
    """The report while it grows.

    `write` flushes, so that an aborted run leaves all verdicts reached until then. UsageError if
    another process is writing a report in the same folder.
    """

    def __init__(self, folder: Path, header: HeaderLine) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / NAME
        self._file: IO[str] = self.path.open("a", encoding="utf-8")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise UsageError(
                f"another run is writing to {folder}: wait for it, or name another --report-dir"
            ) from None
        self._file.truncate(0)
        self.write([line_of(header)])

    def write(self, lines: Iterable[str]) -> None:
        """Append lines, and flush."""
        for line in lines:
            self._file.write(line + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def header_of(collector: Collector, warnings: list[str]) -> HeaderLine:
    """Return the report's first line, with what is known so far.

    The header of a shard contains everything that `kvconform merge` needs.
    """
    settings = collector.settings
    selection = collector.selection
    extra: dict[str, Any] = {
        "extra_config": settings.extra_config,
        "strict": settings.strict,
        "select": settings.select,
    }
    if collector.places:
        # Hook -> path:line in the connector's own source.
        extra["places"] = dict(sorted(collector.places.items()))
    if selection.shard is not None:
        judged_by = settings.model_dump(mode="json", exclude=NOT_JUDGED_BY)
        extra |= {"shard": str(selection.shard), "digest": suite_digest(), "settings": judged_by}
    not_asked = unasked(collector.capabilities, collector.sources, collector.doubts)
    return HeaderLine(
        suite=__version__,
        vllm=collector.vllm,
        connector=settings.connector,
        engines=settings.engines,
        scheduling=settings.schedulings,
        device=settings.target_device,
        adapters=titles(settings.adapters),
        seed=settings.seed,
        profile=settings.profile,
        capabilities=collector.capabilities,
        capability_sources=collector.sources,
        capability_doubts=collector.doubts,
        cases=len(selection.order()),
        requirements=len(selection.shown),
        judged=[] if settings.full else judged_of(collector.spec.requirements, selection.shown),
        warnings=list(dict.fromkeys([*warnings, *not_asked])),
        extra=extra,
    )


def line_of(part: HeaderLine | CaseReport | FooterLine | RunLine | Row) -> str:
    """Return one line of the report; keys whose value is None or empty are left out."""
    if isinstance(part, Row):
        data = {"type": part.type, **part.to_dict()}
    elif isinstance(part, CaseReport):
        data = {"type": part.type, **part.to_dict(LINE)}
    else:
        data = {
            key: value
            for key, value in part.model_dump(mode="json").items()
            if value not in (None, [], {})
        }
    return json.dumps(data, ensure_ascii=False)


def lines_of(
    report: CaseReport, rows: Iterable[Row] | None = None, judged: Sequence[Judged] = ()
) -> list[str]:
    """Return the lines about a run: of its rows (or `rows`), then of the rest, if there is any.

    With the `judged` of the header, rows without findings share a line.
    """
    given = list(report.rows if rows is None else rows)
    line, rest = line_for(given, judged)
    lines = [] if line is None else [line_of(line)]
    lines += [line_of(row) for row in rest]
    return [*lines, line_of(report)] if report.says_something else lines


def rewrite(
    path: Path,
    header: HeaderLine,
    rows: Iterable[Row],
    reports: Iterable[CaseReport],
    footer: FooterLine,
) -> None:
    """Replace the file atomically by the complete, sorted report."""
    by_variant = {report.variant: report for report in reports}
    lines = [line_of(header)]
    for variant, group in itertools.groupby(rows, attrgetter("run")):
        lines += lines_of(by_variant.pop(variant), group, header.judged)
    for report in by_variant.values():
        lines += lines_of(report, ())
    lines.append(line_of(footer))
    files.replace(path, "".join(line + "\n" for line in lines))


Key = tuple[str, str]
"""A requirement and a run."""
_LINES: TypeAdapter[HeaderLine | RunLine | Row | CaseReport | FooterLine] = TypeAdapter(
    ReportLine, config=ConfigDict(defer_build=True)
)


@dataclass
class Report:
    """Content of a report.jsonl. `footer` is None if the report was cut off."""

    path: Path
    header: HeaderLine
    rows: dict[Key, Row] = field(default_factory=dict)
    cases: dict[str, CaseReport] = field(default_factory=dict)
    footer: FooterLine | None = None

    @property
    def complete(self) -> bool:
        """Whether the report has a footer."""
        return self.footer is not None

    @property
    def verdict(self) -> str | None:
        """The overall verdict, as programs read it; None if the report was cut off."""
        return self.footer.verdict if self.footer is not None else None

    @property
    def word(self) -> str:
        """The overall verdict, as it is shown to people."""
        exercised = any(row.verdict in EXERCISED for row in self.rows.values())
        return called(self.verdict or "error", exercised)

    @property
    def silent(self) -> bool:
        """Whether there is no verdict, so that the absence of failures means nothing."""
        return self.verdict in (None, "error")

    @property
    def name(self) -> str:
        """Connector and vLLM version, as far as they are known: `pkg:Class, vLLM 0.32.0`."""
        return f"{self.header.connector or 'no connector'}, vLLM {self.header.vllm or '?'}"

    def counts(self, requirement: str) -> bool:
        """Return whether a requirement counts: no recommendation, no guarantee of the engine."""
        return requirement in self._counting

    @cached_property
    def _counting(self) -> set[str]:
        gating = {row.requirement for row in self.rows.values() if row.gating}
        guarantees = {row.requirement for row in self.rows.values() if row.kind == "guarantee"}
        return gating - guarantees

    @cached_property
    def against(self) -> set[Key]:
        """Keys of the rows that make the connector nonconformant (kvconform.judge.aggregate).

        These are FAIL, XPASS, and BLOCKED by something other than a failure with a row of its own,
        for example by a crash. Only requirements that count are included.
        """
        return {
            key
            for key, row in self.rows.items()
            if self.counts(row.requirement) and self._accuses(row)
        }

    def _accuses(self, row: Row) -> bool:
        if row.beyond and not row.gating:
            return False
        if row.verdict is Verdict.BLOCKED:
            return not self._explained(row)
        return row.verdict in (Verdict.FAIL, Verdict.XPASS)

    def _explained(self, row: Row) -> bool:
        """Return whether a failure that has a row of its own blocks this row."""
        other = self.rows.get((row.blocked_by or "", row.run))
        return other is not None and other.verdict in (Verdict.FAIL, Verdict.XFAIL)


def read(place: str | Path) -> Report:
    """Return the report in the file or directory `place`.

    An unreadable last line is ignored: a run that is killed while it writes leaves one. Raises
    UsageError if there is no report, or it is damaged.
    """
    path = Path(place)
    if not path.exists():
        raise UsageError(f"there is no report {place}, neither a file nor a directory")
    path = path / NAME if path.is_dir() else path
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise UsageError(f"{place} has no readable {NAME}: {why}") from None
    if not text:
        raise UsageError(f"{path} is empty: no run has written a report to it")
    # Not splitlines(): texts may contain its other line separators.
    lines = text.removesuffix("\n").split("\n")
    found: Report | None = None
    for number, line in enumerate(lines, 1):
        try:
            part = _LINES.validate_json(line)
        except ValidationError as error:
            if found is not None and number == len(lines):
                break
            problem = error.errors(include_url=False)[0]
            where = ".".join(str(part) for part in problem["loc"])
            why = f"{where}: {problem['msg']}" if where else problem["msg"]
            raise UsageError(f"{path}:{number}: not a line of a report: {why}") from None
        if found is None and isinstance(part, HeaderLine):
            found = Report(path, part)
        elif found is None or found.complete or isinstance(part, HeaderLine):
            raise UsageError(f"{path}:{number}: unexpected {part.type} line; the file is damaged")
        else:
            _take(found, part)
    assert found is not None
    return found


def _take(report: Report, part: RunLine | Row | CaseReport | FooterLine) -> None:
    """Add a line to the report.

    Raises UsageError for a second verdict of a requirement on the same run.
    """
    if isinstance(part, FooterLine):
        report.footer = part
    elif isinstance(part, CaseReport):
        report.cases[part.variant] = part
    elif isinstance(part, RunLine):
        try:
            rows = list(rows_of(part, report.header.judged))
        except IndexError:
            raise UsageError(
                f"{report.path} has a run line that its header does not fit; the file is damaged"
            ) from None
        for row in rows:
            _take(report, row)
    else:
        key = (part.requirement, part.run)
        if key in report.rows:
            raise UsageError(
                f"{report.path} has the verdict of {key[0]} on {key[1]} twice; the file is damaged"
            )
        report.rows[key] = part
