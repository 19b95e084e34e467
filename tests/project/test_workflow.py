# SPDX-License-Identifier: Apache-2.0
"""Tests of the workflow files for a connector's repository.

Their commands are extracted and run, with stand-ins for git, pip and nox.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvconform.contract.yaml12 import parse
from kvconform.versions.__main__ import parser
from places import RIGS, ROOT

CI = ROOT / "fixtures" / "ci"
GITHUB = parse((CI / "github-actions.yml").read_text(encoding="utf-8"), "github-actions.yml")
BUILDKITE = parse((CI / "buildkite.yml").read_text(encoding="utf-8"), "buildkite.yml")
NOX = """#!{python}
import os, sys
mine, rest = sys.argv[1:sys.argv.index("--")], sys.argv[sys.argv.index("--") + 1:]
assert mine == ["-f", ".kvconform/noxfile.py", "-s", "conformance"], mine
for name in ("--vllm", "--install"):  # the noxfile's own
    place = rest.index(name)
    del rest[place:place + 2]
os.execv({python!r}, [{python!r}, "-m", "kvconform", "run", "--workers", "1", *rest])
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A connector's repository with its settings, and stand-in programs in `bin`."""
    here = tmp_path / "connector"
    (here / "bin").mkdir(parents=True)
    cases = '["lifecycle.api", "lifecycle.hook-order", "preemption.in-decode"]'
    (here / "kvconform.toml").write_text(
        f'connector = "json:Fake"\nselect = {cases}\nscheduling = "sync"\n', encoding="utf-8"
    )
    program(here, "nox", NOX.format(python=sys.executable))
    program(here, "kvconform", f'#!/bin/sh\nexec {sys.executable} -m kvconform "$@"\n')
    for name in ("git", "pip", "buildkite-agent"):
        program(here, name, f'#!/bin/sh\necho "{name} $*" >> said\n')
    return here


def program(here: Path, name: str, text: str) -> None:
    path = here / "bin" / name
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)


def shell(here: Path, command: str, env: dict[str, str]) -> int:
    """Run a command as a CI system does; returns its status."""
    path = f"{here / 'bin'}:{os.environ['PATH']}"
    modules = os.pathsep.join([str(RIGS), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    more = {
        "PATH": path,
        "KVCONFORM_RUNNER": "fake_runner:judge",
        "PYTHONPATH": modules,
        "NO_COLOR": "1",
    }
    return subprocess.run(
        ["bash", "-e", "-c", command], cwd=here, env={**os.environ, **env, **more}, timeout=240
    ).returncode


def cells(matrix: dict[str, list[Any]]) -> list[dict[str, str]]:
    return [
        dict(zip(matrix, map(str, values), strict=True))
        for values in itertools.product(*matrix.values())
    ]


def filled(text: str, cell: dict[str, str]) -> str:
    """The text with the matrix's values in it, in either system's notation."""
    return re.sub(r"\$?\{\{ ?matrix\.(\w+) ?\}\}", lambda match: cell[match[1]], text)


@pytest.mark.e2e
def test_github_actions(repository: Path) -> None:
    env = GITHUB["env"]
    shards, verdict = GITHUB["jobs"]["shard"], GITHUB["jobs"]["verdict"]
    assert (
        verdict["needs"] == "shard"
        and shards["strategy"]["matrix"]["vllm"] == verdict["strategy"]["matrix"]["vllm"]
    )
    artifacts: dict[str, Path] = {}
    for cell in [cell for cell in cells(shards["strategy"]["matrix"]) if cell["vllm"] == "0.32.0"]:
        for step in shards["steps"]:
            if "run" in step:
                assert shell(repository, filled(step["run"], cell), env) == 0
            elif step["uses"].startswith("actions/upload-artifact"):
                kept = repository.parent / filled(step["with"]["name"], cell)
                shutil.move(repository / step["with"]["path"], kept)
                artifacts[kept.name] = kept
    cell = {"vllm": "0.32.0"}
    for step in verdict["steps"]:
        if step.get("uses", "").startswith("actions/download-artifact"):
            pattern = filled(step["with"]["pattern"], cell)
            for name, kept in artifacts.items():
                assert Path(name).match(pattern)
                # each in a directory of its name
                shutil.copytree(kept, repository / step["with"]["path"] / name)
        elif "run" in step:
            assert shell(repository, filled(step["run"], cell), env) == 0
    assert_joint(repository / "report", parts=3)
    assert "git -C .kvconform checkout --quiet main" in (repository / "said").read_text()


@pytest.mark.e2e
@pytest.mark.long
def test_buildkite(repository: Path) -> None:
    env = BUILDKITE["env"]
    shards, wait, verdict = BUILDKITE["steps"]
    assert "wait" in wait and wait["continue_on_failure"] is True
    for cell in [cell for cell in cells(shards["matrix"]["setup"]) if cell["vllm"] == "0.32.0"]:
        for command in shards["commands"]:
            assert shell(repository, filled(command, cell), env) == 0
    for command in verdict["commands"]:
        assert shell(repository, filled(command, {"vllm": "0.32.0"}), env) == 0
    assert_joint(repository / "report", parts=3)


def assert_joint(report: Path, *, parts: int) -> None:
    summary = json.loads((report / "summary.json").read_text(encoding="utf-8"))
    header = json.loads((report / "report.jsonl").read_text(encoding="utf-8").splitlines()[0])
    assert (
        summary["verdict"] == "conformant"
        and summary["extra"]["runs_missing"] == []
        and "shard" not in header["extra"]
    )
    assert (
        len(
            list((report.parent / "reports").glob("*/report.jsonl"))
            or list((report.parent / "reports").glob("*/*/report.jsonl"))
        )
        == parts
    )


def test_the_number_of_shards_is_the_length_of_the_list() -> None:
    for text, count in (
        (
            str(GITHUB["jobs"]["shard"]["steps"]),
            len(GITHUB["jobs"]["shard"]["strategy"]["matrix"]["shard"]),
        ),
        (
            str(BUILDKITE["steps"][0]["commands"]),
            len(BUILDKITE["steps"][0]["matrix"]["setup"]["shard"]),
        ),
    ):
        assert re.findall(r"--shard \$?\{\{ ?matrix\.shard ?\}\}/(\d+)", text) == [str(count)]


def test_the_job_for_releases_has_options_that_exist() -> None:
    (command,) = (
        step["run"] for step in GITHUB["jobs"]["releases"]["steps"] if step.get("name") == "Compare"
    )
    words = command.split("-- ", 1)[1].replace('"', "").split()
    rest = [
        word
        for i, word in enumerate(words)
        if word not in ("--vllm", "--install") and words[i - 1] not in ("--vllm", "--install")
    ]
    found = parser().parse_args(["--at", "0.33.0=python", *rest])
    assert found.config == "$PWD/kvconform.toml" and found.report_dir == "$PWD/report"
