# SPDX-License-Identifier: Apache-2.0
"""Tests of the bounds that a connector's counters are held against."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvconform.contract.trace import Trace
from kvconform.observe import seen
from kvconform.observe.cache import evicted
from kvconform.observe.seen import Bounds, Seen


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


class Listeners:
    """A probe whose hooks a test calls."""

    def __init__(self) -> None:
        self.listeners: dict[tuple[str, str], Any] = {}

    def on(self, hook: str, **listeners: Any) -> None:
        self.listeners |= {(hook, when): listener for when, listener in listeners.items()}

    def call(self, hook: str, when: str, result: Any = None, **arguments: Any) -> None:
        call = SimpleNamespace(legal=True, result=result, arg=lambda _, name: arguments[name])
        self.listeners[hook, when](call)


class World:
    """An engine of one rank with blocks of four tokens, of ten bytes each."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.trace = Trace()
        self.probe = Listeners()
        self.seen = Seen(self.trace, self.probe)  # type: ignore[arg-type]
        self.grants: list[tuple[str, int]] = []

    def look_up(
        self,
        req: str,
        tokens: int,
        found: int | None,
        seconds: float = 0.0,
        preemptions: int = 0,
        skips: bool = False,
    ) -> None:
        request = SimpleNamespace(
            request_id=req,
            num_tokens=tokens,
            num_preemptions=preemptions,
            skip_reading_prefix_cache=skips,
        )
        arguments = {"request": request, "num_computed_tokens": 0}
        self.probe.call("get_num_new_matched_tokens", "before", **arguments)
        self.clock.now += seconds
        self.probe.call("get_num_new_matched_tokens", "after", (found, False), **arguments)

    def admit(self, req: str, external: int) -> None:
        self.probe.call(
            "update_state_after_alloc",
            "before",
            request=SimpleNamespace(request_id=req),
            num_external_tokens=external,
        )
        tables = [[4, 0, [1, 2, 3, 4]]]
        transfer = req if external else None
        self.trace.emit(
            "alloc", req=req, transfer=transfer, local=0, external=external, tables=tables
        )

    def compute(self, req: str, computed: int, scheduled: int) -> None:
        self.trace.emit("req.scheduled", req=req, computed=computed, scheduled=scheduled)

    def land(self, req: str, granted: int, ranks: int = 1, seconds: float = 0.0) -> None:
        self.clock.now += seconds
        for rank in range(ranks):
            self.trace.emit(
                "load.due",
                req=req,
                transfer=req,
                granted=granted,
                missing=[],
                bytes=10 * granted,
                most_bytes=10 * granted,
                rank=rank,
            )
        self.probe.call("get_kv_connector_stats", "before")

    def bounds(self) -> dict[str, Bounds]:
        self.trace.emit("run.end", quiesced=True, crashed=False)
        return dict(self.seen.of_run())


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    clock = Clock()
    monkeypatch.setattr(seen, "time", clock)
    return World(clock)


def within(bounds: Bounds, value: float) -> bool:
    return bounds[0] <= value <= bounds[1]


def test_seconds_count_from_the_first_lookup(world: World) -> None:
    """A lookup may start the fetch and answer None, or fetch itself."""
    world.look_up("a", 9, None, seconds=0.5)
    world.clock.now += 0.25
    world.look_up("a", 9, 8)
    world.admit("a", 8)
    world.land("a", 8, seconds=0.25)
    assert world.bounds()["load_seconds"][1] == 1.0


def test_ranks_that_load_at_the_same_time_add_their_seconds(world: World) -> None:
    world.look_up("a", 9, 8)
    world.admit("a", 8)
    world.land("a", 8, ranks=2, seconds=0.5)
    assert world.bounds()["load_seconds"][1] == 1.0


def test_a_fetch_that_was_not_granted_counts(world: World) -> None:
    world.look_up("a", 9, None, seconds=0.5)
    world.look_up("a", 9, 0)
    world.admit("a", 0)
    world.look_up("b", 9, 8)
    world.admit("b", 8)
    world.land("b", 8)
    assert world.bounds()["load_seconds"][1] == 0.5


def test_seconds_count_from_when_a_request_is_shown(world: World) -> None:
    """Its KV may be fetched before it is looked up."""
    request = SimpleNamespace(request_id="a")
    world.probe.call("on_new_request", "before", request=request)
    world.clock.now += 0.5
    world.look_up("a", 9, 8)
    world.admit("a", 8)
    world.land("a", 8)
    assert world.bounds()["load_seconds"][1] == 0.5


def test_a_load_that_failed_in_part_need_not_count(world: World) -> None:
    world.look_up("a", 9, 8)
    world.admit("a", 8)
    world.land("a", 8)
    world.trace.events[-1]["missing"] = [4, 5, 6, 7]
    found = world.bounds()
    assert (found["tokens_loaded"], found["bytes_loaded"]) == ((0, 8), (0, 80))


def test_what_a_resumed_or_a_skipping_request_misses(world: World) -> None:
    """The first may count, and the second does not."""
    world.look_up("a", 9, 0, preemptions=1)
    world.admit("a", 0)
    world.look_up("b", 9, 0, skips=True)
    world.admit("b", 0)
    assert world.bounds()["tokens_missed"] == (0, 12)


