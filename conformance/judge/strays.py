# SPDX-License-Identifier: Apache-2.0
"""Writes of a load outside its blocks: the request whose load made them."""

from __future__ import annotations

from collections.abc import Iterable

from kvconform.contract.trace import Event

LOADING = ("start_load_kv", "wait_for_layer_load")
"""Hooks in which a connector loads."""


def loader(trace: Iterable[Event], event: Event) -> str | None:
    """Return the request whose load wrote where it must not, if it was the only one to load.

    None for other events and hooks, if several loads were due later, and on a rank whose load was
    due before. The load of an aborted request is never due and may still write.
    """
    if event["kind"] != "kv.changed" or event["after_hook"] not in LOADING:
        return None
    waiting: set[str] = set()
    for e in trace:
        if e["seq"] >= event["seq"]:
            break
        if e.get("on") != event.get("on"):
            continue
        if e["kind"] == "alloc" and e["external"] > 0:
            waiting.add(e["req"])
        elif e["kind"] == "load.due":
            waiting.discard(e["req"])
    return waiting.pop() if len(waiting) == 1 else None
