# SPDX-License-Identifier: Apache-2.0
"""Tests of what the workers of one run share of their plain round trips."""

from __future__ import annotations

import fcntl
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvconform.config.target import Target
from kvconform.run import calibration
from kvconform.run.calibration import Calibration, _Measured
from kvconform.run.promises import MEASURED, Plain

PLAIN = Plain(9, 1, 9, 9)
REFERENCE = "kvconform.refimpl.connector:ReferenceConnector"


def target(**options: str) -> Target:
    return Target(REFERENCE, {"store": "{tmp}/store", **options})


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the seed of each run that is made."""
    monkeypatch.setenv(MEASURED, str(tmp_path / "measured"))
    made: list[int] = []
    real = calibration.run_variant

    def counted(*args: object, **rest: object) -> object:
        made.append(rest["seed"])  # type: ignore[arg-type]
        return real(*args, **rest)  # type: ignore[arg-type]

    monkeypatch.setattr(calibration, "run_variant", counted)
    return made


def test_another_worker_finds_what_was_measured(tmp_path: Path, runs: list[int]) -> None:
    first = Calibration(target(), tmp_path / "1").came_back(PLAIN, 4)
    assert first == (8, False) and len(runs) == 1
    assert Calibration(target(), tmp_path / "2").came_back(PLAIN, 4) == first
    assert len(runs) == 1


def test_other_targets_and_workloads_are_measured(tmp_path: Path, runs: list[int]) -> None:
    Calibration(target(), tmp_path / "1").came_back(PLAIN, 4)
    answer = Calibration(target(load="async"), tmp_path / "2").came_back(PLAIN, 4)
    assert answer == (8, True)
    Calibration(target(), tmp_path / "3").came_back(Plain(10, 1, 10, 10), 4)
    assert len(set(runs)) == 3


def test_a_run_that_broke_off_is_not_shared(
    tmp_path: Path, runs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = calibration.run_variant

    def broken(*args: object, **rest: object) -> object:
        run = counted(*args, **rest)  # type: ignore[arg-type]
        run.trace.append({"kind": "engine.crash", "error": "no space"})  # type: ignore[arg-type]
        return run

    monkeypatch.setattr(calibration, "run_variant", broken)
    for name in ("1", "2"):
        found = Calibration(target(), tmp_path / name)
        assert found.error_of(PLAIN, 4) and found.came_back(PLAIN, 4) == (0, False)
        assert (found.broke, found.announced) == ("no space", (8, False))
    assert len(runs) == 2, "perhaps the machine was busy"
    monkeypatch.setattr(calibration, "run_variant", counted)
    assert Calibration(target(), tmp_path / "3").came_back(PLAIN, 4) == (8, False)


def test_workers_that_begin_together_measure_once(
    tmp_path: Path, runs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str] = []

    def measured(self: Calibration, *args: object) -> _Measured:
        begun.append(self.tmp.name)
        time.sleep(0.5)
        return _Measured((8, False), None, False)

    monkeypatch.setattr(Calibration, "_measure", measured)
    workers = [Calibration(target(), tmp_path / name) for name in "ab"]
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda each: each.came_back(PLAIN, 4), workers))
    assert answers == [(8, False), (8, False)] and len(begun) == 1


def test_a_lock_that_nobody_releases_is_not_waited_for(
    tmp_path: Path, runs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Calibration(target(), tmp_path / "1").came_back(PLAIN, 4)
    (shared,) = (tmp_path / "measured").glob("*.json")
    with shared.with_suffix(".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # as a process that was forked while its parent measured
        assert Calibration(target(), tmp_path / "2").came_back(PLAIN, 4) == first
        shared.unlink()
        monkeypatch.setattr(calibration, "PATIENCE", 0.3)
        began = time.monotonic()
        assert Calibration(target(), tmp_path / "3").came_back(PLAIN, 4) == first
        assert time.monotonic() - began >= 0.3 and len(runs) == 2
