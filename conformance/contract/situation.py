# SPDX-License-Identifier: Apache-2.0
"""Situations: what the suite's engines do, and whether vLLM itself brings it about.

A failure in a situation that the installed vLLM brings about is a failure in production. The
contract allows more than one vLLM release does; a failure in such a situation is a risk.
"""

from __future__ import annotations

import importlib.resources
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter, ValidationError, model_validator

from kvconform.contract.requirement import Model, Source
from kvconform.contract.yaml12 import Lines, line_of, parse
from kvconform.errors import BrokenFile, Location, Problem

FILE = "situations.yaml"


class Reading(Model):
    """Why no test brings a situation about, and the line of the source that shows it instead."""

    why: str = Field(min_length=1, description="what a test would need")
    line: str = Field(min_length=1, description="text of a line of the source")


class Situation(Model):
    """One entry of spec/situations.yaml."""

    id: Annotated[str, Field(pattern=r"^[a-z]+([_-][a-z]+)*$")]
    text: str = Field(min_length=1)
    of: Literal["policy", "step", "axis", "config", "case"] = Field(
        description="what brings it about: a policy that a case names, a step, a field of the"
        " matrix or of the configuration, or a property of a case"
    )
    vllm: bool = Field(description="whether vLLM brings it about, and not only the contract allows")
    why: str = Field(min_length=1, description="what vLLM does")
    source: Source
    excuses: list[str] = Field(
        default=[],
        description="the only requirements whose failure is a risk in what vLLM does not bring"
        " about; default: all",
    )
    read: Reading | None = Field(
        default=None, description="of a situation of vLLM's that no test brings about"
    )

    @model_validator(mode="after")
    def _what_vllm_never_does_is_not_read(self) -> Situation:
        if self.read is not None and not self.vllm:
            raise ValueError("`read` is for what vLLM does")
        if self.excuses and self.vllm:
            raise ValueError("`excuses` is for what vLLM does not do")
        return self

    def makes_a_risk_of(self, requirement: str) -> bool:
        """Return whether a failure of the requirement in this situation is a risk only."""
        return not self.vllm and (not self.excuses or requirement in self.excuses)


class _Known:
    entries: Mapping[str, Situation] | None = None


def hand_on(entries: Mapping[str, Situation]) -> None:
    """Make these the situations of this process, by id. The loader does so before any case."""
    _Known.entries = dict(entries)


def situations() -> Mapping[str, Situation]:
    """Return the situations by id, in the order of the file.

    They are those of the specification that was loaded last. Before any is loaded, the
    distribution's file is read; BrokenFile if it is broken.
    """
    if _Known.entries is None:
        hand_on(_read())
    assert _Known.entries is not None
    return _Known.entries


def _read() -> dict[str, Situation]:
    name = f"spec/{FILE}"
    text = (importlib.resources.files("kvconform.spec") / FILE).read_text(encoding="utf-8")
    lines: Lines = {}
    try:
        entries = TypeAdapter(list[Situation]).validate_python(parse(text, name, lines))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = Location(name, line_of(lines, first["loc"]))
        field = ".".join(str(part) for part in first["loc"][1:])
        raise BrokenFile(Problem(where, f"{field}: {first['msg']}")) from None
    return {entry.id: entry for entry in entries}


def policies() -> list[str]:
    """Return the names of the policies, sorted."""
    return sorted(name for name, situation in situations().items() if situation.of == "policy")
