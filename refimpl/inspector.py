# SPDX-License-Identifier: Apache-2.0
"""The optional window into a connector: what a step's metadata plans, and how much state the connector keeps.

Any connector may offer one: a method ``kvconform_inspector()`` that returns an object with these two methods. Without it the suite
judges what it sees from outside.
"""

from __future__ import annotations

from collections.abc import Sized
from typing import TYPE_CHECKING, Any

from kvconform.refimpl.plan import Load, ReferenceMetadata, Save

if TYPE_CHECKING:
    from kvconform.refimpl.connector import ReferenceConnector


class Inspector:
    """Reads the reference connector; changes nothing."""

    def __init__(self, connector: ReferenceConnector) -> None:
        self._connector = connector

    def plan(self, metadata: object) -> list[dict[str, Any]]:
        """One entry per load and save: op, req, start, end (token positions), timing, key of the last chunk, and C, S, N, P at
        planning (saves)."""
        if not isinstance(metadata, ReferenceMetadata):
            return []
        entries = []
        for load in metadata.loads:
            entries.append(_entry("load", load, "before_forward", (0, 0, 0, 0)))
        for save in metadata.saves:
            if save.pieces:
                timing = "before_forward" if save.final else "after_forward"
                entries.append(_entry("save", save, timing, save.counters))
        return entries

    def gauges(self) -> dict[str, int]:
        """Entries of the tables that must be empty when no request is left."""
        connector = self._connector
        tables: dict[str, Sized] = {"tracked": connector._tracked, "granted": connector._granted, "loading": connector._loading}
        tables |= {"final": connector._final, "sent": connector._sent, "invalid": connector._invalid}
        tables |= {"loads": connector._load_queue, "saves": connector._save_queue}
        return {name: len(table) for name, table in tables.items()}


def _entry(op: str, transfer: Load | Save, timing: str, counters: tuple[int, int, int, int]) -> dict[str, Any]:
    key = transfer.pieces[-1].key if transfer.pieces else ""
    where = {"req": transfer.req, "start": transfer.start, "end": transfer.end, "timing": timing, "key": key}
    return {"op": op, **where, **dict(zip("CSNP", counters, strict=True))}
