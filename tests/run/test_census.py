# SPDX-License-Identifier: Apache-2.0
"""Tests of the census: what grows is found and named, and what is bounded is not."""

from __future__ import annotations

import sqlite3
from collections import Counter, deque
from types import SimpleNamespace
from typing import Any

import torch

from kvconform.run.census import grown, held_by, shrunk


def _after_rounds(half: Any, one_round: Any) -> list[tuple[str, list[int]]]:
    censuses = []
    for _ in range(3):
        for _ in range(5):
            one_round()
        censuses.append(held_by(half, []))
    return grown(censuses, 5)


def test_a_table_per_request_is_found_by_its_place() -> None:
    half = SimpleNamespace(worker=SimpleNamespace(tables={}))
    numbers = iter(range(100))
    found = _after_rounds(half, lambda: half.worker.tables.update({f"r{next(numbers)}": None}))
    assert found[0] == ("worker.tables", [5, 10, 15])


def test_a_buffer_that_becomes_larger_is_found() -> None:
    half = SimpleNamespace(buffer=torch.zeros(0))

    def extend() -> None:
        half.buffer = torch.cat([half.buffer, torch.zeros(4)])

    assert _after_rounds(half, extend)[0] == ("buffer", [80, 160, 240])


def test_a_chain_of_links_is_one_place() -> None:
    half: Any = SimpleNamespace(first=None)

    def link() -> None:
        half.first = SimpleNamespace(data=[0], next=half.first)

    places = [place for place, _ in _after_rounds(half, link)]
    assert "first.next.data" in places and len(places) == 1


def test_slots_are_seen() -> None:
    class Slotted:
        __slots__ = ("ids",)

    half = Slotted()
    half.ids = []
    assert _after_rounds(half, lambda: half.ids.append(None)) == [("ids", [5, 10, 15])]


def test_a_full_record_of_the_latest_does_not_grow() -> None:
    half = SimpleNamespace(latest=deque(maxlen=8))
    assert _after_rounds(half, lambda: half.latest.append("x")) == []


def test_what_only_begins_to_grow_has_not_grown() -> None:
    assert grown([Counter(), Counter(a=5), Counter(a=9)], 5) == []
    assert grown([Counter(), Counter(a=5), Counter(a=10)], 5) == [("a", [0, 5, 10])]


def test_only_a_pool_that_every_round_takes_from_has_shrunk() -> None:
    assert shrunk([Counter(a=9), Counter(a=5), Counter()], 5) == []
    assert shrunk([Counter(a=10), Counter(a=5), Counter()], 5) == [("a", [10, 5, 0])]
    assert shrunk([Counter(a=5), Counter(a=10), Counter(a=5)], 5) == []


def test_internals_of_types_in_c_are_not_looked_at() -> None:
    """sqlite3 prunes its list of cursors only now and then."""
    half = SimpleNamespace(db=sqlite3.connect(":memory:"))
    assert _after_rounds(half, lambda: half.db.execute("select 1").fetchall()) == []
