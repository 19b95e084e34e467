# SPDX-License-Identifier: Apache-2.0
"""A report as Markdown, for a job's summary or a pull request's comment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kvconform.ci.annotation import Annotation
from kvconform.compare import pages
from kvconform.compare.changes import Comparison
from kvconform.compare.reports import Report
from kvconform.html.page import SHOWN

SIGN = {"conformant": "✅", "partial": "🟡", "nonconformant": "❌"}


def markdown(report: Report, found: Sequence[Annotation], comparison: Comparison | None) -> str:
    """The answer, what failed and where, the counts, and what flipped since the baseline."""
    answer = report.answer or "error"
    lines = [f"## {SIGN.get(answer, '⚠️')} {report.word}: {pages.plain(report.name)}", ""]
    if not report.complete:
        lines += ["The run was cut off: this is what it had found out.", ""]
    if found:
        lines += ["| requirement | found | where |", "|---|---|---|"]
        for one in found:
            more = f" and {one.others} more" if one.others else ""
            place = f"<br>{pages.code(f'{one.path}:{one.line}')}" if one.path else ""
            lines.append(f"| {pages.code(one.requirement)} | {pages.plain(one.message)} | {pages.code(one.run)}{more}{place} |")
        lines.append("")
    counts = Counter(report.verdicts.values())
    lines += [", ".join(f"{counts[name]} {name.lower().replace('_', ' ')}" for name in SHOWN if counts[name]), ""]
    if comparison is not None:
        lines += ["### Since the baseline", "", pages.markdown([comparison]).replace("### ", "", 1)]
    return "\n".join(lines) + "\n"
