# SPDX-License-Identifier: Apache-2.0
"""The command that runs a failing case again."""

from __future__ import annotations

import os
import shlex

from kvconform.config.settings import Settings
from kvconform.judge.verdict import Row
from kvconform.report.collector import Collector

THROUGH = "KVCONFORM_THROUGH"
"""Environment variable: the command that hands its arguments to `kvconform run`, as nox does in an environment of its own."""


def of(collector: Collector, row: Row) -> str:
    """The command for a row of a run that was collected."""
    alike = collector.spec.cases[row.case].variants(
        [row.engine], [row.scheduling], [row.slow] if row.slow else None
    )
    return command(collector.settings, row, alone=len(alike) == 1 and row.slow is None)


def command(settings: Settings, row: Row, *, alone: bool) -> str:
    """`kvconform run ...`, or what stands for it, for the row's run.

    `alone`: the case has only one run with this engine and scheduling, so its id is enough.
    """
    parts = run_of(settings)
    if alone:
        parts += ["-k", row.case, "--engine", row.engine, "--scheduling", row.scheduling]
    else:
        parts += ["-k", row.run]
    parts += ["--seed", str(settings.seed), *settings.arguments]
    return shlex.join(parts)


def run_of(settings: Settings) -> list[str]:
    """The words `kvconform run CONNECTOR`, or what stands for them."""
    name = settings.catalogue or settings.connector
    through = os.environ.get(THROUGH)
    return [*shlex.split(through), "--connector", name] if through else ["kvconform", "run", name]
