# SPDX-License-Identifier: Apache-2.0
"""Tests of what engines leave when they are shut down: growth is found, and nothing else is."""

from __future__ import annotations

import json
import socket
import threading
from pathlib import Path
from typing import Any, ClassVar

import pytest

from kvconform.config.target import Target
from kvconform.contract.case import Device
from kvconform.contract.loader import load_spec
from kvconform.contract.steps import restarts_process
from kvconform.process import descriptors
from kvconform.refimpl.connector import ReferenceConnector
from kvconform.run import leftovers
from kvconform.run.records import Run
from kvconform.run.runner import run_variant


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leftovers, "PAUSES", (0.02, 0.1, 0.3, 0.6))


CASE = load_spec().cases["lifecycle.several-restarts"]
REFERENCE = "kvconform.refimpl.connector:ReferenceConnector"
DEFECTS = "kvconform.refimpl.defects.growth"


def after_restarts(
    connector: str, tmp_path: Path, engine: str = "reference", device: Device = "cpu"
) -> Run:
    slow = None if device == "cpu" else ["compute"]
    [variant] = CASE.variants([engine], None, slow)
    run = run_variant(variant, Target(connector, {}, device=device), seed=0, tmp=tmp_path)
    assert run.harness_error is None
    return run


def grown(run: Run) -> dict[str, list[int]]:
    assert [e["restarts"] for e in run.trace if e["kind"] == "restart.compared"] == [3]
    return {e["what"]: e["numbers"] for e in run.trace if e["kind"] == "restart.grown"}


class OfAll(ReferenceConnector):
    """Has one socket in the process, which each engine closes and opens again.

    It keeps the KV tensors of the latest engine only.
    """

    server: ClassVar[socket.socket | None] = None
    latest: ClassVar[Any] = None

    def register_kv_caches(self, kv_caches: Any) -> None:
        super().register_kv_caches(kv_caches)
        OfAll.latest = kv_caches
        if OfAll.server is not None:
            OfAll.server.close()
        OfAll.server = socket.create_server(("127.0.0.1", 0))


class ClosesLater(ReferenceConnector):
    """Closes its socket in a thread that takes its time, and that has the caches until then."""

    def register_kv_caches(self, kv_caches: Any) -> None:
        super().register_kv_caches(kv_caches)
        self._later = threading.Timer(
            0.15, lambda *held: held[0].close(), (socket.create_server(("127.0.0.1", 0)), kv_caches)
        )

    def shutdown(self) -> None:
        super().shutdown()
        later = self.__dict__.pop("_later", None)
        if later is not None:
            later.start()


class OnlyTwice(ReferenceConnector):
    """Notes its ids, and cannot be constructed a third time."""

    ids: ClassVar[list[str]] = []

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        self.ids.append(vllm_config.kv_transfer_config.engine_id)
        if len(set(self.ids)) > 2:
            raise RuntimeError("the port is taken")
        super().__init__(vllm_config, role, kv_cache_config)


@pytest.mark.parametrize("device", ["cpu", "emulated"])
@pytest.mark.parametrize("engine", ["reference", "vllm"])
@pytest.mark.parametrize("connector", [REFERENCE, "kvconform.refimpl.variants.threads:Threads"])
def test_the_harness_keeps_nothing_itself(
    connector: str, engine: str, device: Device, tmp_path: Path
) -> None:
    assert grown(after_restarts(connector, tmp_path, engine, device)) == {}


@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_kv_tensors_in_a_table_are_counted(device: Device, tmp_path: Path) -> None:
    run = after_restarts(f"{DEFECTS}:KeepsCaches", tmp_path, device=device)
    assert grown(run) == {"KV tensors": [1, 2, 3]}


@pytest.mark.skipif(not descriptors.can_list(), reason="the system does not list descriptors")
@pytest.mark.parametrize(
    ("name", "what"), [("LeavesSocket", "listening sockets"), ("LeavesFile", "files")]
)
def test_descriptors_are_counted_by_kind(name: str, what: str, tmp_path: Path) -> None:
    assert grown(after_restarts(f"{DEFECTS}:{name}", tmp_path)) == {what: [1, 2, 3]}


@pytest.mark.parametrize("name", ["OfAll", "ClosesLater"])
def test_what_is_shared_or_closed_a_little_later_is_not_reported(name: str, tmp_path: Path) -> None:
    assert grown(after_restarts(f"{__name__}:{name}", tmp_path)) == {}


def test_what_cannot_be_counted_is_not_said_to_be_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(descriptors, "FILES", tmp_path / "none")
    run = after_restarts(f"{DEFECTS}:LeavesFile", tmp_path / "run")
    assert grown(run) == {}
    [compared] = [e for e in run.trace if e["kind"] == "restart.compared"]
    assert compared["checked"] == ["KV tensors"]


def test_an_engine_that_cannot_start_is_the_last_one(tmp_path: Path) -> None:
    run = after_restarts(f"{__name__}:OnlyTwice", tmp_path)
    assert len(set(OnlyTwice.ids)) == 3, "each engine has an id of its own"
    steps = [e for e in run.trace if e["kind"] == "engine.lifecycle"]
    assert [e["op"] for e in steps if e["error"]] == ["start"]
    assert "the port is taken" in str(steps[-1]["error"])


def test_equal_runs_have_equal_traces(tmp_path: Path) -> None:
    traces = [after_restarts(f"{DEFECTS}:LeavesFile", tmp_path / n).trace for n in "ab"]
    assert json.dumps(traces[0]) == json.dumps(traces[1])


def test_both_kinds_of_restart_stay_in_the_process() -> None:
    assert not any(restarts_process(step) for step in CASE.steps)
