# SPDX-License-Identifier: Apache-2.0
"""The rules of the contract: the numbered list that requirements, guarantees and cases say they cover, and what is left out of it.

A rule binds the connector (an obligation), the engine (a guarantee), or nobody: a hazard is what an engine may do unannounced, a note is
what an older vLLM did. `spec/waivers.yaml` says why a rule is covered by nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from kvconform.requirement import Model, Version

if TYPE_CHECKING:
    from kvconform.load import Spec

RuleNumber = Annotated[str, Field(pattern=r"^R\d{3}$")]
Who = Literal["connector MUST", "connector SHOULD", "connector MAY", "engine", "hazard", "note"]


class Rule(Model):
    """One rule. `until`: the first vLLM version that knows it no more."""

    rule: RuleNumber
    who: Who
    title: str = Field(min_length=1)
    until: Version | None = None


class RuleWaiver(Model):
    """A rule that nothing covers, and why: it is wrong, nothing here could observe it, or it binds what is not the connector interface."""

    rule: RuleNumber
    because: Literal["wrong", "not observable", "other half"]
    reason: str = Field(min_length=1)
    link: str = Field(min_length=1, description="where that can be checked: a place in vLLM's source, or an issue")


def covered_by(spec: Spec) -> dict[str, list[str]]:
    """Rule number -> what covers it: the ids of requirements, guarantees and, for hazards and notes only, of cases."""
    found: dict[str, list[str]] = {number: [] for number in spec.rules}
    for req in spec.requirements.values():
        for number in req.rules:
            found.setdefault(number, []).append(req.id)
    for case in spec.cases.values():
        for number in case.rules:
            rule = spec.rules.get(number)
            if rule is not None and rule.who in ("hazard", "note"):
                found[number].append(case.id)
    return found


def problems(spec: Spec) -> Iterator[tuple[str, str]]:
    """(rule number, sentence) for every rule that nothing covers, that is waived although something does, or that does not exist."""
    for number, ids in covered_by(spec).items() if spec.rules else ():
        waiver = spec.rule_waivers.get(number)
        if number not in spec.rules:
            yield number, f"{ids[0]} names rule {number}, which spec/rules.yaml does not list"
        elif waiver is None and not ids:
            kind = "case or requirement" if spec.rules[number].who in ("hazard", "note") else "requirement or guarantee"
            yield number, f"no {kind} covers rule {number} ({spec.rules[number].title}), and no waiver says why"
        elif waiver is not None and ids:
            yield number, f"rule {number} is waived, but {ids[0]} covers it"
    for number in spec.rule_waivers.keys() - spec.rules.keys():
        yield number, f"a waiver names rule {number}, which spec/rules.yaml does not list"
