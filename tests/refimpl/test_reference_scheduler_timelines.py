# SPDX-License-Identifier: Apache-2.0
"""Tests that both schedulers reproduce, hook by hook, what was recorded of vLLM's.

The records are in reference_timelines.txt.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from scheduler_rig import Ask, Rig, Setup

HERE = Path(__file__).parent

EIGHT, TWELVE = (8, True), (12, True)


def ask(req: str, length: int, max_tokens: int, base: int = 0, **script: object) -> Ask:
    return Ask(req, tuple(range(base, base + length)), max_tokens, **script)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Timeline:
    setup: Setup
    asks: tuple[Ask, ...]
    # number of scheduled steps -> what is done then
    after: dict[int, Callable[[Rig], object]] = field(default_factory=dict)
    only: str = ""  # request whose hooks were recorded; "" for all
    steps: int = 100


def again(rig: Rig) -> None:
    rig.abort("r0")
    rig.add(ask("r0", 8, 2))


def abort(req: str) -> Callable[[Rig], object]:
    return lambda rig: rig.abort(req)


SYNC, ASYNC = Setup(), Setup(scheduling="async")
PAIR = (ask("r0", 12, 9), ask("r1", 12, 9, base=100))
DRAFTS = (ask("r0", 6, 14, accepted=(0, 3, 1, 0, 2, 3, 0)),)
MANY = (
    ask("r0", 9, 12, accepted=(3, 0, 1, 2, 3, 0, 1, 2, 3)),
    ask("r1", 9, 12, base=100, accepted=(0, 3, 0, 3, 1, 2, 0, 3, 1)),
)
LOAD = (ask("r0", 12, 3, answers=(EIGHT,), load_steps=3),)
BAD_LOAD = (ask("r0", 12, 3, answers=(TWELVE,), load_steps=2, failures=((1,),)),)
SYNC_LOAD = (ask("r0", 12, 3, answers=((8, False),)),)
BAD_SYNC_LOAD = (ask("r0", 12, 3, answers=((8, False),), failures=((1,),)),)
STOP = (ask("r0", 9, 20, stop_at=3),)
STOP_IN_DRAFTS = (ask("r0", 6, 30, stop_at=6, accepted=(3, 3, 3, 3, 3)),)
PRODUCER = Setup(scheduling="async", num_blocks=9, role="kv_producer")

TIMELINES = {
    "01 decode sync": Timeline(SYNC, (ask("r0", 10, 8),)),
    "01 decode async": Timeline(ASYNC, (ask("r0", 10, 8),)),
    "02 chunked sync": Timeline(Setup(budget=6), (ask("r0", 21, 3),)),
    "02 chunked async": Timeline(Setup(scheduling="async", budget=6), (ask("r0", 21, 3),)),
    "03 preempt sync v1": Timeline(Setup(num_blocks=9), PAIR),
    "03 preempt sync v2": Timeline(Setup(num_blocks=9, runner="v2"), PAIR),
    "03 preempt async v1": Timeline(Setup(scheduling="async", num_blocks=9), PAIR),
    "03 preempt async v2": Timeline(Setup(scheduling="async", num_blocks=9, runner="v2"), PAIR),
    "04 drafts sync": Timeline(Setup(spec=3), DRAFTS),
    "04 drafts async": Timeline(Setup(scheduling="async", spec=3), DRAFTS),
    "05 async load sync": Timeline(SYNC, LOAD),
    "05 async load async": Timeline(ASYNC, LOAD),
    "05 async load full": Timeline(SYNC, (ask("r0", 12, 3, answers=(TWELVE,), load_steps=2),)),
    "05 async load invalid recompute": Timeline(SYNC, BAD_LOAD),
    "05 async load invalid fail": Timeline(Setup(failure="fail"), BAD_LOAD),
    "05 async load failed_recving": Timeline(
        SYNC, (ask("r0", 12, 3, answers=(TWELVE,), load_steps=2, failures=("request",)),), steps=3
    ),
    "05 abort while loading": Timeline(
        SYNC, (ask("r0", 12, 3, answers=(EIGHT,), load_steps=4),), {1: abort("r0")}
    ),
    "05 delayed free": Timeline(SYNC, (ask("r0", 6, 2, send_steps=3),)),
    "06 sync load sync": Timeline(SYNC, SYNC_LOAD),
    "06 sync load async": Timeline(ASYNC, SYNC_LOAD),
    "06 sync load unaligned": Timeline(SYNC, (ask("r0", 12, 3, answers=((10, False),)),)),
    "06 local and external": Timeline(
        SYNC,
        (ask("a", 9, 1),),
        {2: lambda rig: rig.add(ask("b", 18, 2, answers=((16, False),)))},
        only="b",
    ),
    "06 none then load": Timeline(
        SYNC, (ask("r0", 12, 2, answers=(None, None, None, EIGHT), load_steps=3),)
    ),
    "06 lookups repeat": Timeline(
        Setup(num_blocks=9),
        (ask("r0", 24, 3), ask("r1", 16, 1, base=500, answers=((8, False),))),
        only="r1",
    ),
    "06 sync load invalid recompute": Timeline(SYNC, BAD_SYNC_LOAD),
    "06 sync load invalid fail": Timeline(Setup(failure="fail"), BAD_SYNC_LOAD),
    "07 stop sync": Timeline(SYNC, STOP),
    "07 stop async": Timeline(ASYNC, STOP),
    "07 stop in drafts sync": Timeline(Setup(spec=3), STOP_IN_DRAFTS),
    "07 stop in drafts async": Timeline(Setup(scheduling="async", spec=3), STOP_IN_DRAFTS),
    "07 abort sync": Timeline(SYNC, (ask("r0", 9, 20),), {4: abort("r0")}),
    "07 abort async": Timeline(ASYNC, (ask("r0", 9, 20),), {4: abort("r0")}),
    "07 abort in chunks async": Timeline(
        Setup(scheduling="async", budget=6), (ask("r0", 21, 5),), {2: abort("r0")}
    ),
    "08 reset sync": Timeline(
        SYNC, (ask("r0", 9, 8),), {3: lambda rig: rig.reset(running=True, connector=True)}
    ),
    "09 negative answer": Timeline(SYNC, (ask("r0", 12, 2, answers=(("raw", (-4, False)),)),)),
    "09 stale delivered": Timeline(Setup(**{**PRODUCER.__dict__, "delivery": False}), PAIR),
    "09 stale dropped": Timeline(Setup(**{**PRODUCER.__dict__, "delivery": True}), PAIR),
    "09 drafts and preemption": Timeline(Setup(scheduling="async", num_blocks=10, spec=3), MANY),
    "15 abort unscheduled": Timeline(SYNC, (ask("r0", 8, 3),), {0: abort("r0")}),
    "15 abort while None": Timeline(SYNC, (ask("r0", 8, 3, answers=(None,)),), {2: abort("r0")}),
    "15 abort preempted": Timeline(Setup(num_blocks=9), PAIR, {7: abort("r1")}),
    "15 same id again": Timeline(SYNC, (ask("r0", 8, 9),), {2: again}),
    "15 same prompt sync load": Timeline(
        SYNC, (ask("a", 12, 1, answers=((8, False),)), ask("b", 12, 1, answers=((8, False),)))
    ),
    "15 same prompt async load": Timeline(
        SYNC,
        (
            ask("a", 12, 1, answers=(EIGHT,), load_steps=2),
            ask("b", 12, 1, answers=(EIGHT,), load_steps=2),
        ),
    ),
}


def recorded() -> dict[str, list[str]]:
    """The sections of reference_timelines.txt."""
    sections: dict[str, list[str]] = {}
    for line in (HERE / "reference_timelines.txt").read_text().splitlines():
        if line.startswith("## "):
            lines = sections.setdefault(line[3:], [])
        elif line and not line.startswith("#"):
            lines.append(line)
    return sections


RECORDED = recorded()


def kind(line: str) -> str:
    words = line.split()
    return (
        {"resumed": "new", "cached": "new"}.get(words[1], words[1]) if words[0] != "end" else "end"
    )


def test_every_recording_has_a_timeline() -> None:
    assert RECORDED.keys() == TIMELINES.keys()


@pytest.mark.parametrize("engine", ["reference", "vllm"])
@pytest.mark.parametrize("name", sorted(TIMELINES))
def test_timeline(name: str, engine: str) -> None:
    timeline, expected = TIMELINES[name], RECORDED[name]
    rig = Rig(engine, timeline.setup)
    for one in timeline.asks:
        rig.add(one)
    done: set[int] = set()
    for _ in range(timeline.steps):
        if rig.steps in timeline.after and rig.steps not in done:
            done.add(rig.steps)
            timeline.after[rig.steps](rig)
        if not rig.step():
            break
    # Some recordings leave out hooks, or the other requests.
    kinds = {kind(line) for line in expected}
    told = [line for line in rig.story if kind(line) in kinds]
    if timeline.only:
        told = [line for line in told if kind(line) == "step" or timeline.only in line.split()]
    if timeline.steps < 100:
        assert len(told) == 7
        expected = expected[: len(told)]
    assert told == expected
