# SPDX-License-Identifier: Apache-2.0
"""Writer of summary.json: the overall verdict, and times and other facts that vary between runs."""

from __future__ import annotations

import platform
import sys
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from kvconform import __version__, files
from kvconform.adapters.registry import titles
from kvconform.judge.aggregate import Aggregate
from kvconform.judge.records import Overall
from kvconform.report.collector import Collector
from kvconform.report.jsonl import Counts, Part

NAME = "summary.json"


class RequirementCounts(Part):
    """Numbers of requirements; `failed` lists the ids that count against the connector."""

    total: int
    exercised: int
    failed: list[str]


class CaseCounts(Part):
    """Number of cases."""

    total: int


class Summary(Part):
    """summary.json: the overall verdict in one object."""

    suite: str
    vllm: str | None
    connector: str | None
    engine: str
    scheduling: str
    verdict: Overall
    counts: Counts
    requirements: RequirementCounts
    cases: CaseCounts
    seconds: float
    extra: dict[str, Any] = {}


def read(folder: Path) -> Summary | None:
    """Return the summary in a report's folder; None if it is missing or damaged."""
    try:
        return Summary.model_validate_json((folder / NAME).read_text(encoding="utf-8"))
    except (OSError, ValidationError):
        return None


def write(
    folder: Path,
    collector: Collector,
    found: Aggregate,
    *,
    seconds: float,
    started: str,
    exit_code: int,
) -> Summary:
    """Write summary.json to `folder` and return its content.

    `started` is an ISO time; `seconds` is the duration of the run.
    """
    settings = collector.settings
    summary = Summary(
        suite=__version__,
        vllm=collector.vllm,
        connector=settings.connector,
        engine=settings.engine,
        scheduling=settings.scheduling,
        verdict=found.verdict,
        counts=found.counts,
        requirements=RequirementCounts(
            total=found.total, exercised=found.exercised, failed=found.failed
        ),
        cases=CaseCounts(total=found.cases),
        seconds=round(seconds, 2),
        extra={
            "started": started,
            "exit_code": exit_code,
            "reasons": found.reasons,
            "guarantees_broken": found.engine_failed,
            "risks": found.risks,
            "advisory": found.advisory,
            "unreached": found.unreached,
            "runs": len(collector.reports),
            "runs_missing": collector.missing(),
            "workers": settings.workers,
            "device": settings.target_device,
            "adapters": titles(settings.adapters),
            "slow": settings.slows or [],
            "seed": settings.seed,
            "profile": settings.profile,
            "strict": settings.strict,
            "narrowed": collector.selection.narrowed or collector.selection.shard is not None,
            "python": sys.version.split()[0],
            "platform": platform.platform(),
        },
    )
    files.replace(folder / NAME, summary.model_dump_json(indent=2) + "\n")
    return summary
