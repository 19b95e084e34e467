# SPDX-License-Identifier: Apache-2.0
"""Time limits of commands: `--minutes` or `--seconds`, in every command that takes one of them."""

from __future__ import annotations

from kvconform.errors import UsageError


def in_seconds(minutes: float | None, seconds: float | None) -> float | None:
    """Return the limit in seconds, or None without one.

    UsageError if both are given, or for a number that is not positive.
    """
    given = {"--minutes": minutes, "--seconds": seconds}
    named = {option: value for option, value in given.items() if value is not None}
    if len(named) > 1:
        raise UsageError("name --minutes or --seconds, not both")
    for option, value in named.items():
        if not value > 0:
            raise UsageError(f"{option} {value:g}: a time limit is greater than 0")
    return seconds if minutes is None else 60 * minutes
