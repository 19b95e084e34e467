# SPDX-License-Identifier: Apache-2.0
"""Result of `kvconform gpu`: the machine, and the outcome of each part (gpu.json)."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvconform import __version__, files
from kvconform.errors import UsageError

NAME = "gpu.json"
Status = Literal["done", "failed", "timed out", "not run"]
SETTLED: tuple[Status, ...] = ("done", "failed")
"""A part with one of these ran to its end, and is not repeated."""


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Machine(_Model):
    """Hardware and software versions of a measurement, without the machine's name."""

    device: str | None = Field(description="name of the device; null: there is none")
    driver: str | None
    capability: str | None
    python: str
    torch: str | None
    triton: str | None
    vllm: str | None
    compiled: bool = Field(description="whether vLLM has its compiled parts for CUDA")

    def differences(self, other: Machine) -> list[str]:
        """Return the fields that differ, as `torch 2.11.0 -> 2.12.0`."""
        theirs = other.model_dump()
        return [
            f"{name} {value} -> {theirs[name]}"
            for name, value in self.model_dump().items()
            if value != theirs[name]
        ]


class Outcome(_Model):
    """Outcome of one part.

    `reason`: why it did not pass, or was not run; empty if it passed. `seconds`: by the clock.
    `figures`: numbers and short texts by name, or tables (lists of such).
    """

    part: str
    title: str
    status: Status = "not run"
    reason: str = ""
    seconds: float = 0.0
    date: str = ""
    figures: dict[str, Any] = {}


class Result(_Model):
    """All outcomes on one machine, in order of worth."""

    format: Literal[1] = 1
    kvconform: str = __version__
    machine: Machine
    emulated: bool = Field(default=False, description="made without a GPU, as tests do")
    parts: list[Outcome]

    def of(self, part: str) -> Outcome:
        """Return the outcome of a part. KeyError if there is none."""
        for each in self.parts:
            if each.part == part:
                return each
        raise KeyError(part)

    def put(self, outcome: Outcome) -> None:
        """Replace the outcome of the same part."""
        self.parts = [outcome if each.part == outcome.part else each for each in self.parts]

    @property
    def code(self) -> int:
        """Exit status: 1 if a part that ran did not pass, else 0."""
        return int(any(each.status in ("failed", "timed out") for each in self.parts))


def load(path: Path) -> Result | None:
    """Return a stored result, None if there is none.

    UsageError for a file that is none, or of another format.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    try:
        return Result.model_validate_json(text)
    except ValidationError as error:
        place = ".".join(map(str, error.errors()[0]["loc"])) or "its syntax"
        raise UsageError(
            f"{path} is no result of this version of kvconform gpu ({place}); --afresh replaces it"
        ) from None


def save(result: Result, path: Path) -> None:
    """Write the result atomically. Changes only the file."""
    files.replace(path, result.model_dump_json(indent=1) + "\n")


def today() -> str:
    """Return the date as 2026-12-31."""
    return date.today().isoformat()
