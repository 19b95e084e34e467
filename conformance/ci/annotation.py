# SPDX-License-Identifier: Apache-2.0
"""A failure at a line of the connector's source, for the review of a pull request."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from kvconform.ci.places import CLASS
from kvconform.compare.reports import Report
from kvconform.load import Spec
from kvconform.report.causes import signature, split


@dataclass(frozen=True)
class Annotation:
    """`path` and `line` are None if nothing of the connector's source is known."""

    requirement: str
    path: str | None
    line: int
    message: str
    run: str
    others: int

    @property
    def fingerprint(self) -> str:
        """The same for the same failure, whatever its numbers."""
        return hashlib.sha256(f"{self.requirement} {self.path} {signature(self.message)}".encode()).hexdigest()


def annotated(report: Report, spec: Spec, only: Iterable[str] | None = None) -> list[Annotation]:
    """One per requirement and cause that counts (of the requirements in `only`, if given), in the report's order."""
    wanted = report.failing() if only is None else set(only)
    places = report.header.extra.get("places", {})
    groups: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for (requirement, run), verdict in report.verdicts.items():
        if verdict == "FAIL" and requirement in wanted:
            message = report.messages.get((requirement, run), "")
            groups.setdefault((requirement, signature(message)), []).append((run, message))
    return [_annotation(requirement, runs, places, spec) for (requirement, _), runs in groups.items()]


def _annotation(requirement: str, runs: list[tuple[str, str]], places: Mapping[str, Any], spec: Spec) -> Annotation:
    run, message = runs[0]
    told = split(message)[0]
    known = spec.requirements.get(requirement)
    names = [told.partition(" ")[0], *(known.touches if known else ()), CLASS]
    place = next((places[name] for name in names if name in places), None)
    path, _, line = (_raised(told, places) or place or "").rpartition(":")
    return Annotation(
        requirement, path or None, int(line) if path else 0, told or (known.text if known else requirement), run, len(runs) - 1
    )


def _raised(told: str, places: Mapping[str, str]) -> str | None:
    """`path:line` of the innermost place of a traceback in the connector's source, if the message names one."""
    found = re.search(r"\((\S+\.py):(\d+), in [^)]*\)", told)
    if found is None:
        return None
    for path in dict.fromkeys(place.rpartition(":")[0] for place in places.values()):
        beside = PurePosixPath(path).parent / found[1]  # a helper's file is not among the hooks' places
        if PurePosixPath(path).name == found[1] or Path(beside).is_file():
            return f"{beside.as_posix()}:{found[2]}"
    return None
