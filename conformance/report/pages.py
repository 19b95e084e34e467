# SPDX-License-Identifier: Apache-2.0
"""Pages from Jinja templates, and the escaping of text for Markdown."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from importlib.resources.abc import Traversable
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined

_MARKUP = re.compile(r"[\\`*\[\]|~]|#(?!\d)|(?<!\w)_|_(?!\w)")
_MENTION = re.compile(r"@|#(?=\d)")
"""Mention of a person or an issue. GitHub searches the rendered page for them."""


def render(
    folder: Traversable, name: str, filters: Mapping[str, Callable[..., Any]], /, **values: Any
) -> str:
    """Return the page that the template `name` makes of the values; it ends with one newline.

    The template may include and import others of the folder. Values are escaped in templates of
    HTML only; one that is missing is an error. Lines that consist of a tag leave no line behind.
    """
    environment = Environment(
        loader=FunctionLoader(lambda file: (folder / file).read_text(encoding="utf-8")),
        autoescape=".html." in name,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= filters
    return environment.get_template(name).render(values).rstrip() + "\n"


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
