# SPDX-License-Identifier: Apache-2.0
"""The machine-readable report: the lines of report.jsonl (a header, one line per row, one per case that has something to say, a footer)
and summary.json. Keys whose value is None or empty are left out of a line.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from kvconform.contract.case import Device, Slow

VerdictName = Literal[
    "PASS",
    "FAIL",
    "ERROR",
    "XFAIL",
    "XPASS",
    "UNSUPPORTED",
    "NOT_EXERCISED",
    "UNOBSERVABLE",
    "BLOCKED",
    "DISABLED",
]
Overall = Literal["conformant", "partial", "nonconformant", "error"]
Counts = dict[VerdictName, int]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class HeaderLine(_Part):
    """What was judged, with what."""

    type: Literal["header"] = "header"
    suite: str = Field(description="version of kvconform")
    vllm: str | None
    connector: str | None = Field(
        description="package.module:Class, a registered name, or null for no connector"
    )
    engines: list[str]
    scheduling: list[str]
    device: Device = Field(
        default="cpu", description="where the KV cache is; emulated: CUDA, on the CPU"
    )
    adapters: list[str] = Field(
        default=[], description="stand-ins that were in force (docs/adapters.md)"
    )
    seed: int
    profile: str
    capabilities: dict[str, Any] = Field(default={}, description="empty until the first run")
    capability_sources: dict[str, str] = Field(
        default={}, description="declared, inferred or default, per capability"
    )
    cases: int | None = None
    requirements: int | None = None
    warnings: list[str] = []
    extra: dict[str, Any] = {}


class RowLine(_Part):
    """The verdict of one requirement on one run of a case."""

    type: Literal["row"] = "row"
    requirement: str
    case: str
    engine: str
    scheduling: str
    runner: str
    depth: int
    block_size: int
    verdict: VerdictName
    slow: Slow | None = Field(
        default=None, description="which streams are slow, on a device that has streams"
    )
    kind: Literal["requirement", "guarantee"] = Field(
        default="requirement", description="a guarantee's FAIL is the engine's"
    )
    level: str = "MUST"
    gating: bool = Field(
        default=True, description="whether a FAIL of this row makes the connector nonconformant"
    )
    exercised: int = Field(default=0, description="how often the trigger matched")
    count: int = Field(default=0, description="violations in this run")
    step: int | None = Field(default=None, description="schedule() call of the first violation")
    req: str | None = None
    event: int | None = Field(
        default=None, description="seq of the first violating event in the run's trace"
    )
    message: str | None = None
    evidence: str | None = Field(
        default=None, description="`file: symbol` of vLLM that the requirement rests on"
    )
    blocked_by: str | None = Field(
        default=None, description="the requirement (or engine.crash) that explains it"
    )


class CaseLine(_Part):
    """What else is known about one run: stimuli that did not happen, an excerpt of the trace per failure, an error of the harness."""

    type: Literal["case"] = "case"
    variant: str
    provoked: list[str] = Field(default=[], description="stimuli that did not happen")
    timeline: dict[str, list[str]] = Field(
        default={}, description="requirement -> lines around its first violation"
    )
    story: str | None = Field(
        default=None,
        description="the whole run, packed for the timeline of report.html, if something failed",
    )
    harness_error: str | None = None
    seconds: float | None = None


class FooterLine(_Part):
    """The end of a complete report."""

    type: Literal["footer"] = "footer"
    counts: Counts
    verdict: Overall
    seconds: float | None = None


ReportLine = Annotated[HeaderLine | RowLine | CaseLine | FooterLine, Field(discriminator="type")]


class RequirementCounts(_Part):
    total: int
    exercised: int
    failed: list[str]


class CaseCounts(_Part):
    total: int


class Summary(_Part):
    """summary.json: the answer in one object."""

    suite: str
    vllm: str | None
    connector: str | None
    engine: str
    scheduling: str
    verdict: Overall
    counts: Counts
    requirements: RequirementCounts
    cases: CaseCounts
    seconds: float
    extra: dict[str, Any] = {}
