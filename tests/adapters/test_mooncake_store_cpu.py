# SPDX-License-Identifier: Apache-2.0
"""Tests of the adapter `mooncake-store-cpu`.

vLLM's MooncakeStoreConnector stores and loads through a private Mooncake store.
The suite must notice an adapter that works wrongly.

Needs the package mooncake-transfer-engine-non-cuda==0.3.13.post1:
`nox -s tests -- --install PACKAGE tests/adapters`.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip(
    "mooncake.store", reason="Mooncake is not installed; this file's first lines say how to run it"
)
pytest.importorskip(
    "vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.worker",
    reason="this vLLM has no MooncakeStoreConnector",
)

import torch

from adapters_rig import judged, noticed, row
from kvconform.adapters import mooncake_store_cpu as adapter
from kvconform.adapters import registry as adapters
from kvconform.judge.records import Verdict

if torch.cuda.is_available():
    pytest.skip(
        "the adapter stands in for CUDA's events, and there is CUDA", allow_module_level=True
    )

ENTRY, CASE = "mooncake-store", "chunked.boundaries[vllm-sync-v1-d1-b4]"


def test_it_stores_and_loads_and_closes_what_it_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: list[Any] = []
    close = adapter._close
    monkeypatch.setattr(adapter, "_close", lambda end: (ends.append(end), close(end)))
    threads: list[threading.Thread] = []
    end_all = adapter._end
    monkeypatch.setattr(adapter, "_end", lambda made: (threads.extend(made), end_all(made)))
    report = judged(ENTRY, CASE, tmp_path, monkeypatch)
    assert not noticed(report) and row(report, "load.complete-or-failed").exercised
    assert ends and all(end.ctx.closed for end in ends) and not adapter._made
    assert not any(getattr(end, "thread", None) in threading.enumerate() for end in ends)
    assert threads and not any(each.is_alive() for each in threads)
    assert not adapter._transferring


def test_an_event_that_fails_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The connector's thread waits for a step's event before it saves the step's KV."""
    adapters.install(["mooncake-store-cpu"])

    def fails(self: Any) -> None:
        raise RuntimeError("the event never comes")

    monkeypatch.setattr(adapter.Event, "synchronize", fails)
    report = judged(ENTRY, CASE, tmp_path, monkeypatch)
    # nothing was stored
    assert (
        noticed(report) or row(report, "load.complete-or-failed").verdict == Verdict.NOT_EXERCISED
    )


def test_events_of_a_device_that_is_not_there_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As without the adapter: torch has no events where it was built without CUDA."""
    adapters.install(["mooncake-store-cpu"])

    class Dummy:
        def __init__(self) -> None:
            raise RuntimeError("Tried to instantiate dummy base class Event")

    monkeypatch.setattr(torch.cuda, "Event", Dummy)
    assert "hook.no-raise" in noticed(judged(ENTRY, CASE, tmp_path, monkeypatch))
