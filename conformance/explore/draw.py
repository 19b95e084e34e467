# SPDX-License-Identifier: Apache-2.0
"""Workloads drawn by Hypothesis: engine, requests and schedule. Only what an engine and its clients may do; every draw is a case."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.errors import HypothesisWarning

from kvconform.explore.workload import Data, Workload, make
from kvconform.refimpl.settings import POLICIES

NAMES = "abcdef"
BATCH = 100
"""Workloads of one Hypothesis run."""
Draw = Any


@st.composite
def cases(draw: Draw, engines: list[str], schedulings: list[str], slows: list[str] | None) -> Data:
    """The data of a case of one run."""
    engine, scheduling = draw(st.sampled_from(engines)), draw(st.sampled_from(schedulings))
    block = draw(st.sampled_from([4, 4, 4, 16]))
    drafts = draw(st.sampled_from([0, 0, 0, 2, 3]))
    config: Data = {
        "block_size": block,
        "budget": draw(st.sampled_from([64, 64, 5, 7, block, block + 1, 2 * block + 3])),
        "max_seqs": draw(st.sampled_from([8, 8, 1, 2])),
    }
    config["budget"] = max(config["budget"], 1 + drafts)
    if drafts:
        config["spec_tokens"] = drafts
    if draw(st.integers(0, 9)) == 0:
        config["prefix_caching"] = False
    steps, longest = _schedule(draw, block, drafts)
    enough = -(-(longest + drafts + 1) // block) + 2  # one request alone must fit
    config["num_blocks"] = draw(st.sampled_from([64, enough, enough + 1, enough + 3, enough + 6]))
    policies = []
    if engine == "reference" and draw(st.booleans()):
        policies = [draw(st.sampled_from(sorted(POLICIES)))]
    return make(
        "drawn.one", "Drawn at random.", steps, engine=engine, scheduling=scheduling, runner=draw(st.sampled_from(["v1", "v2"])),
        depth=draw(st.sampled_from([2, 2, 3])), config=config, policies=policies, slow=draw(st.sampled_from(slows)) if slows else None,
    )  # fmt: skip


def _schedule(draw: Draw, block: int, drafts: int) -> tuple[list[Data], int]:
    """(steps, length of the longest request with its output)."""
    steps: list[Data] = []
    lengths: dict[str, int] = {}
    outputs: dict[str, int] = {}
    count = draw(st.integers(2, len(NAMES)))
    for name in NAMES[:count]:
        add = _request(draw, name, lengths, outputs, block, drafts)
        steps.append({"add": add})
        then = draw(st.sampled_from(["disturb", "disturb", "disturb", "finish", "finish", "finish", "step"]))
        if then == "disturb":  # while it is under way
            steps += [{"step": draw(st.integers(1, 4))}, *draw(st.lists(_events(name, list(lengths)), min_size=1, max_size=4))]
        elif then == "finish":  # the next one finds nothing in the local cache
            steps += [{"run": {}}, {"drop-local": {}}]
        elif then == "step":
            steps.append({"step": draw(st.integers(1, 6))})
    steps.append({"run": {}})
    return steps, max(lengths[name] + outputs[name] for name in lengths)


def _request(draw: Draw, name: str, lengths: dict[str, int], outputs: dict[str, int], block: int, drafts: int) -> Data:
    max_tokens = draw(st.sampled_from([1, 2, 4, 7, 9]))
    prompt: Any
    earlier = draw(st.sampled_from(sorted(lengths))) if lengths and draw(st.integers(0, 3)) else None
    if earlier is None:
        prompt = length = max(1, draw(st.integers(1, 4)) * block + draw(st.sampled_from([-1, 0, 1, 2])))
    elif draw(st.booleans()):
        prompt, length = {"same": earlier}, lengths[earlier]
    else:
        prompt, length = {"of": earlier}, lengths[earlier]
        if draw(st.booleans()):
            length = prompt["tokens"] = draw(st.integers(1, length))
        prompt["then"] = draw(st.sampled_from([1, 2, block, block + 1]))
        length += prompt["then"]
    lengths[name], outputs[name] = length, max_tokens
    add: Data = {"req": name, "prompt": prompt, "max_tokens": max_tokens}
    if drafts and draw(st.booleans()):
        add["drafts"] = draw(st.lists(st.integers(0, drafts), min_size=1, max_size=3))
    if draw(st.integers(0, 7)) == 0:
        add["salt"] = draw(st.sampled_from(["s", "t"]))
    if draw(st.integers(0, 11)) == 0:
        add["lora"] = draw(st.sampled_from(["one", "two"]))
    return add


def _events(latest: str, names: list[str]) -> st.SearchStrategy[Data]:
    """What happens between steps, mostly to the latest request."""
    anyone, yes_no = st.sampled_from([latest, latest, *names]), (False, True)
    resets = [{"reset": {"running": running, "connector": connector}} for running in yes_no for connector in yes_no]
    return st.one_of(
        st.integers(1, 5).map(lambda count: {"step": count}),
        anyone.map(lambda name: {"abort": name}),
        anyone.map(lambda name: {"preempt": name}),
        anyone.map(lambda name: {"preempt": name}),
        st.just({"run": {}}),
        st.just({"drop-local": {}}),
        st.sampled_from(resets),
        st.just({"idle": 1}),
        st.just({"reorder": {}}),
    )


def drawn(engines: list[str], schedulings: list[str], slows: list[str] | None, *, first_seed: int, count: int) -> Iterator[Workload]:
    """`count` workloads, the same for the same arguments on every machine."""
    strategy = cases(engines, schedulings, slows)
    for number in range(-(-count // BATCH)):
        yield from _batch(strategy, first_seed * 1_000_003 + number, min(BATCH, count - number * BATCH))


def _batch(strategy: st.SearchStrategy[Data], number: int, count: int) -> list[Workload]:
    found: list[Workload] = []

    @seed(number)
    @settings(
        max_examples=count, database=None, phases=[Phase.generate], deadline=None, suppress_health_check=list(HealthCheck)
    )  # fmt: skip
    @given(strategy)
    def collect(data: Data) -> None:
        found.append(Workload({**data, "id": f"drawn.{number}.{len(found)}"}, number))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", HypothesisWarning)
        collect()
    return found
