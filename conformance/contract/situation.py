# SPDX-License-Identifier: Apache-2.0
"""Situations: what the suite's engines do, and whether vLLM itself brings it about.

A failure in a situation that the installed vLLM brings about is a failure in production. The
contract allows more than one vLLM release does; a failure in such a situation is a risk.
"""

from __future__ import annotations

import importlib.resources
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter, ValidationError

from kvconform.contract.requirement import Model, Source
from kvconform.contract.yaml12 import Lines, line_of, parse
from kvconform.errors import BrokenFile, Location, Problem

FILE = "situations.yaml"


class Situation(Model):
    """One entry of spec/situations.yaml."""

    id: Annotated[str, Field(pattern=r"^[a-z]+([_-][a-z]+)*$")]
    text: str = Field(min_length=1)
    of: Literal["policy", "step", "axis", "case"] = Field(
        description="what brings it about: a policy that a case names, a step, a field of the"
        " matrix, or the requests of a case"
    )
    vllm: bool = Field(description="whether vLLM brings it about, and not only the contract allows")
    why: str = Field(min_length=1, description="what vLLM does")
    source: Source


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
