# SPDX-License-Identifier: Apache-2.0
"""statement.json, what a connector was found to be, for others to rely on; and badge.json, the same for a README (shields.io endpoint)."""

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
from kvconform.judge.verdict import Verdict
from kvconform.report.collector import Collector
from kvconform.report.models import Overall, VerdictName

NAME, BADGE = "statement.json", "badge.json"
COLOURS = {
    "conformant": "brightgreen",
    "partial": "yellow",
    "nonconformant": "red",
    "error": "lightgrey",
}
PROFILE = "core"
"""The profile that a badge is about: a good answer about another says nothing about a connector."""
ENOUGH = 0.5
"""The share of the requirements that count which has to hold for the best colour."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Capability(_Part):
    """What the connector can do: declared by it, inferred from it, or assumed."""

    value: Any
    source: str


class Statement(_Part):
    """The conformance statement."""

    format: Literal[1] = 1
    suite: str = Field(description="version of kvconform")
    specification: str = Field(
        description="digest of the specification and the code that judges; equal digests judge alike"
    )
    vllm: str
    connector: str
    engines: list[str]
    scheduling: list[str]
    device: str
    adapters: list[str] = Field(description="stand-ins that were in force (docs/adapters.md)")
    profile: str
    seed: int
    judged: date
    complete: bool = Field(
        description="whether all cases and requirements of the profile were asked for; a statement about less is none"
    )
    verdict: Overall
    passed: int = Field(description="requirements that count, were exercised, and hold")
    core: int = Field(
        description="requirements that count; unsupported, unexercised and unobservable ones are among them"
    )
    capabilities: dict[str, Capability]
    requirements: dict[str, VerdictName] = Field(
        description="requirements that count: what each came to"
    )
    failed: list[str]


def make(collector: Collector, found: Aggregate, *, judged: date) -> Statement:
    """The statement about a finished run."""
    settings, spec = collector.settings, collector.spec
    levels = (
        ("MUST", "MUST NOT", "SHOULD", "SHOULD NOT", "MAY")
        if settings.strict
        else ("MUST", "MUST NOT")
    )
    core = {
        r.id for r in spec.requirements.values() if r.kind == "requirement" and r.level in levels
    }
    counting = {name: status for name, status in found.status.items() if name in core}
    capabilities = {
        name: Capability(value=value, source=collector.sources.get(name, "default"))
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
        complete=not collector.selection.narrowed
        and collector.selection.shard is None
        and not collector.missing(),
        verdict=found.verdict,  # type: ignore[arg-type]
        passed=sum(status is Verdict.PASS for status in counting.values()),
        core=len(counting),
        capabilities=capabilities,
        requirements={name: status.value for name, status in sorted(counting.items())},
        failed=found.failed,
    )


def badge(statement: Statement) -> dict[str, Any]:
    """For https://img.shields.io/endpoint. What was not asked for, supported or exercised does not count as passed. A good answer needs a
    complete run of profile core; the best colour, that at least half of what counts holds."""
    exercised = any(status in EXERCISED for status in statement.requirements.values())
    word, colour = called(statement.verdict, exercised).lower(), COLOURS[statement.verdict]
    if (
        exercised
        and statement.verdict in ("conformant", "partial")
        and not (statement.complete and statement.profile == PROFILE)
    ):
        word, colour = f"judged in part ({statement.profile})", "lightgrey"
    elif statement.verdict == "conformant" and statement.passed < ENOUGH * statement.core:
        word, colour = "conformant in what it supports", "yellowgreen"
    message = (
        f"{word} · {statement.passed}/{statement.core} · vLLM {statement.vllm.partition('+')[0]}"
    )
    return {"schemaVersion": 1, "label": "KV connector", "message": message, "color": colour}


def write(folder: Path, statement: Statement) -> None:
    """Write both files."""
    for name, text in (
        (NAME, statement.model_dump_json(indent=2)),
        (BADGE, json.dumps(badge(statement), ensure_ascii=False)),
    ):
        files.replace(folder / name, text + "\n")
