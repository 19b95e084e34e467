# SPDX-License-Identifier: Apache-2.0
"""Random workloads for both schedulers, and a function that plays one."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from kvconform.compat.vllm_api import AWAITING_INPUT
from scheduler_rig import Ask, Rig, Setup

STEPS_AFTER = 150
WINDOWS = (
    *[(0,)] * 7,
    *((5,), (-8,), (0, 6), (0, 9), (0, -8), (0, 5, 11), (5, 10), (0, 0, 6), (0, 0, 6, -8)),
)
"""Those of the groups of a model; see `Setup.windows`."""


@st.composite
def setups(draw: Any) -> Setup:
    spec = draw(st.sampled_from([0, 0, 1, 3]))
    if draw(st.sampled_from([False, False, True])):
        # Many short requests in little memory, preempted while steps are in flight.
        return Setup(
            scheduling="async",
            runner=draw(st.sampled_from(["v1", "v2"])),
            depth=draw(st.sampled_from([2, 3])),
            num_blocks=draw(st.sampled_from([8, 9, 12])),
            spec=spec,
            windows=draw(st.sampled_from([(0,), (0,), (0,), (5,)])),
            role="kv_producer",
            policy=draw(st.sampled_from(["fcfs", "priority"])),
            delivery=False,
            full_isl=False,
        )
    windows = draw(st.sampled_from(WINDOWS))
    connectors = ["ScriptedConnector", "ScriptedConnector", "ScriptedHMAConnector", ""]
    if len(windows) > 1:
        connectors = ["ScriptedHMAConnector", "ScriptedHMAConnector", ""]
    return Setup(
        scheduling=draw(st.sampled_from(["sync", "async"])),
        runner=draw(st.sampled_from(["v1", "v2"])),
        depth=draw(st.sampled_from([1, 2, 2, 3])),
        num_blocks=draw(st.sampled_from([9, 12, 16, 64])),
        budget=draw(st.sampled_from([6, 8, 16, 64])),
        max_seqs=draw(st.sampled_from([1, 2, 4])),
        max_model_len=draw(st.sampled_from([32, 256])),
        spec=spec,
        windows=windows,
        retention=draw(st.sampled_from([None, 0, 8])) if max(windows) > 0 else None,
        caching=draw(st.sampled_from([True, True, True, False])),
        role=draw(st.sampled_from(["kv_both", "kv_producer", "kv_consumer"])),
        failure=draw(st.sampled_from(["recompute", "fail"])),
        policy=draw(st.sampled_from(["fcfs", "fcfs", "priority"])),
        connector=draw(st.sampled_from(connectors)),
        delivery=draw(st.sampled_from([None, False])),
        full_isl=draw(st.booleans()),
        long_prefill=draw(st.sampled_from([0, 0, max(3, 1 + spec)])),
        adaptive=draw(st.booleans()),
        watermark=draw(st.sampled_from([0.0, 0.0, 0.2])),
        chunked=draw(st.sampled_from([True, True, True, False])),
    )


ANSWERS = st.one_of(
    st.none(),
    st.tuples(st.sampled_from([0, 4, 8, 10, 12, 64]), st.just(False)),
    st.tuples(st.sampled_from([4, 8, 10, 12, 64]), st.just(True)),
)
FAILURES = st.sampled_from([None, None, None, "request", (0,), (1,), (0, 2)])


@st.composite
def asks(draw: Any, req: str, setup: Setup) -> Ask:
    tight = setup.delivery is False and not setup.full_isl
    longest = (
        8
        if tight
        else min(setup.max_model_len - 2, (setup.num_blocks - 1) * setup.block_size - 10, 30)
    )
    # With priorities, vLLM leaves a session in its old place of the queue.
    may_be_session = AWAITING_INPUT is not None and setup.policy == "fcfs"
    base = draw(st.sampled_from([0, 100]))  # prompts with the same base share a prefix
    prompt = [base + i for i in range(draw(st.one_of(st.just(longest), st.integers(1, longest))))]
    if draw(st.booleans()):
        prompt[-1] = 900 + draw(st.integers(0, 9))
    answers = draw(st.lists(ANSWERS, max_size=3))
    if answers and answers[-1] is None:
        answers.append((8, draw(st.booleans())))  # "don't know yet" ends some time (R028)
    return Ask(
        req,
        tuple(prompt),
        max_tokens=draw(st.integers(8, 16) if tight else st.integers(1, 12)),
        accepted=tuple(draw(st.lists(st.integers(0, 3), max_size=6))),
        stop_at=draw(st.sampled_from([None, None, 3, 6])),
        answers=tuple(answers),
        load_steps=draw(st.integers(1, 4)),
        failures=tuple(draw(st.lists(FAILURES, max_size=3))),
        send_steps=draw(st.sampled_from([0, 0, 1, 4])),
        skip_reading=draw(st.sampled_from([False] * 9 + [True])),
        priority=draw(st.integers(0, 2)),
        session=may_be_session and draw(st.sampled_from([False, False, False, True])),
    )


@st.composite
def workloads(draw: Any) -> tuple[Setup, list[tuple[Any, ...]]]:
    """Draw a configuration and a sequence of events.

    These are arrivals, steps, aborts, resets, pauses, and more input of sessions.
    """
    setup = draw(setups())
    names = [f"r{i}" for i in range(draw(st.integers(1, 5)))]
    steps = st.integers(0, 4).map(lambda count: [("step",)] * count)
    events: list[tuple[Any, ...]] = []
    for name in names:
        events.append(("add", draw(asks(name, setup))))
        events.extend(draw(steps))
    for _ in range(draw(st.integers(0, 6))):
        events.extend(draw(steps))
        events.append(
            draw(
                st.one_of(
                    st.tuples(st.just("abort"), st.sampled_from(names)),
                    st.tuples(st.just("reset"), st.booleans(), st.booleans()),
                    st.tuples(st.just("pause"), st.sampled_from([0, 0, 1, 2])),
                    st.tuples(
                        st.just("more"),
                        st.sampled_from(names),
                        st.lists(st.integers(500, 503), max_size=9).map(tuple),
                        st.integers(1, 6),
                    ),
                )
            )
        )
    over = [("more", name, (), 1) for name in names]
    return setup, [*events, ("pause", 0), *over]


def play(engine: str, setup: Setup, events: list[tuple[Any, ...]]) -> Rig:
    rig = Rig(engine, setup)
    for event in events:
        if event[0] == "add":
            rig.add(event[1])
        elif event[0] == "step":
            rig.step()
        elif event[0] == "abort":
            rig.abort(event[1])
        elif event[0] == "reset":
            rig.reset(event[1], event[2])
        elif event[0] == "more":
            rig.proceed(*event[1:])
        else:
            rig.pause(event[1])
    return rig.run(STEPS_AFTER)
