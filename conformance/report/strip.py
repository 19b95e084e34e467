# SPDX-License-Identifier: Apache-2.0
"""The timeline of report.html as text, in 100 columns: steps across, a lane per request, what each step was about in a few characters."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from kvconform.html.lanes import PIECES

WIDTH = 100
NAME = 12
CELL = 8
PER_LINE = (WIDTH - NAME) // CELL
SIGNS = {"local": "h", "loaded": "L", "computed": "", "placeholder": "?", "accepted": "+", "rejected": "x", "draft": "d"}
LEGEND = (
    "N computed", "hN found in the local prefix cache", "LN loaded", "?N placeholders", "+N drafts accepted", "xN rejected",
    "dN of unknown fate",
    "P preempted", "F finished", "! wrong KV",
)  # fmt: skip
LINES = 40
"""Stretches of steps that are shown at most; a long run is told by its events."""


def render(story: dict[str, Any]) -> list[str]:
    """The lines; none for a run without requests."""
    if not story["requests"]:
        return []
    cells = _cells(story)
    stretches = [list(part) for part in _parts(sorted({step for step, _ in cells}))]
    lines = []
    for steps in stretches[:LINES]:
        lines.append("step".ljust(NAME) + "".join(str(step).rjust(CELL) for step in steps))
        for lane, name in enumerate(story["requests"]):
            texts = [cells.get((step, lane), "") for step in steps]
            if any(texts):
                lines.append(_short(name, NAME - 1).ljust(NAME) + "".join(_short(text, CELL - 1).rjust(CELL) for text in texts))
        lines.append("")
    if len(stretches) > LINES:
        lines += [f"... and {sum(map(len, stretches[LINES:]))} more steps", ""]
    return [*lines, *_legend(), ""] if lines else []


def _cells(story: dict[str, Any]) -> dict[tuple[int, int], str]:
    """Text by step and lane."""
    found: dict[tuple[int, int], str] = {}
    for lane, step, _, *rest in story["cells"]:
        if lane >= 0:
            parts = [f"{SIGNS[name]}{count}" for name, count in zip(PIECES, rest, strict=False) if count > 0]
            found[step, lane] = " ".join(parts)
    for lane, step, state, _ in story["states"]:
        if lane >= 0 and (state == "PREEMPTED" or state.startswith("FINISHED")):
            found[step, lane] = " ".join([found.get((step, lane), ""), state[0]]).strip()
    for lane, step, *_ in story["wrong"]:
        if lane >= 0:
            found[step, lane] = "!" + found.get((step, lane), "")
    return found


def _parts(steps: list[int]) -> Iterator[list[int]]:
    rest = iter(steps)
    while part := list(islice(rest, PER_LINE)):
        yield part


def _short(text: str, width: int) -> str:
    return text if len(text) <= width else text.replace(" ", "")[:width]


def _legend() -> list[str]:
    words: list[str] = [""]
    for word in LEGEND:
        if len(words[-1]) + len(word) + 2 > WIDTH:
            words.append("")
        words[-1] += (", " if words[-1] else "") + word
    return words
