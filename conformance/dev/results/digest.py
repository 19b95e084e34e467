# SPDX-License-Identifier: Apache-2.0
"""Digests of reports: the results of one connector of the catalogue on one engine, by area.

Each digest is a small JSON file in docs/results/data/.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvconform.config.catalogue import versions
from kvconform.contract.loader import Spec
from kvconform.errors import Place, UsageError
from kvconform.judge.aggregate import aggregate
from kvconform.judge.describe import spans
from kvconform.judge.records import Row, Verdict
from kvconform.report import jsonl
from kvconform.report.collector import LOADED
from kvconform.report.jsonl import HeaderLine

UNMADE = (Verdict.UNSUPPORTED, Verdict.DISABLED)
"""Verdicts of rows whose run was not made, if it has no others."""
FAILURES = (Verdict.FAIL, Verdict.XFAIL, Verdict.ERROR, Verdict.XPASS)
"""Verdicts of rows that fail, or have no verdict, and count."""
RANDOM = re.compile(r"(live|pair)\.random-\d+")


class Area(BaseModel):
    """Requirements of one area, by their status over all runs."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    passed: int = 0
    failed: list[str] = Field(
        default=[], description="ids of what failed and counts: FAIL, XFAIL, ERROR or XPASS"
    )
    risks: list[str] | None = Field(
        default=None,
        description="ids of what fails only in situations that no vLLM brings about; None: recorded"
        " before these were told apart",
    )
    advice: list[str] = Field(default=[], description="ids of SHOULD and MAY that were not met")
    blocked: list[str] = Field(
        default=[], description="ids of failures that another failure explains"
    )
    not_shown: int = Field(default=0, description="not exercised, unobservable or disabled")
    unsupported: int = 0


