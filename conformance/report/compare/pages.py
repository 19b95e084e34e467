# SPDX-License-Identifier: Apache-2.0
"""Comparisons as Markdown and as HTML."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib import resources

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from kvconform.report.causes import split
from kvconform.report.compare.changes import Comparison
from kvconform.report.html.page import stylesheet

_MARKUP = re.compile(r"[\\`*\[\]|~]|#(?!\d)|(?<!\w)_|_(?!\w)")
_MENTION = re.compile(r"@|#(?=\d)")
"""Of a person or an issue: GitHub looks for them in the finished page."""

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
    return " ".join(split(message)[0].split())


def plain(text: object) -> str:
    """What a connector says, as text of a Markdown page, one line, also in a table: no markup, links, pictures or mentions."""
    escaped = _MARKUP.sub(
        r"\\\g<0>", " ".join(str(text).split()).replace("&", "&amp;").replace("<", "&lt;")
    )
    return _MENTION.sub(r"\g<0><!-- -->", escaped.replace("://", r":\//").replace("www.", r"www\."))


def code(text: object) -> str:
    """The same as code: nothing in it is markup."""
    return "`" + " ".join(str(text).replace("`", "'").split()).replace("|", "\\|") + "`"


def _render(name: str, comparisons: Sequence[Comparison], *, autoescape: bool) -> str:
    environment = Environment(
        autoescape=autoescape, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {
        "told": told,
        "plain": plain,
        "code": code,
        "low": lambda text: text.lower().replace("_", " "),
    }
    template = (resources.files("kvconform.report.compare") / "assets" / name).read_text(
        encoding="utf-8"
    )
    return environment.from_string(template).render(
        comparisons=comparisons, shown=SHOWN, css=Markup(stylesheet())
    )
