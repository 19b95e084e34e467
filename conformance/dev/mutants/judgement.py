# SPDX-License-Identifier: Apache-2.0
"""What people found out about survivors: spec/mutants/survivors/SUBJECT.yaml.

A judgement has the identity of a mutation, and so outlives changes elsewhere in the module.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from kvconform.contract.yaml12 import parse
from kvconform.dev.mutants.mutation import Site
from kvconform.dev.mutants.subject import FOLDER

Kind = Literal["equivalent", "performance", "recommendation", "open"]


class Judgement(BaseModel):
    """Why a mutant survives.

    `equivalent`: the connector still does the same, or something else that is as correct.
    `performance`: it stores or loads less, or later, within what it promises. `recommendation`: a
    SHOULD finds it, or a run that shows a risk, which `why` names and which makes no connector NOT
    CONFORMANT. `open`: the suite misses a situation, which `why` names.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    module: str
    function: str = ""
    operator: str
    line: str
    occurrence: int = Field(default=0, ge=0)
    kind: Kind
    why: str = Field(min_length=1)

    @property
    def site(self) -> Site:
        """The mutation's identity."""
        return Site(self.module, self.function, self.operator, self.line, self.occurrence)


def read(name: str, folder: Path = FOLDER) -> dict[Site, Judgement]:
    """Return the judgements on the survivors of a subject. ValueError if there are two on one."""
    path = folder / "survivors" / f"{name}.yaml"
    if not path.exists():
        return {}
    found: dict[Site, Judgement] = {}
    for raw in parse(path.read_text(encoding="utf-8"), str(path)) or []:
        each = Judgement.model_validate(raw)
        if each.site in found:
            raise ValueError(f"{path}: two entries for {each.site}")
        found[each.site] = each
    return found


def obsolete(judgements: Iterable[Site], sites: Iterable[Site]) -> list[Site]:
    """Return the judgements on mutations that no longer exist."""
    known = set(sites)
    return [site for site in judgements if site not in known]
