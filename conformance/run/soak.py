# SPDX-License-Identifier: Apache-2.0
"""The step `soak`: identical rounds, and what the connector holds after each third of them."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

from kvconform.contract.steps import Soak, Step, repeated
from kvconform.contract.trace import Trace
from kvconform.engine.engine import Engine
from kvconform.run.census import Census, grown, held_by, held_by_process, shrunk

THIRDS = 3
"""Censuses: a place has grown if it did so between the first and the second, and after that.

So it is with one that has shrunk.
"""
SHOWN = 3
"""Places of each holder that are reported."""
IDLE = 3
"""Steps without work before a census, in which transfers end."""
PROCESS = "process"
"""The holder of what neither half refers to."""


class Driven(Protocol):
    """The part of a driver that `soak` uses."""

    trace: Trace
    tmp: Path

    @property
    def named_engines(self) -> Mapping[str, Engine]:
        """The engines that are driven, by their names; a single one is called ""."""

    def execute_steps(self, steps: Sequence[Step]) -> None:
        """Execute some steps of the case."""

    def settle(self, steps: int) -> None:
        """Iterate until nothing is left to do, then do steps without work on each engine."""


def soak(driver: Driven, steps: Sequence[Step], argument: Soak) -> None:
    """Repeat `steps` in rounds, and emit what grew, or became less, in each of them."""
    first = _censuses(driver)
    censuses: list[dict[str, Census]] = []
    between: list[dict[str, Census]] = []
    number = 0
    for third in range(THIRDS):
        for _ in range(argument.rounds):
            number += 1
            driver.execute_steps([repeated(step, number) for step in steps if step.op != "expect"])
            if third == THIRDS - 1 and any(_shrunk(first, censuses, argument.rounds).values()):
                driver.settle(IDLE)  # what is in use comes back: it is no growth
                between.append(_censuses(driver))
        driver.settle(IDLE)
        censuses.append(_censuses(driver))
    for holder in censuses[-1]:
        places = grown([each[holder] for each in censuses], argument.rounds)
        for place, numbers in places[:SHOWN]:
            driver.trace.emit("soak.grown", holder=holder, place=place, numbers=numbers)
    rounds = [*censuses[THIRDS - 2 : THIRDS - 1], *between, censuses[-1]]
    for holder, places in _shrunk(first, censuses, argument.rounds).items():
        # A heap that is cleared of old entries now and then grows between two of its clearances.
        lasting = [
            (place, numbers)
            for place, numbers in places
            if all(one[holder][place] >= two[holder][place] for one, two in pairwise(rounds))
        ]
        for place, numbers in lasting[:SHOWN]:
            driver.trace.emit("soak.shrunk", holder=holder, place=place, numbers=numbers)
    driver.trace.emit("soak.ended", rounds=THIRDS * argument.rounds, holders=list(censuses[-1]))


def _shrunk(
    first: dict[str, Census], censuses: Sequence[dict[str, Census]], rounds: int
) -> dict[str, list[tuple[str, list[int]]]]:
    """Return the places of each half that became smaller, with their numbers.

    `first`: before the rounds. The process is left out: it gets rid of what it needs no more.
    """
    halves = [holder for holder in censuses[-1] if holder != PROCESS]
    return {
        each: shrunk([census[each] for census in censuses], rounds, first[each]) for each in halves
    }


def _censuses(driver: Driven) -> dict[str, Census]:
    """Return a census of each holder: the halves of the connectors, and the process."""
    engines = driver.named_engines
    connectors = [engine.connector for engine in engines.values() if engine.connector is not None]
    if not connectors:
        return {}
    gc.collect()
    outside: list[Any] = []
    for engine in engines.values():
        manager = engine.scheduler.kv_cache_manager
        outside += [engine.scheduler, manager, manager.block_pool, *engine.ranks.members]
        for rank in engine.ranks.members:
            outside += [rank.config, *rank.cache.tensors]
    found: dict[str, Census] = {}
    for name, engine in engines.items():
        of = f" of engine {name}" if name else ""
        found[f"scheduler half{of}"] = held_by(engine.connector, outside)
        for rank in engine.ranks.members:
            at = "" if rank.place.alone else f" of rank {rank.place.rank}"
            found[f"worker half{at}{of}"] = held_by(rank.half, outside)
    module = type(connectors[0]).__module__
    package = module.rpartition(".")[0] or module
    found[PROCESS] = held_by_process(package, driver.tmp)
    return found
