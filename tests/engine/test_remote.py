# SPDX-License-Identifier: Apache-2.0
"""Tests of the worker half in a separate process.

The run is the same, only pickled values are shared, and no process is left behind.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from core_rig import REFERENCE, ROUND_TRIP, check_ok, run_case, select
from kvconform.compat.vllm_api import KVConnectorMetadata
from kvconform.process import watchdog
from kvconform.refimpl.connector import ReferenceConnector
from places import ROOT


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fresh interpreter imports this module's connectors by their name, from the checkout."""
    monkeypatch.syspath_prepend(str(ROOT))


class SharesByModule(ReferenceConnector):
    """Its halves talk through a variable of the module, which only works within one process."""

    requests: dict[str, int] = {}

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self.requests[request.request_id] = num_external_tokens
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for load in self._metadata().loads:
            self.requests[load.req]
        super().start_load_kv(forward_context, **kwargs)


class Locked(KVConnectorMetadata):
    """Metadata that does not pickle."""

    def __init__(self) -> None:
        self.lock = threading.Lock()


class Unpicklable(ReferenceConnector):
    """Passes a lock to its worker."""

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        super().build_connector_meta(scheduler_output)
        return Locked()


class Dies(ReferenceConnector):
    """Takes its process with it."""

    def wait_for_save(self) -> None:
        os._exit(3)


class Hangs(ReferenceConnector):
    """Never returns."""

    def wait_for_save(self) -> None:
        time.sleep(60)


class CannotStart(ReferenceConnector):
    """Its worker half cannot be constructed."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if role.name == "WORKER":
            raise OSError("no device")


class CannotStop(ReferenceConnector):
    """Raises when its worker half is shut down."""

    def shutdown(self) -> None:
        if self._role.name == "WORKER":
            raise OSError("busy")


@pytest.fixture(autouse=True)
def no_process_left() -> Any:
    yield
    for _ in range(100):
        if not multiprocessing.active_children():
            break
        time.sleep(0.02)
    assert multiprocessing.active_children() == []


def apart(connector: str | type, tmp_path: Path, **more: Any) -> Any:
    name = connector if isinstance(connector, str) else f"{__name__}:{connector.__name__}"
    return run_case(name, ROUND_TRIP, tmp_path, relation="second-process", **more)


@pytest.mark.parametrize(
    ("engine", "runner"), [("reference", "v1"), ("reference", "v2"), ("vllm", "v1"), ("vllm", "v2")]
)
def test_a_run_with_the_worker_apart_is_the_same(engine: str, runner: str, tmp_path: Path) -> None:
    together = run_case(REFERENCE, ROUND_TRIP, tmp_path / "one", engine=engine, runner=runner)
    run = apart(REFERENCE, tmp_path / "two", engine=engine, runner=runner)
    check_ok(together), check_ok(run)
    for kind in ("sample", "lookup", "alloc", "load.due", "kv.computed"):
        assert [{**e, "seq": 0} for e in select(run.trace, kind)] == [
            {**e, "seq": 0} for e in select(together.trace, kind)
        ], kind
    assert select(run.trace, "load.due")[0]["missing"] == []
    hooks = [
        [e["hook"] for e in select(r.trace, "hook.called", half="worker", depth=0)]
        for r in (together, run)
    ]
    assert hooks[0] == hooks[1]


@pytest.mark.parametrize(
    ("cls", "hook", "text"),
    [
        (SharesByModule, "start_load_kv", "KeyError"),
        (Unpicklable, "handle_preemptions", "lock"),
        (Dies, "wait_for_save", "died"),
        (CannotStart, "__init__", "OSError: no device"),
        (CannotStop, "shutdown", "OSError: busy"),
    ],
)
def test_what_goes_wrong_there_is_the_connectors(
    cls: type, hook: str, text: str, tmp_path: Path
) -> None:
    run = apart(cls, tmp_path)
    assert run.harness_error is None
    (event,) = select(run.trace, "engine.crash")
    assert (event["where"], event["hook"]) == ("hook", hook) and text in event["error"]


def test_a_half_that_hangs_is_given_up(tmp_path: Path) -> None:
    watchdog.start(limit=3)
    try:
        run = apart(Hangs, tmp_path)
    finally:
        watchdog.stop()
    assert run.harness_error is None
    assert select(run.trace, "hook.returned", hook="wait_for_save")[0]["timed_out"] is True
