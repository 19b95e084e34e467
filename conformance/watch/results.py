# SPDX-License-Identifier: Apache-2.0
"""The result of one run as `kvconform watch` needs it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from kvconform.judge.records import CaseReport, Verdict
from kvconform.run.lines import Lines


@dataclass
class Result:
    """What one run said.

    - `failed`: requirements that count and were violated, with the first failure's sentence.
    - `lines`: executed lines of the connector, by file.
    - `seconds`: what the run took; 0 if that is not known.
    """

    variant: str
    failed: dict[str, str] = field(default_factory=dict)
    lines: Lines = field(default_factory=dict)
    seconds: float = 0.0


def result_of(report: CaseReport, lines: Lines, seconds: float) -> dict[str, Any]:
    """Return the Result of a run as JSON data."""
    failed = {
        row.requirement: row.finding
        for row in report.rows
        if row.verdict is Verdict.ERROR or row.accuses
    }
    return asdict(Result(report.variant, failed, lines, seconds))
