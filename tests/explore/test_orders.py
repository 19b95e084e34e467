# SPDX-License-Identifier: Apache-2.0
"""Orders of completion: all of them, each once, and the connector's transfers take as long as they are told."""

from __future__ import annotations

from kvconform.explore.orders import Order, Told, orders, situations
from kvconform.explore.races import FAMILIES


def test_every_order_comes_once() -> None:
    found = list(orders(2, 1, 2))
    assert len(found) == len(set(found)) == 27 and Order((2, 0), (1,)) in found


def test_every_situation_has_every_point_of_its_abort() -> None:
    found = [workload.data["id"] for workload in situations(3)]
    assert len(found) == len(set(found)) == len(FAMILIES) * 3 * 2
    assert all(workload.variant().engine == "reference" for workload in situations(1))


def test_what_was_added_first_may_be_due_last() -> None:
    queue: Told[str] = Told((2, 0))
    for name in "abc":
        queue.add(name, 1)
    assert [queue.poll() for _ in range(4)] == [["b", "c"], [], ["a"], []]
