# SPDX-License-Identifier: Apache-2.0
"""The conformance statement of a connector (statement.json), and its badge (badge.json).

The badge is for a README: the file is the data of a shields.io endpoint.
"""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from kvconform import __version__, files
from kvconform.adapters.registry import titles
from kvconform.config.selection import suite_digest
from kvconform.judge.aggregate import EXERCISED, Aggregate, called
from kvconform.judge.records import Overall, Verdict
from kvconform.report.collector import Collector
from kvconform.words import many

NAME = "statement.json"
BADGE = "badge.json"
COLOURS = {
    "conformant": "brightgreen",
    "partial": "yellow",
    "nonconformant": "red",
    "error": "lightgrey",
}
PROFILES = ("core", "full")
"""The profiles that a badge is about: success in another one says little about a connector."""
ENOUGH = 0.5
"""The share of counting requirements that must hold for the best colour."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Capability(_Part):
    """A capability of the connector: declared, inferred or assumed."""

    value: Any
    source: str
    doubt: str | None = None


class Statement(_Part):
    """The conformance statement."""

    format: Literal[1] = 1
    suite: str = Field(description="version of kvconform")
    specification: str = Field(
        description="digest of the specification and the judging code; equal digests judge alike"
    )
    vllm: str
    connector: str
    engines: list[str]
    scheduling: list[str]
    device: str
    adapters: list[str] = Field(description="stand-ins that were active (docs/adapters.md)")
    profile: str
    seed: int
    judged: date
    complete: bool = Field(
        description="whether all cases and requirements of the profile were judged;"
        " a statement about a part of them is no conformance statement"
    )
    verdict: Overall
    passed: int = Field(description="number of requirements that count, were exercised, and hold")
    core: int = Field(
        description="number of requirements that count, including unsupported, unexercised and"
        " unobservable ones"
    )
    capabilities: dict[str, Capability]
    requirements: dict[str, Verdict] = Field(description="verdict per requirement that counts")
    failed: list[str]
    risks: list[str] = Field(
        default=[],
        description="requirements that fail only in situations that the contract allows and this"
        " vLLM does not bring about",
    )


def make(collector: Collector, found: Aggregate, *, judged: date) -> Statement:
    """Return the statement about a finished run."""
    settings = collector.settings
    spec = collector.spec
    selection = collector.selection
    levels = ["MUST", "MUST NOT"]
    if settings.strict:
        levels += ["SHOULD", "SHOULD NOT", "MAY"]
    core = {
        r.id for r in spec.requirements.values() if r.kind == "requirement" and r.level in levels
    }
    counting = {name: status for name, status in found.status.items() if name in core}
    capabilities = {
        name: Capability(
            value=value,
            source=collector.sources.get(name, "default"),
            doubt=collector.doubts.get(name),
        )
        for name, value in sorted(collector.capabilities.items())
    }
    return Statement(
        suite=__version__,
        specification=suite_digest(),
        vllm=collector.vllm,
        connector=settings.catalogue or settings.connector,
        engines=settings.engines,
        scheduling=settings.schedulings,
        device=settings.target_device,
        adapters=titles(settings.adapters),
        profile=settings.profile,
        seed=settings.seed,
        judged=judged,
        complete=not selection.narrowed and selection.shard is None and not collector.missing(),
        verdict=found.verdict,
        passed=sum(status is Verdict.PASS for status in counting.values()),
        core=len(counting),
        capabilities=capabilities,
        requirements=dict(sorted(counting.items())),
        failed=found.failed,
        risks=found.risks,
    )


def badge(statement: Statement) -> dict[str, Any]:
    """Return the badge as data for https://img.shields.io/endpoint.

    A requirement that was not selected, supported or exercised does not count as passed. A badge
    that says (partly) conformant needs a complete run of one of PROFILES. The best colour needs a
    share of ENOUGH of the counting requirements to hold.
    """
    exercised = any(status in EXERCISED for status in statement.requirements.values())
    good = statement.verdict in ("conformant", "partial")
    whole = statement.complete and statement.profile in PROFILES
    word = called(statement.verdict, exercised).lower()
    colour = COLOURS[statement.verdict]
    if exercised and good and not whole:
        word = f"judged in part ({statement.profile})"
        colour = "lightgrey"
    elif statement.verdict == "conformant" and statement.passed < ENOUGH * statement.core:
        word = "conformant in what it supports"
        colour = "yellowgreen"
    vllm = statement.vllm.partition("+")[0]
    message = f"{word} · {statement.passed}/{statement.core} · vLLM {vllm}"
    if statement.risks:
        message += f" · {many(len(statement.risks), 'risk')}"
    return {"schemaVersion": 1, "label": "KV connector", "message": message, "color": colour}


def write(folder: Path, statement: Statement) -> None:
    """Write statement.json and badge.json to `folder`."""
    for name, text in (
        (NAME, statement.model_dump_json(indent=2)),
        (BADGE, json.dumps(badge(statement), ensure_ascii=False)),
    ):
        files.replace(folder / name, text + "\n")
