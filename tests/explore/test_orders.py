# SPDX-License-Identifier: Apache-2.0
"""Tests of every order in which the first loads and saves can complete.

A request is aborted at every point. The reference connector fails nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest

from kvconform.config.target import Target
from kvconform.contract.loader import load_spec
from kvconform.explore.outcome import outcome
from kvconform.explore.races import FAMILIES
from kvconform.explore.workload import Workload, make
from kvconform.refimpl.connector import ReferenceConnector
from kvconform.refimpl.delay import Countdown

T = TypeVar("T")
BLOCK, PROMPT, POINTS = 4, 9, 4


@dataclass(frozen=True)
class Order:
    """Steps that the first loads take, and the first saves; later ones take as long as the last."""

    loads: tuple[int, ...]
    saves: tuple[int, ...]


class Scripted(Countdown[T]):
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
        self._load_queue = Scripted(self.order.loads)
        self._save_queue = Scripted(self.order.saves)


def situations() -> Iterator[Workload]:
    """Every situation with its abort after each number of steps, sync and two steps in flight."""
    for (name, steps), point, (scheduling, depth) in itertools.product(
        sorted(FAMILIES.items()), range(POINTS), (("sync", 2), ("async", 2))
    ):
        data = make(
            f"order.{name}.{point}.{scheduling}",
            "Transfers complete in a given order.",
            steps(PROMPT, point),
            engine="reference",
            scheduling=scheduling,
            depth=depth,
            config={"block_size": BLOCK, "num_blocks": 24},
        )
        yield Workload(data)


def test_a_scripted_queue_delivers_the_first_item_last() -> None:
    queue: Scripted[str] = Scripted((2, 0))
    for name in "abc":
        queue.add(name, 1)
    assert [queue.poll() for _ in range(4)] == [["b", "c"], [], ["a"], []]


@pytest.mark.parametrize("latest", [0, *(pytest.param(n, marks=pytest.mark.long) for n in (1, 2))])
def test_no_order_of_completion_breaks_the_reference_connector(latest: int, tmp_path: Path) -> None:
    spec = load_spec()
    # The capabilities are the same in every order. Undeclared, they would be inferred from the
    # first one.
    declared = {"store": True, "saves": "all", "chunk_tokens": BLOCK, "async_load": True}
    extra = {"store": "{tmp}/store", "load": "async", "async_saves": True}
    target = Target(f"{__name__}:Timed", extra, capabilities=declared)
    steps = range(latest + 1)
    held = 0
    for load, save in itertools.product(steps, steps):
        Timed.order = Order((load, 0), (save, 0))
        for workload in situations():
            found = outcome(workload, target, spec, tmp_path / "run")
            held += "abort during a load" in found.reached or "blocks held" in found.reached
            assert (found.error, found.failures) == (None, []), (workload.data["id"], Timed.order)
    assert held > 25 * (
        latest + 1
    )  # else no transfer was under way at the aborts, and nothing was tested
