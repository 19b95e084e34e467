# SPDX-License-Identifier: Apache-2.0
"""What two sentences about failures have in common when they are about the same fault: their words, without particulars.

A sentence of ours (kvconform.diagnosis) says its fault in its first clause; what comes after a semicolon explains where the bytes came
from, and differs from run to run. A sentence that quotes an exception is the connector's, and all of it counts: two exceptions often
begin alike.
"""

from __future__ import annotations

import re

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
    place = f" {found[1]} {found[2]}" if found is not None else ""  # not the line: it moves with every edit above it
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
