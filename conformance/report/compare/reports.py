# SPDX-License-Identifier: Apache-2.0
"""Reads a report that was written earlier, whole or cut off, for a comparison."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from kvconform.errors import UsageError
from kvconform.judge.aggregate import EXERCISED, called
from kvconform.judge.verdict import Row
from kvconform.report import jsonl
from kvconform.report.models import HeaderLine

Key = tuple[str, str]
"""A requirement and a run."""


@dataclass
class Report:
    """What a report.jsonl says: verdict and message per requirement and run, which requests a message names (`Row.req`), and
    what explains a BLOCKED; `complete` unless it was cut off."""

    path: Path
    header: HeaderLine
    verdicts: dict[Key, str] = field(default_factory=dict)
    messages: dict[Key, str] = field(default_factory=dict)
    names: dict[Key, str] = field(default_factory=dict)
    blocked_by: dict[Key, str] = field(default_factory=dict)
    gating: dict[str, bool] = field(default_factory=dict)
    guarantees: set[str] = field(default_factory=set)
    answer: str | None = None

    @property
    def complete(self) -> bool:
        return self.answer is not None

    @property
    def word(self) -> str:
        """The answer in front of people."""
        return called(
            self.answer or "error", any(verdict in EXERCISED for verdict in self.verdicts.values())
        )

    @property
    def silent(self) -> bool:
        """Whether it has no answer: then that nothing fails in it says nothing."""
        return self.answer in (None, "error")

    @property
    def name(self) -> str:
        """`connector, vLLM 0.32.0`, as far as it is known."""
        return f"{self.header.connector or 'no connector'}, vLLM {self.header.vllm or '?'}"

    def counts(self, requirement: str) -> bool:
        """Whether it is held against the connector: not a recommendation, and not the engine's."""
        return bool(self.gating.get(requirement)) and requirement not in self.guarantees

    @cached_property
    def against(self) -> set[Key]:
        """What makes the connector nonconformant (kvconform.judge.aggregate): FAIL, XPASS, and BLOCKED by something that is not among them (a
        crash), not expected, and not the engine's fault."""
        return {
            key
            for key, verdict in self.verdicts.items()
            if self.counts(key[0])
            and (
                verdict in ("FAIL", "XPASS")
                or (
                    verdict == "BLOCKED"
                    and self.verdicts.get((self.blocked_by.get(key, ""), key[1]))
                    not in ("FAIL", "XFAIL")
                )
            )
        }


def read(place: str) -> Report:
    """The report in a file, or of a directory. UsageError if there is none, or if it is damaged."""
    path = Path(place)
    path = path / jsonl.NAME if path.is_dir() else path
    try:
        lines = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{place}: there is no readable report: {getattr(error, 'strerror', None) or error}"
        ) from None
    found: Report | None = None
    for number, text in enumerate(lines, 1):
        try:
            line = json.loads(text)
            found = _take(path, found, line)
        except (ValueError, KeyError, TypeError, AttributeError, ValidationError) as error:
            if found is not None and number == len(lines):  # the run was killed while it wrote
                break
            raise UsageError(
                f"{path}:{number}: not a line of a report ({str(error).splitlines()[0]})"
            ) from None
    assert found is not None
    return found


def _take(path: Path, found: Report | None, line: dict[str, Any]) -> Report:
    kind = line.pop("type")
    if found is None:
        if kind != "header":
            raise ValueError("a report begins with its header")
        return Report(path, HeaderLine.model_validate(line))
    if kind == "row":
        row = Row.from_dict(line)
        key = (row.requirement, row.run)
        found.verdicts[key] = str(row.verdict)
        if row.message:
            found.messages[key] = row.message
        if row.req:
            found.names[key] = row.req
        if row.blocked_by:
            found.blocked_by[key] = row.blocked_by
        found.gating[row.requirement] = row.gating
        if row.kind == "guarantee":
            found.guarantees.add(row.requirement)
    elif kind == "footer":
        found.answer = line["verdict"]
    return found
