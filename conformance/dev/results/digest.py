# SPDX-License-Identifier: Apache-2.0
"""What is kept of a report: a connector of the catalogue on one engine, area by area. One small JSON file each."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from kvconform.config.catalogue import versions
from kvconform.contract.loader import Spec
from kvconform.errors import UsageError
from kvconform.judge.aggregate import aggregate
from kvconform.judge.verdict import Row, Verdict
from kvconform.report import jsonl
from kvconform.report.models import FooterLine, HeaderLine, ReportLine, RowLine

UNMADE = (Verdict.UNSUPPORTED, Verdict.DISABLED)
"""Verdicts of rows that say nothing of a run: if a run has no others, it was not made."""
RANDOM = re.compile(r"(live|pair)\.random-\d+")
LINES: TypeAdapter[ReportLine] = TypeAdapter(ReportLine)


class Area(BaseModel):
    """The requirements of one area, by their status over all runs."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    passed: int = 0
    failed: list[str] = Field(default=[], description="FAIL or XFAIL of what counts; ids")
    advice: list[str] = Field(default=[], description="SHOULD and MAY that were not met; ids")
    blocked: list[str] = Field(
        default=[], description="what failed is explained by another failure; ids"
    )
    not_shown: int = Field(default=0, description="not exercised, unobservable or disabled")
    unsupported: int = 0


class Digest(BaseModel):
    """One connector on one engine."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    entry: str = Field(description="name in the catalogue")
    engine: str
    date: str
    suite: str
    vllm: str | None
    packages: dict[str, str] = Field(
        default={}, description="what else was installed for it, with versions"
    )
    adapters: list[str] = []
    device: str = "cpu"
    seed: int = 0
    seeds: int = Field(
        default=0,
        description="of a campaign: so many random workloads, from `seed` on, and nothing else",
    )
    verdict: str
    complete: bool = Field(description="the report has an end")
    runs: int
    transfers: int | None = Field(
        default=None,
        description="loads whose KV was judged when it was relied on; None: not counted then",
    )
    loads: int = Field(
        description="how often anything about loads was judged, calls without any load among them"
    )
    saves: int = Field(description="how often anything about saved KV was judged")
    guarantees: list[str] = Field(default=[], description="guarantees that the engine broke")
    areas: dict[str, Area]


LOADED = "load.complete-or-failed"
"""The requirement that is judged once for every load."""


def digests(
    folder: Path, entry: str, requires: Sequence[str], date: str, spec: Spec
) -> list[Digest]:
    """The digests of a report directory, one per engine. UsageError if there is no report in it, or a broken one."""
    header: HeaderLine | None = None
    rows: list[Row] = []
    complete = False
    try:
        text = (folder / jsonl.NAME).read_text(encoding="utf-8")
        for line in text.splitlines():
            found = LINES.validate_json(line)
            if isinstance(found, HeaderLine):
                header = found
            elif isinstance(found, RowLine):
                rows.append(_row(found))
            complete = complete or isinstance(found, FooterLine)
    except (OSError, ValidationError) as error:
        raise UsageError(
            f"{folder} holds no report that can be read: {' '.join(str(error).split())[:200]}"
        ) from None
    if header is None or not rows:
        raise UsageError(
            f"the report in {folder} has no runs; run `kvconform run` with --report-dir first"
        )
    packages = {
        name: version for name, version in versions(requires).items() if version is not None
    }
    return [
        _digest(
            entry,
            engine,
            header,
            [row for row in rows if row.engine == engine],
            packages,
            date,
            spec,
            complete=complete,
        )
        for engine in sorted({row.engine for row in rows})
    ]


def _row(line: RowLine) -> Row:
    data = line.model_dump(exclude={"type"})
    return Row(**{**data, "verdict": Verdict(data["verdict"])})


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
        area = areas.get(requirement.area, Area())
        areas[requirement.area] = _counted(
            area, name, status, advice=name in found.advisory or name not in found.failed
        )
    drawn = {row.case for row in rows if row.verdict not in UNMADE}
    return Digest(
        seeds=len(drawn) if drawn and all(map(RANDOM.fullmatch, drawn)) else 0,
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
    )


def _run(row: Row) -> tuple[object, ...]:
    return row.case, row.scheduling, row.runner, row.depth, row.block_size, row.slow


def _counted(area: Area, name: str, status: Verdict, *, advice: bool) -> Area:
    if status is Verdict.PASS:
        return area.model_copy(update={"passed": area.passed + 1})
    if status in (Verdict.FAIL, Verdict.XFAIL, Verdict.ERROR, Verdict.XPASS):
        which = "advice" if advice and status is Verdict.FAIL else "failed"
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
    """Where a digest is kept below the directory of results."""
    return root / "data" / f"{digest.entry}-{digest.engine}{'-seeds' if digest.seeds else ''}.json"


def write(root: Path, digest: Digest) -> Path:
    """Keep a digest, in place of an older one; returns its path."""
    path = path_of(root, digest)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(digest.model_dump_json(indent=1) + "\n", encoding="utf-8")
    return path


def read(root: Path) -> list[Digest]:
    """All digests, by entry and engine. UsageError for a file that is none."""
    found = []
    for path in sorted((root / "data").glob("*.json")):
        try:
            found.append(Digest.model_validate_json(path.read_text(encoding="utf-8")))
        except ValidationError as error:
            raise UsageError(
                f"{path.name} is no digest of a report: {' '.join(str(error).split())[:200]}"
            ) from None
    return sorted(found, key=lambda digest: (digest.entry, digest.engine, digest.seeds))
