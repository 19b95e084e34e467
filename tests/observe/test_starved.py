# SPDX-License-Identifier: Apache-2.0
"""Tests of requests that wait for blocks which the engine reserves for their own failed load."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from kvconform.observe.observer import starved


def scheduler(
    request: object,
    *others: object,
    free: int,
    held: Any = ((),),
    verifying: Any = 0,
    finished: Sequence[str] = (),
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
    status = RequestStatus.WAITING_FOR_REMOTE_KVS


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


@pytest.mark.parametrize(
    ("waits", "finished", "free", "expected"),
    [
        (True, ["b"], 4, True),  # it holds 2 blocks, and 3 are kept for it
        (True, ["b"], 0, True),
        (True, ["b"], 8, False),  # it is admitted
        (True, [], 4, False),  # that load is still under way
        (True, ["b"], -1, False),  # there is no room, whatever it gives back
        (False, ["b"], 4, False),  # it is not behind it
    ],
)
def test_who_waits_for_one_behind_it(
    waits: bool, finished: list[str], free: int, expected: bool
) -> None:
    request, behind = Request(), Behind()
    engine = scheduler(request, behind, free=free, finished=finished)
    engine.kv_holding_waiting = [request, behind] if waits else [request]
    held = {"a": ((),), "b": ([5, 6],)}
    engine.kv_cache_manager.get_block_ids = held.__getitem__
    assert starved(engine, request, 8, 4) is expected


def test_nothing_is_kept_for_a_request_that_is_not_in_flight_or_has_blocks() -> None:
    request = Request()
    assert not starved(scheduler(Request(), free=4), request, 8, 4)
    assert not starved(scheduler(request, free=4, held=((7,),)), request, 8, 4)
    assert not starved(scheduler(request, free=4, held=((), ())), request, 8, 4)
    assert not starved(SimpleNamespace(kv_cache_manager=None), request, 8, 4)