class Digest(BaseModel):
    """Results of one connector on one engine."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    entry: str = Field(description="name in the catalogue")
    engine: str
    date: str
    suite: str
    vllm: str | None
    packages: dict[str, str] = Field(
        default={}, description="versions of the packages that were installed for it"
    )
    adapters: list[str] = []
    device: str = "cpu"
    seed: int = 0
    seeds: str = Field(
        default="",
        description="numbers of the random workloads, as 0-19; empty unless all runs are of those",
    )
    verdict: str
    complete: bool = Field(description="the report has an end")
    runs: int
    transfers: int | None = Field(
        default=None,
        description="loads whose KV was judged; None: the suite did not count them yet",
    )
    loads: int = Field(
        description="number of judgements about loads, including calls without a load"
    )
    saves: int = Field(description="number of judgements about saved KV")
    guarantees: list[str] = Field(default=[], description="guarantees that the engine broke")
    areas: dict[str, Area]
    failures: dict[str, dict[str, list[str]]] | None = Field(
        default=None,
        description="per requirement that failed or is at risk: the cases where it did, each with"
        " the lines of the connector that raised; None: recorded before the suite kept them",
    )

    @property
    def knows_risks(self) -> bool:
        """Whether risks were told apart from failures when it was recorded."""
        return all(area.risks is not None for area in self.areas.values())


def digests(
    folder: Path, entry: str, requires: Sequence[str], date: str, spec: Spec
) -> list[Digest]:
    """Return the digests of a report directory, one per engine.

    UsageError if it has no report, or a broken one.
    """
    report = jsonl.read(folder)
    rows = list(report.rows.values())
    if not rows:
        advice = "run `kvconform run` with --report-dir first"
        raise UsageError(f"the report in {folder} has no runs; {advice}")
    packages = {
        name: version for name, version in versions(requires).items() if version is not None
    }
    return [
        _digest(
            entry,
            engine,
            report.header,
            [row for row in rows if row.engine == engine],
            packages,
            date,
            spec,
            complete=report.complete,
        )
        for engine in sorted({row.engine for row in rows})
    ]


def _digest(
    entry: str,
    engine: str,
    header: HeaderLine,
    rows: list[Row],
    packages: dict[str, str],
    date: str,
    spec: Spec,
    *,
    complete: bool,
) -> Digest:
    found = aggregate(rows)
    areas: dict[str, Area] = {}
    for name, status in sorted(found.status.items()):
        requirement = spec.requirements.get(name)
        if requirement is None or name in found.engine_failed:
            continue
        area = areas.get(requirement.area, Area(risks=[]))
        failure = "advice"
        if name in found.failed:
            failure = "failed"
        elif name in found.risks:
            failure = "risks"
        areas[requirement.area] = _counted(area, name, status, failure)
    drawn = {row.case for row in rows if row.verdict not in UNMADE}
    campaign = all(map(RANDOM.fullmatch, drawn))
    return Digest(
        seeds=spans({int(name.rpartition("-")[2]) for name in drawn}) if campaign else "",
        entry=entry,
        engine=engine,
        date=date,
        suite=header.suite,
        vllm=header.vllm,
        packages=packages,
        adapters=header.adapters,
        device=header.device,
        seed=header.seed,
        verdict=found.verdict,
        complete=complete,
        runs=len({_run(row) for row in rows if row.verdict not in UNMADE}),
        transfers=sum(row.exercised for row in rows if row.requirement == LOADED),
        loads=_happened(rows, spec, "load"),
        saves=_happened(rows, spec, "save"),
        guarantees=found.engine_failed,
        areas=dict(sorted(areas.items())),
        failures=_failures(rows, areas.values()),
    )


def _failures(rows: Iterable[Row], areas: Iterable[Area]) -> dict[str, dict[str, list[str]]]:
    """Return where the requirements failed or are at risk, as in `Digest.failures`."""
    failed = {name for area in areas for name in area.failed}
    at_risk = {name for area in areas for name in area.risks or ()}
    found: dict[str, dict[str, list[str]]] = {}
    for row in sorted(rows, key=lambda row: (row.requirement, row.case)):
        counts = row.requirement in failed and row.gating
        if row.verdict in FAILURES and (counts or (row.requirement in at_risk and row.risk)):
            lines = found.setdefault(row.requirement, {}).setdefault(row.case, [])
            if row.place is not None and _line(row.place) not in lines:
                lines.append(_line(row.place))
    return found


def _line(place: Place) -> str:
    return f"{place.function}: {place.code}"


def _run(row: Row) -> tuple[object, ...]:
    return row.case, row.scheduling, row.runner, row.depth, row.block_size, row.slow


def _counted(area: Area, name: str, status: Verdict, failure: str) -> Area:
    """Return `area` with a requirement more; a FAIL is added to the list `failure`."""
    if status is Verdict.PASS:
        return area.model_copy(update={"passed": area.passed + 1})
    if status in FAILURES:
        which = failure if status is Verdict.FAIL else "failed"
        return area.model_copy(update={which: [*getattr(area, which), name]})
    if status is Verdict.BLOCKED:
        return area.model_copy(update={"blocked": [*area.blocked, name]})
    which = "unsupported" if status is Verdict.UNSUPPORTED else "not_shown"
    return area.model_copy(update={which: getattr(area, which) + 1})


def _happened(rows: Iterable[Row], spec: Spec, area: str) -> int:
    return sum(
        row.exercised
        for row in rows
        if (found := spec.requirements.get(row.requirement)) and found.area == area
    )


def path_of(root: Path, digest: Digest) -> Path:
    """Return the path of a digest's file below the directory of results."""
    suffix = "-seeds" if digest.seeds else ""
    return root / "data" / f"{digest.entry}-{digest.engine}{suffix}.json"


def write(root: Path, digest: Digest) -> Path:
    """Write a digest, in place of an older one, and return its path."""
    path = path_of(root, digest)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(digest.model_dump_json(indent=1) + "\n", encoding="utf-8")
    return path


def read(root: Path) -> list[Digest]:
    """Return all digests, sorted by entry and engine. UsageError for a broken file."""
    found = []
    for path in sorted((root / "data").glob("*.json")):
        try:
            found.append(Digest.model_validate_json(path.read_text(encoding="utf-8")))
        except ValidationError as error:
            reason = " ".join(str(error).split())[:200]
            raise UsageError(f"{path.name} is no digest of a report: {reason}") from None
    return sorted(found, key=lambda digest: (digest.entry, digest.engine, digest.seeds))
