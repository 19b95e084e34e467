# SPDX-License-Identifier: Apache-2.0
"""Tests of the adapter `hf3fs-mock`: vLLM's HF3FSKVConnector with its own metadata server.

The suite must notice an adapter that copies wrongly, and must find the connector's own bugs.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip(
    "vllm.distributed.kv_transfer.kv_connector.v1.hf3fs.hf3fs_connector",
    reason="this vLLM has no HF3FS connector",
)

from kvconform.adapters import registry as adapters
from kvconform.config.settings import load
from kvconform.config.target import Target
from kvconform.contract.loader import load_spec
from kvconform.judge.records import CaseReport, Verdict
from kvconform.process.servers import Servers
from kvconform.run import smoke
from kvconform.run.case import run_and_judge

SPEC = load_spec()
PLAIN = "chunked.boundaries[vllm-sync-v1-d1-b4-slow-compute]"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    """The catalogue's connector, and its server."""
    tmp = tmp_path_factory.mktemp("hf3fs")
    settings = load({"connector": "catalogue:hf3fs"}, start=Path("/"))
    with Servers(settings, tmp / "servers", tmp) as servers, pytest.MonkeyPatch.context() as patch:
        settings = servers.settle(settings)
        for name, value in settings.env.items():
            patch.setenv(name, value)
        adapters.install(settings.adapters)
        yield smoke.target_of(settings)


def judged(name: str, target: Target, tmp: Path) -> CaseReport:
    variants = SPEC.cases[name.partition("[")[0]].variants(slow=["compute", "transfers"])
    variant = next(v for v in variants if v.id == name)
    return run_and_judge(variant, target, SPEC, seed=0, tmp=tmp / "case")


def failed(report: CaseReport) -> set[str]:
    """Requirements that count and failed."""
    return {r.requirement for r in report.rows if r.verdict == Verdict.FAIL and r.gating}


def exercised(report: CaseReport, requirement: str) -> int:
    return next(r.exercised for r in report.rows if r.requirement == requirement)


def test_it_stores_and_loads(target: Target, tmp_path: Path) -> None:
    handlers, threads = (
        [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)],
        threading.active_count(),
    )
    report = judged(PLAIN, target, tmp_path)
    assert not failed(report), [row.message for row in report.rows if row.verdict == Verdict.FAIL]
    assert exercised(report, "load.complete-or-failed") > 2
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert threading.active_count() <= threads + 1, "the process is as before"


def test_a_copy_of_the_wrong_block_is_noticed(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.hf3fs.hf3fs_connector import (
        HF3FSKVConnector as Connector,
    )

    copy: Any = Connector._gather_or_scatter_kv_caches

    def moved(self: Any, block_ids: list[int], buffers: Any, operation: str) -> None:
        copy(
            self,
            [block + 1 for block in block_ids] if operation == "gather" else block_ids,
            buffers,
            operation,
        )

    monkeypatch.setattr(Connector, "_gather_or_scatter_kv_caches", moved)
    assert failed(judged(PLAIN, target, tmp_path)) & {
        "load.position",
        "save.owned",
        "save.confirmed",
        "load.content",
    }


def test_a_load_that_does_not_happen_is_noticed(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.hf3fs.hf3fs_connector import (
        HF3FSKVConnector as Connector,
    )

    copy: Any = Connector._gather_or_scatter_kv_caches
    monkeypatch.setattr(
        Connector,
        "_gather_or_scatter_kv_caches",
        lambda self, b, p, how: copy(self, b, p, how) if how == "gather" else None,
    )
    assert "load.complete-or-failed" in failed(judged(PLAIN, target, tmp_path))


@pytest.mark.parametrize(
    ("case", "requirement"),
    [
        ("preemption.in-decode[vllm-sync-v1-d1-b4-slow-compute]", "load.position"),
        pytest.param(
            "lifecycle.fail-recompute[vllm-sync-v1-d1-b4-slow-compute]",
            "load.complete-or-failed",
            marks=pytest.mark.long,
        ),
        pytest.param(
            "lifecycle.abort-loading[vllm-sync-v1-d1-b4-slow-compute]",
            "report.one-way-out",
            marks=pytest.mark.long,
        ),
    ],
)
def test_what_was_found(case: str, requirement: str, target: Target, tmp_path: Path) -> None:
    """docs/results/findings/hf3fs-*.yaml.

    Fails when vLLM repairs the bug: then add the fixed release to the finding.
    """
    from kvconform.compat.vllm_api import VLLM_VERSION

    if not VLLM_VERSION.startswith(("0.31", "0.32", "0.33")):
        pytest.skip("not looked at with this vLLM")
    report = judged(case, replace(target, stall_seconds=0.5), tmp_path)  # one never ends
    found = {r.requirement for r in report.rows if r.verdict == Verdict.FAIL}
    assert requirement in found or (requirement == "load.position" and "save.owned" in found)
