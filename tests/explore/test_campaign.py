# SPDX-License-Identifier: Apache-2.0
"""Tests of `kvconform explore` on planted defects.

It finds them, shrinks their workloads, and survives connectors that end the process.
"""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from kvconform.cli import main
from kvconform.config.settings import Settings, load
from kvconform.contract.loader import load_spec
from kvconform.explore import command
from kvconform.explore.campaign import Campaign
from kvconform.explore.pool import Pool
from kvconform.explore.races import races
from kvconform.run.isolation import RESEEDED
from places import BAD_CONNECTORS
from program_rig import kvconform

pytestmark = pytest.mark.e2e


def explore(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return kvconform("explore", *arguments, "-n", "1", "--out", "found", cwd=tmp_path)


def test_a_defect_is_found_and_made_small(tmp_path: Path) -> None:
    store = json.dumps({"store": "{tmp}/store"})
    connector = "kvconform.refimpl.defects.boundaries:LastToken"
    drawn = ["--examples", "8", "--seed", "2"]
    done = explore(tmp_path, connector, "--extra-config", store, *drawn, "--shrink", "30")
    assert done.returncode == 1, done.stdout + done.stderr
    files = sorted((tmp_path / "found").glob("*.yaml"))
    assert files
    spec = load_spec(cases=[str(path) for path in files[:1]])
    case = spec.cases[spec.own_cases[0]]
    assert sum(step.op == "add" for step in case.steps) <= 3 and len(case.steps) <= 15
    comment = [
        line for line in files[0].read_text(encoding="utf-8").splitlines() if line.startswith("#")
    ]
    assert any(
        line.startswith(f"# kvconform run {connector}") and "--case" in line for line in comment
    )


@pytest.mark.long
def test_the_reference_connector_survives_its_races(tmp_path: Path) -> None:
    done = explore(tmp_path, "--profile", "races", "--examples", "8")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "8 workloads" in done.stdout and "nothing failed" in done.stdout


def test_a_process_that_dies_is_a_failure_of_its_workload_alone(tmp_path: Path) -> None:
    settings = load(
        {"connector": "on_abort:Exits", "pythonpath": [str(BAD_CONNECTORS)], "workers": 1}
    )
    workloads = [
        each for each in races(["reference"], ["sync"], None, 0) if "saving" in each.data["id"]
    ][:6]
    with Pool(settings, tmp_path, 1) as pool:
        found = list(pool.outcomes(workloads))
    assert [workload for workload, _ in found] == workloads
    died = [
        outcome.failures[0].requirement == "process.died" if outcome.failures else False
        for _, outcome in found
    ]
    assert any(died) and not all(died) and pool.deaths == sum(died)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--profile", "hunt"], "give one of them"),
        (["--profile", "nothing"], "there is no profile 'nothing'"),
        (["no_such_package:X"], "no package 'no_such_package'"),
        (["--engine", "live"], "--seeds 20"),
        (["--engine", "vllm, reference", "no_such_package:X"], "no package 'no_such_package'"),
        (["--engine", "vllm,live"], "'vllm,live' is no engine or scheduling: name one, or all"),
        (
            ["--engine", "foo"],
            (
                "kvconform: there is no engine 'foo' of explore; "
                "there are reference and vllm, and all for both"
            ),
        ),
    ],
)
def test_what_is_wrong_is_told_in_a_sentence(
    arguments: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as done:
        main(["explore", *arguments, "-n", "1", "--out", "found"])
    assert done.value.code == 2 and said in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_has_a_bar_and_a_file_has_lines(
    terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "PAUSE", 1e-9)
    monkeypatch.setattr(command, "REFRESH", 0.0)
    out = io.StringIO()
    monkeypatch.setattr(out, "isatty", lambda: terminal)
    monkeypatch.setenv("TERM", "xterm")
    threads = threading.active_count()
    console = Console(file=out, force_terminal=True, width=80, color_system=None)
    campaign = Campaign(runs=97_312, seconds=4000.0)
    with command._Progress(console, 1_000_000) as progress:
        progress.print(campaign)
        assert ("per minute" in out.getvalue()) is not terminal
        assert threading.active_count() == threads, "it would count as the connector's"
    *_, last = (line for line in re.split("[\r\n]", out.getvalue()) if "workloads" in line)
    assert "97312/1000000 workloads, 24 per second" in last and "0 failures" in last
    assert ("━" in last) is terminal


@pytest.mark.parametrize("unfit", [{}, {"device": "cuda"}, {"debug": True}])
def test_a_campaign_has_a_process_that_forks_for_other_hash_seeds(
    unfit: dict[str, Any], tmp_path: Path
) -> None:
    """Each such workload would import vLLM otherwise."""
    assert RESEEDED not in os.environ
    with command._other_hash_seed(Settings(**unfit), tmp_path / "log"):
        assert (RESEEDED in os.environ) is not bool(unfit)
    assert RESEEDED not in os.environ
