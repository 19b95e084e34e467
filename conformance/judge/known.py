# SPDX-License-Identifier: Apache-2.0
"""Which known bugs of vLLM explain that a guarantee of the engine is broken."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache

from kvconform.contract.loader import explained, load_spec
from kvconform.contract.references import Entry
from kvconform.contract.trace import Event
from kvconform.judge.records import Row, Verdict


def name_known_bugs(rows: Iterable[Row], trace: Sequence[Event]) -> None:
    """Fill in `bugs` of the guarantees that failed. Changes the rows.

    A bug that has a mark counts only if an event with this mark precedes the failure.
    """
    for row in rows:
        if row.kind == "guarantee" and row.verdict is Verdict.FAIL:
            row.bugs = tuple(
                bug.id
                for bug in _known().get(row.requirement, ())
                if not bug.mark or bug.mark.precedes(trace, row.event)
            )


@cache
def _known() -> dict[str, list[Entry]]:
    """Map guarantees that known bugs of vLLM break to these bugs."""
    return explained(load_spec())
