# SPDX-License-Identifier: Apache-2.0
"""Tests of stalls.

The trace of a stall does not depend on how many steps fit into the stall time, and it lacks nothing
that was discovered.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from core_rig import ROUND_TRIP, check_ok, run_case, select
from kvconform.config.target import Target
from kvconform.contract.loader import load_spec
from kvconform.contract.trace import Trace
from kvconform.refimpl.connector import Lookup, ReferenceConnector
from kvconform.run.records import Run
from kvconform.run.runner import run_variant
from kvconform.run.stall import STALL_STEPS, StallDetector

FAST, SLOW = 0.002, 0.03
LATE = STALL_STEPS + 8


class Clock:
    """Stands for the module `time`, on a machine on which a step takes `seconds`."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.now, self.naps = seconds, 0.0, 0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, _: float) -> None:
        self.now += self.seconds
        self.naps += 1

    def advance(self, seconds: float) -> None:
        """Do nothing: no connector here has a lease."""


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], Clock]:
    """Makes the machine one on which a step takes so long."""

    def make(seconds: float) -> Clock:
        clock = Clock(seconds)
        monkeypatch.setattr("kvconform.run.stall.time", clock)
        monkeypatch.setattr("kvconform.run.stall.clock", clock)
        return clock

    return make


class NeverAnswers(ReferenceConnector):
    """Is asked again and again."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Lookup:
        return None, False


class AnswersLate(ReferenceConnector):
    """Needs more steps for its first answer than make a stall, but not the time."""

    asked = 0

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Lookup:
        self.asked += 1
        return (
            super().get_num_new_matched_tokens(request, num_computed_tokens)
            if self.asked > LATE
            else (None, False)
        )


class WrongLate(NeverAnswers):
    """Never answers, and once its answer is not even of the right form."""

    asked = 0

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        self.asked += 1
        return (None, "perhaps") if self.asked == LATE else (None, False)


class TakesTurns(ReferenceConnector):
    """Says in every other step that the load would be asynchronous."""

    asked = 0

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Lookup:
        self.asked += 1
        return None, bool(self.asked % 2)


def never_answers(tmp: Path, name: str = "NeverAnswers", **more: Any) -> Run:
    return run_case(f"{__name__}:{name}", ROUND_TRIP[:2], tmp, **more)


def silent_pair(tmp: Path) -> Run:
    variant = load_spec().cases["transfer.altered"].variants(["reference"])[-1]
    target = Target(
        "kvconform.refimpl.defects.transfer:SilentFailure",
        {},
        capabilities={"async_load": True},
        stall_seconds=0.1,
    )
    return run_variant(variant, target, seed=0, tmp=tmp)


@pytest.mark.parametrize(
    ("run", "options"),
    [
        (never_answers, {"engine": "reference"}),
        (never_answers, {"engine": "reference", "scheduling": "async", "depth": 3}),
        (never_answers, {"engine": "vllm", "scheduling": "async"}),
        (never_answers, {"engine": "reference", "name": "TakesTurns"}),
        (silent_pair, {}),
    ],
)
def test_a_stall_gives_the_same_trace_on_a_slow_machine(
    run: Callable[..., Run],
    options: dict[str, Any],
    machine: Callable[[float], Clock],
    tmp_path: Path,
) -> None:
    traces, naps = [], []
    for seconds in (FAST, SLOW):
        clock = machine(seconds)
        traces.append(run(tmp_path, **options).trace)
        naps.append(clock.naps)
    assert naps[0] > naps[1] + 40  # steps that nothing came of
    assert json.dumps(traces[0]) == json.dumps(traces[1])
    assert [e["seq"] for e in traces[0]] == list(range(len(traces[0])))
    assert [e["kind"] for e in traces[0] if e["kind"] in ("engine.stall", "run.end")][:2] == [
        "engine.stall",
        "run.end",
    ]
    assert traces[0][-1]["kind"] in ("engine.lifecycle", "hook.returned")  # it was shut down


def test_who_takes_its_time_is_no_stall(machine: Callable[[float], Clock], tmp_path: Path) -> None:
    clock = machine(FAST)
    run = run_case(f"{__name__}:AnswersLate", ROUND_TRIP, tmp_path)
    check_ok(run)
    assert clock.naps == LATE - STALL_STEPS + 1
    assert [e["tokens"] for e in select(run.trace, "lookup")] == [None] * LATE + [0, 12]


def test_what_only_a_late_step_says_is_kept(
    machine: Callable[[float], Clock], tmp_path: Path
) -> None:
    machine(FAST)
    run = run_case(f"{__name__}:WrongLate", ROUND_TRIP[:2], tmp_path)
    assert len(select(run.trace, "engine.stall")) == 1
    lookups = select(run.trace, "lookup")
    assert [number for number, e in enumerate(lookups, 1) if not e["type_ok"]] == [LATE]


class Alone:
    """A driver of nothing but the scheduler half."""

    target = Target(None, half="scheduler")
    all_engines: Sequence[Any] = ()

    def __init__(self, trace: Trace) -> None:
        self.trace = trace

    def live_threads(self) -> int:
        return 0


@pytest.mark.parametrize(
    ("says", "kept"),
    [
        (lambda step: {"value": "None"}, STALL_STEPS),
        (
            lambda step: {
                "called_seq": 2 * step,
                "of_step": step,
                "digest": str(step),
            },
            STALL_STEPS,
        ),
        (lambda step: {"value": "none" if step % 3 else "soon"}, STALL_STEPS),
        (
            lambda step: (
                {"value": "none" if step % 3 else "soon"}
                | ({"error": "OSError"} if step == STALL_STEPS - 2 else {})
            ),
            100,
        ),
        (lambda step: {"value": "none" if step % 5 else "soon"}, 100),
        (lambda step: {"value": str(min(step, STALL_STEPS))}, STALL_STEPS),
        (lambda step: {"value": str(min(step, STALL_STEPS + 1))}, 100),
        (lambda step: {"value": str(step == 90)}, 100),
        (lambda step: {"value": str(step)}, 100),
        (lambda step: {"value": "None"} | ({"layer": "0"} if step == 100 else {}), 100),
        (lambda step: {"value": "None", "error": "OSError"}, 100),
    ],
)
def test_only_steps_that_say_nothing_new_are_forgotten(
    says: Callable[[int], dict[str, Any]], kept: int
) -> None:
    trace = Trace()
    idle = StallDetector(Alone(trace))
    for step in range(1, 101):
        trace.step += 1
        trace.emit("hook.called")
        trace.emit("hook.returned", **says(step))
        assert idle.stalled() is (step >= STALL_STEPS)
    idle.forget()
    assert (trace.step, len(trace.events)) == (kept, 2 * kept)


def test_steps_before_there_was_progress_do_not_count() -> None:
    trace = Trace()
    idle = StallDetector(Alone(trace))
    for step in range(1, 101):
        if step == 50:
            idle.over()
        trace.emit("step.scheduled", empty=True)
        assert not idle.stalled()
    idle.forget()
    assert len(trace.events) == 100
