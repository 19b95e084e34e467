# SPDX-License-Identifier: Apache-2.0
"""Text on the terminal, wrapped to its width so that ids, paths and names of hooks stay whole."""

from __future__ import annotations

import os
import shlex
import sys
import textwrap
from collections.abc import Sequence
from typing import IO

from rich.console import Console
from rich.text import Text

WIDTH = 100
"""Width where there is neither a terminal nor COLUMNS."""
INDENT = 13
"""Width of the column with the names of paragraphs."""


class _Console(Console):
    """A console that drops its output once its reader has closed the pipe, as `| head` does.

    The reports and the exit code are wanted all the same.
    """

    def on_broken_pipe(self) -> None:
        self.quiet = True
        with open(os.devnull, "wb") as nothing:  # what is buffered is written at exit
            os.dup2(nothing.fileno(), self.file.fileno())


def make_console(file: IO[str] | None = None) -> Console:
    """Return a console that writes to `file` or to the present sys.stdout.

    The stream is resolved now, because kvconform.session.launch redirects sys.stdout later.
    """
    console = _Console(file=file or sys.stdout, highlight=False)
    if not console.is_terminal:
        given = os.environ.get("COLUMNS", "")
        console.width = int(given) if given.isdecimal() and int(given) else WIDTH
    return console


def is_watched(console: Console) -> bool:
    """Return whether the output is a terminal, and one on which lines can be replaced.

    With FORCE_COLOR, a console takes every file for a terminal.
    """
    return console.is_interactive and console.file.isatty()


def wrapped(text: str, width: int, first: str = "", later: str = "") -> list[str]:
    """Return the lines of a text; no word is broken, and the first words follow `first`."""
    return textwrap.wrap(
        " ".join(text.split()),
        max(width, len(later) + 20),
        initial_indent=first,
        subsequent_indent=later,
        break_long_words=False,
        break_on_hyphens=False,
    )


def paragraph(
    console: Console, name: str, text: str | None, style: str = "", indent: int = INDENT
) -> None:
    """Print a text next to its name; nothing for an empty text."""
    if not text:
        return
    label = f"{name:<{indent - 1}} "
    for number, line in enumerate(wrapped(text, console.width, label, " " * indent)):
        shown = Text(line, style=style)
        if number == 0:
            shown.stylize("dim", 0, len(label))
        console.print(shown, soft_wrap=True)


def command(console: Console, name: str, words: Sequence[str]) -> None:
    """Print a command over as many lines as it needs, so that it can be copied and run.

    An option stays with its value.
    """
    lines = [f"{name:<{INDENT - 1}}"]
    for part in _with_values(words):
        if len(lines[-1]) + len(part) + 3 > console.width and lines[-1].strip() != name:
            lines.append("   ")
        lines[-1] += f" {part}"
    for number, line in enumerate(lines):
        more = " \\" if number + 1 < len(lines) else ""
        text = Text(line + more, style="cyan")
        if number == 0:
            text.stylize("dim", 0, INDENT)
        console.print(text, soft_wrap=True)


def _with_values(words: Sequence[str]) -> list[str]:
    """Return the words of a command, quoted; an option and its value are one part."""
    parts: list[str] = []
    for before, word in zip(["", *words], words, strict=False):
        quoted = shlex.quote(word)
        if parts and before.startswith("-") and before != "--" and not word.startswith("-"):
            parts[-1] += f" {quoted}"
        else:
            parts.append(quoted)
    return parts
