# SPDX-License-Identifier: Apache-2.0
"""What ends a job."""

from __future__ import annotations

from collections.abc import Collection

from kvconform.collector import EXIT_CODES
from kvconform.compare.reports import Report

POLICIES = ("any", "new", "never")
"""any: whatever ends `kvconform run`; new: only what the baseline did not have; never: only a report that is none."""


def exit_code(report: Report, policy: str, new: Collection[object] | None) -> int:
    """0, 1 (the connector's fault) or 3 (no answer: harness or environment, or a report that was cut off).
    `new`: what counts against the connector and did not in the baseline; it outweighs that there is no answer."""
    if report.silent and not (policy == "new" and new):
        return 3
    if policy == "never":
        return 0
    if policy == "new":
        return 1 if new else 0
    return EXIT_CODES[report.answer or "error"]
