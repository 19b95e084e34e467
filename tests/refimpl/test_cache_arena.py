# SPDX-License-Identifier: Apache-2.0
"""Tests of the levels in device memory and in pinned memory, on the emulated device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from early_reads import ReadsEarly
from kvconform.config.target import Target
from kvconform.contract.loader import load_spec
from kvconform.emulation.emulate import emulate
from kvconform.refimpl.cache.arena import DeviceBackend, PinnedBackend
from kvconform.refimpl.cache.backend import Full, StoreError
from kvconform.refimpl.cache.memory import MemoryBackend
from kvconform.refimpl.cache.tiers import Level, Tiers
from kvconform.refimpl.cache.urls import open_backend
from kvconform.run.case import run_and_judge

SPEC = load_spec()


@pytest.fixture(params=["compute", "transfers"])
def cuda(request: pytest.FixtureRequest) -> Iterator[Any]:
    """An emulated device, once with each adversary."""
    with emulate(request.param) as cuda:
        yield cuda


@pytest.mark.parametrize("scheme", ["device", "pinned"])
def test_values_come_back_from_the_gaps_that_others_left(cuda: Any, scheme: str) -> None:
    backend = open_backend(f"{scheme}:8")
    for key, value in (("a", b"aaa"), ("b", b"bb"), ("c", b"ccc")):
        backend.set(key, value)
    with pytest.raises(Full, match=f"the {scheme} memory has no room for 1 bytes"):
        backend.set("d", b"d")
    with pytest.raises(StoreError, match=f"the {scheme} memory is too small for 9") as refused:
        backend.set("d", bytes(9))
    assert not isinstance(refused.value, Full)  # to delete others would be of no use
    backend.delete("b")
    backend.set("e", b"ee")
    assert [backend.get(key) for key in "abce"] == [b"aaa", None, b"ccc", b"ee"]
    assert [*backend.list()] == ["a", "c", "e"] and [*backend.list("c")] == ["c"]
    backend.set("a", b"AAA")
    backend.set("empty", b"")
    assert backend.get("a") == b"AAA" and backend.get("empty") == b"" and backend.exists("empty")
    backend.delete("a")
    backend.delete("a")
    assert not backend.exists("a") and backend.get("a") is None


def test_a_value_on_the_device_takes_no_host_memory_and_storing_it_does_not_wait(cuda: Any) -> None:
    backend = DeviceBackend(16)
    backend.set("a", b"a" * 16)
    assert cuda.notes == []
    assert backend._memory is not None and backend._memory.is_cuda
    assert backend.get("a") == b"a" * 16
    assert cuda.notes == [] or [note.kind for note in cuda.notes] == ["sync"]


def test_memory_is_reused_while_the_copy_of_its_last_value_is_queued(cuda: Any) -> None:
    backend = DeviceBackend(4)
    for number in range(20):
        backend.set("a", b"%04d" % number)
    backend.delete("a")
    backend.set("b", b"last")
    assert backend.get("b") == b"last"


def test_a_copy_from_pinned_memory_is_late_without_an_event() -> None:
    """The emulated device sees it: the memory has another value when the copy is made."""
    with emulate("transfers"):
        backend, side = PinnedBackend(4), torch.cuda.Stream()
        target = torch.zeros(4, dtype=torch.uint8, device="cuda")
        backend.set("a", b"old!")
        with torch.cuda.stream(side):
            target.copy_(backend._part(0, 4), non_blocking=True)
        backend.set("a", b"new!")
        side.synchronize()
        assert bytes(target.tolist()) == b"new!"


def test_values_move_between_the_levels_and_what_is_full_in_bytes_evicts(cuda: Any) -> None:
    levels = [
        Level("device", open_backend("device:8"), 2),
        Level("pinned", open_backend("pinned:4"), 2),
        Level("host", MemoryBackend()),
    ]
    cache = Tiers(levels, lambda key: False)
    for number in range(6):
        cache.set(f"k{number}", b"v%03d" % number)
    stored = [sorted(level.backend.list()) for level in levels]
    assert stored == [["k4", "k5"], ["k3"], ["k0", "k1", "k2"]]
    for number in range(6):
        assert cache.get(f"k{number}") == b"v%03d" % number
    assert sorted(levels[0].backend.list()) == ["k4", "k5"] and cache.lost == 0
    assert levels[0].counts.promoted == 6


def test_they_need_a_device_and_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="a store at device: needs a CUDA device"):
        open_backend("device:1000")
    with pytest.raises(ValueError, match="pinned:much is no store: pinned: needs its size"):
        open_backend("pinned:much")


TIERS = [
    {"url": "device:65536", "chunks": 4},
    {"url": "pinned:65536", "chunks": 4},
]
RUNS = (
    "cache.demoted[vllm-async-v1-d2-b4]",
    "cache.torn[reference-sync-v1-d1-b4]",
    "cache.pressure[vllm-sync-v1-d1-b4]",
)


def failed(connector: str, run: str, tmp: Path) -> dict[str, str]:
    """Run a case over both levels, and return the messages of the failed requirements."""
    (variant,) = (each for each in SPEC.cases[run.split("[")[0]].variants() if each.id == run)
    options = {"store": "{tmp}/disk", "tiers": TIERS}
    target = Target(connector, options, device="emulated")
    variant = replace(variant, slow="transfers")
    report = run_and_judge(variant, target, SPEC, seed=0, tmp=tmp / "run")
    assert report.harness_error is None
    rows = {row.requirement: row for row in report.rows if row.kind == "requirement"}
    assert rows["tiers.bounded"].verdict == "PASS"
    bad = [row for row in rows.values() if row.verdict in ("FAIL", "ERROR", "BLOCKED")]
    # The reference connector's copies make the host wait, whatever its store: recommended only.
    return {
        row.requirement: str(row.message)
        for row in bad
        if not SPEC.requirements[row.requirement].level.startswith("SHOULD")
    }


@pytest.mark.parametrize("run", RUNS)
def test_a_connector_over_them_fails_nothing(run: str, tmp_path: Path) -> None:
    assert failed("kvconform.refimpl.variants.tiers:Tiered", run, tmp_path) == {}


def test_a_connector_that_does_not_wait_for_the_copy_is_caught(tmp_path: Path) -> None:
    found = failed("early_reads:ReadsDeviceEarly", RUNS[0], tmp_path)
    assert "lookup.lease" in found


def test_a_read_that_does_not_wait_returns_other_bytes() -> None:
    with emulate("transfers"):
        backend = ReadsEarly(4)
        backend.set("a", b"data")
        assert backend.get("a") != b"data"
