# SPDX-License-Identifier: Apache-2.0
"""Tests of the engine on a device with streams: what waits, what is reported, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvconform.kv import gpu
from places import ROOT

pytest.importorskip("vllm")
import torch

from kvconform.config.settings import Settings
from kvconform.config.target import Target
from kvconform.contract.case import SLOW, Variant
from kvconform.contract.loader import load_spec
from kvconform.emulation.note import NotEmulated
from kvconform.errors import EnvironmentProblem, UsageError
from kvconform.judge.records import CaseReport
from kvconform.kv import device
from kvconform.refimpl.streamed import StreamedConnector
from kvconform.refimpl.variants.registry import STREAMED
from kvconform.run.case import run_and_judge
from kvconform.run.smoke import check

SPEC = load_spec()
STREAMS = [case for case in SPEC.cases.values() if case.area == "streams"]
DECLARED = {"store": True, "saves": "all", "chunk_tokens": 4}


class Graphs(StreamedConnector):
    """Captures a CUDA graph."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        torch.cuda.CUDAGraph()
        super().start_load_kv(forward_context, **kwargs)


class Tries(StreamedConnector):
    """Does the same, and goes on without, when it has requests."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self._metadata().saves:
            try:
                torch.cuda.CUDAGraph()
            except RuntimeError:
                return
        super().start_load_kv(forward_context, **kwargs)


def runs(case: str, slow: str, **settings: Any) -> Variant:
    return next(iter(SPEC.cases[case].variants(["reference"], ["sync"], [slow])))


def judged(connector: str, tmp_path: Path, variant: Variant, **extra: Any) -> CaseReport:
    target = Target(
        connector,
        {"store": "{tmp}/store", **extra},
        capabilities={**DECLARED, **{k: v for k, v in extra.items() if k in DECLARED}},
        device="emulated",
    )
    return run_and_judge(variant, target, SPEC, seed=0, tmp=tmp_path / "run")


def verdicts(report: CaseReport) -> dict[str, str]:
    return {row.requirement: row.verdict for row in report.rows if row.kind == "requirement"}


def test_on_the_cpu_all_is_done_at_once() -> None:
    seen: list[int] = []
    device.current.launch(lambda: 3, seen.append)
    assert seen == [3] and not device.current.streamed


def test_a_slow_compute_stream_waits_until_the_step_ends() -> None:
    seen: list[str] = []
    with gpu.opened("emulated", "compute") as emulated:
        emulated.launch(lambda: seen.append("work"), lambda _: seen.append("judged"))
        assert seen == []
        emulated.finish()
        assert seen == ["work", "judged"]
    assert device.current.streamed is False and not torch.cuda.is_available()


def test_the_harness_waits_for_nobody_and_is_not_noted() -> None:
    with gpu.opened("emulated", "transfers") as emulated:
        memory = emulated.allocate(8)
        assert memory.sum().item() == 0 and emulated.notes() == []
        with emulated.calling():
            assert memory.is_cuda and torch.cuda.is_available()
            memory.cpu()
        (note,) = emulated.notes()
        assert (
            note["what"] == "sync"
            and "test_device.py" in note["text"]
            and str(ROOT) not in note["text"]
        )


@pytest.mark.parametrize(
    ("name", "slow"),
    [
        pytest.param(name, slow, marks=[pytest.mark.long] if number and slow == "compute" else [])
        for number, name in enumerate(STREAMED)
        for slow in SLOW
    ],
)
def test_streams_that_wait_pass_everything(name: str, slow: str, tmp_path: Path) -> None:
    connector, extra = STREAMED[name]
    for number, case in enumerate(STREAMS):
        report = judged(connector, tmp_path / str(number), runs(case.id, slow), **extra)
        found = verdicts(report)
        assert report.harness_error is None and not report.unmet
        assert {
            req for req, verdict in found.items() if verdict in ("FAIL", "BLOCKED", "ERROR")
        } == set()
        at_stake = "streams.save-after-write" if slow == "compute" else "streams.load-before-use"
        assert found[at_stake] == "PASS"


def test_on_the_cpu_streams_cannot_be_judged(tmp_path: Path) -> None:
    target = Target(
        "kvconform.refimpl.connector:ReferenceConnector", {"store": "{tmp}"}, capabilities=DECLARED
    )
    variant = next(iter(STREAMS[0].variants(["reference"], ["sync"])))
    found = verdicts(run_and_judge(variant, target, SPEC, seed=0, tmp=tmp_path))
    assert (
        found["streams.save-after-write"] == found["streams.hooks-do-not-wait"] == "UNOBSERVABLE"
        and found["save.owned"] == "PASS"
    )


def test_the_same_run_gives_the_same_trace(tmp_path: Path) -> None:
    variant, waits = (
        runs("streams.save-then-load", "compute"),
        "kvconform.refimpl.defects.streams:WaitsInTheHook",
    )
    first, second = (
        judged(waits, tmp_path / part, variant, layerwise=True, async_saves=True).trace
        for part in ("a", "b")
    )
    assert first == second and any(event["kind"] == "device.note" for event in first or ())


def test_an_early_read_is_told(tmp_path: Path) -> None:
    report = judged(
        "kvconform.refimpl.defects.streams:SavesTooEarly",
        tmp_path,
        runs("streams.save-then-load", "compute"),
        async_saves=True,
    )
    assert verdicts(report)["streams.save-after-write"] == "FAIL"
    notes = [
        event
        for event in report.trace
        if event["kind"] == "device.note" and event["what"] == "read_early"
    ]
    assert notes and "moving.py" in notes[0]["text"]


@pytest.mark.parametrize("name", ["Graphs", "Tries"])
def test_what_cannot_be_emulated_is_unsupported(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = judged(f"{__name__}:{name}", tmp_path, runs("streams.save-then-load", "compute"))
    assert {row.verdict for row in report.rows} == {"UNSUPPORTED"}
    assert all("The CUDA emulation has no" in row.message for row in report.rows)


def test_a_connector_that_never_works_there_is_told_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        EnvironmentProblem,
        match=(
            r"Graphs cannot run on the emulated device \(docs/emulation.md\): The CUDA emulation "
            r"has no"
        ),
    ):
        check(Target(f"{__name__}:Graphs", {"store": "{tmp}"}, device="emulated"), tmp_path, 120.0)


def test_not_emulated_has_a_sentence() -> None:
    assert str(NotEmulated("graphs")) == "The CUDA emulation has no graphs."
    NotEmulated.raised.pop()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_cuda_is_refused() -> None:
    with (
        pytest.raises(EnvironmentProblem, match="--emulate-cuda does without one"),
        gpu.opened("cuda", "compute"),
    ):
        pass


def test_an_emulation_of_what_is_there_is_refused() -> None:
    with pytest.raises(UsageError, match="it needs --device cpu"):
        _ = Settings(device="cuda", emulate_cuda=True).slows


def test_slow_streams_want_a_device_with_streams() -> None:
    with pytest.raises(UsageError, match="it needs --emulate-cuda"):
        _ = Settings(slow="compute").slows


def test_who_needs_cuda_is_told_of_the_emulation(tmp_path: Path) -> None:
    with pytest.raises(
        EnvironmentProblem, match="it needs CUDA, which --emulate-cuda stands in for"
    ):
        check(
            Target("kvconform.refimpl.streamed:StreamedConnector", {"store": "{tmp}"}),
            tmp_path,
            120.0,
        )


class WildIndex(StreamedConnector):
    """Reads a slot that does not exist, on its own stream."""

    def _slots(self, transfer: Any, piece: Any, device: Any) -> Any:
        return super()._slots(transfer, piece, device) + 100_000


def test_a_fault_of_queued_work_is_the_connectors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for slow in SLOW:
        report = judged(
            f"{__name__}:WildIndex", tmp_path / slow, runs("streams.save-then-load", slow)
        )
        assert report.harness_error is None
        (row,) = [
            row
            for row in report.rows
            if row.verdict == "FAIL" and row.requirement == "hook.no-raise"
        ]
        assert "DeviceFault" in row.message and "out of bounds" in row.message


def test_the_axis_of_slow_streams() -> None:
    assert Settings().slows is None and Settings(emulate_cuda=True).slows == [
        "compute",
        "transfers",
    ]
    assert Settings(device="cuda", slow="transfers").slows == ["transfers"]
    variants = SPEC.cases["streams.save-then-load"].variants(["vllm"], ["sync"], SLOW)
    assert [v.id.partition("-b4")[2] for v in variants] == ["-slow-compute]", "-slow-transfers]"]
    assert [v.axes["slow"] for v in variants] == ["compute", "transfers"]
