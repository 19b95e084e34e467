# SPDX-License-Identifier: Apache-2.0
"""Tests of the engine as it runs on a GPU (`--device cuda`).

The device is emulated around the harness, the engine and the connector. A real GPU adds only its
own speed, and holds of its streams (tests/kv/test_held.py); here the emulation slows them down.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest

from kvconform.kv import gpu

pytest.importorskip("vllm")
import torch

import kvconform.compat.vllm_api  # noqa: F401  # before torch is patched
from kvconform.config.target import Target
from kvconform.contract.loader import load_spec
from kvconform.emulation.emulate import emulate
from kvconform.emulation.machine import Delay
from kvconform.emulation.note import Note
from kvconform.emulation.vllm_on_cuda import vllm_on_cuda
from kvconform.judge.records import CaseReport
from kvconform.kv.gpu import OnCuda
from kvconform.kv.held import Holds
from kvconform.run.case import run_and_judge

SPEC = load_spec()


@pytest.fixture(autouse=True)
def _no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton has no emulated device; tests/kv/test_access.py is about the kernels."""
    monkeypatch.setattr(OnCuda, "kernels", False)


@pytest.fixture(autouse=True)
def held(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The streams that are held, and releases, in order; the emulated device notices neither."""
    asked: list[str] = []

    class Noted(Holds):
        def hold(self, stream: int) -> None:
            asked.append(f"hold {stream}")

        def release(self) -> None:
            asked.append("release")

    monkeypatch.setattr(gpu, "on_this_device", lambda: nullcontext(Noted(lambda *_: None, 0, 0)))
    return asked


AFTERWARDS = {
    "_catch_up",
    "changed_slots",
    "_judge",
    "mismatches",
    "read",
    "on_cuda",
    "shutdown",
}
"""Where the host may wait: when the compute stream has been waited for, and at the end."""


def judged(
    connector: str, delay: Delay | None, engine: str, scheduling: str, tmp_path: Path
) -> tuple[CaseReport, list[Note]]:
    variant = SPEC.cases["streams.save-then-load"].variants([engine], [scheduling], ["compute"])[0]
    declared = {"store": True, "saves": "all", "chunk_tokens": 4}
    target = Target(
        connector,
        {"store": "{tmp}/store", "async_saves": True},
        capabilities=declared,
        device="cuda",
    )
    with emulate(delay) as cuda, vllm_on_cuda(cuda):
        return run_and_judge(variant, target, SPEC, seed=0, tmp=tmp_path / "run"), cuda.notes


def failed(report: CaseReport) -> set[str]:
    assert report.harness_error is None
    return {row.requirement for row in report.rows if row.verdict == "FAIL"}


@pytest.mark.parametrize(
    ("engine", "scheduling", "delay"),
    [
        ("reference", "sync", "transfers"),
        ("reference", "async", "compute"),
        ("vllm", "async", None),
        *(
            pytest.param(engine, scheduling, delay, marks=pytest.mark.long)
            for engine in ("reference", "vllm")
            for scheduling in ("sync", "async")
            for delay in (None, "compute", "transfers")
        ),
    ],
)
def test_a_correct_connector_passes_and_nobody_waits(
    delay: Delay | None, engine: str, scheduling: str, tmp_path: Path
) -> None:
    report, notes = judged(
        "kvconform.refimpl.streamed:StreamedConnector", delay, engine, scheduling, tmp_path
    )
    assert failed(report) == set() and not report.unmet
    assert {note.kind for note in notes} == {"sync"}
    assert {note.where.rpartition(" in ")[2] for note in notes} <= AFTERWARDS


@pytest.mark.parametrize(
    ("defect", "delay", "requirement"),
    [
        ("SavesTooEarly", "compute", "save.confirmed"),
        ("NobodyWaits", "transfers", "load.before-read"),
        ("PublishesTooEarly", "transfers", "load.content"),
    ],
)
def test_a_missing_wait_is_wrong_bytes(
    defect: str, delay: Delay, requirement: str, tmp_path: Path
) -> None:
    report, _ = judged(
        f"kvconform.refimpl.defects.streams:{defect}", delay, "reference", "sync", tmp_path
    )
    assert requirement in failed(report)


def test_the_reference_connector_needs_no_streams_of_its_own(tmp_path: Path) -> None:
    report, _ = judged(
        "kvconform.refimpl.connector:ReferenceConnector", "compute", "reference", "async", tmp_path
    )
    assert failed(report) == set()


def test_work_is_judged_in_order_when_the_step_is_over() -> None:
    with emulate("compute"), gpu.opened("cuda", "compute") as cuda:
        assert isinstance(cuda, OnCuda)
        memory, seen = cuda.allocate(4), list[float]()
        for value in (1.0, 2.0):
            cuda.launch(
                lambda value=value: memory.fill_(value).sum(),
                lambda total: seen.append(total.item()),
            )
        assert seen == [] and memory.is_cuda
        cuda.finish()
        assert seen == [4.0, 8.0]


def test_slow_transfers_hold_every_stream_but_the_compute_stream(held: list[str]) -> None:
    with emulate(None):
        with gpu.opened("cuda", "transfers"):
            compute, other = torch.cuda.current_stream(), torch.cuda.Stream()
            with torch.cuda.stream(other):
                pass
            other.wait_event(compute.record_event())
            other.wait_stream(compute)
            compute.record_event().wait(other)
            torch.cuda.set_stream(other)
            torch.cuda.set_stream(compute)
            before = len(held)
            compute.wait_stream(other)
            compute.wait_event(other.record_event())
            other.record_event().wait()
            with torch.cuda.stream(compute):
                pass
            assert len(held) == before and len(held) >= 5
            assert set(held) == {f"hold {other.cuda_stream}"}
        held.clear()
        with torch.cuda.stream(other):
            pass
        assert not held


@pytest.mark.parametrize("slow", ["compute", "transfers"])
def test_a_host_that_waits_releases_all_streams(slow: str, held: list[str]) -> None:
    with emulate(None):
        with gpu.opened("cuda", slow):
            stream = torch.cuda.Stream()
            for waits in (
                torch.cuda.synchronize,
                stream.synchronize,
                stream.record_event().synchronize,
            ):
                held.clear()
                waits()
                assert held == ["release"]
        held.clear()
        stream.synchronize()
        assert not held


def test_transfers_are_released_only_if_the_compute_stream_waits_for_them(
    held: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with emulate(None), gpu.opened("cuda", "transfers") as cuda:
        cuda.launch(lambda: None)
        cuda.finish()
        assert not held
        monkeypatch.setattr(type(torch.cuda.current_stream()), "query", lambda self: False)
        cuda.launch(lambda: None)
        cuda.finish()
        assert held == ["release"]


def test_a_slow_compute_stream_is_held_once_per_step_and_waited_for(held: list[str]) -> None:
    with emulate("compute") as emulated, gpu.opened("cuda", "compute") as cuda:
        memory = cuda.allocate(4)
        for _ in range(2):
            held.clear()
            cuda.launch(lambda: memory.add_(1))
            cuda.launch(lambda: memory.add_(1))
            assert held == [f"hold {torch.cuda.current_stream().cuda_stream}"]
            assert emulated.machine.compute.entries
            cuda.finish()
            assert held[1:] == ["release"] and not emulated.machine.compute.entries
