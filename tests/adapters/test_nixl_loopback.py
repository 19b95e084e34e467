# SPDX-License-Identifier: Apache-2.0
"""Tests of the adapter `nixl-loopback`: it leaves the process unchanged.

The suite must notice an adapter that works wrongly.

Needs NIXL: `nox -s tests -- --install nixl==1.5.1 tests/adapters`.
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip(
    "nixl._api", reason="NIXL is not installed; this file's first lines say how to run it"
)


from adapters_rig import PLAIN, judged, noticed, row
from kvconform.adapters import nixl_loopback as adapter
from kvconform.adapters import registry as adapters

ENTRY = "nixl"


@pytest.fixture(autouse=True)
def _cores() -> Any:
    """Whatever a broken adapter does to this thread, the next test has all cores."""
    before = os.sched_getaffinity(0)
    yield
    os.sched_setaffinity(0, before)


def test_kv_arrives_and_the_process_is_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cores = os.sched_getaffinity(0)
    report = judged(ENTRY, PLAIN, tmp_path, monkeypatch)
    assert not noticed(report) and row(report, "transfer.delivered").exercised == 2
    assert os.sched_getaffinity(0) == cores


def test_kernels_that_take_no_such_block_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the adapter did nothing about block sizes.

    The machine's kernel has its own block size, and cannot use blocks of 4 tokens.
    """
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    adapters.install(["nixl-loopback"])
    monkeypatch.setattr(
        base_worker, "get_current_attn_backends", lambda *_, **__: [CPUAttentionBackend]
    )
    assert noticed(judged(ENTRY, PLAIN, tmp_path, monkeypatch))


def test_a_thread_that_is_left_on_one_core_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Show that the test above can fail: the thread stays on the core that the connector chose."""
    cores = os.sched_getaffinity(0)
    if len(cores) < 2:
        pytest.skip("this machine has one core")
    monkeypatch.setattr(adapter, "_cores", nullcontext)
    judged(ENTRY, PLAIN, tmp_path, monkeypatch)
    assert os.sched_getaffinity(0) != cores
