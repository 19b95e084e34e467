# SPDX-License-Identifier: Apache-2.0
"""The step `soak`: what many rounds leave behind.

After each third of identical rounds, what the connector holds is compared. Rounds with prompts of
their own fill its store; what it gives back of a new prompt is compared before and after them.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

from kvconform.contract.steps import STEPS, Add, AddStep, ResetStep, Soak, Step, repeated
from kvconform.contract.trace import Trace
from kvconform.engine.engine import Engine
from kvconform.process import alive
from kvconform.run.census import Census, grown, held_by, held_by_process, shrunk

THIRDS = 3
"""Censuses: a place has grown if it did so between the first and the second, and after that.

So it is with one that has shrunk.
"""
SHOWN = 3
"""Places of each holder that are reported."""
IDLE = 3
"""Steps without work before a census, in which transfers end."""
TRIES = 3
"""How often a new prompt is repeated if less comes back than before."""
PATIENT_TRIES = 30
"""The same where connectors get time to store."""
REST = 0.5
"""Seconds before it is repeated again, if threads or processes may be storing."""
PAUSE = 0.05
"""Seconds after which what is held is counted again, until they change nothing any more."""
STILL = 2
"""How often in a row they must have changed nothing: a timer may be late."""
MOST_PAUSES = 20
"""How often that is done at most."""
SHORT = 17
"""Tokens of that prompt if the case has none of a length of its own."""
_ALONE = [
    STEPS["run"].model_validate({"run": {}}),
    STEPS["drop-local"].model_validate({"drop-local": {}}),
]
PROCESS = "process"
"""The holder of what neither half refers to."""


class Driven(Protocol):
    """The part of a driver that `soak` uses."""

    trace: Trace
    tmp: Path
    rests: bool

    @property
    def named_engines(self) -> Mapping[str, Engine]:
        """The engines that are driven, by their names; a single one is called ""."""

    def execute_steps(self, steps: Sequence[Step]) -> None:
        """Execute some steps of the case."""

    def settle(self, steps: int) -> None:
        """Iterate until nothing is left to do, then do steps without work on each engine."""


def soak(driver: Driven, steps: Sequence[Step], argument: Soak) -> None:
    """Repeat `steps` in rounds, and emit what they changed: in what is held, or what comes back."""
    steps = [step for step in steps if step.op != "expect"]
    if argument.fresh:
        _soak_with_new_prompts(driver, steps, argument)
    else:
        _soak_with_the_same(driver, steps, argument)


def _soak_with_new_prompts(driver: Driven, steps: Sequence[Step], argument: Soak) -> None:
    added = (step.add for step in steps if isinstance(step, AddStep) and isinstance(step.add, Add))
    length = max((each.prompt for each in added if isinstance(each.prompt, int)), default=SHORT)
    first = _given_back(driver, "before", length, 0)
    for number in range(1, THIRDS * argument.rounds + 1):
        driver.execute_steps([repeated(step, number, fresh=True) for step in steps])
    resets = [each for each in steps if isinstance(each, ResetStep) and each.reset.connector]
    alone = len(driver.named_engines) < 2
    emptied = alone and bool(resets) and _empties(driver, resets[-1])
    last = _given_back(driver, "after", length, first) if first else 0
    driver.trace.emit(
        "soak.served", rounds=THIRDS * argument.rounds, first=first, last=last, emptied=emptied
    )


def _empties(driver: Driven, reset: Step) -> bool:
    """Reset once more, when nothing is under way; return whether the cache is empty then."""
    driver.settle(IDLE)
    since = len(driver.trace.events)
    driver.execute_steps([reset])
    resets = [e for e in driver.trace.events[since:] if e["kind"] == "cache.reset"]
    return any(e["phase"] == "done" and e["returned"] for e in resets)


def _given_back(driver: Driven, name: str, length: int, wanted: int) -> int:
    """Return how many tokens of a new prompt of this length can be loaded when it is repeated.

    A connector that stores in the background may need time, above all after the rounds: the prompt
    is repeated until `wanted` tokens come back, or TRIES times, or PATIENT_TRIES.
    """
    driver.settle(IDLE)
    add = {"req": f"soak_{name}", "prompt": length, "max_tokens": 1}
    driver.execute_steps([STEPS["add"].model_validate({"add": add}), *_ALONE])
    found = 0
    for number in range(PATIENT_TRIES if driver.rests else TRIES):
        if number and alive.works_aside():
            time.sleep(REST)
        driver.settle(IDLE)
        again = f"soak_{name}_{number}"
        repeat = {"req": again, "prompt": {"same": f"soak_{name}"}, "max_tokens": 1}
        since = len(driver.trace.events)
        driver.execute_steps([STEPS["add"].model_validate({"add": repeat}), *_ALONE])
        grants = [e for e in driver.trace.events[since:] if e["kind"] == "alloc"]
        found = max([found, *(e["external"] for e in grants if e["req"] == again)])
        if found and found >= wanted:
            break
    return found


def _soak_with_the_same(driver: Driven, steps: Sequence[Step], argument: Soak) -> None:
    first = _settled(driver)
    censuses: list[dict[str, Census]] = []
    between: list[dict[str, Census]] = []
    number = 0
    for third in range(THIRDS):
        for _ in range(argument.rounds):
            number += 1
            driver.execute_steps([repeated(step, number) for step in steps])
            if third == THIRDS - 1 and any(_shrunk(first, censuses, argument.rounds).values()):
                between.append(_settled(driver))  # what is in use comes back: it is no growth
        censuses.append(_settled(driver))
    for holder in censuses[-1]:
        places = grown([each[holder] for each in censuses], argument.rounds)
        for place, numbers in places[:SHOWN]:
            driver.trace.emit("soak.grown", holder=holder, place=place, numbers=numbers)
    rounds = [*censuses[THIRDS - 2 : THIRDS - 1], *between, censuses[-1]]
    used_up = _shrunk(first, censuses, argument.rounds)
    rested = _rested(driver) if any(used_up.values()) else {}
    for holder, places in used_up.items():
        # A heap that is cleared of old entries now and then grows between two of its clearances; a
        # queue that is worked off becomes shorter without rounds, too.
        lasting = [
            (place, numbers)
            for place, numbers in places
            if all(one[holder][place] >= two[holder][place] for one, two in pairwise(rounds))
            and rested[holder].get(place, 0) >= censuses[-1][holder][place]
        ]
        for place, numbers in lasting[:SHOWN]:
            driver.trace.emit("soak.shrunk", holder=holder, place=place, numbers=numbers)
    driver.trace.emit("soak.ended", rounds=THIRDS * argument.rounds, holders=list(censuses[-1]))


def _rested(driver: Driven) -> dict[str, Census]:
    """Return what is held after a while in which nothing happened."""
    if alive.works_aside():
        time.sleep(REST)
    return _settled(driver)


def _settled(driver: Driven) -> dict[str, Census]:
    """Return what is held when nothing is under way, as far as threads come to an end soon."""
    driver.settle(IDLE)
    works_aside = alive.works_aside()  # a thread may end during the census, which counts it
    found, still = _censuses(driver), 0
    for _ in range(MOST_PAUSES if works_aside else 0):
        time.sleep(PAUSE)
        before, found = found, _censuses(driver)
        still = still + 1 if found == before else 0
        if still == STILL:
            break
    return found


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