def test_a_miss_may_count_with_all_of_its_chunk(world: World) -> None:
    world.seen.chunk_tokens = 16
    world.look_up("a", 17, 12)
    world.admit("a", 12)
    world.land("a", 12)
    assert world.bounds()["tokens_missed"] == (4, 20)
    other = World(world.clock)
    other.seen.chunk_tokens = 3
    other.look_up("a", 17, 0)
    other.admit("a", 0)
    assert other.bounds()["tokens_missed"] == (15, 20)


def test_nothing_is_known_of_tokens_that_are_split_or_of_several_groups(world: World) -> None:
    world.seen.splits_tokens = True
    world.look_up("a", 9, 8)
    world.admit("a", 8)
    world.land("a", 8)
    assert {"tokens_loaded", "blocks_loaded"}.isdisjoint(world.bounds())
    other = World(world.clock)
    other.look_up("a", 9, 8)
    other.admit("a", 8)
    other.trace.events[-1]["tables"] = [[4, 0, [1, 2]], [4, 0, [3, 4]]]
    other.land("a", 8)
    assert {"tokens_loaded", "bytes_saved"}.isdisjoint(other.bounds())


@pytest.mark.parametrize(
    ("quiesced", "crashed"), [(False, False), (True, True)], ids=["unfinished", "crashed"]
)
def test_nothing_is_known_of_a_run_that_did_not_end_well(
    quiesced: bool, crashed: bool, world: World
) -> None:
    world.look_up("a", 9, 0)
    world.admit("a", 0)
    world.trace.emit("run.end", quiesced=quiesced, crashed=crashed)
    assert world.seen.of_run() == {}


def test_no_seconds_without_a_load_that_brought_anything(world: World) -> None:
    world.look_up("a", 9, 8)
    world.admit("a", 8)
    world.land("a", 8)
    world.trace.events[-1]["missing"] = [0]
    found = world.bounds()
    assert "load_seconds" not in found and "bytes_saved" not in found


@pytest.mark.parametrize(
    ("chunk", "accepted", "refused"),
    [(0, (12, 13, 16), (11, 17)), (8, (8, 13, 16), (7, 17)), (256, (0, 13, 16), (17,))],
)
def test_misses_may_count_in_whole_blocks_or_chunks(
    chunk: int, accepted: tuple[int, ...], refused: tuple[int, ...], world: World
) -> None:
    world.seen.chunk_tokens = chunk
    world.look_up("a", 13, 0)
    world.admit("a", 0)
    bounds = world.bounds()["tokens_missed"]
    assert all(within(bounds, value) for value in accepted)
    assert not any(within(bounds, value) for value in refused)


def test_blocks_are_those_of_a_request_or_of_each_rank(world: World) -> None:
    """Nine tokens are in three blocks; a load that missed some may have written none of its own."""
    for req, tokens in (("a", 9), ("b", 4)):
        world.look_up(req, 12, tokens)
        world.admit(req, tokens)
        world.land(req, tokens, ranks=2)
    world.trace.events[-1]["missing"] = [0]
    assert world.bounds()["blocks_loaded"] == (3, 2 * (3 + 1))


def test_each_offered_state_has_an_outcome(world: World) -> None:
    world.look_up("a", 9, 0)
    world.admit("a", 0)
    for block in (3, 5):
        world.trace.emit("state.offered", req="a", block=block)
    assert world.bounds()["states_offered"] == (2, 2)


def test_what_all_ranks_load_one_of_them_may_have_saved(world: World) -> None:
    world.look_up("a", 9, 8)
    world.admit("a", 8)
    world.compute("a", 8, 1)
    world.land("a", 8, ranks=2)
    assert world.bounds()["bytes_saved"][0] == 80


def test_an_unfull_block_may_be_saved_again_in_each_step(world: World) -> None:
    world.look_up("a", 9, 8)
    world.admit("a", 8)
    for computed in range(8, 12):
        world.compute("a", computed, 1)
    world.land("a", 8)
    assert world.bounds()["bytes_saved"][1] == 10 * (8 + 4 * 4)


@pytest.mark.parametrize(
    ("before", "now", "bounds", "count"),
    [
        (["a b", ""], ["c b", "a"], [2, None], 1),  # demoted
        (["a b", "c"], ["a c", ""], [2, None], 1),  # c moved up, b made room
        (["", "a b"], ["a", "b"], [2, 2], 0),  # moved up
        (["", "a b"], ["a", "b c"], [2, 2], 0),  # moved up: no other had to go for c
        (["a b"], [""], [2], 0),  # expired
        (["a b"], ["b c"], [3], 0),  # expired: there was room
        (["a b"], ["c d"], [2], 2),
        (["a b"], ["c d"], [None], 0),
        (["a b c"], ["d"], [3], 1),  # two may have expired
    ],
)
def test_an_entry_is_evicted_if_it_had_to_make_room(
    before: list[str], now: list[str], bounds: list[int | None], count: int
) -> None:
    def keys(levels: list[str]) -> list[set[str]]:
        return [set(level.split()) for level in levels]

    assert evicted(keys(before), keys(now), bounds) == count
