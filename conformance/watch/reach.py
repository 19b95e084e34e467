# SPDX-License-Identifier: Apache-2.0
"""Which runs execute the lines that were changed."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence

from kvconform.run.lines import Lines
from kvconform.watch.results import Result

Texts = Mapping[str, Sequence[str]]


def _changed(before: Texts, after: Texts) -> Iterator[tuple[str, difflib.SequenceMatcher[str]]]:
    """Yield each file that is another in `after`, and what compares its two texts."""
    for file, old in before.items():
        new = after.get(file, ())
        if old != new:
            yield file, difflib.SequenceMatcher(None, old, new, autojunk=False)


def changed_lines(before: Texts, after: Texts) -> Lines:
    """Return the lines of `before` (from 1) that are others in `after`, by file.

    For lines that were only added, these are the lines next to them.
    """
    found: Lines = {}
    for file, matcher in _changed(before, after):
        lines: set[int] = set()
        for what, first, last, _, _ in matcher.get_opcodes():
            if what == "insert":
                lines |= {first, first + 1}
            elif what != "equal":
                lines |= set(range(first + 1, last + 1))
        found[file] = sorted(lines)
    return found


def move(results: Iterable[Result], before: Texts, after: Texts) -> None:
    """Change the results' lines from those of `before` to those of `after`.

    Lines that were changed are dropped.
    """
    maps: dict[str, dict[int, int]] = {}
    for file, matcher in _changed(before, after):
        maps[file] = {
            block.a + offset + 1: block.b + offset + 1
            for block in matcher.get_matching_blocks()
            for offset in range(block.size)
        }
    for result in results:
        for file in maps.keys() & result.lines.keys():
            to = maps[file]
            result.lines[file] = [to[line] for line in result.lines[file] if line in to]


def reaching(results: Iterable[Result], changed: Lines) -> list[str]:
    """Return the runs that executed one of the changed lines when they were made last."""
    return [
        result.variant
        for result in results
        if any(
            not set(lines).isdisjoint(result.lines.get(file, ())) for file, lines in changed.items()
        )
    ]
