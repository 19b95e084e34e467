# SPDX-License-Identifier: Apache-2.0
"""Requirements: normative sentences with an executable check.

They are read from spec/requirements/<area>.yaml. A requirement names one event, an optional guard
(`where`) and exactly one pattern: `always`, `never`, `count`, `precede`, `respond` or `relate`.
Expressions are compiled and checked against the list of events while the model is validated, so
that a bad one is an error of its file.
"""

from __future__ import annotations

import re
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from kvconform.contract.events import EVENTS, channels_of
from kvconform.contract.expression import ExprError, Expression, compile_capability, compile_expr
from kvconform.errors import did_you_mean

Level = Literal["MUST", "MUST NOT", "SHOULD", "SHOULD NOT", "MAY"]
KEYWORDS = re.compile(
    r"\b(MUST NOT|MUST|SHOULD NOT|SHOULD|MAY|SHALL NOT|SHALL|REQUIRED|RECOMMENDED|OPTIONAL)\b"
)
"""RFC 2119 keywords, longest first."""

ID = r"^[a-z0-9]+(?:[.-][a-z0-9]+)*$"
TOUCHED = r"^([A-Z][A-Za-z0-9]+\.)?[a-z][a-z0-9_]*$"
Id = Annotated[str, Field(pattern=ID)]
Version = Annotated[str, Field(pattern=r"^\d+(\.\d+)*$")]
Relation = Literal[
    "connector",
    "no-connector",
    "pickled-metadata",
    "second-process",
    "hash-seed",
    "repeat",
    "inside-multi",
    "alone",
]


def _known_event(name: str) -> str:
    if name not in EVENTS:
        raise ValueError(f"unknown event {name!r}{did_you_mean(name, EVENTS)}")
    return name


def _expression_text(value: Any) -> Any:
    """Return the Python spelling of a YAML boolean or number, as in `always: true`."""
    return repr(value) if isinstance(value, (bool, int)) else value


Event = Annotated[str, AfterValidator(_known_event)]
Check = Annotated[
    str,
    BeforeValidator(_expression_text, json_schema_input_type=str | bool | int),
    Field(min_length=1),
]
TraceEvent = dict[str, Any]


