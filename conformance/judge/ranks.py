# SPDX-License-Identifier: Apache-2.0
"""How many ranks reported a transfer, and how many reports the engine waits for."""

from __future__ import annotations

from collections.abc import Sequence

from kvconform.contract.trace import Event

_ONE = ("on", "direction", "req", "generation", "transfer")
"""Fields that all reports of one transfer share."""


def reports_of(trace: Sequence[Event], event: Event) -> str:
    """Return how many reports of a transfer came, of how many, and from which ranks.

    `event` is one of its `transfer.reported` events.
    """
    reports = [
        e
        for e in trace
        if e["kind"] == event["kind"] and all(e.get(name) == event.get(name) for name in _ONE)
    ]
    ranks = sorted({e["rank"] for e in reports})
    number, why = _expected(trace, event)
    named = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
    return f"{len(reports)} of {number} reports came, from {named} ({why})"


def _expected(trace: Sequence[Event], event: Event) -> tuple[int, str]:
    """Return the number of reports that the engine waits for, and what says so."""
    number = next((e["ranks"] for e in trace if e["kind"] == "run.start"), 1)
    asked: str | None = None
    for e in trace:
        if e.get("on") != event.get("on"):
            continue
        if e["kind"] == "ranks.joined":
            number = e["expected"]
        elif e["kind"] == "hook.returned" and e["hook"] == "get_finished_count":
            asked = str(e["value"])
            number = int(asked) if asked.isdecimal() and int(asked) else number
    why = f"get_finished_count returned {asked}" if asked else "get_finished_count was not asked"
    return number, why if asked and asked.isdecimal() else f"{why}: one from each rank"
