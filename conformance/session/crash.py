# SPDX-License-Identifier: Apache-2.0
"""Rows for a case whose worker process died: from the note that the process left, a trace is made up of what is known, and judged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvconform.config.selection import Selection
from kvconform.contract.capabilities import complete
from kvconform.contract.case import Variant
from kvconform.contract.events import run_cut_short, run_start
from kvconform.contract.loader import Spec
from kvconform.judge.verdict import Row, Verdict, judge, new_row
from kvconform.process.watchdog import Note

HANG, EXIT = "hook.terminates", "hook.keeps-process"
"""The requirements that a hang and an exit of the process break."""


@dataclass
class DeadRun:
    """What judge() wants to know about a run (verdict.RunLike)."""

    variant: Variant
    trace: list[dict[str, Any]]
    channels: frozenset[str] = frozenset({"hooks", "sched", "kv"})
    harness_error: str | None = None
    caps: dict[str, Any] = field(default_factory=dict)


def sentence(note: Note | None) -> str:
    """What happened, for a person."""
    if note is None:
        return "the worker process died, and nothing is known about where"
    where = f"in {note.hook}" if note.hook else "outside of any hook"
    if note.hung:
        limit = f" within {note.limit:g} s" if note.limit else ""
        return (
            f"{note.hook} did not return{limit} and could not be interrupted"
            if note.hook
            else f"the case did not end, it hung {where}"
        )
    return f"the process ended {where} (os._exit, or a fatal signal)"


def rows_of(
    note: Note | None,
    variant: Variant,
    spec: Spec,
    selection: Selection,
    caps: Mapping[str, Any],
    strict: bool,
) -> list[Row]:
    """One row per judged requirement; the one that the death breaks is FAIL. `caps`: the connector's, if another case told them."""
    hung, hook = note is not None and note.hung, note.hook if note is not None else None
    step = note.step if note is not None else 0
    requirements = [spec.requirements[name] for name in selection.judged]
    known = complete({}) | dict(caps)
    run = DeadRun(variant, _trace(variant, hung, hook, step, sentence(note)))
    rows = judge(
        requirements, {"connector": run}, known, strict=strict, disabled=set(selection.disabled)
    )
    culprit = HANG if hung else EXIT
    own = next((row for row in rows if row.requirement == culprit), None)
    if own is None and culprit in spec.requirements:
        own = new_row(spec.requirements[culprit], variant, strict=strict)
    elif own is None:
        own = Row(culprit, variant.case.id, verdict=Verdict.FAIL, level="MUST NOT", **variant.axes)  # type: ignore[arg-type]
    if own not in rows:
        rows.append(own)
    if own.verdict is not Verdict.DISABLED:
        own.verdict, own.message, own.count, own.exercised, own.step = (
            Verdict.FAIL,
            sentence(note),
            1,
            1,
            step or None,
        )
    return rows


def _trace(
    variant: Variant, hung: bool, hook: str | None, step: int, text: str
) -> list[dict[str, Any]]:
    """The made-up trace: the run began, the hook was called, and that was it."""
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
        called = {"hook": hook, "half": "worker", "rank": 0, "depth": 0}
        events.append({"kind": "hook.called", **called, "bound": None, "thread": "main"})
        returned = {
            "kind": "hook.returned",
            **called,
            "error": "HookTimeout",
            "error_text": text,
            "value": None,
            "value_ok": True,
            "mutated_args": False,
            "params_msgpack_ok": True,
            "params_aliased": False,
            "called_seq": 1,
            "layer": None,
            "timed_out": True,
        }
        events.append(returned)
    where = "hook" if hung else "process"
    events.append({"kind": "engine.crash", "where": where, "error": text, "hook": hook})
    events.append({"kind": "run.end", **run_cut_short()})
    return [{**event, "seq": seq, "step": step} for seq, event in enumerate(events)]
