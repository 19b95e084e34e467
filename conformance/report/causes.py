# SPDX-License-Identifier: Apache-2.0
"""Tells root causes apart: two failures of one requirement are one cause if they say the same but for numbers and names.

What two sentences about failures have in common when they are about the same fault: their words, without particulars.

A sentence of ours (kvconform.judge.describe) says its fault in its first clause; what comes after a semicolon explains where the bytes came
from, and differs from run to run. A sentence that quotes an exception is the connector's, and all of it counts: two exceptions often
begin alike.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from kvconform.judge.verdict import Row

_PLACE = re.compile(r"\((\S+\.py):\d+, in ([^)]*)\)")
_EXCEPTION = re.compile(r" raised |\b\w*(?:Error|Exception|Panic)\b")
_KEY = re.compile(r"\bKeyError: (?:'[^']*'|\"[^\"]*\"|\S+)")
_VALUE = re.compile(r"(?<==)\s*(?:'[^']*'|\"[^\"]*\"|[\w.-]+)")
_NAMES = re.compile(r"\b([Rr]equest)s?( objects of)? [\w./-]+(?:, [\w./-]+)*")
_WRONG = re.compile(r"(\bhold [\w ]+):.*", re.DOTALL)
_GROUP = re.compile(r" of KV cache group \d+")
_WORD = re.compile(r"[A-Za-z_]{3,}(?![\w/])")
_SMALL = {"and", "the", "was", "were", "are", "has", "have", "them", "none", "nobody"}
"""Words that depend on how many there are of something."""


def words(told: str, names: str | None = None) -> str:
    """The words of a failure's sentence that say which fault it is: of three letters and more, in the singular, without numbers, paths
    and the names of requests. `names`: those that it is about, as in `Row.req` (`a, b`)."""
    found = _PLACE.search(told)
    place = (
        f" {found[1]} {found[2]}" if found is not None else ""
    )  # not the line: it moves with every edit above it
    text = _PLACE.sub(" ", told)
    if _EXCEPTION.search(text):
        text = _KEY.sub("KeyError", text)
    else:
        text = _WRONG.sub(r"\1", _GROUP.sub("", text)).partition("; ")[0]
    for name in (names or "").split(", "):
        if name:
            text = re.sub(rf"(?<![\w./-]){re.escape(name)}(?![\w/-])", " ", text)
    text = _NAMES.sub(r"\1\2", _VALUE.sub(" ", text))
    text = re.sub(r"\S*[\d/{]\S*", " ", text)
    return " ".join(_singular(word) for word in _WORD.findall(text) if word not in _SMALL) + place


def _singular(word: str) -> str:
    return word[:-1] if word.endswith("s") and not word.endswith("ss") else word


SHOWN = 4
"""Causes of one requirement that are shown each; what comes after joins the last of them."""
_CHECK = re.compile(r" \[(?=`|[a-z_.]+ (?:#\d+|occurred|after|without) )")


def split(message: str | None) -> tuple[str, str]:
    """(what was seen, the check that it broke) of a row's message; the latter is in brackets, and may be missing."""
    text = message or ""
    found = next(reversed(list(_CHECK.finditer(text))), None) if text.endswith("]") else None
    return (
        (text, "")
        if found is None
        else (text[: found.start()], text[found.end() :].removesuffix("]").replace("`", ""))
    )


def signature(message: str | None, names: str | None = None) -> str:
    """What a diagnosis says without its particulars (kvconform.report.causes), nor the check in brackets. `names`: `Row.req`."""
    return words(split(message)[0], names)


def rank(requirement: str) -> int:
    """Causes before what follows from them: a copy in the wrong order explains wrong bytes, those explain what was announced and tokens."""
    if requirement == "compose.null-effect":
        return 3
    return (
        0 if requirement.startswith("streams.") else 2 if requirement.startswith("events.") else 1
    )


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
    order = {
        requirement: index
        for index, requirement in enumerate(_earlier_first(per_requirement, rows))
    }
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
        place = next(
            (
                index
                for index, other in enumerate(order)
                if rank(other) == rank(name) and earlier(name, other)
            ),
            len(order),
        )
        order.insert(place, name)
    return sorted(order, key=rank)
