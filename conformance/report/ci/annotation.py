# SPDX-License-Identifier: Apache-2.0
"""A failure at a line of the connector's source, for the review of a pull request.

Where a connector's hooks are in its own source, so that a failure can be shown there.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from kvconform.contract.loader import Spec
from kvconform.judge.verdict import CRASH
from kvconform.report.causes import signature, split
from kvconform.report.compare.reports import Key, Report

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
            function = (
                member.__func__ if isinstance(member, (classmethod, staticmethod)) else member
            )
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
    below = (
        Path(*parts, "__init__.py") if file.name == "__init__.py" else Path(*parts[:-1], file.name)
    )
    try:
        for top in (
            root,
            *sorted(
                folder
                for folder in root.iterdir()
                if folder.is_dir() and not folder.name.startswith(".")
            ),
        ):
            if (top / below).is_file() and (top / below).read_bytes() == file.read_bytes():
                return (top / below).relative_to(root)
    except OSError:
        return None
    return None


@dataclass(frozen=True)
class Annotation:
    """`path` and `line` are None if nothing of the connector's source is known."""

    requirement: str
    path: str | None
    line: int
    message: str
    run: str
    others: int
    cause: str

    @property
    def fingerprint(self) -> str:
        """The same for the same failure, whatever its numbers."""
        return hashlib.sha256(f"{self.requirement} {self.path} {self.cause}".encode()).hexdigest()


def annotated(report: Report, spec: Spec, only: Collection[Key] | None = None) -> list[Annotation]:
    """One per requirement and cause that counts (of `only`, if given), in the report's order; what a crash cut short is one."""
    places = report.header.extra.get("places", {})
    groups: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for key, verdict in report.verdicts.items():
        if key not in (report.against if only is None else only):
            continue
        requirement, run = key
        message = report.messages.get(key, "")
        cause = signature(message, report.names.get(key))
        if verdict == "XPASS":
            message = cause = (
                "holds, and was expected to fail: delete the entry in expected_failures"
            )
        elif verdict == "BLOCKED":
            requirement, cause = report.blocked_by.get(key, CRASH), "cut short"
            message = (
                f"{key[0]} and what else is BLOCKED could not be judged: the run was cut short"
            )
        groups.setdefault((requirement, cause), []).append((run, message))
    return [
        _annotation(requirement, cause, runs, places, spec)
        for (requirement, cause), runs in groups.items()
    ]


def _annotation(
    requirement: str, cause: str, runs: list[tuple[str, str]], places: Mapping[str, Any], spec: Spec
) -> Annotation:
    run, message = runs[0]
    told = split(message)[0]
    known = spec.requirements.get(requirement)
    names = [told.partition(" ")[0], *(known.touches if known else ()), CLASS]
    place = next((places[name] for name in names if name in places), None)
    path, _, line = (_raised(told, places) or place or "").rpartition(":")
    text = told or (known.text if known else requirement)
    return Annotation(
        requirement,
        path or None,
        int(line) if path else 0,
        text,
        run,
        len({run for run, _ in runs}) - 1,
        cause,
    )


def _raised(told: str, places: Mapping[str, str]) -> str | None:
    """`path:line` of the innermost place of a traceback in the connector's source, if the message names one and one file can be meant: its
    name is all that the message tells of it, so the function has to be at that line."""
    found = re.search(r".*\((\S+\.py):(\d+), in ([^)]*)\)", told)
    if found is None:
        return None
    name, line, function = found[1], int(found[2]), found[3]
    # a helper has a file of its own, in which no hook is
    folders = {PurePosixPath(place.rpartition(":")[0]).parent for place in places.values()}
    meant = [
        path
        for path in sorted(folder / name for folder in folders)
        if _has(Path(path), line, function)
    ]
    return f"{meant[0].as_posix()}:{line}" if len(meant) == 1 else None


def _has(file: Path, line: int, function: str) -> bool:
    """Whether a file's line is in a function of that name; of `<lambda>`, `<module>` and the like, whether there is such a line."""
    try:
        text = file.read_text(encoding="utf-8")
        tree = ast.parse(text)
    except (OSError, SyntaxError, ValueError):
        return False
    if function.startswith("<"):
        return line <= len(text.splitlines())
    return any(
        isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name == function
        and node.lineno <= line <= (node.end_lineno or 0)
        for node in ast.walk(tree)
    )
