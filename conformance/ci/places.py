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
    except (OSError, TypeError, ValueError):
        return None
    here = in_checkout(file, str(getattr(thing, "__module__", "")), root.resolve())
    return f"{here.as_posix()}:{max(1, line)}" if here is not None else None


def in_checkout(file: Path, module: str, root: Path) -> Path | None:
    """Where a module's file is in the checkout `root`, relative to it: there itself, or as the source that an equal copy of was installed,
    also within it (an environment is no source)."""
    if file.is_relative_to(root) and "site-packages" not in file.parts:
        return file.relative_to(root)
    parts = module.split(".")
    below = Path(*parts, "__init__.py") if file.name == "__init__.py" else Path(*parts[:-1], file.name)
    try:
        for top in (root, *sorted(folder for folder in root.iterdir() if folder.is_dir() and not folder.name.startswith("."))):
            if (top / below).is_file() and (top / below).read_bytes() == file.read_bytes():
                return (top / below).relative_to(root)
    except OSError:
        return None
    return None
