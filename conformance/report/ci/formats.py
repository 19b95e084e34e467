# SPDX-License-Identifier: Apache-2.0
"""Output formats of `kvconform ci`.

These are workflow commands for GitHub Actions, a Code Quality report for GitLab, and Markdown for
a job's summary or a pull request's comment.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvconform.judge.aggregate import WORST_FIRST
from kvconform.report import pages, summary
from kvconform.report.ci.annotation import Annotation
from kvconform.report.compare import changes
from kvconform.report.compare.changes import Comparison
from kvconform.report.jsonl import Report

LONGEST = 3000
"""Largest number of characters of a workflow command's message."""
NAME = "gl-code-quality-report.json"
"""Name of GitLab's Code Quality report."""
SIGN = {"conformant": "✅", "partial": "🟡", "nonconformant": "❌"}


class Place(NamedTuple):
    """Where a reader finds report.html: in a folder (a path or a URL), or the archive of a page."""

    folder: str = ""
    archive: str = ""

    def of(self, link: str) -> str:
        """Return the place of a failure's section, which `link` names."""
        if self.archive:
            return f"{link} in the artefacts of {self.archive}"
        return f"{self.folder}/{link}" if self.folder else link


def command(one: Annotation, place: Place) -> str:
    """Return `::error file=...,line=...,title=...::message`, escaped for GitHub's runner."""
    runs = "run" if one.others == 1 else "runs"
    more = f" (and in {one.others} more {runs})" if one.others else ""
    source = f"file={_property(one.path)},line={one.line}," if one.path else ""
    title = _property(f"kvconform: {one.requirement}")
    section = _see(one, place)
    message = f"{one.message}{more}: {one.run}"[: LONGEST - len(section)] + section
    return f"::error {source}title={title}::{_data(message)}"


def _see(one: Annotation, place: Place) -> str:
    """Return the end of a message: where report.html has the failure."""
    return f" ({place.of(one.link)})" if one.link else ""


def _of_report(place: Place) -> str:
    """Return a sentence about where report.html is."""
    if place.archive:
        return f"report.html is in the artefacts of [this run]({place.archive})."
    if "://" in place.folder:
        return f"The failures are in [report.html]({place.folder}/report.html)."
    return f"report.html is in {pages.code(place.folder)}."


def _data(text: str) -> str:
    """Escape the message of a workflow command."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str | None) -> str:
    """Escape a property of a workflow command."""
    return _data(text or "").replace(":", "%3A").replace(",", "%2C")


def code_quality(found: Iterable[Annotation], place: Place) -> str:
    """Return the text of GitLab's Code Quality report.

    GitLab requires a path: a failure without a place in the connector's source is shown at
    kvconform.toml.
    """
    entries = [
        {
            "description": f"{one.requirement}: {one.message} ({one.run}){_see(one, place)}",
            "check_name": f"kvconform/{one.requirement}",
            "fingerprint": one.fingerprint,
            "severity": "critical",
            "location": {
                "path": one.path or "kvconform.toml",
                "lines": {"begin": max(1, one.line)},
            },
        }
        for one in found
    ]
    return json.dumps(entries, indent=1, ensure_ascii=False) + "\n"


def _reasons(report: Report) -> list[str]:
    """Return why a report has no verdict, from summary.json; empty if it has one."""
    found = summary.read(report.path.parent) if report.silent else None
    return [] if found is None else [str(reason) for reason in found.extra.get("reasons", ())]


def markdown(
    report: Report, found: Sequence[Annotation], comparison: Comparison | None, report_is: Place
) -> str:
    """Return the verdict, the failures with their places, the counts, and the comparison."""
    verdict = report.verdict or "error"
    lines = [f"## {SIGN.get(verdict, '⚠️')} {report.word}: {pages.plain(report.name)}", ""]
    if not report.complete:
        lines += ["The run was cut off: these are the results until then.", ""]
    lines += [f"{pages.plain(reason)}\n" for reason in _reasons(report)]
    if found:
        lines += ["| requirement | found | where |", "|---|---|---|"]
        for one in found:
            more = f" and {one.others} more" if one.others else ""
            place = f"<br>{pages.code(f'{one.path}:{one.line}')}" if one.path else ""
            section = f"<br>{pages.code(one.link)}" if one.link else ""
            where = f"{pages.code(one.run)}{more}{place}{section}"
            lines.append(
                f"| {pages.code(one.requirement)} | {pages.plain(one.message)} | {where} |"
            )
        lines.append("")
    if any(one.link for one in found):
        lines += [_of_report(report_is), ""]
    counts = Counter(row.verdict for row in report.rows.values())
    numbers = [
        f"{counts[name]} {name.lower().replace('_', ' ')}" for name in WORST_FIRST if counts[name]
    ]
    lines += [", ".join(numbers), ""]
    if comparison is not None:
        lines += [
            "### Since the baseline",
            "",
            changes.markdown([comparison]).replace("### ", "", 1),
        ]
    return "\n".join(lines) + "\n"
