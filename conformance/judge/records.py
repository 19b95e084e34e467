# SPDX-License-Identifier: Apache-2.0
"""The records of what was judged: one verdict (Row), and one run of a case (CaseReport).

Both are plain dataclasses. A worker sends them, the controller collects them, and report.jsonl has
one per line, from which they are read back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter
from pydantic.json_schema import SkipJsonSchema

from kvconform.contract.case import Slow, variant_id
from kvconform.contract.trace import Event
from kvconform.errors import Place


class Verdict(StrEnum):
    """What one run says about one requirement."""

    PASS = "PASS"
    FAIL = "FAIL"
    ERROR = "ERROR"  # the harness or the environment is at fault
    XFAIL = "XFAIL"  # failed, as expected
    XPASS = "XPASS"  # expected to fail, and did not
    UNSUPPORTED = "UNSUPPORTED"  # a capability is not declared, or settings are refused
    NOT_EXERCISED = "NOT_EXERCISED"  # its trigger never matched
    UNOBSERVABLE = "UNOBSERVABLE"  # no such events, or not deterministic
    BLOCKED = "BLOCKED"  # an earlier failure of the same run explains it
    DISABLED = "DISABLED"  # switched off by the operator


FAILED_LOAD = "failed load"
"""Last part of the cause of a failure: a load into the block had failed."""
AGAIN = "reported before"
"""Last part of the cause of a report of failed blocks: an earlier report had named them."""
MUST = ("MUST", "MUST NOT")
"""Levels of requirements whose violations count."""

Overall = Literal["conformant", "partial", "nonconformant", "error"]
"""The overall verdict on a connector."""


STRICT = ConfigDict(extra="forbid", defer_build=True)
"""No field may be unknown. Validators are built on first use, because most commands need none."""


@dataclass(slots=True)
class Row:
    """The verdict of one requirement on one run of a case."""

    __pydantic_config__ = STRICT

    requirement: str
    case: str
    engine: str
    scheduling: str
    runner: str
    depth: int
    block_size: int
    verdict: Verdict
    slow: Annotated[
        Slow | None, Field(description="which streams are slow, on a device that has streams")
    ] = None
    kind: Annotated[
        Literal["requirement", "guarantee"], Field(description="a guarantee's FAIL is the engine's")
    ] = "requirement"
    level: str = "MUST"
    gating: Annotated[
        bool, Field(description="whether a FAIL of this row makes the connector nonconformant")
    ] = True
    beyond: Annotated[
        tuple[str, ...],
        Field(
            description="situations of the run (spec/situations.yaml) that the contract allows and"
            " vLLM does not bring about: a FAIL is a risk"
        ),
    ] = ()
    exercised: Annotated[int, Field(description="how often the trigger matched")] = 0
    count: Annotated[int, Field(description="violations in this run")] = 0
    step: Annotated[int | None, Field(description="schedule() call of the first violation")] = None
    req: Annotated[str | None, Field(description="request of the first violation")] = None
    event: Annotated[
        int | None, Field(description="seq of the first violating event in the run's trace")
    ] = None
    message: Annotated[str | None, Field(description="what was found, in words")] = None
    check: Annotated[
        str | None, Field(description="the condition that was false, and the values that it read")
    ] = None
    cause: Annotated[
        tuple[str, ...],
        Field(description="the kind of fault: equal for failures that differ only in particulars"),
    ] = ()
    differs: Annotated[
        tuple[str, ...],
        Field(
            description="what tells the request apart from the one whose KV it got: salt, adapter,"
            " embeds, items or model"
        ),
    ] = ()
    hook: Annotated[str | None, Field(description="the hook that the failure is about")] = None
    place: Annotated[
        Place | None, Field(description="the connector's line that raised, if one did")
    ] = None
    headline: Annotated[
        str | None, Field(description="what was found, in a few words without particulars")
    ] = None
    side: Annotated[
        Literal["load", "save"] | None,
        Field(description="where wrong bytes went wrong, if block tables tell"),
    ] = None
    outdated: Annotated[
        tuple[str, int] | None,
        Field(
            description="the request, and the step of its preemption or next admission, whose block"
            " table from before explains what was found"
        ),
    ] = None
    suspected: Annotated[
        tuple[str, int] | None,
        Field(description="the same as `outdated`, where that table only may explain it"),
    ] = None
    rank: Annotated[
        int | None, Field(description="the rank whose KV was wrong, if there are several")
    ] = None
    adds_to_itself: Annotated[
        bool,
        Field(
            description="whether the answer to a lookup would be right if vLLM did not add it to"
            " its own hit"
        ),
    ] = False
    absent: Annotated[
        tuple[str, ...],
        Field(description="situations that had not come up before the failure"),
    ] = ()
    evidence: Annotated[
        str | None, Field(description="`file: symbol` of vLLM that the requirement rests on")
    ] = None
    bugs: Annotated[
        tuple[str, ...],
        Field(
            description="the known bugs of vLLM (spec/history.yaml) that break this guarantee, and"
            " whose mark, if they have one, came before"
        ),
    ] = ()
    blocked_by: Annotated[
        str | None, Field(description="the requirement (or engine.crash) that explains it")
    ] = None
    type: Literal["row"] = "row"

    @property
    def accuses(self) -> bool:
        """Whether the connector fails a requirement that counts."""
        return self.verdict is Verdict.FAIL and self.gating and self.kind == "requirement"

    @property
    def run(self) -> str:
        """Id of the run that the row is about."""
        return variant_id(
            self.case,
            self.engine,
            self.scheduling,
            self.runner,
            self.depth,
            self.block_size,
            self.slow,
        )

    @property
    def risk(self) -> bool:
        """Whether a FAIL of this row is a risk: no vLLM brings its situation about."""
        return (
            self.kind == "requirement"
            and not self.gating
            and self.level in MUST
            and bool(self.beyond)
        )

    @property
    def finding(self) -> str:
        """The message, and the check in brackets, if there is one."""
        return f"{self.message or ''} [{self.check}]" if self.check else self.message or ""

    def to_dict(self) -> dict[str, Any]:
        """Return the row as JSON data. Defaults are left out, `type` included."""
        found: dict[str, Any] = ROW.dump_python(self, mode="json", exclude_defaults=True)
        return found

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Row:
        """Return a row from what `to_dict` returned. Raises ValidationError for other data."""
        return ROW.validate_python(data)


ROW = TypeAdapter(Row)

LINE = {"variant", "unmet", "timelines", "story", "harness_error"}
"""The fields of a CaseReport that are written to report.jsonl; its rows have their own lines."""


@dataclass
class CaseReport:
    """The result of one run of a case.

    The run fills in `rows` to `doubts`, and `trace` and `excerpts`, which do not leave its process.
    The worker makes `timelines`, `story` and `printed` from these. `abort` is set if the whole
    session cannot continue: an exit code and a sentence. `refused` is the sentence of a worker that
    runs no case, because vLLM does not construct the class. `foreign`: `abort` is about KV of other
    runs, so no run of the session can be judged.
    """

    __pydantic_config__ = STRICT

    variant: str
    unmet: Annotated[list[str], Field(description="stimuli that did not happen")] = field(
        default_factory=list
    )
    timelines: Annotated[
        dict[str, list[str]], Field(description="requirement -> lines around its first violation")
    ] = field(default_factory=dict)
    story: Annotated[
        str | None,
        Field(
            description="the whole run, packed for the timeline of report.html, if something failed"
        ),
    ] = None
    works_aside: Annotated[
        bool, Field(description="whether the connector had threads or processes of its own")
    ] = False
    harness_error: str | None = None
    rows: SkipJsonSchema[list[Row]] = field(default_factory=list)
    capabilities: SkipJsonSchema[dict[str, Any]] = field(default_factory=dict)
    sources: SkipJsonSchema[dict[str, str]] = field(default_factory=dict)
    doubts: SkipJsonSchema[dict[str, str]] = field(default_factory=dict)
    places: SkipJsonSchema[dict[str, str]] = field(default_factory=dict)
    printed: SkipJsonSchema[list[str]] = field(default_factory=list)
    abort: SkipJsonSchema[tuple[int, str] | None] = None
    refused: SkipJsonSchema[str | None] = None
    foreign: SkipJsonSchema[bool] = False
    trace: Annotated[SkipJsonSchema[list[Event]], Field(exclude=True)] = field(default_factory=list)
    excerpts: Annotated[SkipJsonSchema[dict[str, list[Event]]], Field(exclude=True)] = field(
        default_factory=dict
    )
    type: Literal["case"] = "case"

    @property
    def says_something(self) -> bool:
        """Whether the run needs a line in report.jsonl, besides those of its rows."""
        return bool(self.unmet or self.timelines or self.harness_error)

    def to_dict(
        self, only: set[str] | None = None, exclude: set[str] | None = None
    ) -> dict[str, Any]:
        """Return the report (or only some of its fields) as JSON data, without defaults."""
        found: dict[str, Any] = CASE.dump_python(
            self, mode="json", exclude_defaults=True, include=only, exclude=exclude
        )
        return found

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> CaseReport:
        """Return a report from what `to_dict` returned. Raises ValidationError for other data."""
        return CASE.validate_python(data)


CASE = TypeAdapter(CaseReport)
