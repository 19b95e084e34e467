# SPDX-License-Identifier: Apache-2.0
"""The optional inspector of a connector: shows the suite what a step's metadata plans.

Any connector may offer one: a method `kvconform_inspector()` that returns an object with a method
`plan`. Without it, the suite judges only what it observes from outside. Methods about the cache are
in `refimpl/variants/tiers.py`.
"""

from __future__ import annotations

from typing import Any

from kvconform.refimpl.plan import Load, ReferenceMetadata, Save


class Inspector:
    """Reads the reference connector's metadata; changes nothing."""

    def plan(self, metadata: object) -> list[dict[str, Any]]:
        """Return one entry per load and per save of a step's metadata.

        Fields: `op`; `req`; `start` and `end`, in token positions; `timing`; `key`, of the last
        chunk; and for saves `computed`, `scheduled`, `known` and `placeholders`, as they were when
        the save was planned.
        """
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
    computed, scheduled, known, placeholders = counters
    return {
        "op": op,
        "req": transfer.req,
        "start": transfer.start,
        "end": transfer.end,
        "timing": timing,
        "key": transfer.pieces[-1].key if transfer.pieces else "",
        "computed": computed,
        "scheduled": scheduled,
        "known": known,
        "placeholders": placeholders,
    }
