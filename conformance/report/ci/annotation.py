# SPDX-License-Identifier: Apache-2.0
"""Annotations: failures at lines of the connector's source, for the review of a pull request."""

from __future__ import annotations

import ast
import hashlib
import inspect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from kvconform.contract.loader import Spec
from kvconform.errors import Place
from kvconform.judge.records import Row, Verdict
from kvconform.judge.verdict import CRASH
from kvconform.report.causes import plainest
from kvconform.report.html.anchor import links
from kvconform.report.jsonl import Key, Report

CLASS = "class"
"""Key of the class itself among the places of methods."""
CUT_SHORT = "cut short"
"""Cause of everything that a crash prevented from being judged."""


def places_of(connector: type[Any], root: Path) -> dict[str, str]:
    """Return `path:line` of each method of a connector class, by name, and of the class (CLASS).

    Only methods whose file is below `root` are included, also those of base classes; paths are
    relative to `root`. Calls nothing of the class.
    """
    found: dict[str, str] = {}
    for one in reversed(connector.__mro__):
        place = _source_of(one, root)
        if place is None:
            continue
        found[CLASS] = place
        for name, member in vars(one).items():
            function = member
            if isinstance(member, (classmethod, staticmethod)):
                function = member.__func__
            if inspect.isfunction(function) and (line := _source_of(function, root)):
                found[name] = line
    return found


def _source_of(thing: Any, root: Path) -> str | None:
    """Return `path:line` of a class or function, or None if its source is not below `root`."""
    try:
        file = Path(inspect.getsourcefile(inspect.unwrap(thing)) or "").resolve()
        line = inspect.getsourcelines(inspect.unwrap(thing))[1]
    except (OSError, TypeError, ValueError):
        return None
    here = in_checkout(file, str(getattr(thing, "__module__", "")), root.resolve())
    return f"{here.as_posix()}:{max(1, line)}" if here is not None else None


def in_checkout(file: Path, module: str, root: Path) -> Path | None:
    """Return the path of a module's source in the checkout `root`, relative to it, or None.

    An installed file (below site-packages, which may itself be in the checkout) is mapped to the
    source file with the same content, in `root` or in one of its folders.
    """
    if file.is_relative_to(root) and "site-packages" not in file.parts:
        return file.relative_to(root)
    parts = module.split(".")
    if file.name == "__init__.py":
        below = Path(*parts, "__init__.py")
    else:
        below = Path(*parts[:-1], file.name)
    try:
        folders = sorted(
            folder
            for folder in root.iterdir()
            if folder.is_dir() and not folder.name.startswith(".")
        )
        for top in (root, *folders):
            source = top / below
            if source.is_file() and source.read_bytes() == file.read_bytes():
                return source.relative_to(root)
    except OSError:
        return None
    return None


@dataclass(frozen=True)
class Annotation:
    """A failure at a place. Without a place in the connector's source, `path` is None and `line` 0.

    `run` is the first run that failed, `others` the number of further ones. `link` leads to the
    failure in report.html; it is empty if the failure has no section there.
    """

    requirement: str
    path: str | None
    line: int
    message: str
    run: str
    others: int
    cause: str
    link: str = ""

    @property
    def fingerprint(self) -> str:
        """Digest that identifies the failure; particulars such as numbers do not enter it."""
        return hashlib.sha256(f"{self.requirement} {self.path} {self.cause}".encode()).hexdigest()


def annotated(report: Report, spec: Spec, only: Collection[Key] | None = None) -> list[Annotation]:
    """Return an annotation per requirement and cause that counts, in the report's order.

    `only`: the verdicts to consider; the default is `report.against`. Everything that a crash cut
    short is one annotation.
    """
    places = report.header.extra.get("places", {})
    wanted = report.against if only is None else only
    # A run that was cut off has written no report.html.
    known = links(report.rows.values()) if report.complete else {}
    groups: dict[tuple[str, tuple[str, ...]], list[Row]] = {}
    for key, row in report.rows.items():
        if key not in wanted:
            continue
        if row.verdict is Verdict.BLOCKED:
            group: tuple[str, tuple[str, ...]] = (row.blocked_by or CRASH, (CUT_SHORT,))
        else:
            group = (row.requirement, (str(row.verdict), *row.cause))
        groups.setdefault(group, []).append(row)
    return [
        _annotation(requirement, cause, rows, places, spec, known)
        for (requirement, cause), rows in groups.items()
    ]


def _annotation(
    requirement: str,
    cause: tuple[str, ...],
    rows: Sequence[Row],
    places: Mapping[str, str],
    spec: Spec,
    sections: Mapping[Key, str],
) -> Annotation:
    first = plainest(rows)
    known = spec.requirements.get(requirement)
    path, line = _place(first, [*(known.touches if known else ()), CLASS], places)
    return Annotation(
        requirement,
        path,
        line,
        _text(first) or (known.text if known else requirement),
        first.run,
        len({row.run for row in rows}) - 1,
        " ".join(cause),
        sections.get((requirement, first.run), ""),
    )


def _text(row: Row) -> str:
    """Return the message of a row's annotation."""
    if row.verdict is Verdict.XPASS:
        return "holds, and was expected to fail: delete the entry in expected_failures"
    if row.verdict is Verdict.BLOCKED:
        return (
            f"{row.requirement} and all other BLOCKED requirements could not be judged:"
            " the run was cut short"
        )
    return row.message or ""


def _place(row: Row, names: Sequence[str], places: Mapping[str, str]) -> tuple[str | None, int]:
    """Return (path, line) of a failure in the connector's source; (None, 0) if it is unknown.

    This is the line that raised, else the hook that the failure is about, else the first of
    `names` that has a place.
    """
    known = (places[name] for name in (row.hook, *names) if name and name in places)
    found = _raised(row.place, places) or next(known, "")
    path, _, line = found.rpartition(":")
    return (path, int(line)) if path else (None, 0)


def _raised(place: Place | None, places: Mapping[str, str]) -> str:
    """Return `path:line` of a place in the connector's source; empty if the file is ambiguous.

    A place has only the base name of its file. Therefore a file qualifies only if the place's
    function is at the place's line in it.
    """
    if place is None:
        return ""
    # Folders, not files: a helper that raised may be in a file without any hook.
    folders = {PurePosixPath(each.rpartition(":")[0]).parent for each in places.values()}
    candidates = [
        path
        for path in sorted(folder / place.file for folder in folders)
        if _has(Path(path), place.line, place.function)
    ]
    return f"{candidates[0].as_posix()}:{place.line}" if len(candidates) == 1 else ""


def _has(file: Path, line: int, function: str) -> bool:
    """Return whether a line of a file is in a function of this name.

    For `<lambda>`, `<module>` and the like, return whether the file has such a line.
    """
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
