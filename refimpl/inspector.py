# SPDX-License-Identifier: Apache-2.0
"""The optional window into a connector: what a step's metadata plans.

Any connector may offer one: a method ``kvconform_inspector()`` that returns an object with this method. Without it the suite judges what
it sees from outside.
"""

from __future__ import annotations

from typing import Any

from kvconform.refimpl.plan import Load, ReferenceMetadata, Save


class Inspector:
    """Reads the reference connector's metadata; changes nothing."""

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


def _entry(
    op: str, transfer: Load | Save, timing: str, counters: tuple[int, int, int, int]
) -> dict[str, Any]:
    key = transfer.pieces[-1].key if transfer.pieces else ""
    where = {
        "req": transfer.req,
        "start": transfer.start,
        "end": transfer.end,
        "timing": timing,
        "key": key,
    }
    return {
        "op": op,
        **where,
        **dict(zip(("computed", "scheduled", "known", "placeholders"), counters, strict=True)),
    }
