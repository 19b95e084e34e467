# SPDX-License-Identifier: Apache-2.0
"""The result of `kvconform gpu` as a Markdown page, and as a section of docs/performance.md."""

from __future__ import annotations

import importlib.resources
from typing import Any

from kvconform.gpu.parts import PARTS
from kvconform.gpu.result import Outcome, Result
from kvconform.report.pages import code, plain, render

NAME = "gpu.md"
TEMPLATES = "assets"
SHOWN = ("rows", "defects", "differences")
"""Figures with tables or lists of their own."""


def page(result: Result) -> str:
    """Return the page about a result."""
    return _render("page.md.jinja", result)


def section(result: Result | None) -> str:
    """Return the generated section of docs/performance.md; without a result it says so."""
    return _render("section.md.jinja", result)


def numbers(outcome: Outcome) -> str:
    """Return the figures of a part that fit into a cell of a table."""
    found = (
        f"{name} {value}"
        for name, value in outcome.figures.items()
        if name not in SHOWN and not isinstance(value, list | dict)
    )
    return ", ".join(found)


def _render(name: str, result: Result | None) -> str:
    folder = importlib.resources.files(__package__) / TEMPLATES
    outcomes = result.parts if result is not None else []
    tables: dict[str, Any] = {figure: None for figure in SHOWN}
    for outcome in outcomes:
        tables.update(
            {figure: outcome.figures[figure] for figure in SHOWN if figure in outcome.figures}
        )
    filters = {"plain": plain, "code": code, "numbers": numbers}
    return render(folder, name, filters, result=result, tables=tables, parts=PARTS)