class Model(BaseModel):
    """Base of the models that are read from YAML.

    Unknown keys and values of another type are errors; instances are immutable.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, ignored_types=(cached_property,)
    )

    def __getstate__(self) -> dict[Any, Any]:
        """Leave out cached properties: compiled expressions cannot be pickled."""
        state = super().__getstate__()
        state["__dict__"] = {
            name: value
            for name, value in state["__dict__"].items()
            if name in type(self).model_fields
        }
        return state


class Source(Model):
    """Where vLLM's source shows that the requirement holds.

    `file` is relative to vllm/, `symbol` is Class.method or a function.
    """

    file: str
    symbol: str
    lines: str | None = None


class Match(Model):
    """A set of events: a kind, and a guard over the event `e` and the trigger `t`."""

    event: Event
    where: Check | None = None


class Count(Model):
    """Between `min` and `max` matching events per value of `per`, or in all if it is absent.

    Judged at the end of the run.
    """

    per: Check | None = None
    min: int | None = Field(default=None, ge=1)
    max: int | None = Field(default=None, ge=0)

    @model_validator(mode="after")
    def _bounded(self) -> Count:
        if self.min is None and self.max is None:
            raise ValueError("count needs min or max")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError("count: min is larger than max")
        return self


class Precede(Model):
    """Every trigger `t` comes after a `before` event, with no `end` event between the two."""

    before: Match
    end: Match | None = None


def _deadline(value: Any) -> Any:
    return {"event": value} if isinstance(value, str) else value


class Respond(Model):
    """Every trigger `t` is followed by a `then` event no later than the next `by` event.

    If one event is both, `then` counts.
    """

    then: Match
    by: Annotated[Match, BeforeValidator(_deadline, json_schema_input_type=str | Match)]


class Relate(Model):
    """The projections of all matching events of two runs of one case are equal.

    They are compared in order within each group `per` (one group if absent). With `prefix`, a group
    that only stops earlier is equal. With `common`, groups that have one value in common are equal,
    and so are those that only one run has.
    """

    runs: list[Relation] = Field(min_length=2, max_length=2)
    event: Event
    where: Check | None = None
    project: Check
    per: Check | None = None
    prefix: bool = False
    common: bool = False


def _capability_text(value: Any) -> Any:
    if isinstance(value, list) and all(isinstance(part, str) for part in value):
        return " and ".join(f"({part})" if " " in part else part for part in value) or "core"
    return value


def _capability_valid(value: str) -> str:
    try:
        compile_capability(value)
    except ExprError as error:
        raise ValueError(f"capability: {error}") from None
    return value


CapabilityExpr = Annotated[
    str,
    BeforeValidator(_capability_text, json_schema_input_type=str | list[str]),
    AfterValidator(_capability_valid),
]


class Requirement(Model):
    """One sentence of the contract, and its check.

    `kind: guarantee` binds the engine, not the connector.
    """

    id: Id
    kind: Literal["requirement", "guarantee"] = "requirement"
    level: Level = "MUST"
    text: str = Field(min_length=1)
    why: str | None = None
    since: Version | None = Field(default=None, description="first vLLM version in which it holds")
    until: Version | None = Field(
        default=None, description="first vLLM version in which it no longer holds"
    )
    source: Source | None = None
    rules: list[Annotated[str, Field(pattern=r"^R\d{3}$")]] = []
    touches: list[Annotated[str, Field(pattern=TOUCHED)]] = Field(
        default=[], description="hooks and Class.field that it is about"
    )
    area: str = ""
    capability: CapabilityExpr = "core"
    needs: list[Literal["hooks", "sched", "kv", "plan", "device", "live"]] = []
    engines: list[Literal["reference", "vllm", "live"]] = ["reference", "vllm", "live"]
    consequence: bool = Field(
        default=False,
        description="violated only as a consequence of another violation: "
        "BLOCKED after an earlier FAIL",
    )

    event: Event | None = None
    where: Check | None = None
    exercised: Match | None = Field(
        default=None,
        description="the event that exercises the rule, where `event` is the breach itself",
    )
    always: Check | None = None
    never: Check | None = None
    count: Count | None = None
    precede: Precede | None = None
    respond: Respond | None = None
    relate: Relate | None = None

    wrong: str | None = None
    right: str | None = None
    good: list[Any] = []
    bad: list[Any] = []
    bugs: list[Annotated[str, Field(pattern=r"^B\d{3}$")]] = []

    @model_validator(mode="after")
    def _one_pattern(self) -> Requirement:
        names = [name for name in PATTERNS if getattr(self, name) is not None]
        if len(names) != 1:
            found = ", ".join(names) or "none"
            raise ValueError(f"exactly one of {', '.join(PATTERNS)} is needed, found {found}")
        if self.event is None and self.relate is None:
            raise ValueError("`event` is missing")
        if self.event is not None and self.relate is not None:
            raise ValueError("with `relate`, put `event` and `where` inside of it")
        if self.exercised is not None and self.relate is not None:
            raise ValueError("`exercised` goes with an `event`, not with `relate`")
        try:
            _ = self.expressions
        except ExprError as error:
            raise ValueError(str(error)) from None
        for name in ("good", "bad"):
            traces = getattr(self, name)
            first = traces[0] if traces else None
            one_pair = isinstance(first, list) and bool(first) and isinstance(first[0], dict)
            if self.relate is not None and one_pair and len(traces) != 2:
                raise ValueError(f"{name}: a relate trace is a pair of traces")
        return self

    @cached_property
    def pattern(self) -> str:
        """The name of the pattern: always, never, count, precede, respond or relate."""
        return next(name for name in PATTERNS if getattr(self, name) is not None)

    @cached_property
    def expressions(self) -> dict[str, Expression]:
        """The compiled expressions by role; absent ones have no entry.

        Roles: where, check, exercised, per, before, end, then, by, project.
        """
        return _compile_all(self)

    @cached_property
    def capability_expr(self) -> Expression:
        """The compiled capability condition."""
        return compile_capability(self.capability)

    def applies_to(self, caps: dict[str, Any]) -> bool:
        """Return whether it binds a connector with these capabilities."""
        return bool(self.capability_expr.bind(caps)({}))

    @cached_property
    def kinds(self) -> frozenset[str]:
        """The event kinds that it reads."""
        matches = [self.exercised]
        if self.precede is not None:
            matches += [self.precede.before, self.precede.end]
        if self.respond is not None:
            matches += [self.respond.then, self.respond.by]
        kinds = {self.relate.event if self.relate is not None else self.event}
        kinds |= {match.event for match in matches if match is not None}
        return frozenset(kind for kind in kinds if kind is not None)

    @cached_property
    def channels(self) -> frozenset[str]:
        """The channels that it needs: those of its events, and those in `needs`."""
        return frozenset(channels_of(set(self.kinds)) | set(self.needs))

    def in_force(self, vllm: str) -> bool:
        """Return whether it holds in this vLLM version: since <= version < until."""
        return in_force(self.since, self.until, vllm)

    def traces(self, which: Literal["good", "bad"]) -> list[Any]:
        """Return the example traces as a list of traces; for `relate`, of pairs of traces.

        A trace is a list of events. With `always` and `never` each event that is not in a list is a
        trace of its own, because each must be accepted or rejected alone.
        """
        raw: list[Any] = getattr(self, which)
        if self.relate is not None:
            first = raw[0] if raw else None
            one_pair = isinstance(first, list) and all(isinstance(event, dict) for event in first)
            return [raw] if one_pair else raw
        of_events = bool(raw) and all(isinstance(item, dict) for item in raw)
        if of_events and self.pattern not in ("always", "never"):
            return [raw]
        return [item if isinstance(item, list) else [item] for item in raw]


PATTERNS = ("always", "never", "count", "precede", "respond", "relate")


def version_key(version: str) -> tuple[int, ...]:
    """Return a key that orders vLLM's releases: `0.32.0rc1+cpu` -> (0, 32).

    Trailing zeros are left out.
    """
    found = re.match(r"v?(\d+(?:\.\d+)*)", version)
    numbers = [int(part) for part in found.group(1).split(".")] if found else [0]
    while len(numbers) > 1 and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def in_force(since: str | None, until: str | None, vllm: str) -> bool:
    """Return whether since <= version < until; None is no bound."""
    version = version_key(vllm)
    return (since is None or version >= version_key(since)) and (
        until is None or version < version_key(until)
    )


def _compile_all(req: Requirement) -> dict[str, Expression]:
    found: dict[str, Expression] = {}

    def add(role: str, text: str | None, e: str | None, t: str | None = None) -> None:
        if text is not None:
            scope: dict[str, str | None] = {"e": e} if t is None else {"e": e, "t": t}
            found[role] = compile_expr(text, scope)

    if req.relate is not None:
        add("where", req.relate.where, req.relate.event)
        add("project", req.relate.project, req.relate.event)
        add("per", req.relate.per, req.relate.event)
        return found
    event = req.event
    add("where", req.where, event)
    add("check", req.always if req.always is not None else req.never, event)
    if req.exercised is not None:
        add("exercised", req.exercised.where, req.exercised.event)
    if req.count is not None:
        add("per", req.count.per, event)
    if req.precede is not None:
        add("before", req.precede.before.where, req.precede.before.event, event)
        if req.precede.end is not None:
            add("end", req.precede.end.where, req.precede.end.event, event)
    if req.respond is not None:
        add("then", req.respond.then.where, req.respond.then.event, event)
        add("by", req.respond.by.where, req.respond.by.event, event)
    return found
