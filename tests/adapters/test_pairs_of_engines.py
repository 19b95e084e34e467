# SPDX-License-Identifier: Apache-2.0
"""Tests of the adapters `nixl-loopback` and `mooncake-loopback` with two engines.

KV goes from one engine to the other through the real packages. The suite must notice an adapter
that works wrongly.

Needs the packages nixl==1.5.1 and mooncake-transfer-engine-non-cuda==0.3.13.post1:
`nox -s tests -- --install PACKAGE tests/adapters`.
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from kvconform.adapters import registry as adapters
from kvconform.config.settings import load
from kvconform.contract.loader import load_spec
from kvconform.judge.records import CaseReport, Verdict
from kvconform.run import smoke
from kvconform.run.case import run_and_judge

SPEC = load_spec()
PLAIN = "transfer.prompt[vllm-sync-v1-d1-b4]"
PACKAGES = {"nixl": "nixl", "mooncake": "mooncake.engine"}


def installed(entry: str) -> None:
    """Skip unless the package is there, and its libraries."""
    try:
        importlib.import_module("nixl._api" if entry == "nixl" else PACKAGES[entry])
    except ImportError as missing:
        pytest.skip(
            f"{entry} cannot be imported ({missing}); this file's first lines say how to run it"
        )


def judged(entry: str, name: str, tmp: Path, monkeypatch: pytest.MonkeyPatch) -> CaseReport:
    settings = load({"connector": f"catalogue:{entry}"}, start=Path("/"))
    for key, value in settings.env.items():
        monkeypatch.setenv(key, value)
    adapters.install(settings.adapters)
    variant = next(v for v in SPEC.cases[name.partition("[")[0]].variants() if v.id == name)
    return run_and_judge(variant, smoke.target_of(settings), SPEC, seed=0, tmp=tmp / "case")


def failed(report: CaseReport) -> set[str]:
    return {r.requirement for r in report.rows if r.verdict == Verdict.FAIL and r.gating}


@pytest.mark.parametrize("entry", sorted(PACKAGES))
def test_kv_arrives(entry: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(entry)
    report = judged(entry, PLAIN, tmp_path, monkeypatch)
    assert not failed(report) and not report.unmet
    rows = {row.requirement: row for row in report.rows}
    assert (
        rows["transfer.delivered"].verdict == Verdict.PASS
        and rows["transfer.delivered"].exercised == 2
    )


def test_a_router_that_sends_to_the_wrong_engine_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed("mooncake")
    module: Any = importlib.import_module("kvconform.adapters.mooncake_loopback")
    monkeypatch.setattr(module, "_engine", lambda half: "another")
    assert failed(judged("mooncake", PLAIN, tmp_path, monkeypatch))


@pytest.mark.parametrize(
    ("entry", "case", "requirement"),
    [
        ("nixl", "transfer.replayed[vllm-sync-v1-d1-b4]", "transfer.fail-closed"),
        ("nixl", "transfer.incomplete[vllm-sync-v1-d1-b4]", "hook.no-raise"),
    ],
)
def test_what_was_found(
    entry: str, case: str, requirement: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """docs/results/findings/nixl-*.yaml; one of them is a risk.

    Fails when vLLM repairs the bug: then add the fixed release to the finding.
    """
    installed(entry)
    rows = judged(entry, case, tmp_path, monkeypatch).rows
    assert requirement in {row.requirement for row in rows if row.verdict == Verdict.FAIL}
