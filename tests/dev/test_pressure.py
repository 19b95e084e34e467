# SPDX-License-Identifier: Apache-2.0
"""Tests of the benchmark of a cache under pressure, with few requests."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvconform.dev.pressure import FAULTS, figures, pressed, problems
from stores import url_of

pytestmark = pytest.mark.e2e  # many seconds each

REQUESTS = 108
CONNECTOR = "kvconform.refimpl.variants.tiers:Tiered"
SMALL = (16, 64)
"""Bounds that few requests exceed."""


@pytest.mark.parametrize("kind", ["memory", "redis"])
def test_nothing_is_lost_and_the_levels_are_used(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with url_of(kind, tmp_path, monkeypatch) as url:
        found = figures(pressed(url, REQUESTS, tmp_path / "run", CONNECTOR, SMALL))
    assert problems(found) == []
    assert found["requests"] == REQUESTS and found["loads"] > REQUESTS / 4
    assert found["level0_promoted"] > 0
    assert found["level0_evicted"] > found["level1_evicted"] > 0


@pytest.mark.parametrize(
    ("defect", "figure"),
    [
        ("EvictsPinned", "failed_loads"),
        ("EvictsWhileReading", "failed_loads"),
        ("LeaksPins", "held"),
        ("NeverEvicts", "beyond_bound"),
    ],
)
def test_defects_miss_the_bar(defect: str, figure: str, tmp_path: Path) -> None:
    connector = f"kvconform.refimpl.defects.cache:{defect}"
    found = figures(pressed("memory:{tmp}", REQUESTS, tmp_path / "run", connector, SMALL))
    assert found[figure] > 0 and found["failed"] > 0
    assert len(problems(found)) >= 2


def test_other_figures_are_no_problem() -> None:
    assert problems({"failed": 1.0}) == [] and "failed" in FAULTS
