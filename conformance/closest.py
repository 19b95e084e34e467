# SPDX-License-Identifier: Apache-2.0
"""The end of a sentence about a name that does not exist: what may have been meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str], most: int = 3) -> str:
    """`; did you mean a or b?` for the nearest of the known names, or nothing."""
    close = difflib.get_close_matches(name, list(known), most, 0.5)
    return f"; did you mean {' or '.join(close)}?" if close else ""
