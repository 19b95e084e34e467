# SPDX-License-Identifier: Apache-2.0
"""Lint of the rules of the contract: each is covered or waived, and none is both."""

from __future__ import annotations

from collections.abc import Iterator

from kvconform import rules
from kvconform.lint import Finding
from kvconform.load import Spec


def check(spec: Spec) -> Iterator[Finding]:
    """L029 for every rule that is neither covered nor waived, or both."""
    for number, sentence in rules.problems(spec):
        places = (spec.places.get(f"{what}:{number}") for what in ("waiver", "rule"))
        yield Finding(next((place for place in places if place), number), "L029", sentence)
