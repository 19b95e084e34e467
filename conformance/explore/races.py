# SPDX-License-Identifier: Apache-2.0
"""Abort races: requests aborted after every number of steps, while saves or loads are in flight.

Each function builds one situation: a save, a load, a shared load, a preemption, a resubmission or
the like. Afterwards the prompt is requested twice more. That shows what the abort left behind: in
the local cache, in the connector's store, in blocks that were freed too early or never.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator

from kvconform.explore.workload import Data, Workload, make

POINTS = range(11)
"""Steps between a request and its abort: with 0 it was never scheduled, with 10 it has finished."""
DROP: list[Data] = [{"run": {}}, {"drop-local": {}}]


def _add(name: str, prompt: object, max_tokens: int = 3) -> Data:
    return {"add": {"req": name, "prompt": prompt, "max_tokens": max_tokens}}


def _steps(count: int) -> list[Data]:
    return [{"step": count}] if count else []


def _again(first: str) -> list[Data]:
    """Return steps that repeat the prompt from the store, and once more after that repetition."""
    return [*DROP, _add("y", {"same": first}), *DROP, _add("z", {"same": first}), {"run": {}}]


def saving(length: int, point: int) -> list[Data]:
    """Abort while the prompt is computed and stored."""
    return [_add("a", length, 5), *_steps(point), {"abort": "a"}, *_again("a")]


def loading(length: int, point: int) -> list[Data]:
    """Abort while the prompt is loaded."""
    return [
        _add("a", length),
        *DROP,
        _add("b", {"same": "a"}, 5),
        *_steps(point),
        {"abort": "b"},
        *_again("a"),
    ]


def sharing(length: int, point: int) -> list[Data]:
    """Abort one of two requests that load the same blocks."""
    both = [_add("b", {"same": "a"}, 5), _add("c", {"of": "a", "then": 3}, 5)]
    return [_add("a", length), *DROP, *both, *_steps(point), {"abort": "b"}, *_again("a")]


def both(length: int, point: int) -> list[Data]:
    """Abort two requests, one of which loads, a step apart."""
    ours = [_add("b", {"same": "a"}, 5), _add("c", length, 5)]
    return [
        _add("a", length),
        *DROP,
        *ours,
        *_steps(point),
        {"abort": "c"},
        {"step": 1},
        {"abort": "b"},
        *_again("a"),
    ]


def resubmitting(length: int, point: int) -> list[Data]:
    """Abort, and repeat the request at once, before anything is cleaned up."""
    return [
        _add("a", length),
        *DROP,
        _add("b", {"same": "a"}, 5),
        *_steps(point),
        {"abort": "b"},
        _add("c", {"same": "a"}),
        *_again("a"),
    ]


def preempted(length: int, point: int) -> list[Data]:
    """Preempt a request, and abort it while it waits to resume."""
    ours = [_add("b", {"same": "a"}, 6), {"step": 2}, {"preempt": "b"}]
    return [_add("a", length), *DROP, *ours, *_steps(point), {"abort": "b"}, *_again("a")]


def renaming(length: int, point: int) -> list[Data]:
    """Abort while nothing is in flight, and send another prompt under the same id."""
    other: Data = {"add": {**_add("b", length - 2)["add"], "id": "a"}}
    return [
        _add("a", length, 40),
        {"step": point + 1},
        {"land": 3},
        {"abort": "a"},
        other,
        *_again("b"),
        _add("c", {"same": "a"}),
        {"run": {}},
    ]


FAMILIES: dict[str, Callable[[int, int], list[Data]]] = {
    each.__name__: each
    for each in (saving, loading, sharing, both, resubmitting, preempted, renaming)
}


def races(
    engines: list[str], schedulings: list[str], slows: list[str] | None, seed: int
) -> Iterator[Workload]:
    """Yield every race once, in an order that depends on the seed.

    The first races are therefore a fair sample, however many. Each variant has an id of its own.
    Variants with the same id would have the same tokens, and one could find what a server stored
    late for another that is over.
    """
    modes: list[tuple[str, int]] = []
    if "sync" in schedulings:
        modes.append(("sync", 1))
    if "async" in schedulings:
        modes += [("async", 2), ("async", 3)]
    sizes = [(4, edge, budget) for edge in (-1, 0, 1) for budget in (7, 64)]
    sizes += [(16, edge, 64) for edge in (-1, 0, 1)]
    streams: list[str | None] = [*slows] if slows else [None]
    every = list(
        itertools.product(sorted(FAMILIES), POINTS, engines, modes, ("v1", "v2"), sizes, streams)
    )
    random.Random(seed).shuffle(every)
    for family, point, engine, (scheduling, depth), runner, (block, edge, budget), slow in every:
        length = 5 * block + edge
        summary = (FAMILIES[family].__doc__ or "").rstrip(".")
        data = make(
            f"race.{family}.{point}.{length}.{budget}",
            f"{summary} (after {point} steps).",
            FAMILIES[family](length, point),
            engine=engine,
            scheduling=scheduling,
            runner=runner,
            depth=depth,
            config={"block_size": block, "budget": budget},
            slow=slow,
        )
        yield Workload(data, seed)
