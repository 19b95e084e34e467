# SPDX-License-Identifier: Apache-2.0
"""Tells root causes apart: two failures of one requirement are one cause if they say the same but for numbers and names."""

from __future__ import annotations

import re
from collections.abc import Sequence

from kvconform.verdict import Row

SHOWN = 4
"""Causes of one requirement that are shown each; what comes after joins the last of them."""
_LENGTH = 72


def signature(message: str | None) -> str:
    """What a diagnosis says without its particulars: words of three letters and more, no numbers, no paths, not the check in brackets."""
    text = (message or "").partition(" [`")[0]
    words = [word for word in re.findall(r"[A-Za-z_]{3,}(?![\w/])", re.sub(r"\S*[\d/{]\S*", " ", text))]
    return " ".join(words)[:_LENGTH]


def rank(requirement: str) -> int:
    """Causes before what follows from them: a copy in the wrong order explains wrong bytes, and those explain wrong tokens."""
    return 0 if requirement.startswith("streams.") else 2 if requirement == "compose.null-effect" else 1


def by_cause(rows: Sequence[Row]) -> list[list[Row]]:
    """Failed rows grouped by requirement and cause, in order of first appearance; at most SHOWN groups per requirement."""
    groups: dict[tuple[str, str], list[Row]] = {}
    per_requirement: dict[str, list[tuple[str, str]]] = {}
    for row in rows:
        key = (row.requirement, signature(row.message))
        known = per_requirement.setdefault(row.requirement, [])
        if key not in groups and len(known) >= SHOWN:
            key = known[-1]
        if key not in groups:
            known.append(key)
        groups.setdefault(key, []).append(row)
    order = {requirement: (rank(requirement), index) for index, requirement in enumerate(per_requirement)}
    return [group for key, group in sorted(groups.items(), key=lambda item: order[item[0][0]])]
