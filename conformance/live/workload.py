# SPDX-License-Identifier: Apache-2.0
"""From a scenario to what a child process is told: phases of requests with token ids."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from kvconform.live.job import Ask, Play
from kvconform.live.scenario import Phase, Prompt, Request, Scenario, Workload

FIRST, VOCABULARY = 3, 512
"""Token ids from FIRST on; below are those with a meaning."""
FAMILY = 320


def tokens(count: int, *seed: Any) -> list[int]:
    """Random token ids, the same for the same seed."""
    source = random.Random(repr(seed))
    return [source.randrange(FIRST, VOCABULARY) for _ in range(count)]


def prompts(found: Sequence[Prompt], seed: int) -> dict[str, list[int]]:
    """The token ids of every prompt by name."""
    made: dict[str, list[int]] = {}
    for prompt in found:
        own = tokens(prompt.tokens, seed, prompt.name)
        if prompt.period is not None:
            cycle = tokens(prompt.period, prompt.draw, "loop")
            own = [cycle[i % prompt.period] for i in range(prompt.tokens)]
        made[prompt.name] = (made[prompt.like][: prompt.shared] if prompt.like else []) + own[prompt.shared if prompt.like else 0 :]
    return made


def plays(scenario: Scenario, workload: Workload | None, seed: int) -> list[Play]:
    """The phases of a scenario. A conversation is continued from the answers of the run itself (`Ask.after`), as nobody knows them yet."""
    if workload is None:
        return list(_requests(scenario.requests, seed if scenario.families is None else scenario.families))
    found = [_phase(phase, workload, prompts(workload.prompts, seed), seed) for phase in workload.phases]
    return [play.model_copy(update={"faults": [fault for fault in scenario.faults if fault.phase == play.name]}) for play in found]


def _phase(phase: Phase, workload: Workload, made: dict[str, list[int]], seed: int) -> Play:
    asks, first = [], workload.phases[0].name
    for name, ids in made.items():
        if phase.take == "continued":
            more = tokens(phase.more, seed, name, phase.name)
            asks.append(Ask(id=f"{phase.name}/{name}", tokens=more, after=f"{first}/{name}", out=workload.output))
            continue
        part = ids[: max(1, len(ids) // 2)] if phase.take == "halves" else ids
        asks.append(Ask(id=f"{phase.name}/{name}", tokens=part, out=1 if phase.take == "halves" else workload.output))
    return Play(name=phase.name, reset=phase.reset, hits=phase.hits, asks=asks[::-1] if phase.reverse else asks)


def _requests(requests: Sequence[Request], seed: int) -> list[Play]:
    """One phase per reset."""
    parts: list[list[Ask]] = []
    began = 0
    for number, request in enumerate(requests):
        if request.reset or not parts:
            parts.append([])
            began = request.at
        own = number if request.own is None else request.own
        ids = tokens(FAMILY, seed, "family", request.family)[: request.shared] + tokens(request.tail, seed, "own", own)
        parts[-1].append(
            Ask(
                id=f"r{own}", tokens=ids or [FIRST], out=request.out, at=max(0, request.at - began), abort=request.abort,
                priority=request.priority,
            )
        )  # fmt: skip
    return [Play(name=f"part{number}", reset=number > 1, hits=number > 1, asks=asks) for number, asks in enumerate(parts, 1)]
