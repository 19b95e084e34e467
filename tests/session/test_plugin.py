# SPDX-License-Identifier: Apache-2.0
"""Tests of the pytest plugin: inert without --connector, usable without `kvconform run`."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path

import pytest

from program_rig import FAKE, python

INERT = """
import sys

def test_nothing_heavy(pytestconfig):
    assert pytestconfig.pluginmanager.hasplugin("kvconform")
    ours = {name for name in sys.modules if name.split(".")[0] == "kvconform"}
    assert ours == {"kvconform", "kvconform.session", "kvconform.session.plugin"}, ours
    assert not {"vllm", "torch", "rich", "ruamel.yaml", "kvconform.config.settings"} & \
set(sys.modules)
    assert pytestconfig.getoption("dist", "no") == "no"
"""


def pytest_in(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    plugins = ("-p", "no:cacheprovider", "-p", "no:hypothesispytest")
    return python("-P", "-m", "pytest", *plugins, *arguments, cwd=folder, env=FAKE)


def test_inert_without_connector(tmp_path: Path) -> None:
    (tmp_path / "test_x.py").write_text(INERT)
    done = pytest_in(tmp_path, "-q", "test_x.py")
    assert done.returncode == 0, done.stdout


def test_without_a_connector_there_is_a_sentence(tmp_path: Path) -> None:
    done = pytest_in(tmp_path, "-q", "--pyargs", "kvconform")
    assert done.returncode == 2
    assert (
        "name the connector: pytest --pyargs kvconform --connector package.module:Class"
        in done.stdout
    )


@pytest.mark.parametrize(
    ("option", "value"), [("--kvconform-hook-timeout", "-1"), ("--extra-config", "nope")]
)
def test_a_mistake_names_the_option_as_pytest_has_it(
    tmp_path: Path, option: str, value: str
) -> None:
    connector = ("--pyargs", "kvconform", "--connector", "json:Fake")
    done = pytest_in(tmp_path, *connector, option, value)
    assert f"ERROR: {option}" in done.stdout + done.stderr


def test_pytest_runs_it_too(tmp_path: Path) -> None:
    orders = json.dumps({"exit": ["lifecycle.abort-waiting"]})
    arguments = (
        "--pyargs",
        "kvconform",
        "--connector",
        "json:Fake",
        "--kvconform-engine",
        "reference",
        "--extra-config",
        orders,
    )
    done = pytest_in(
        tmp_path,
        *arguments,
        "--kvconform-scheduling",
        "sync",
        "-k",
        "lifecycle.abort",
        "--junitxml",
        "out.xml",
    )
    assert done.returncode == 1, done.stdout
    assert "hook.keeps-process" in done.stdout
    assert "NOT CONFORMANT" in done.stdout
    told = " ".join(done.stdout.replace("\\\n", " ").split())
    assert f"--extra-config {shlex.quote(orders)}" in told, "the command that shows it again"
    assert (tmp_path / "out.xml").exists()
    rows = [
        json.loads(line)
        for line in (tmp_path / "kvconform-report" / "report.jsonl").read_text().splitlines()
    ]
    assert {row["case"] for row in rows if row.get("verdict") == "FAIL"} == {
        "lifecycle.abort-waiting"
    }
    assert len({row["case"] for row in rows if row["type"] in ("row", "run")}) > 3


def test_mistakes_are_usage_errors(tmp_path: Path) -> None:
    done = pytest_in(tmp_path, "--pyargs", "kvconform", "--connector", "no_such_package.x:C")
    assert done.returncode == 4
    assert "ERROR: there is no package 'no_such_package'" in done.stderr
    assert "Traceback" not in done.stderr
