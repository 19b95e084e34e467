# SPDX-License-Identifier: Apache-2.0
"""Expectations of a case (`expect`), and the situations that it must provoke (`provokes`).

Both are one-key maps of one closed vocabulary, with an optional `when`. An expectation that does
not hold is a finding of the case: a `case.expectation` event, for requirement `case.expected`. An
unmet entry of `provokes` means that the stimulus did not happen, which is never the connector's
fault. A number or text may differ per scheduling, as `{sync: 10, async: 11}`;
`expectation.at("async")` returns the plain value.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union

from pydantic import BeforeValidator, Discriminator, Field, Tag, field_validator, model_validator

from kvconform.contract.expression import ExprError, Expression, compile_expr
from kvconform.contract.requirement import Check, Model, Version, in_force
from kvconform.errors import did_you_mean

Name = Annotated[
    str, Field(pattern=r"^[a-z][a-z0-9_]*$", description="a request's name within the case")
]
Natural = Annotated[int, Field(ge=0)]


class _PerScheduling(Model):
    """Base of values that differ between sync and async."""


class NaturalPer(_PerScheduling):
    """A number per scheduling."""

    sync: Natural
    async_: Natural = Field(alias="async")


class TextPer(_PerScheduling):
    """A text per scheduling."""

    sync: str
    async_: str = Field(alias="async")


class BoolPer(_PerScheduling):
    """A boolean per scheduling."""

    sync: bool
    async_: bool = Field(alias="async")


class RowsPer(_PerScheduling):
    """A table per scheduling."""

    sync: list[list[int | None]]
    async_: list[list[int | None]] = Field(alias="async")


Number = Natural | NaturalPer
Text = str | TextPer
Flag = bool | BoolPer
Rows = list[list[int | None]] | RowsPer
GUARDS = ("when", "since")
ROW_FIELDS = (
    "step",
    "output_computed",
    "computed",
    "scheduled",
    "placeholders",
    "known",
    "in_flight",
    "drafts",
    "final_before",
    "final_after",
    "all_ids",
)


class _Body(Model):
    """The body of an expectation.

    `when` and `since` may be written here; validation moves them to the expectation.
    """

    when: Check | None = None
    since: Version | None = None


class State(_Body):
    """The scheduler's view of a request now.

    `tokens` are its known tokens; `real` is `computed` - `placeholders`.
    """

    req: Name
    status: Text | None = None
    computed: Number | None = None
    placeholders: Number | None = None
    tokens: Number | None = None
    in_flight: Number | None = None
    real: Number | None = None


class RowsOf(_Body):
    """Expected values of these fields, in the `req.scheduled` events of a request so far."""

    req: Name
    fields: list[Literal[ROW_FIELDS]] = Field(min_length=1)  # type: ignore[valid-type]
    values: Rows

    @model_validator(mode="after")
    def _widths(self) -> RowsOf:
        if isinstance(self.values, RowsPer):
            tables = [self.values.sync, self.values.async_]
        else:
            tables = [self.values]
        if any(len(row) != len(self.fields) for table in tables for row in table):
            raise ValueError(f"every row of values needs {len(self.fields)} numbers, one per field")
        return self


class Outputs(_Body):
    """The output of a request."""

    req: Name
    count: Number | None = None
    finish: Literal["length", "stop", "abort", "error", "repetition"] | TextPer | None = None
    same_as: Name | None = None
    clean: Flag | None = None


class AtLeast(_Body):
    """How often something happened to a request: at least, or exactly, this many times."""

    req: Name | None = None
    at_least: Number | None = None
    equal: Number | None = None

    @model_validator(mode="after")
    def _one_bound(self) -> AtLeast:
        if self.at_least is not None and self.equal is not None:
            raise ValueError("at_least and equal exclude each other")
        return self


class OfRequest(AtLeast):
    """How often something happened to a request, which must be named."""

    req: Name


def _counted(value: Any) -> Any:
    """Expand the short forms.

    `preempted: a` means at least once; `loads: 2` means at least twice, of any request.
    """
    if isinstance(value, str):
        return {"req": value, "at_least": 1}
    if isinstance(value, int) and not isinstance(value, bool):
        return {"at_least": value}
    if isinstance(value, dict) and value.keys() <= {"req"}:
        return {**value, "at_least": 1}
    return value


Counted = Annotated[
    AtLeast, BeforeValidator(_counted, json_schema_input_type=Name | Natural | AtLeast)
]


def _key_of(kind: type[BaseExpectation]) -> tuple[str, str]:
    """Return the name of the field of a kind of expectation, and the key of the map."""
    name = next(name for name in kind.model_fields if name not in GUARDS)
    return name, kind.model_fields[name].alias or name


class BaseExpectation(Model):
    """A map with one key, and optional guards: `when`, over cap and cfg, and `since`."""

    when: Check | None = None
    since: Version | None = Field(
        default=None, description="first vLLM version whose own scheduler does so"
    )

    @property
    def what(self) -> str:
        """The key of the map."""
        return _key_of(type(self))[1]

    @property
    def arg(self) -> Any:
        """The value of that key."""
        return getattr(self, _key_of(type(self))[0])

    @field_validator("when")
    @classmethod
    def _guard(cls, value: str | None) -> str | None:
        if value is not None:
            try:
                compile_expr(value, {})
            except ExprError as error:
                raise ValueError(str(error)) from None
        return value

    @cached_property
    def when_expr(self) -> Expression | None:
        """The compiled `when`."""
        return None if self.when is None else compile_expr(self.when, {})

    def applies(self, cap: dict[str, Any], cfg: dict[str, Any]) -> bool:
        """Return whether the guards hold for this connector and run."""
        if cfg.get("engine") == "vllm" and not in_force(self.since, None, str(cfg["vllm"])):
            return False
        return self.when_expr is None or bool(self.when_expr.bind(cap, cfg)({}))

    def mentions(self) -> set[str]:
        """Return the names of the requests that it refers to."""
        names = {getattr(self.arg, name, None) for name in ("req", "same_as")}
        return {name for name in names if name is not None}

    def at(self, scheduling: str) -> Any:
        """Return the argument with every per-scheduling value replaced by the plain one."""
        return resolve(self.arg, scheduling)


def resolve(value: Any, scheduling: str) -> Any:
    """Return the value for `sync` or `async`; of a model, with all its fields."""
    if isinstance(value, _PerScheduling):
        return getattr(value, "sync" if scheduling == "sync" else "async_")
    if isinstance(value, Model):
        changed = {
            name: resolve(getattr(value, name), scheduling) for name in type(value).model_fields
        }
        return value.model_copy(update=changed)
    return value


class StateE(BaseExpectation):
    """The scheduler's view of a request now."""

    state: State


