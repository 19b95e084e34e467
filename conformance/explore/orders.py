# SPDX-License-Identifier: Apache-2.0
"""Every order in which loads and saves can complete, with an abort at every point: `python -m kvconform.explore.orders --bound 1`.

Nothing is drawn. The reference connector's transfers take as many steps as they are told, one after the other: all ways to give the first
loads and the first saves of a situation 0 to `bound` steps each are run, for every situation of `races` and every point of its abort.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from kvconform.explore.races import FAMILIES
from kvconform.explore.workload import Workload, make
from kvconform.files import scratch_root
from kvconform.refimpl.connector import ReferenceConnector
from kvconform.refimpl.delay import Countdown

T = TypeVar("T")
CONNECTOR = "kvconform.explore.orders:Timed"
BLOCK, PROMPT = 4, 9


@dataclass(frozen=True)
class Order:
    """Steps that the first loads take, and the first saves; later ones take as long as the last."""

    loads: tuple[int, ...]
    saves: tuple[int, ...]


class Told(Countdown[T]):
    """A queue whose items come due when the order says so."""

    def __init__(self, polls: tuple[int, ...]) -> None:
        super().__init__()
        self._polls_of, self._number = polls, 0

    def add(self, item: T, polls: int) -> None:
        super().add(item, self._polls_of[min(self._number, len(self._polls_of) - 1)])
        self._number += 1


class Timed(ReferenceConnector):
    """The reference connector, asynchronous both ways, in the order that is set."""

    order = Order((0,), (0,))

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._load_queue = Told(self.order.loads)
        self._save_queue = Told(self.order.saves)


def orders(loads: int, saves: int, bound: int) -> Iterator[Order]:
    """All of them: each of so many loads and saves takes 0 to `bound` steps."""
    steps = range(bound + 1)
    for first in itertools.product(steps, repeat=loads):
        for second in itertools.product(steps, repeat=saves):
            yield Order(first, second)


def situations(points: int) -> Iterator[Workload]:
    """Every situation with its abort after each number of steps, sync and two steps in flight."""
    for (name, steps), point, (scheduling, depth) in itertools.product(
        sorted(FAMILIES.items()), range(points), (("sync", 2), ("async", 2))
    ):
        data = make(
            f"order.{name}.{point}.{scheduling}", "Transfers complete in an order that is given.", steps(PROMPT, point), engine="reference",
            scheduling=scheduling, depth=depth, config={"block_size": BLOCK, "num_blocks": 24},
        )  # fmt: skip
        yield Workload(data)


def main(arguments: list[str] | None = None) -> int:
    """Print what failed in which order; 0 if nothing did."""
    parser = argparse.ArgumentParser(prog="kvconform.explore.orders", description=__doc__)
    parser.add_argument("--bound", type=int, default=2, help="a transfer takes at most so many steps (default: 2)")
    parser.add_argument("--transfers", type=int, default=2, help="loads, and saves, that are told apart (default: 2)")
    parser.add_argument("--points", type=int, default=6, help="steps before the abort: 0 to one less (default: 6)")
    parser.add_argument("--only", help="situations whose name contains this")
    parser.add_argument("--minutes", type=float, default=60.0)
    given = parser.parse_args(arguments)
    from kvconform.explore.orders import Timed as connector  # as vLLM imports it: run as a command, this module is another one
    from kvconform.explore.outcome import outcome
    from kvconform.load import load_spec
    from kvconform.target import Target

    spec, end, runs, failed, waited = load_spec(), time.monotonic() + 60 * given.minutes, 0, 0, 0
    # The capabilities are declared: they are the same in every order, and would be worked out in the first one.
    declared = {"store": True, "saves": "all", "chunk_tokens": BLOCK, "async_load": True}
    target = Target(CONNECTOR, {"store": "{tmp}/store", "load": "async", "async_saves": True}, capabilities=declared)
    every = [each for each in situations(given.points) if (given.only or "") in each.data["id"]]
    planned = list(itertools.product(orders(given.transfers, given.transfers, given.bound), every))
    with tempfile.TemporaryDirectory(prefix="kvconform-", dir=scratch_root()) as tmp:
        for order, workload in planned:
            if time.monotonic() > end:
                break
            connector.order, runs = order, runs + 1
            found = outcome(workload, target, spec, Path(tmp) / "run")
            waited += "abort during a load" in found.reached or "blocks held" in found.reached
            for failure in found.failures:
                failed += 1
                print(f"{workload.data['id']} loads {order.loads} saves {order.saves}: {failure.requirement}: {failure.message[:200]}")
            if found.error:
                failed += 1
                print(f"{workload.data['id']} loads {order.loads} saves {order.saves}: harness: {found.error}")
    print(f"{runs} of {len(planned)} runs, {waited} of them with transfers under way at an end: {failed} failures")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
