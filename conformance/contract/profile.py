# SPDX-License-Identifier: Apache-2.0
"""Profiles, and waivers.

A profile is a named selection of requirements and cases. A waiver is a known failure of the engine
itself, in a range of vLLM versions.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping
from datetime import date
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from kvconform.contract.case import Case, Variant
from kvconform.contract.expression import compile_capability
from kvconform.contract.requirement import CapabilityExpr, Id, Model, Requirement, version_key

DIAGONAL = {("reference", "sync"), ("vllm", "async")}
"""Engines and schedulings that `Profile.diagonal` keeps of a case that has all four pairs."""
_BOUND = re.compile(r"(>=|<=|==|<|>)(\d+(?:\.\d+)*)")


class Profile(Model):
    """A selection of requirements and cases.

    A requirement or case belongs to it if a glob names its area or its id, unless it is excluded.
    """

    id: Id
    text: str
    includes: list[Id] = Field(default=[], description="profiles that this one extends")
    requirements: list[str] = Field(default=[], description="globs over requirement ids")
    areas: list[str] = Field(default=[], description="globs over requirement areas")
    exclude: list[str] = Field(
        default=[], description="globs over ids of requirements and cases to leave out"
    )
    cases: list[str] = Field(default=[], description="globs over case ids")
    case_areas: list[str] = Field(default=[], description="globs over case areas")
    diagonal: list[str] = Field(
        default=[],
        description="globs over areas and ids of cases of which half of the runs will do: engine"
        " reference with synchronous scheduling, and engine vllm with asynchronous",
    )
    complete: list[str] = Field(
        default=[], description="globs over ids of cases in `diagonal` that have all runs after all"
    )
    capability: CapabilityExpr = Field(
        default="core", description="what a connector must declare for the profile to make sense"
    )

    def suits(self, caps: Mapping[str, Any]) -> bool:
        """Return whether a connector with these capabilities is one that the profile is for."""
        return bool(compile_capability(self.capability).bind(dict(caps))({}))

    def has_requirement(self, req: Requirement) -> bool:
        """Return whether the profile itself, not one of `includes`, names the requirement."""
        named = _any(self.requirements, req.id) or _any(self.areas, req.area)
        return named and not _any(self.exclude, req.id)

    def has_run(self, variant: Variant) -> bool:
        """Return whether the profile itself, not one of `includes`, has a run."""
        case = variant.case
        if not self.has_case(case):
            return False
        halved = _any(self.diagonal, case.area) or _any(self.diagonal, case.id)
        if not halved or _any(self.complete, case.id):
            return True
        crossed = len(case.engines) > 1 and len(case.matrix.scheduling) > 1
        return not crossed or (variant.engine, variant.scheduling) in DIAGONAL

    def has_case(self, case: Case) -> bool:
        """Return whether the profile itself, not one of `includes`, names the case."""
        named = _any(self.cases, case.id) or _any(self.case_areas, case.area)
        return named and not _any(self.exclude, case.id)


def _any(globs: Iterable[str], name: str) -> bool:
    return any(fnmatch.fnmatchcase(name, glob) for glob in globs)


def _chain(profiles: dict[str, Profile], name: str) -> list[Profile]:
    """Return the profile `name` and those that it includes. KeyError for an unknown one."""
    chain: list[Profile] = []
    waiting = [name]
    while waiting:
        profile = profiles[waiting.pop()]
        if profile not in chain:
            chain.append(profile)
            waiting.extend(profile.includes)
    return chain


def runs_in(profiles: dict[str, Profile], name: str, variant: Variant) -> bool:
    """Return whether profile `name`, or one that it includes, has this run of one of its cases."""
    return any(profile.has_run(variant) for profile in _chain(profiles, name))


def select(
    profiles: dict[str, Profile],
    name: str,
    requirements: Iterable[Requirement],
    cases: Iterable[Case],
) -> tuple[list[str], list[str]]:
    """Return the ids of the requirements and cases of profile `name` and of those it includes.

    They are in the order given. KeyError for an unknown profile.
    """
    chain = _chain(profiles, name)
    chosen = [
        req.id for req in requirements if any(profile.has_requirement(req) for profile in chain)
    ]
    return chosen, [case.id for case in cases if any(profile.has_case(case) for profile in chain)]


def _version_range(value: str) -> str:
    if not all(_BOUND.fullmatch(part.strip()) for part in value.split(",")):
        raise ValueError(f"{value!r} is not a range of versions such as '>=0.31,<0.33'")
    return value


def in_range(version: str, bounds: str | None) -> bool:
    """Return whether a vLLM version lies in bounds such as `>=0.31,<0.33`; None: no bounds."""
    if bounds is None:
        return True
    have = version_key(version)
    for part in bounds.split(","):
        found = _BOUND.fullmatch(part.strip())
        assert found is not None, bounds
        want = version_key(found.group(2))
        holds = {
            ">=": have >= want,
            "<=": have <= want,
            "==": have == want,
            "<": have < want,
            ">": have > want,
        }
        if not holds[found.group(1)]:
            return False
    return True


def _iso_date(value: str) -> str:
    try:
        date.fromisoformat(value)
    except ValueError:
        raise ValueError("must be a day such as 2027-01-31") from None
    return value


class Expected(Model):
    """A known failure.

    `requirement` and `case` are globs. `expires` is the last day on which it holds, as ISO date.
    """

    requirement: str
    case: str = "*"
    reason: str = Field(min_length=1)
    link: str | None = None
    expires: Annotated[str, AfterValidator(_iso_date)] | None = None

    def expired(self, today: date) -> bool:
        """Return whether the entry no longer holds."""
        return self.expires is not None and today > date.fromisoformat(self.expires)

    def matches(self, requirement: str, case: str) -> bool:
        """Return whether the entry is about this requirement and case."""
        return fnmatch.fnmatchcase(requirement, self.requirement) and fnmatch.fnmatchcase(
            case, self.case
        )


class Waiver(Expected):
    """A known failure of the engine, in the suite's own list.

    It applies to guarantees, on these engines, schedulings and vLLM versions.
    """

    engines: list[Literal["reference", "vllm", "live"]] = ["vllm"]
    scheduling: list[Literal["sync", "async"]] = ["sync", "async"]
    vllm: Annotated[str, AfterValidator(_version_range)] | None = None

    def applies(self, engine: str, scheduling: str, vllm: str) -> bool:
        """Return whether it covers runs of this engine, scheduling and vLLM version."""
        here = engine in self.engines and scheduling in self.scheduling
        return here and in_range(vllm, self.vllm)


def unknown_requirements(entries: Iterable[Expected], known: Iterable[str]) -> list[str]:
    """Return the requirement globs of entries that match no known requirement."""
    ids = list(known)
    return [entry.requirement for entry in entries if not fnmatch.filter(ids, entry.requirement)]
