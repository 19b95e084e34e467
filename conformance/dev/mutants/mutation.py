# SPDX-License-Identifier: Apache-2.0
"""One change of a module's source, and its identity.

A mutation is known by its module, function, operator, original line and occurrence. So results and
classifications survive changes elsewhere in the file.
"""

from __future__ import annotations

import difflib
import hashlib
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Edit:
    """Replace the bytes `[start, end)` of a source by `text`."""

    start: int
    end: int
    text: str


@dataclass(frozen=True, order=True)
class Site:
    """Identity of a mutation.

    - `function`: qualified name of the innermost function or class; "" at module level.
    - `line`: the original line on which the change begins, without indentation.
    - `occurrence`: number among the mutations that agree in all else, from 0.
    """

    module: str
    function: str
    operator: str
    line: str
    occurrence: int = 0

    def __str__(self) -> str:
        number = f" #{self.occurrence}" if self.occurrence else ""
        return f"{self.module}:{self.function or '<module>'} [{self.operator}{number}] {self.line}"

    def rank(self, seed: int) -> str:
        """Return a text whose order is random, and the same for the same seed."""
        return hashlib.sha256(f"{seed}\0{self}".encode()).hexdigest()


@dataclass(frozen=True)
class Mutation:
    """A site, the edit that it stands for, and the lines that must run for it to matter.

    `lines`: first and last line number, from 1. None: the change is in code that runs on import.
    """

    site: Site
    edit: Edit
    lines: tuple[int, int] | None
    source: bytes = field(repr=False)

    @property
    def mutated(self) -> bytes:
        """The source with the change."""
        edit = self.edit
        return self.source[: edit.start] + edit.text.encode() + self.source[edit.end :]

    def diff(self) -> list[str]:
        """Return the lines that the change removes (`-`) and adds (`+`)."""
        before = self.source.decode().splitlines()
        after = self.mutated.decode().splitlines()
        changed = difflib.unified_diff(before, after, lineterm="", n=0)
        return [line for line in changed if line[0] in "+-" and line[:3] not in ("+++", "---")]


def digest(source: bytes) -> str:
    """Return 12 hexadecimal digits that identify a source."""
    return hashlib.sha256(source).hexdigest()[:12]
