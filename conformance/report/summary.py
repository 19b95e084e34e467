# SPDX-License-Identifier: Apache-2.0
"""summary.json: the answer, with the times and everything else that differs between two runs of the same."""

from __future__ import annotations

import platform
import sys
from pathlib import Path

from kvconform import __version__, files
from kvconform.adapters.registry import titles
from kvconform.judge.aggregate import Aggregate
from kvconform.report.collector import Collector
from kvconform.report.models import CaseCounts, RequirementCounts, Summary

NAME = "summary.json"


def write(
    folder: Path,
    collector: Collector,
    found: Aggregate,
    *,
    seconds: float,
    started: str,
    exit_code: int,
) -> Summary:
    """Write the file; returns what is in it. `started`: ISO time; `seconds`: s from start to end of the run."""
    settings = collector.settings
    summary = Summary(
        suite=__version__,
        vllm=collector.vllm,
        connector=settings.connector,
        engine=settings.engine,
        scheduling=settings.scheduling,
        verdict=found.verdict,  # type: ignore[arg-type]
        counts=found.counts,  # type: ignore[arg-type]
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
            "advisory": found.advisory,
            "runs": len(collector.rows),
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
