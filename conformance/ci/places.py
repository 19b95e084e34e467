# SPDX-License-Identifier: Apache-2.0
"""Where a connector's hooks are in its own source, so that a failure can be shown there."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

CLASS = "class"
"""The key of the class itself."""


def places_of(connector: type[Any], root: Path) -> dict[str, str]:
    """`path:line` of each method that the class or a base of it defines in a file below `root`, paths relative to it. Empty for a class
    whose source is elsewhere. Does not call anything of it."""
    found: dict[str, str] = {}
    for one in reversed(connector.__mro__):
        place = _place(one, root)
        if place is None:
            continue
        found[CLASS] = place
        for name, member in vars(one).items():
            function = member.__func__ if isinstance(member, (classmethod, staticmethod)) else member
            if inspect.isfunction(function) and (line := _place(function, root)):
                found[name] = line
    return found


def _place(thing: Any, root: Path) -> str | None:
    try:
        file = Path(inspect.getsourcefile(inspect.unwrap(thing)) or "").resolve()
        line = inspect.getsourcelines(inspect.unwrap(thing))[1]
        return f"{file.relative_to(root.resolve()).as_posix()}:{max(1, line)}"
    except (OSError, TypeError, ValueError):
        return None