class RowsE(BaseExpectation):
    """What each step scheduled of a request so far."""

    rows: RowsOf


class OutputsE(BaseExpectation):
    """The output of a request."""

    outputs: Outputs


class PreemptedE(BaseExpectation):
    """Preemptions."""

    preempted: Counted


class ResumedE(BaseExpectation):
    """Resumptions after a preemption."""

    resumed: Counted


class AbortedE(BaseExpectation):
    """Aborts."""

    aborted: Counted


class ChunksE(BaseExpectation):
    """Steps in which the request's prompt was computed."""

    chunks: Counted


class LoadsE(BaseExpectation):
    """Grants with external tokens."""

    loads: Counted


class RejectedE(BaseExpectation):
    """Drafts rejected."""

    rejected: Counted


class ExternalE(BaseExpectation):
    """All external tokens granted to a request."""

    external: OfRequest


class FailedLoadsE(BaseExpectation):
    """Loads reported as failed."""

    failed_loads: Counted = Field(alias="failed-loads")


class WaitsAfterLoadE(BaseExpectation):
    """Steps in which a request was not admitted although its asynchronous load was over."""

    waits_after_load: Counted = Field(alias="waits-after-load")


class RepeatedLookupsE(BaseExpectation):
    """Lookups repeated before memory was granted."""

    repeated_lookups: Counted = Field(alias="repeated-lookups")


class LocalHitsE(BaseExpectation):
    """Tokens found in the local prefix cache at a lookup or grant."""

    local_hits: Counted = Field(alias="local-hits")


class CopiesE(BaseExpectation):
    """Blocks of a prefix-cache hit that the engine copied, as the hit ends inside them."""

    copies: Counted


class GivenUpE(BaseExpectation):
    """Producers' requests whose blocks were released before a consumer looked anything up."""

    given_up: Counted = Field(alias="given-up")


class KilledE(BaseExpectation):
    """Whether the process was killed in the midst of a save (`restart: {killed_at: ...}`)."""

    killed: bool


class FreeBlocksE(BaseExpectation):
    """Free blocks of the pool now."""

    free_blocks: Number


EXPECTATIONS: dict[str, type[BaseExpectation]] = {
    _key_of(kind)[1]: kind for kind in BaseExpectation.__subclasses__()
}
"""The kinds of expectation by key, in the order of their definition."""


def _what(value: Any) -> str | None:
    if isinstance(value, BaseExpectation):
        return value.what
    keys = [key for key in value if key not in GUARDS] if isinstance(value, dict) else []
    return keys[0] if len(keys) == 1 else None


def _exists(value: Any) -> Any:
    """Return a value. ValueError if it is no expectation, with one that is close to it."""
    what = _what(value)
    if isinstance(what, str) and what not in EXPECTATIONS:
        known = f"; the expectations are {', '.join(EXPECTATIONS)}"
        close = did_you_mean(what, EXPECTATIONS, 1) or known
        raise ValueError(f"there is no expectation {what!r}{close}")
    return value


def _guard_outside(value: Any) -> Any:
    """Move guards out of the body: `external: {req: a, when: ...}`."""
    if isinstance(value, dict) and len(value) == 1:
        key, body = next(iter(value.items()))
        if isinstance(body, dict) and body.keys() & set(GUARDS):
            return {
                key: {k: v for k, v in body.items() if k not in GUARDS},
                **{k: body[k] for k in GUARDS if k in body},
            }
    return value


if TYPE_CHECKING:
    Expectation = BaseExpectation
else:
    Expectation = Annotated[
        Union[tuple(Annotated[model, Tag(name)] for name, model in EXPECTATIONS.items())],  # noqa: UP007
        Discriminator(
            _what,
            custom_error_type="unknown_expectation",
            custom_error_message="an expectation is a map with one key (and an optional `when`), "
            "one of: " + ", ".join(EXPECTATIONS),
        ),
        BeforeValidator(_exists),
        BeforeValidator(_guard_outside),
    ]
