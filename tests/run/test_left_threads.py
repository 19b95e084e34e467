# SPDX-License-Identifier: Apache-2.0
"""Tests of the threads that a connector leaves behind, and of those that only take a moment."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from kvconform.config.target import Target
from kvconform.contract.loader import load_spec
from kvconform.refimpl.connector import ReferenceConnector
from kvconform.run import driver
from kvconform.run.runner import run_variant

STOP = threading.Event()
"""What the threads of `Leaves` wait for."""


@pytest.fixture(autouse=True)
def no_threads_have_stayed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver.Driver, "threads_stay", False)


class EndsLater(ReferenceConnector):
    """Has a thread that ends a little after the shutdown."""

    def shutdown(self) -> None:
        super().shutdown()
        threading.Timer(0.1, int).start()


class Leaves(ReferenceConnector):
    """Leaves a thread behind."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if role.name == "WORKER":
            threading.Thread(target=STOP.wait, daemon=True).start()


def left(name: str, folder: Path) -> int:
    """Return how many threads run.end says are left."""
    variants = load_spec().cases["lifecycle.hook-order"].variants(["reference"], ["sync"], None)
    run = run_variant(variants[0], Target(f"{__name__}:{name}", {}), seed=0, tmp=folder)
    [end] = [event for event in run.trace if event["kind"] == "run.end"]
    threads: int = end["threads"]
    return threads


def test_a_thread_may_take_a_moment_to_end(tmp_path: Path) -> None:
    assert left("EndsLater", tmp_path) == 0
    assert not driver.Driver.threads_stay


def test_threads_that_stay_are_waited_for_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "ENDING", 0.05)
    try:
        assert left("Leaves", tmp_path / "first") == 1
        assert driver.Driver.threads_stay
        monkeypatch.setattr(driver, "ENDING", 3600.0)
        assert left("Leaves", tmp_path / "second") == 1  # at once
    finally:
        STOP.set()
