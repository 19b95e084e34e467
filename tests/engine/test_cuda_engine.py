# SPDX-License-Identifier: Apache-2.0
"""Tests of the engine as it runs on a GPU (`--device cuda`).

The device is emulated around the harness, the engine and the connector. A real GPU adds only its
own speed, and holds of its streams (tests/kv/test_held.py); here the emulation slows them down.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

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
from kvconform.kv.slowed import PATIENCE
from kvconform.run import runner
from kvconform.run.case import run_and_judge
from kvconform.run.isolation import FirstPartEnded

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
            self._places[stream] = stream
            self._last[stream] += 1
            asked.append(f"hold {stream}")

        def _ask(self, place: int, number: int, when: float) -> bool:
            asked.append(f"release {place}")
            return True

        def _ended(self, place: int) -> int:
            return 0

    monkeypatch.setattr(gpu, "on_this_device", lambda: nullcontext(Noted(lambda *_: None, 0, 0)))
    return asked


AFTERWARDS = {
    "finish",
    "settle",
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


Wait = Callable[[Any, Any, Any], object]


def by_stream(compute: Any, load: Any, event: Any) -> None:
    compute.wait_stream(load)


def by_event(compute: Any, load: Any, event: Any) -> None:
    compute.wait_event(event)


def by_the_event_itself(compute: Any, load: Any, event: Any) -> None:
    event.wait()


def by_an_event_for_any_device(compute: Any, load: Any, event: Any) -> None:
    event = torch.Event("cuda")
    event.record(load)
    compute.wait_event(event)


@pytest.mark.parametrize(
    "wait", [by_stream, by_event, by_the_event_itself, by_an_event_for_any_device]
)
def test_a_transfer_goes_on_when_the_compute_stream_waits_for_it(
    wait: Wait, held: list[str]
) -> None:
    with emulate(None), gpu.opened("cuda", "transfers") as cuda:
        compute, load, store = (torch.cuda.current_stream(), *two_streams())
        for stream in (load, store):
            with torch.cuda.stream(stream):
                pass
        event = torch.cuda.Event()
        event.record(load)
        cuda.launch(lambda: None)
        held.clear()
        cuda.finish()
        assert not held
        wait(compute, load, event)
        cuda.finish()
        assert held == [f"release {load.cuda_stream}"]


class OutlivedByReferences:
    """Has no weak references, which are never cleared when torch 2.11 frees a torch.cuda.Event."""

    __slots__ = ("__dict__",)

    def record(self, stream: Any = None) -> None:
        """Record nothing."""

    wait = synchronize = query = record


def test_events_are_not_noted_by_weak_references(
    held: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with emulate(None):
        monkeypatch.setattr(torch.cuda, "Event", OutlivedByReferences)
        with gpu.opened("cuda", "transfers"):
            load, _ = two_streams()
            with torch.cuda.stream(load):
                pass
            event = torch.cuda.Event()
            event.record(load)
            held.clear()
            event.synchronize()
            assert held == [f"release {load.cuda_stream}"]
        with gpu.opened("cuda", "transfers"):
            held.clear()
            event.synchronize()
            assert held == [], "what an earlier run has recorded is no place of this one"
        monkeypatch.undo()


class TakesNoAttributes(OutlivedByReferences):
    """Is like a torch.Event that was made before the run."""

    __slots__ = ()

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(name)


@pytest.mark.parametrize("kind", ["before the run", "takes no attributes"])
def test_a_wait_for_an_event_of_unknown_origin_releases_all(held: list[str], kind: str) -> None:
    with emulate(None):
        event: Any = torch.cuda.Event()
        event.record()
        with gpu.opened("cuda", "transfers"):
            if kind == "takes no attributes":
                event = torch.cuda.current_stream().record_event(TakesNoAttributes())
            streams = two_streams()
            for stream in streams:
                with torch.cuda.stream(stream):
                    pass
            held.clear()
            torch.cuda.current_stream().wait_event(event)
            assert {*held} == {f"release {stream.cuda_stream}" for stream in streams}


def test_events_are_of_the_types_that_they_are_without_holds() -> None:
    with emulate(None):

        def types() -> list[bool]:
            events = torch.cuda.Event(), torch.Event("cuda")
            found = [isinstance(event, torch.Event) for event in events]
            return [*found, issubclass(torch.cuda.Event, torch.Event), isinstance(1, torch.Event)]

        without = types()
        with gpu.opened("cuda", "transfers"):
            assert types() == without


@pytest.mark.parametrize(
    "wait",
    [
        lambda compute, load, event: load.synchronize(),
        lambda compute, load, event: event.synchronize(),
        lambda compute, load, event: [event.query() for _ in range(PATIENCE)],
        lambda compute, load, event: [load.query() for _ in range(PATIENCE)],
    ],
    ids=["stream", "event", "polls of the event", "polls of the stream"],
)
def test_a_transfer_goes_on_when_the_host_waits_for_it(
    wait: Wait, held: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with emulate(None):
        for owner in (torch.cuda.Stream, torch.cuda.Event):
            monkeypatch.setattr(owner, "query", lambda self: False)
        with gpu.opened("cuda", "transfers"):
            load, store = two_streams()
            for stream in (load, store):
                with torch.cuda.stream(stream):
                    pass
            event = load.record_event()
            held.clear()
            event.query()
            assert not held
            wait(torch.cuda.current_stream(), load, event)
            assert held == [f"release {load.cuda_stream}"]
            torch.cuda.synchronize()
            assert held[1:] == [f"release {store.cuda_stream}"]
        monkeypatch.undo()


def test_a_host_that_waits_for_a_save_waits_for_the_compute_stream_only_if_the_save_does(
    held: list[str],
) -> None:
    with emulate(None), gpu.opened("cuda", "compute") as cuda:
        compute, save, early = (torch.cuda.current_stream(), *two_streams())
        cuda.launch(lambda: None)
        save.wait_stream(compute)
        held.clear()
        early.synchronize()
        assert not held
        save.synchronize()
        assert held == [f"release {compute.cuda_stream}"]


def two_streams() -> tuple[Any, Any]:
    return torch.cuda.Stream(), torch.cuda.Stream()


def test_a_slow_compute_stream_is_held_once_per_step_and_waited_for(held: list[str]) -> None:
    with emulate("compute") as emulated, gpu.opened("cuda", "compute") as cuda:
        memory = cuda.allocate(4)
        for _ in range(2):
            held.clear()
            cuda.launch(lambda: memory.add_(1))
            cuda.launch(lambda: memory.add_(1))
            compute = torch.cuda.current_stream().cuda_stream
            assert held == [f"hold {compute}"] and emulated.machine.compute.entries
            cuda.finish()
            assert held[1:] == [f"release {compute}"] and not emulated.machine.compute.entries


def test_no_process_is_forked_that_could_not_use_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []

    def afresh(*_: Any, reseeded: bool, **__: Any) -> Any:
        asked.append(reseeded)
        raise FirstPartEnded(None, "enough was seen")

    monkeypatch.setattr(runner, "run_first_part_afresh", afresh)
    monkeypatch.setattr(runner, "run_first_part", None)
    for case, reseeded in (
        ("lifecycle.restart-process", False),
        ("lifecycle.restart-interpreter", True),
    ):
        variant = SPEC.cases[case].variants(["reference"])[0]
        target = Target(
            "kvconform.refimpl.connector:ReferenceConnector",
            {"store": "{tmp}/store"},
            device="cuda",
        )
        with emulate(None) as cuda, vllm_on_cuda(cuda):
            made = runner.run_variant(variant, target, seed=0, tmp=tmp_path / case)
        assert (made.lacks, asked.pop()) == ("enough was seen", reseeded)
