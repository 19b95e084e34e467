# SPDX-License-Identifier: Apache-2.0
"""Runs a case with a connector and records the calls of its hooks and the KV that it stored."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from kvconform.compat.vllm_api import hook_classes, init_none_hash, sha256
from kvconform.config.settings import HASH_SEED
from kvconform.contract.case import Case, Variant
from kvconform.contract.steps import forks
from kvconform.errors import EnvironmentProblem
from kvconform.judge.foreign import ForeignKV, foreign, sentence
from kvconform.observe.call import Call
from kvconform.run.calibration import in_its_role, target_profile
from kvconform.run.runner import run_variant
from kvconform.run.runs import caps_of, unsupported
from kvconform.snapshots.canonical import EncodeError, encode
from kvconform.snapshots.normalise import Rule, Rules
from kvconform.snapshots.readback import Stored, read_back
from kvconform.snapshots.value import Value

if TYPE_CHECKING:
    from kvconform.config.target import Target
    from kvconform.engine.engine import Engine
    from kvconform.run.driver import Driver

SIMPLE = (bool, int, float, str, type(None))
COMPLETIONS = ("get_finished", "get_transfer_results")
"""Hooks that report finished transfers. The vLLM release decides which of them is called."""


@contextlib.contextmanager
def fixed_block_hashes() -> Iterator[None]:
    """Seed vLLM's block hashes as PYTHONHASHSEED=0 does; before 0.31, vLLM seeds them at random."""
    try:
        with patch.dict(os.environ, {HASH_SEED: "0"}):
            init_none_hash(sha256)
            yield
    finally:
        init_none_hash(sha256)


@dataclass
class HookCall:
    """An outermost call of a hook.

    `of`: id of the request that it is about, or "".
    `given`: arguments that mean something by themselves: numbers, texts and block tables.
    `returned`: None if nothing was. `raised`: type and message of an exception.
    `completed`: of a hook in COMPLETIONS, request ids by direction; None for other hooks.
    """

    step: int
    hook: str
    of: str = ""
    given: dict[str, Value] = field(default_factory=dict)
    returned: Value = None
    raised: str | None = None
    completed: dict[str, list[str]] | None = None


@dataclass
class Recording:
    """One run of a case. `unread`: why nothing was read back. `ended`: crash or stall, if any."""

    cell: str
    calls: list[HookCall]
    stored: list[Stored]
    unread: str | None = None
    ended: str | None = None


def suits(case: Case) -> bool:
    """Return whether a case can have snapshots.

    It needs one engine, one rank, one KV cache group, one process, and no sibling connectors.
    """
    config = case.config
    alone = (
        not config.engines
        and not config.multi
        and config.tensor_parallel == config.pipeline_parallel == 1
        and len(config.groups) < 2
    )
    return alone and not any(forks(step) for step in case.steps)


def cells(case: Case, engine: str) -> list[Variant]:
    """Return the runs to record: one per scheduling, with the first value of every other axis."""
    found: dict[str, Variant] = {}
    for variant in case.variants([engine]):
        found.setdefault(variant.scheduling, variant)
    return list(found.values())


def cell_name(variant: Variant) -> str:
    """Return the name of a run within the snapshot of its case: `reference-sync-v1-d1-b4`."""
    return variant.id.partition("[")[2].rstrip("]")


def record(
    variant: Variant, target: Target, rules: list[Rule], *, seed: int, tmp: Path
) -> Recording | None:
    """Record one run, from an empty store; None if the case needs a capability that is missing.

    Writes below `tmp`. EncodeError for a value without a canonical form, EnvironmentProblem if the
    harness failed, ForeignKV if the store holds KV of another run.
    """
    target = in_its_role(target)
    profile = target_profile(target, tmp.parent)
    caps = caps_of(variant, target, profile)
    if unsupported(variant, target, caps) is not None:
        return None
    recorder = Recorder(Rules(rules, str(tmp)), caps)
    with fixed_block_hashes():
        run = run_variant(
            variant,
            target,
            seed=seed,
            tmp=tmp,
            caps=caps,
            promises=profile.promises,
            watcher=recorder,
        )
    stored_before = foreign(run.trace)
    if stored_before is not None:
        raise ForeignKV(sentence(stored_before, target.extra_config))
    if recorder.error is not None:
        raise recorder.error
    if run.harness_error is not None:
        last = run.harness_error.strip().splitlines()[-1]
        raise EnvironmentProblem(f"{variant.id}: the harness failed: {last}")
    events = [event for event in run.trace if event["seq"] < recorder.cut]
    ends = [
        f"{e['kind']}: {e.get('error') or ', '.join(e.get('waiting_on', []))}".rstrip()
        for e in events
        if e["kind"] in ("engine.crash", "engine.stall")
    ]
    calls = [recorder.call_of(e) for e in events if e["kind"] == "hook.called" and e["depth"] == 0]
    return Recording(
        cell_name(variant), calls, recorder.stored, recorder.unread, ends[0] if ends else None
    )


