# SPDX-License-Identifier: Apache-2.0
"""A failure at a line of the connector's source, for the review of a pull request."""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from kvconform.ci.places import CLASS
from kvconform.compare.reports import Key, Report
from kvconform.load import Spec
from kvconform.report.causes import signature, split
from kvconform.verdict import CRASH


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
            message = cause = "holds, and was expected to fail: delete the entry in expected_failures"
        elif verdict == "BLOCKED":
            requirement, cause = report.blocked_by.get(key, CRASH), "cut short"
            message = f"{key[0]} and what else is BLOCKED could not be judged: the run was cut short"
        groups.setdefault((requirement, cause), []).append((run, message))
    return [_annotation(requirement, cause, runs, places, spec) for (requirement, cause), runs in groups.items()]


def _annotation(requirement: str, cause: str, runs: list[tuple[str, str]], places: Mapping[str, Any], spec: Spec) -> Annotation:
    run, message = runs[0]
    told = split(message)[0]
    known = spec.requirements.get(requirement)
    names = [told.partition(" ")[0], *(known.touches if known else ()), CLASS]
    place = next((places[name] for name in names if name in places), None)
    path, _, line = (_raised(told, places) or place or "").rpartition(":")
    text = told or (known.text if known else requirement)
    return Annotation(requirement, path or None, int(line) if path else 0, text, run, len({run for run, _ in runs}) - 1, cause)


def _raised(told: str, places: Mapping[str, str]) -> str | None:
    """`path:line` of the innermost place of a traceback in the connector's source, if the message names one and one file can be meant: its
    name is all that the message tells of it, so the function has to be at that line."""
    found = re.search(r".*\((\S+\.py):(\d+), in ([^)]*)\)", told)
    if found is None:
        return None
    name, line, function = found[1], int(found[2]), found[3]
    # a helper has a file of its own, in which no hook is
    folders = {PurePosixPath(place.rpartition(":")[0]).parent for place in places.values()}
    meant = [path for path in sorted(folder / name for folder in folders) if _has(Path(path), line, function)]
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
        isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == function and node.lineno <= line <= (node.end_lineno or 0)
        for node in ast.walk(tree)
    )
