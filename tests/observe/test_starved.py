# SPDX-License-Identifier: Apache-2.0
"""Tests of requests that wait for blocks which the engine reserves for their own failed load."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvconform.observe.observer import starved


def scheduler(
    request: object,
    *others: object,
    free: int,
    held: Any = ((),),
    verifying: Any = 0,
    finished: frozenset[str] = frozenset(),
) -> Any:
    """Return a scheduler with these prefills in flight, each of which still needs 3 blocks.

    `verifying` is the number of blocks of a step with drafts. `finished`: requests whose loads are
    over, and which have not been admitted since.
    """
    manager = SimpleNamespace(
        get_block_ids=lambda _: held,
        block_pool=SimpleNamespace(get_num_free_blocks=lambda: free),
    )
    return SimpleNamespace(
        _inflight_prefills={request, *others},
        kv_cache_manager=manager,
        _request_remaining_blocks=lambda _: 3,
        _spec_decode_step_blocks=verifying,
        finished_recving_kv_req_ids=finished,
    )


class Request:
    request_id = "a"


class Behind:
    request_id = "b"


@pytest.mark.parametrize(
    ("free", "others", "verifying", "expected"),
    [
        (4, 0, 0, True),  # the load's 2 blocks fit, 2 are left, 3 are kept for itself
        (5, 0, 0, False),  # it is admitted
        (1, 0, 0, False),  # there is no room, whatever is kept
        (7, 1, 0, True),
        (4, 1, 0, False),  # another request's blocks are in the way
        (5, 0, 1, True),
        (5, 0, lambda: 1, True),  # a method until 0.31
    ],
)
def test_who_stands_in_the_own_way(free: int, others: int, verifying: Any, expected: bool) -> None:
    request = Request()
    engine = scheduler(request, *(Request() for _ in range(others)), free=free, verifying=verifying)
    assert starved(engine, request, end=8, block_size=4) is expected


def test_who_waits_for_one_behind_it_whose_load_is_over() -> None:
    request = Request()
    for req, free, expected in (("b", 4, True), ("b", 8, False), ("d", 4, False)):
        engine = scheduler(request, Behind(), free=free, finished=frozenset({req}))
        assert starved(engine, request, 8, 4) is expected, (req, free)


def test_nothing_is_kept_for_a_request_that_is_not_in_flight_or_has_blocks() -> None:
    request = Request()
    assert not starved(scheduler(Request(), free=4), request, 8, 4)
    assert not starved(scheduler(request, free=4, held=((7,),)), request, 8, 4)
    assert not starved(scheduler(request, free=4, held=((), ())), request, 8, 4)
    assert not starved(SimpleNamespace(kv_cache_manager=None), request, 8, 4)
