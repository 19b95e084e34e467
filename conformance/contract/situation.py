# SPDX-License-Identifier: Apache-2.0
"""Situations: what the suite's engines do, and whether vLLM itself brings it about.

A failure in a situation that the installed vLLM brings about is a failure in production. The
contract allows more than one vLLM release does; a failure in such a situation is a risk.
"""

from __future__ import annotations

import importlib.resources
from functools import cache
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter, ValidationError

from kvconform.contract.requirement import Model, Source
from kvconform.contract.yaml12 import parse
from kvconform.errors import UsageError

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


_ENTRIES = TypeAdapter(list[Situation])


@cache
def situations() -> dict[str, Situation]:
    """Return the situations by id. UsageError if the file is wrong (the loader says where)."""
    text = (importlib.resources.files("kvconform.spec") / FILE).read_text(encoding="utf-8")
    try:
        entries = _ENTRIES.validate_python(parse(text, f"spec/{FILE}"))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        path = ".".join(map(str, first["loc"]))
        raise UsageError(f"spec/{FILE}: entry {path}: {first['msg']}") from None
    return {entry.id: entry for entry in entries}


def policies() -> list[str]:
    """Return the names of the policies, sorted."""
    return sorted(name for name, situation in situations().items() if situation.of == "policy")
