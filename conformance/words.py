# SPDX-License-Identifier: Apache-2.0
"""Numbers with their nouns, for sentences that people read."""

from __future__ import annotations


def many(count: int, noun: str) -> str:
    """Return a count and its noun: `1 token`, `2 tokens`, `0 tokens`, `2 statuses`."""
    if count == 1:
        return f"1 {noun}"
    return f"{count} {noun}{'es' if noun.endswith('s') else 's'}"
