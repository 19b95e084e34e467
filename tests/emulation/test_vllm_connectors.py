# SPDX-License-Identifier: Apache-2.0
"""Tests of vLLM's own offloading connectors under the emulation.

They store and load, and are detected when they do not wait.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip(
    "vllm.v1.simple_kv_offload.copy_backend", reason="this vLLM has no SimpleCPUOffloadConnector"
)
import torch
from vllm.v1.simple_kv_offload.copy_backend import DmaCopyBackend

from kvconform.config.target import Target
from kvconform.contract.loader import load_spec
from kvconform.emulation.stream import GenericStream
from kvconform.emulation.vllm_on_cuda import Copies
from kvconform.judge.records import CaseReport
from kvconform.run.case import run_and_judge
from warm_rig import Warm

SPEC = load_spec()
OFFLOADING = ("OffloadingConnector", {"cpu_bytes_to_use": 1_000_000})
SIMPLE = ("SimpleCPUOffloadConnector", {"cpu_bytes_to_use": 1_000_000})
ON_DISK = {
    "kv_offload_backend": "disk",
    "disk_path": "{tmp}/disk",
    "disk_capacity_bytes": 1_000_000,
    "use_page_cache": True,
}


def judged(
    connector: tuple[str, dict[str, Any]], tmp_path: Path, engine: str, scheduling: str, slow: str
) -> CaseReport:
    """Prompts that are computed in chunks, saved, forgotten by the engine, and loaded."""
    variant = next(iter(SPEC.cases["chunked.boundaries"].variants([engine], [scheduling], [slow])))
    report = run_and_judge(
        variant,
        Target(*connector, device="emulated"),
        SPEC,
        seed=0,
        tmp=tmp_path / "run",
    )
    assert report.harness_error is None
    return report


def failed(report: CaseReport) -> set[str]:
    return {row.requirement for row in report.rows if row.verdict == "FAIL" and row.level == "MUST"}


def found_out(report: CaseReport) -> None:
    """It saved what was not there yet: the copy is named, and wrong bytes came back."""
    assert "streams.save-after-write" in failed(report)
    assert any(event["wrong"] for event in report.trace if event["kind"] == "load.due")


@pytest.mark.parametrize("slow", ["compute", "transfers"])
@pytest.mark.parametrize(("engine", "scheduling"), [("reference", "sync"), ("vllm", "async")])
@pytest.mark.parametrize(
    "connector",
    [
        OFFLOADING,
        (OFFLOADING[0], OFFLOADING[1] | {"block_size": 8}),
        SIMPLE,
        (SIMPLE[0], SIMPLE[1] | ON_DISK),
    ],
    ids=["offloading", "larger-blocks", "simple", "disk"],
)
def test_it_stores_and_loads(
    connector: Any, engine: str, scheduling: str, slow: str, tmp_path: Path
) -> None:
    report = judged(connector, tmp_path, engine, scheduling, slow)
    assert failed(report) == set()
    due = [event for event in report.trace if event["kind"] == "load.due"]
    assert sum(event["granted"] for event in due) >= 24
    assert not any(event["missing"] or event["wrong"] for event in due)


def test_who_saves_what_is_about_to_be_evicted_is_not_asked_for_more(tmp_path: Path) -> None:
    lazy = (SIMPLE[0], SIMPLE[1] | {"lazy_offload": True})
    report = judged(lazy, tmp_path, "reference", "sync", "transfers")
    assert failed(report) == set()
    assert report.capabilities["store"] and report.capabilities["best_effort"]
    assert not judged(SIMPLE, tmp_path, "reference", "sync", "transfers").capabilities[
        "best_effort"
    ]


def test_blocks_in_the_wrong_place_are_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    right = Copies.swap_blocks_batch

    def swapped(
        self: Copies, src: torch.Tensor, dst: torch.Tensor, *rest: Any, **kwargs: Any
    ) -> None:
        right(
            self,
            src,
            torch.cat([dst[1:2], dst[:1], dst[2:]]) if len(dst) > 1 else dst,
            *rest,
            **kwargs,
        )

    monkeypatch.setattr(Copies, "swap_blocks_batch", swapped)
    assert "load.position" in failed(judged(OFFLOADING, tmp_path, "reference", "sync", "transfers"))


@pytest.mark.parametrize("engine", ["reference", "vllm"])
def test_saves_that_do_not_wait_for_the_forward_pass_are_found(
    engine: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(GenericStream, "wait_stream", lambda self, stream: None)
    found_out(judged(OFFLOADING, tmp_path, engine, "async", "compute"))


@pytest.mark.parametrize("engine", ["reference", "vllm"])
def test_so_are_those_of_a_thread_that_does_not(
    engine: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    launch = DmaCopyBackend.launch_copy

    def unordered(self: Any, *args: Any, wait_event: Any = None, **kwargs: Any) -> None:
        launch(self, *args, **kwargs)

    monkeypatch.setattr(DmaCopyBackend, "launch_copy", unordered)
    found_out(judged(SIMPLE, tmp_path, engine, "async", "compute"))


@pytest.mark.e2e
@pytest.mark.long
def test_the_whole_program_judges_one(tmp_path: Path, warm: Warm) -> None:
    device = ("--device", "cpu", "--emulate-cuda", "--engine", "vllm", "--workers", "1")
    extra = ("--extra-config", '{"cpu_bytes_to_use": 1000000}', "-k", "chunked.boundaries")
    options = (*device, *extra, "--report-dir", "report")
    done = warm.run("OffloadingConnector", *options, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "CONFORMANT in what was selected" in done.stdout
