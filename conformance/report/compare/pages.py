# SPDX-License-Identifier: Apache-2.0
"""Comparisons of reports as Markdown and as HTML."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib import resources

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from kvconform.report.compare.changes import Comparison
from kvconform.report.html.page import stylesheet

_MARKUP = re.compile(r"[\\`*\[\]|~]|#(?!\d)|(?<!\w)_|_(?!\w)")
_MENTION = re.compile(r"@|#(?=\d)")
"""Mention of a person or an issue. GitHub searches the rendered page for them."""

SHOWN = 6
"""Number of runs of a change that are named."""


def markdown(comparisons: Sequence[Comparison]) -> str:
    """Return the comparisons as Markdown, for a pull request's comment or a job's summary."""
    return _render("compare.md.j2", comparisons, autoescape=False)


def html(comparisons: Sequence[Comparison]) -> str:
    """Return the comparisons as one self-contained HTML page."""
    return _render("compare.html.j2", comparisons, autoescape=True)


def plain(text: object) -> str:
    """Return text of a connector as one line of Markdown text, also for a table cell.

    Markup, links, pictures and mentions in it are escaped.
    """
    line = " ".join(str(text).split()).replace("&", "&amp;").replace("<", "&lt;")
    escaped = _MARKUP.sub(r"\\\g<0>", line)
    unlinked = escaped.replace("://", r":\//").replace("www.", r"www\.")
    return _MENTION.sub(r"\g<0><!-- -->", unlinked)


def code(text: object) -> str:
    """Return the text as one line of Markdown code; nothing in it is markup."""
    line = " ".join(str(text).replace("`", "'").split())
    return "`" + line.replace("|", "\\|") + "`"


def _render(name: str, comparisons: Sequence[Comparison], *, autoescape: bool) -> str:
    environment = Environment(
        autoescape=autoescape, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {
        "plain": plain,
        "code": code,
        "low": lambda text: text.lower().replace("_", " "),
    }
    asset = resources.files("kvconform.report.compare") / "assets" / name
    template = environment.from_string(asset.read_text(encoding="utf-8"))
    return template.render(comparisons=comparisons, shown=SHOWN, css=Markup(stylesheet()))