class Recorder:
    """Watcher of a run (kvconform.run.driver).

    It encodes values at once, because a connector may change an object that it returned.
    """

    def __init__(self, rules: Rules, caps: dict[str, Any]) -> None:
        self.rules, self.caps = rules, caps
        self.cut: float = float("inf")
        """Number of the first event that is no longer the case's."""
        self.stored: list[Stored] = []
        self.unread: str | None = "the case ends without a connector that could be asked"
        self.error: EncodeError | None = None
        self._calls: dict[int, HookCall] = {}

    def started(self, engine: Engine) -> None:
        """Listen to an engine's probe."""
        engine.probe.after_any.append(self._returned)

    def finished(self, driver: Driver) -> None:
        """Read back what the requests of the case left in the store."""
        self.cut = len(driver.trace.events)
        if "kv_both" not in self.caps["roles"]:
            self.unread = "the connector saves or loads, it does not do both"
            return
        self.unread = None
        self.stored = read_back(driver)

    def call_of(self, event: dict[str, Any]) -> HookCall:
        """Return the call that a hook.called event is about."""
        known = self._calls.get(event["seq"])
        return HookCall(event["step"], event["hook"]) if known is None else known

    def _returned(self, call: Call) -> None:
        if self.cut != float("inf") or call.event is None or self.error is not None:
            return
        found = HookCall(call.event["step"], call.hook, completed=_completed(call))
        self._calls[call.event["seq"]] = found
        try:
            if call.error is not None:
                message = self.rules.string(str(call.error))
                found.raised = f"{type(call.error).__name__} {message}"
            else:
                found.returned = encode(call.result, self.rules, "answer")
        except EncodeError as error:
            self.error = EncodeError(
                f"what {call.hook} returned in step {found.step} cannot be shown: {error.message}"
            )
        named = [*zip(_parameters(call.hook), call.args, strict=False), *call.kwargs.items()]
        requests = [value.request_id for _, value in named if hasattr(value, "request_id")]
        found.of = requests[0] if requests else ""
        for name, value in named:
            if hasattr(value, "get_block_ids"):
                tables = [list(table) for table in value.get_block_ids()]
                found.given[name] = encode(tables[0] if len(tables) == 1 else tables, self.rules)
            elif _is_simple(value):
                found.given[name] = encode(value, self.rules)


def _is_simple(value: object) -> bool:
    """Return whether an argument is shown: engine objects are not."""
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(isinstance(item, SIMPLE) for item in value)
    return isinstance(value, SIMPLE)


@functools.cache
def _parameters(hook: str) -> list[str]:
    """Return the names of a hook's arguments, as in the base class."""
    owner = next((cls for cls in hook_classes() if hasattr(cls, hook)), None)
    return list(inspect.signature(getattr(owner, hook)).parameters)[1:] if owner is not None else []


def _completed(call: Call) -> dict[str, list[str]] | None:
    """Return the finished transfers that a hook reports, by direction; None for other hooks."""
    if call.hook not in COMPLETIONS:
        return None
    if not call.legal or call.result is None:
        return {}
    result = call.result
    found: dict[str, Any]
    if isinstance(result, tuple) and not hasattr(result, "finished_sending"):
        found = dict(zip(("sending", "recving"), result, strict=False))
    else:
        names = {
            "sending": "finished_sending",
            "recving": "finished_recving",
            "recving, failed": "failed_recving",
        }
        found = {name: getattr(result, field, None) for name, field in names.items()}
    return {name: sorted(map(str, ids or ())) for name, ids in found.items()}
