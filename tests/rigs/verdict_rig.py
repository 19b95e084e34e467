# SPDX-License-Identifier: Apache-2.0
"""Runs of a few events, and their verdicts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvconform.contract.capabilities import complete
from kvconform.contract.requirement import Requirement
from kvconform.judge.records import Row
from kvconform.judge.verdict import judge

AXES: dict[str, Any] = {
    "engine": "reference",
    "scheduling": "sync",
    "runner": "v1",
    "depth": 1,
    "block_size": 4,
}


@dataclass
class FakeCase:
    id: str = "lifecycle.one"


@dataclass
class FakeVariant:
    case: FakeCase = field(default_factory=FakeCase)
    axes: dict[str, Any] = field(default_factory=lambda: dict(AXES))
    beyond: tuple[str, ...] = ()


@dataclass
class FakeRun:
    trace: list[dict[str, Any]]
    channels: frozenset[str] = frozenset({"hooks", "sched", "kv"})
    harness_error: str | None = None
    variant: FakeVariant = field(default_factory=FakeVariant)


def requirement(name: str, **fields: Any) -> Requirement:
    check = (
        {}
        if {"relate", "never", "count", "respond", "precede"} & fields.keys()
        else {"always": "e.type_ok"}
    )
    event = {} if "relate" in fields else {"event": "lookup"}
    source = {"file": "v1/x.py", "symbol": "X.y"}
    return Requirement.model_validate(
        {"id": name, "text": "It MUST be.", "source": source, **event, **check, **fields}
    )


def trace(*events: dict[str, Any]) -> list[dict[str, Any]]:
    start = {"kind": "run.start", "depth": 2}
    return [{"seq": seq, "step": seq // 2, **event} for seq, event in enumerate([start, *events])]


def lookup(ok: bool = True, **more: Any) -> dict[str, Any]:
    return {"kind": "lookup", "type_ok": ok, "tokens": 1, "local": 0, "req": "a", **more}


END = {"kind": "run.end", "crashed": False, "free_blocks": 1, "free_blocks_at_start": 1}


def verdicts(
    reqs: list[Requirement],
    *events: dict[str, Any],
    caps: dict[str, Any] | None = None,
    **options: Any,
) -> dict[str, Row]:
    run = FakeRun(trace(*events), **options.pop("run", {}))
    rows = judge(
        reqs, {"connector": run, **options.pop("runs", {})}, complete(caps or {}), **options
    )
    assert [row.requirement for row in rows] == [req.id for req in reqs]
    return {row.requirement: row for row in rows}
