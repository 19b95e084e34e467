# SPDX-License-Identifier: Apache-2.0
"""GitHub Actions' workflow commands.

GitLab's Code Quality report.

A report as Markdown, for a job's summary or a pull request's comment.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence

from kvconform.report.ci.annotation import Annotation
from kvconform.report.compare import pages
from kvconform.report.compare.changes import Comparison
from kvconform.report.compare.reports import Report
from kvconform.report.html.page import SHOWN

LONGEST = 3000


def command(one: Annotation) -> str:
    """`::error file=...,line=...,title=...::message`, escaped as the runner wants it."""
    more = f" (and in {one.others} more run{'s' if one.others > 1 else ''})" if one.others else ""
    place = f"file={_property(one.path)},line={one.line}," if one.path else ""
    return f"::error {place}title={_property('kvconform: ' + one.requirement)}::{_data(f'{one.message}{more}: {one.run}'[:LONGEST])}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str | None) -> str:
    return _data(text or "").replace(":", "%3A").replace(",", "%2C")


NAME = "gl-code-quality-report.json"


def code_quality(found: Iterable[Annotation]) -> str:
    """The file's text. A failure without a place in the connector's source is shown at kvconform.toml: GitLab wants a path."""
    return (
        json.dumps(
            [
                {
                    "description": f"{one.requirement}: {one.message} ({one.run})",
                    "check_name": f"kvconform/{one.requirement}",
                    "fingerprint": one.fingerprint,
                    "severity": "critical",
                    "location": {
                        "path": one.path or "kvconform.toml",
                        "lines": {"begin": max(1, one.line)},
                    },
                }
                for one in found
            ],
            indent=1,
            ensure_ascii=False,
        )
        + "\n"
    )


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
            lines.append(
                f"| {pages.code(one.requirement)} | {pages.plain(one.message)} | {pages.code(one.run)}{more}{place} |"
            )
        lines.append("")
    counts = Counter(report.verdicts.values())
    lines += [
        ", ".join(
            f"{counts[name]} {name.lower().replace('_', ' ')}" for name in SHOWN if counts[name]
        ),
        "",
    ]
    if comparison is not None:
        lines += ["### Since the baseline", "", pages.markdown([comparison]).replace("### ", "", 1)]
    return "\n".join(lines) + "\n"
