# SPDX-License-Identifier: Apache-2.0
"""report.html: one file that says what was judged, what failed and why, with a timeline of each failure. Made from a report's parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from kvconform import files
from kvconform.judge.aggregate import called
from kvconform.judge.verdict import Row, Verdict
from kvconform.report.collector import Collector
from kvconform.report.html.failure import Failure, failures
from kvconform.report.html.matrix import Area, areas
from kvconform.report.models import HeaderLine, Summary

NAME = "report.html"
SHOWN = (
    "PASS",
    "FAIL",
    "ERROR",
    "XFAIL",
    "XPASS",
    "BLOCKED",
    "NOT_EXERCISED",
    "UNSUPPORTED",
    "UNOBSERVABLE",
    "DISABLED",
)


@dataclass(frozen=True)
class Page:
    """What the page says. `stories`: packed story by run (kvconform.report.html.story), for the runs that are shown."""

    header: HeaderLine
    summary: Summary
    areas: list[Area]
    failures: list[Failure]
    advice: list[Failure]
    engine: list[Failure]
    stories: dict[str, str]
    errors: list[tuple[str, list[str]]]

    @property
    def answer(self) -> str:
        word = called(self.summary.verdict, bool(self.summary.requirements.exercised))
        return word + (" in what was selected" if self.summary.extra.get("narrowed") else "")

    @property
    def counts(self) -> list[tuple[str, int]]:
        """What there are any of, in words."""
        counts: Mapping[str, int] = self.summary.counts  # type: ignore[assignment]
        return [
            (name.lower().replace("_", " "), counts[name]) for name in SHOWN if counts.get(name)
        ]

    @property
    def capabilities(self) -> list[tuple[str, Any, str]]:
        """Those that somebody declared, or that were found out: name, value, source."""
        sources = self.header.capability_sources
        return [
            (name, value, sources[name])
            for name, value in sorted(self.header.capabilities.items())
            if sources.get(name, "default") != "default"
        ]


def make(collector: Collector, header: HeaderLine, summary: Summary, rows: Sequence[Row]) -> Page:
    """The page's content; `rows` are the final ones."""
    shown = failures(rows, collector)
    stories = {
        note.variant: note.story for note in collector.notes.values() if note.story is not None
    }
    own = [one for one in shown if one.kind == "requirement" and one.gating]
    advice = [one for one in shown if one.kind == "requirement" and not one.gating]
    engine = [one for one in shown if one.kind != "requirement"]
    kept = {one.run: stories[one.run] for one in shown if one.run in stories}
    return Page(
        header, summary, areas(rows, collector.spec), own, advice, engine, kept, _errors(rows)
    )


def _errors(rows: Sequence[Row]) -> list[tuple[str, list[str]]]:
    """What went wrong with harness or environment, and in which runs."""
    found: dict[str, list[str]] = {}
    for row in rows:
        if row.verdict is Verdict.ERROR:
            runs = found.setdefault((row.message or "unknown").strip().splitlines()[-1], [])
            if row.run not in runs:
                runs.append(row.run)
    return list(found.items())


def render(page: Page) -> str:
    """The page as HTML: no request leaves it."""
    return (
        _environment()
        .from_string(_text("report.html.j2"))
        .render(page=page, css=Markup(_text("report.css")), js=Markup(_scripts()))
    )


def write(folder: Path, page: Page) -> Path:
    """Write report.html in `folder`; returns its path."""
    path = folder / NAME
    files.replace(path, render(page))
    return path


def stylesheet() -> str:
    """The style of all pages."""
    return _text("report.css")


def _scripts() -> str:
    return "\n".join(_text(name) for name in ("story.js", "drawing.js", "timeline.js", "page.js"))


@cache
def _text(name: str) -> str:
    return (resources.files("kvconform.report.html") / "assets" / name).read_text(encoding="utf-8")


def _environment() -> Environment:
    return Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
