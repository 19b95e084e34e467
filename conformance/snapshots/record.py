# SPDX-License-Identifier: Apache-2.0
"""The seed of vLLM's block hashes, which depends on the environment of the process.

Runs a case with a connector and notes what snapshots are made of: its hooks with their answers, and the KV that can be read back.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash

from kvconform.compat.vllm_api import hook_classes
from kvconform.contract.case import Case, Variant
from kvconform.errors import EnvironmentProblem
from kvconform.observe.call import Call
from kvconform.run.calibration import in_its_role, target_profile
from kvconform.run.runner import run_variant
from kvconform.snapshots.canonical import EncodeError, lines
from kvconform.snapshots.normalise import Rule, Rules
from kvconform.snapshots.readback import Stored, read_back


@contextlib.contextmanager
def fixed_block_hashes() -> Iterator[None]:
    """While entered, block hashes are those of PYTHONHASHSEED=0, which vLLM seeds them with; releases before 0.31 take a random seed."""
    before = os.environ.get("PYTHONHASHSEED")
    os.environ["PYTHONHASHSEED"] = "0"
    init_none_hash(sha256)
    try:
        yield
    finally:
        os.environ.pop("PYTHONHASHSEED")
        if before is not None:
            os.environ["PYTHONHASHSEED"] = before
        init_none_hash(sha256)


if TYPE_CHECKING:
    from kvconform.config.target import Target
    from kvconform.engine.engine import Engine
    from kvconform.run.driver import Driver

SIMPLE = (bool, int, float, str, type(None))


@dataclass
class HookCall:
    """One outermost call of a hook. `of`: the request that it is about. `arguments`: `name: text` of numbers, texts and block tables.
    `answer`: lines of text.

    `completed`: of a hook that says which transfers are over, by direction, request ids.
    """

    step: int
    half: str
    hook: str
    of: str = ""
    arguments: list[str] = field(default_factory=list)
    answer: list[str] = field(default_factory=list)
    completed: dict[str, list[str]] = field(default_factory=dict)


@dataclass
class Recording:
    """One run of a case. `unread`: why nothing was read back, if so. `ended`: how it ended, where it did not end well."""

    cell: str
    calls: list[HookCall]
    stored: list[Stored]
    unread: str | None = None
    ended: str | None = None


def suits(case: Case) -> bool:
    """Whether snapshots of a case are possible: one engine with one rank and one KV cache group, in one process, without siblings."""
    config = case.config
    alone = (
        not config.engines
        and not config.multi
        and config.tensor_parallel == config.pipeline_parallel == 1
        and len(config.groups) < 2
    )
    return alone and not any(step.op == "restart" and step.arg == "process" for step in case.steps)


def cells(case: Case, engine: str) -> list[Variant]:
    """The runs whose snapshots are kept: one per scheduling, the first of the other axes."""
    found: dict[str, Variant] = {}
    for variant in case.variants([engine]):
        found.setdefault(variant.scheduling, variant)
    return list(found.values())


def cell_name(variant: Variant) -> str:
    """What a run is called within the snapshot of its case: `reference-sync-v1-d1-b4`."""
    return variant.id.partition("[")[2].rstrip("]")


def record(
    variant: Variant, target: Target, rules: list[Rule], *, seed: int, tmp: Path
) -> Recording | None:
    """One run, from a fresh store; None if the connector cannot do what the case needs. Writes below `tmp`.

    EncodeError for what has no canonical form, EnvironmentProblem if the harness failed.
    """
    target = in_its_role(target)
    profile = target_profile(target, tmp.parent)
    if variant.case.unmet(profile.caps) is not None:
        return None
    recorder = Recorder(Rules(rules, str(tmp)), profile.caps)
    with fixed_block_hashes():
        run = run_variant(
            variant,
            target,
            seed=seed,
            tmp=tmp,
            caps=profile.caps,
            promises=profile.promises,
            watcher=recorder,
        )
    if recorder.error is not None:
        raise recorder.error
    if run.harness_error is not None:
        raise EnvironmentProblem(
            f"{variant.id}: the harness failed: {run.harness_error.strip().splitlines()[-1]}"
        )
    ended = next(
        (
            e
            for e in run.trace
            if e["kind"] in ("engine.crash", "engine.stall") and e["seq"] < recorder.cut
        ),
        None,
    )
    how = (
        None
        if ended is None
        else f"{ended['kind']}: {ended.get('error') or ', '.join(ended.get('waiting_on', []))}"
    )
    calls = [
        recorder.call_of(e)
        for e in run.trace
        if e["kind"] == "hook.called" and e["depth"] == 0 and e["seq"] < recorder.cut
    ]
    return Recording(cell_name(variant), calls, recorder.stored, recorder.unread, how)


class Recorder:
    """A Watcher (kvconform.run.driver). Answers are taken down as they are given: later the connector may change what it handed over."""

    def __init__(self, rules: Rules, caps: dict[str, Any]) -> None:
        self.rules, self.caps = rules, caps
        self.cut: float = float("inf")
        self.stored: list[Stored] = []
        self.unread: str | None = "the case ends without a connector that could be asked"
        self.error: EncodeError | None = None
        self._calls: dict[int, tuple[str, list[str], list[str], dict[str, list[str]]]] = {}

    def started(self, engine: Engine) -> None:
        """Listen to an engine's probe."""
        engine.probe.after_any.append(self._returned)

    def finished(self, driver: Driver) -> None:
        """The case is over: read back what its requests left in the store."""
        self.cut = len(driver.trace.events)
        if "kv_both" not in self.caps["roles"]:
            self.unread = "the connector saves or loads, it does not do both"
            return
        self.unread = None
        self.stored = read_back(driver)

    def call_of(self, event: dict[str, Any]) -> HookCall:
        """The call that a hook.called event is about."""
        return HookCall(
            event["step"],
            event["half"],
            event["hook"],
            *self._calls.get(event["seq"], ("", [], [], {})),
        )

    def _returned(self, call: Call) -> None:
        if self.cut != float("inf") or call.event is None or self.error is not None:
            return
        answer: list[str] = []
        try:
            if call.error is not None:
                answer = [
                    f"raised: {type(call.error).__name__} {self.rules.string(str(call.error))}"
                ]
            elif call.result is not None:
                answer = lines("answer", call.result, self.rules)
        except EncodeError as error:
            self.error = EncodeError(
                f"what {call.hook} returned in step {call.event['step']} cannot be shown: {error.message}"
            )
        named = list(zip(_parameters(call.hook), call.args, strict=False)) + list(
            call.kwargs.items()
        )
        of = next(
            (f"request {value.request_id}" for _, value in named if hasattr(value, "request_id")),
            "",
        )
        arguments = [
            f"{name}: {text}"
            for name, value in named
            if (text := self._argument(value)) is not None
        ]
        self._calls[call.event["seq"]] = of, arguments, answer, _completed(call)

    def _argument(self, value: Any) -> str | None:
        """Text of an argument that means something by itself; None for engine objects."""
        if isinstance(value, SIMPLE):
            return lines("", value, self.rules)[0].removeprefix(": ")
        if hasattr(value, "get_block_ids"):
            return " ".join(str(list(table)) for table in value.get_block_ids())
        if isinstance(value, (list, tuple, set, frozenset)) and all(
            isinstance(item, SIMPLE) for item in value
        ):
            return " ".join(line.strip() for line in lines("", value, self.rules)).removeprefix(
                ": "
            )
        return None


@functools.cache
def _parameters(hook: str) -> list[str]:
    """Names of a hook's arguments, as the base class has them."""
    owner = next((cls for cls in hook_classes() if hasattr(cls, hook)), None)
    return list(inspect.signature(getattr(owner, hook)).parameters)[1:] if owner is not None else []


def _completed(call: Call) -> dict[str, list[str]]:
    """Which transfers are over, of what get_finished (a pair of sets) or get_transfer_results answered; empty for other hooks."""
    result = (
        call.result
        if call.hook in ("get_finished", "get_transfer_results") and call.legal
        else None
    )
    if result is None:
        return {}
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
