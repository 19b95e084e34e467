# SPDX-License-Identifier: Apache-2.0
"""Tests of the simulation of campaigns: where its numbers are known, it has them."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvconform.dev import scaling
from kvconform.dev.scaling import Costs, Store, freshness, makespan, most_workers, simulate
from kvconform.explore.corpus import PAUSE, SHARE
from kvconform.explore.places import database

EVEN = Costs(piece=0.05, spread=0.001, extra=0.0, driver=0.001, trip=0.0)
"""A driver that has enough for 50 workers, and no chance."""


def test_few_workers_are_always_busy() -> None:
    pace = simulate(EVEN, 10, 5000)
    assert pace.rate == pytest.approx(200, rel=0.02)
    assert pace.workers == pytest.approx(1, abs=0.02)
    assert pace.driver == pytest.approx(0.2, abs=0.01)


def test_many_workers_wait_for_the_driver() -> None:
    pace = simulate(EVEN, 200, 20_000)
    assert pace.rate == pytest.approx(1000, rel=0.03)
    assert pace.driver > 0.97 and pace.workers == pytest.approx(0.25, abs=0.02)


def test_a_second_piece_hides_the_network() -> None:
    far = Costs(piece=0.05, spread=0.001, extra=0.0, driver=0.0, trip=0.04, depth=1)
    near = Costs(**{**far.__dict__, "depth": 2})
    assert simulate(far, 4, 2000).rate == pytest.approx(4 / 0.09, rel=0.02)
    assert simulate(near, 4, 2000).rate == pytest.approx(4 / 0.05, rel=0.02)


def test_what_was_measured_is_simulated() -> None:
    """Four Ray workers took 2.16 s for 160 pieces that sleep for 50 ms (docs/scale.md)."""
    pace = simulate(Costs(piece=0.05, spread=0.001), 4, 160)
    assert 160 / pace.rate == pytest.approx(2.16, rel=0.05)


def test_the_most_workers_that_are_busy() -> None:
    most = most_workers(EVEN)
    assert 40 <= most <= 56
    assert simulate(EVEN, most).workers >= 0.9 > simulate(EVEN, 2 * most).workers


def test_a_busy_server_is_asked_less_often() -> None:
    store = Store("x", save=0.0, fetch=1e-5, server=1e-6)
    assert freshness(store, 1000, 10) == (PAUSE, pytest.approx(0.001))
    assert freshness(store, 10**6, 1) == (pytest.approx(SHARE * 10), pytest.approx(1 / 200))
    assert freshness(store, 1000, 10**6) == (pytest.approx(1000), 1.0)


def test_pieces_go_to_the_first_worker_that_is_free() -> None:
    assert makespan([4, 1, 1, 1, 1], 2) == 4 and makespan([1] * 7, 3) == 3


def test_a_corpus_can_be_measured(tmp_path: Path) -> None:
    entries = scaling.entries_of(20)
    assert len(set(entries)) == 20
    found = scaling.measure(database([str(tmp_path)]), entries)
    assert found.save[0] > 0 and found.fetch[0] > 0 and found.save[1] == 0
    with pytest.raises(ValueError, match="20 of 40 entries were found"):
        scaling.measure(database([str(tmp_path)]), [*entries, *entries])
