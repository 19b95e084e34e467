# SPDX-License-Identifier: Apache-2.0
"""Writer of report.html: one page with the verdicts, and the failures with their timelines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from markupsafe import Markup

from kvconform import files
from kvconform.judge.aggregate import called
from kvconform.judge.records import Row, Verdict
from kvconform.report import pages
from kvconform.report.collector import Collector
from kvconform.report.html.failure import Failure, failures
from kvconform.report.html.matrix import Area, areas
from kvconform.report.jsonl import HeaderLine
from kvconform.report.summary import Summary

ASSETS = resources.files("kvconform.report.html") / "assets"
NAME = "report.html"
SHOWN = (
    Verdict.PASS,
    Verdict.FAIL,
    Verdict.ERROR,
    Verdict.XFAIL,
    Verdict.XPASS,
    Verdict.BLOCKED,
    Verdict.NOT_EXERCISED,
    Verdict.UNSUPPORTED,
    Verdict.UNOBSERVABLE,
    Verdict.DISABLED,
)
"""Verdicts in the order in which their numbers are shown."""


@dataclass(frozen=True)
class Page:
    """Content of the page.

    - `failures` count against the connector; `risks` fail in situations that no vLLM brings about;
      `advice` are violated recommendations; `engine` are guarantees that the engine broke.
    - `stories`: packed story (kvconform.report.html.story) by run, for the runs that are shown.
    - `errors`: errors of the harness, each with the runs in which they occurred.
    """

    header: HeaderLine
    summary: Summary
    areas: list[Area]
    failures: list[Failure]
    risks: list[Failure]
    advice: list[Failure]
    engine: list[Failure]
    stories: dict[str, str]
    errors: list[tuple[str, list[str]]]

    @property
    def title(self) -> str:
        """The overall verdict, as it is shown to people."""
        word = called(self.summary.verdict, bool(self.summary.requirements.exercised))
        return word + (" in what was selected" if self.summary.extra.get("narrowed") else "")

    @property
    def counts(self) -> list[tuple[str, int]]:
        """Number of rows per verdict in words, without zeros."""
        counts = self.summary.counts
        return [
            (name.lower().replace("_", " "), counts[name]) for name in SHOWN if counts.get(name)
        ]

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
    shown = failures(rows, collector)
    stories = {name: report.story for name, report in collector.reports.items() if report.story}
    return Page(
        header=header,
        summary=summary,
        areas=areas(rows, collector.spec),
        failures=[one for one in shown if one.kind == "requirement" and one.gating],
        risks=[one for one in shown if one.risk],
        advice=[
            one for one in shown if one.kind == "requirement" and not one.gating and not one.risk
        ],
        engine=[one for one in shown if one.kind != "requirement"],
        stories={one.run: stories[one.run] for one in shown if one.run in stories},
        errors=_errors(rows),
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


def render(page: Page) -> str:
    """Return the page as HTML. It is self-contained: it makes no network requests."""
    styles = {"css": Markup(_text("report.css")), "js": Markup(_scripts())}
    return pages.render(ASSETS, "report.html.j2", {}, page=page, **styles)


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
