# SPDX-License-Identifier: Apache-2.0
"""Tells root causes apart: two failures of one requirement are one cause if they say the same but for numbers and names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from kvconform.report.wording import words
from kvconform.verdict import Row

SHOWN = 4
"""Causes of one requirement that are shown each; what comes after joins the last of them."""
_CHECK = re.compile(r" \[(?=`|[a-z_.]+ (?:#\d+|occurred|after|without) )")


def split(message: str | None) -> tuple[str, str]:
    """(what was seen, the check that it broke) of a row's message; the latter is in brackets, and may be missing."""
    text = message or ""
    found = next(reversed(list(_CHECK.finditer(text))), None) if text.endswith("]") else None
    return (text, "") if found is None else (text[: found.start()], text[found.end() :].removesuffix("]").replace("`", ""))


def signature(message: str | None, names: str | None = None) -> str:
    """What a diagnosis says without its particulars (kvconform.report.wording), nor the check in brackets. `names`: `Row.req`."""
    return words(split(message)[0], names)


def rank(requirement: str) -> int:
    """Causes before what follows from them: a copy in the wrong order explains wrong bytes, those explain what was announced and tokens."""
    if requirement == "compose.null-effect":
        return 3
    return 0 if requirement.startswith("streams.") else 2 if requirement.startswith("events.") else 1


def by_cause(rows: Sequence[Row]) -> list[list[Row]]:
    """Failed rows grouped by requirement and cause, in order of first appearance; at most SHOWN groups per requirement."""
    groups: dict[tuple[str, str], list[Row]] = {}
    per_requirement: dict[str, list[tuple[str, str]]] = {}
    for row in rows:
        key = (row.requirement, signature(row.message, row.req))
        known = per_requirement.setdefault(row.requirement, [])
        if key not in groups and len(known) >= SHOWN:
            key = known[-1]
        if key not in groups:
            known.append(key)
        groups.setdefault(key, []).append(row)
    order = {requirement: index for index, requirement in enumerate(_earlier_first(per_requirement, rows))}
    return [group for key, group in sorted(groups.items(), key=lambda item: order[item[0][0]])]


def _earlier_first(requirements: Iterable[str], rows: Sequence[Row]) -> list[str]:
    """By rank; one goes before those of its rank that failed later than it in a run that both have failed in; else as they come."""
    when: dict[str, dict[str, int]] = {}
    for row in rows:
        if row.event is not None:
            when.setdefault(row.requirement, {}).setdefault(row.run, row.event)

    def earlier(one: str, other: str) -> bool:
        first, second = when.get(one, {}), when.get(other, {})
        common = min(first.keys() & second.keys(), default=None)
        return common is not None and first[common] < second[common]

    order: list[str] = []
    for name in requirements:
        place = next((index for index, other in enumerate(order) if rank(other) == rank(name) and earlier(name, other)), len(order))
        order.insert(place, name)
    return sorted(order, key=rank)
