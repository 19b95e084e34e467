# SPDX-License-Identifier: Apache-2.0
"""Rows for a run whose worker process died.

The process leaves a note (kvconform.process.watchdog). A trace with the facts of the note is
constructed, and judged like any other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvconform.config.selection import Selection
from kvconform.contract.capabilities import complete
from kvconform.contract.case import Variant
from kvconform.contract.events import crash, never_returned, run_cut_short, run_start
from kvconform.contract.loader import Spec
from kvconform.judge.narrate import narrate
from kvconform.judge.records import Row, Verdict
from kvconform.judge.verdict import judge, new_row
from kvconform.process.watchdog import Note

HANG = "hook.terminates"
"""The requirement that a hang breaks."""
EXIT = "hook.keeps-process"
"""The requirement that an exit of the process breaks."""


@dataclass
class DeadRun:
    """A run whose process died, for `judge` (kvconform.judge.verdict.RunLike)."""

    variant: Variant
    trace: list[dict[str, Any]]
    channels: frozenset[str] = frozenset({"hooks", "sched", "kv"})
    harness_error: str | None = None
    caps: dict[str, Any] = field(default_factory=dict)


def sentence(note: Note | None) -> str:
    """Return a sentence for people about what happened."""
    if note is None:
        return "the worker process died, and it is unknown where"
    if note.hung and note.hook:
        limit = f" within {note.limit:g} s" if note.limit else ""
        return f"{note.hook} did not return{limit} and could not be interrupted"
    if note.hung:
        return "the case did not end; it hung outside of any hook"
    where = f"in {note.hook}" if note.hook else "outside of any hook"
    return f"the process ended {where} (os._exit, or a fatal signal)"


def rows_of(
    note: Note | None,
    variant: Variant,
    spec: Spec,
    selection: Selection,
    caps: Mapping[str, Any],
    strict: bool,
) -> list[Row]:
    """Return a row per judged requirement; that of the requirement that the death breaks is FAIL.

    `caps`: the connector's capabilities, if an earlier case reported them.
    """
    hung = note is not None and note.hung
    hook = note.hook if note is not None else None
    step = note.step if note is not None else 0
    requirements = [spec.requirements[name] for name in selection.judged]
    known = complete({}) | dict(caps)
    run = DeadRun(variant, _trace(variant, hung, hook, step, sentence(note)))
    rows = judge(
        requirements, {"connector": run}, known, strict=strict, disabled=set(selection.disabled)
    )
    narrate(rows, run.trace, spec.requirements)
    culprit = HANG if hung else EXIT
    own = next((row for row in rows if row.requirement == culprit), None)
    if own is None and culprit in spec.requirements:
        own = new_row(spec.requirements[culprit], variant, strict=strict)
    elif own is None:
        own = Row(
            culprit,
            variant.case.id,
            verdict=Verdict.FAIL,
            level="MUST NOT",
            beyond=variant.beyond,
            gating=strict or not variant.beyond,
            **variant.axes,
        )  # type: ignore[arg-type]
    if own not in rows:
        rows.append(own)
    if own.verdict is not Verdict.DISABLED:
        own.verdict = Verdict.FAIL
        own.message = sentence(note)
        own.check = None
        own.cause = (culprit, hook) if hook else (culprit,)
        own.hook = hook
        own.count = 1
        own.exercised = 1
        own.step = step or None
    return rows


def _trace(
    variant: Variant, hung: bool, hook: str | None, step: int, text: str
) -> list[dict[str, Any]]:
    """Return a constructed trace: the run starts, the hook is called, and the process dies."""
    settings = variant.case.config
    start = run_start(
        seed=0,
        case=variant.case.id,
        vllm="0",
        num_blocks=settings.num_blocks,
        connector="",
        policies=variant.case.policies,
        spec_tokens=settings.spec_tokens,
        role=settings.role,
        **variant.axes,
    )
    events: list[dict[str, Any]] = [{"kind": "run.start", **start}]
    if hook is not None and hung:
        called = {"hook": hook, "half": "worker", "rank": 0, "depth": 0, "seq": 1}
        events.append({"kind": "hook.called", **called, "bound": None, "thread": "main"})
        events.append({"kind": "hook.returned", **never_returned(called, text)})
    where = "hook" if hung else "process"
    events.append({"kind": "engine.crash", **crash(where, text, hook)})
    events.append({"kind": "run.end", **run_cut_short()})
    return [{**event, "seq": seq, "step": step} for seq, event in enumerate(events)]
