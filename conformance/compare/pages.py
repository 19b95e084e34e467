# SPDX-License-Identifier: Apache-2.0
"""Comparisons as Markdown and as HTML."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from kvconform.aggregate import ANSWERS
from kvconform.compare.changes import Comparison
from kvconform.html.page import stylesheet

SHOWN = 6
"""Runs of a change that are named."""


def markdown(comparisons: Sequence[Comparison]) -> str:
    """For a pull request's comment, or a job's summary."""
    return _render("compare.md.j2", comparisons, autoescape=False)


def html(comparisons: Sequence[Comparison]) -> str:
    """One file, as self-contained as report.html."""
    return _render("compare.html.j2", comparisons, autoescape=True)


def told(message: str) -> str:
    """A diagnosis without the check that was false."""
    return " ".join(message.partition(" [`")[0].split())


def cell(text: str) -> str:
    """Text for a cell of a Markdown table."""
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


def _render(name: str, comparisons: Sequence[Comparison], *, autoescape: bool) -> str:
    environment = Environment(autoescape=autoescape, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"told": told, "cell": cell, "low": lambda text: text.lower().replace("_", " ")}
    template = (resources.files("kvconform.compare") / "assets" / name).read_text(encoding="utf-8")
    return environment.from_string(template).render(comparisons=comparisons, shown=SHOWN, words=ANSWERS, css=Markup(stylesheet()))
