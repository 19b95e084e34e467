# SPDX-License-Identifier: Apache-2.0
"""The step `soak`: identical rounds, and what the connector holds after each third of them."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from kvconform.contract.steps import Soak, Step, repeated
from kvconform.contract.trace import Trace
from kvconform.engine.engine import Engine
from kvconform.run.census import Census, grown, held_by, held_by_process

THIRDS = 3
"""Censuses: a place has grown if it did so between the first and the second, and after that."""
SHOWN = 3
"""Places of each holder that are reported."""
IDLE = 3
"""Steps without work before a census, in which transfers end."""


class Driven(Protocol):
    """The part of a driver that `soak` uses."""

    engine: Engine
    trace: Trace
    tmp: Path

    def execute_steps(self, steps: Sequence[Step]) -> None:
        """Execute some steps of the case."""

    def run_dry(self) -> None:
        """Iterate until nothing is left to do."""

    def idle(self, steps: int) -> None:
        """Do steps without work."""


def soak(driver: Driven, steps: Sequence[Step], argument: Soak) -> None:
    """Repeat `steps` in rounds, and emit what grew in each of them."""
    censuses: list[dict[str, Census]] = []
    number = 0
    for _ in range(THIRDS):
        for _ in range(argument.rounds):
            number += 1
            driver.execute_steps([repeated(step, number) for step in steps if step.op != "expect"])
        driver.run_dry()
        driver.idle(IDLE)
        censuses.append(_censuses(driver))
    for holder in censuses[-1]:
        places = grown([each[holder] for each in censuses], argument.rounds)
        for place, numbers in places[:SHOWN]:
            driver.trace.emit("soak.grown", holder=holder, place=place, numbers=numbers)
    driver.trace.emit("soak.ended", rounds=THIRDS * argument.rounds, holders=list(censuses[-1]))


def _censuses(driver: Driven) -> dict[str, Census]:
    """Return a census of each holder: the halves of the connector, and the process."""
    engine = driver.engine
    if engine.connector is None:
        return {}
    gc.collect()
    manager = engine.scheduler.kv_cache_manager
    outside: list[Any] = [engine.scheduler, manager, manager.block_pool, *engine.ranks.members]
    found = {"scheduler half": held_by(engine.connector, outside)}
    for rank in engine.ranks.members:
        name = "worker half" if rank.place.alone else f"worker half of rank {rank.place.rank}"
        found[name] = held_by(rank.half, [*outside, rank.config, *rank.cache.tensors])
    module = type(engine.connector).__module__
    package = module.rpartition(".")[0] or module
    found["process"] = held_by_process(package, driver.tmp)
    return found
