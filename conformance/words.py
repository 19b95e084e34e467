# SPDX-License-Identifier: Apache-2.0
"""Numbers with their nouns, and lists that are cut, for sentences that people read."""

from __future__ import annotations

from collections.abc import Sequence


def many(count: int, noun: str) -> str:
    """Return a count and its noun: `1 token`, `2 tokens`, `0 tokens`, `2 statuses`."""
    if count == 1:
        return f"1 {noun}"
    return f"{count} {noun}{'es' if noun.endswith('s') else 's'}"


def listed(names: Sequence[str], most: int) -> str:
    """Return the first `most` names, and how many more there are: `a, b and 3 more`."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"
