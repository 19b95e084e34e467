# SPDX-License-Identifier: Apache-2.0
"""Writer of report.html: one page with the verdicts, and the failures with their timelines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

from markupsafe import Markup

from kvconform import files
from kvconform.judge.aggregate import called
from kvconform.judge.records import Row, Verdict
from kvconform.report import pages
from kvconform.report.collector import Collector
from kvconform.report.html.anchor import NAME
from kvconform.report.html.failure import Cause, causes
from kvconform.report.html.matrix import Area, Counts, areas, counted
from kvconform.report.jsonl import HeaderLine
from kvconform.report.roots import Weight
from kvconform.report.summary import Summary
from kvconform.report.tables import verdict_name

ASSETS = resources.files("kvconform.report.html") / "assets"
SECTIONS = {
    Weight.COUNTS: ("failures", "Failures", ""),
    Weight.ENGINE: (
        "engine",
        "Guarantees that the engine broke",
        "Not the connector's fault, and not counted against it.",
    ),
    Weight.RISK: (
        "risks",
        "Risks",
        "They fail where the contract allows what this vLLM never does."
        " They count with --strict only.",
    ),
    Weight.ADVICE: (
        "advice",
        "Recommendations not followed",
        "They count with --strict only.",
    ),
}
"""Id, title and remark of the section of root causes of one weight."""


@dataclass(frozen=True)
class Section:
    """Root causes of one weight."""

    id: str
    title: str
    remark: str
    causes: list[Cause]


@dataclass(frozen=True)
class Page:
    """Content of the page.

    - `causes`: root causes by weight; those that count against the connector come first.
    - `stories`: packed story (kvconform.report.html.story) by run, for the runs that are shown.
    - `errors`: errors of the harness, each with the runs in which they occurred.
    - `unreached`: runs that did not reach the situation that they test, and what did not happen.
    """

    header: HeaderLine
    summary: Summary
    areas: list[Area]
    causes: list[Cause]
    stories: dict[str, str]
    errors: list[tuple[str, list[str]]]
    unreached: list[tuple[str, list[str]]]

    @property
    def title(self) -> str:
        """The overall verdict, as it is shown to people."""
        word = called(self.summary.verdict, bool(self.summary.requirements.exercised))
        return word + (" in what was selected" if self.summary.extra.get("narrowed") else "")

    @property
    def counts(self) -> Counts:
        """Number of requirements per verdict; they add up to the number of requirements."""
        return counted(line.verdict for area in self.areas for line in area.lines)

    @property
    def uncounted(self) -> list[str]:
        """How many of the requirements that fail do not count, in words."""
        facts = self.summary.extra
        counting = self.summary.requirements.failed
        kinds = {
            "the engine's": facts.get("guarantees_broken", ()),
            "risks": facts.get("risks", ()),
            "recommended only": facts.get("advisory", ()),
        }
        numbers = {kind: len(set(ids) - set(counting)) for kind, ids in kinds.items()}
        return [f"{number} {kind}" for kind, number in numbers.items() if number]

    @property
    def sections(self) -> list[Section]:
        """Sections of the page with root causes."""
        by_weight = groupby(self.causes, attrgetter("weight"))
        return [Section(*SECTIONS[weight], list(group)) for weight, group in by_weight]

    @property
    def capabilities(self) -> list[tuple[str, Any, str]]:
        """Name, value and source of the capabilities that were declared or inferred."""
        sources = self.header.capability_sources
        doubts = self.header.capability_doubts
        return [
            (name, value, f"{sources[name]}, {doubts[name]}" if name in doubts else sources[name])
            for name, value in sorted(self.header.capabilities.items())
            if sources.get(name, "default") != "default"
        ]


def make(collector: Collector, header: HeaderLine, summary: Summary, rows: Sequence[Row]) -> Page:
    """Return the page's content; `rows` are the final ones."""
    shown = causes(rows, collector)
    runs = {failure.run for cause in shown for failure in cause.all}
    stories = {name: collector.reports[name].story for name in sorted(runs)}
    return Page(
        header=header,
        summary=summary,
        areas=areas(rows, collector.spec, summary.extra.get("unreached")),
        causes=shown,
        stories={name: story for name, story in stories.items() if story},
        errors=_errors(rows),
        unreached=_unreached(collector),
    )


def _errors(rows: Sequence[Row]) -> list[tuple[str, list[str]]]:
    """Return each error of the harness or the environment, with the runs in which it occurred."""
    found: dict[str, list[str]] = {}
    for row in rows:
        if row.verdict is Verdict.ERROR:
            runs = found.setdefault((row.message or "unknown").strip().splitlines()[-1], [])
            if row.run not in runs:
                runs.append(row.run)
    return list(found.items())


def _unreached(collector: Collector) -> list[tuple[str, list[str]]]:
    """Return the runs that did not reach the situation that they test, with what did not happen."""
    return [(each.variant, each.unmet) for each in collector.ordered_reports() if each.unmet]


def render(page: Page) -> str:
    """Return the page as HTML. It is self-contained: it makes no network requests."""
    styles = {"css": Markup(_text("report.css")), "js": Markup(_scripts())}
    filters = {"low": verdict_name, "plain": _plain}
    return pages.render(ASSETS, "report.html.j2", filters, page=page, **styles)


def _plain(value: Any) -> str:
    """Return the value of a capability in words."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def write(folder: Path, page: Page) -> Path:
    """Write report.html to `folder`, and return its path."""
    path = folder / NAME
    files.replace(path, render(page))
    return path


def stylesheet() -> str:
    """Return the stylesheet that all pages share."""
    return _text("report.css")


def _scripts() -> str:
    return "\n".join(_text(name) for name in ("story.js", "drawing.js", "timeline.js", "page.js"))


@cache
def _text(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")
