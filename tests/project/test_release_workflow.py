# SPDX-License-Identifier: Apache-2.0
"""Tests of what publishes a release, and that the version is the same wherever it is named."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import kvconform
from kvconform.cli import app
from kvconform.contract.yaml12 import parse
from kvconform.dev import release
from places import ROOT

TEXT = (ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8")
WORKFLOW: Any = parse(TEXT, "release.yml")


def steps(job: str) -> list[Any]:
    return list(WORKFLOW["jobs"][job]["steps"])


def uses(job: str) -> list[str]:
    return [step["uses"].partition("@")[0] for step in steps(job) if "uses" in step]


def test_only_a_tag_publishes_and_only_what_was_checked() -> None:
    assert WORKFLOW["on"] == {"push": {"tags": ["v*"]}}
    (publish,) = (job for job in WORKFLOW["jobs"] if "pypa/gh-action-pypi-publish" in uses(job))
    assert WORKFLOW["jobs"][publish]["needs"] == "build"
    upload, download = steps("build")[-1]["with"], steps(publish)[0]["with"]
    assert upload["path"].startswith("dist/kvconform-")
    assert (upload["name"], download["path"]) == (download["name"], "dist")


def test_only_the_job_that_publishes_has_an_identity_and_it_runs_no_code_of_ours() -> None:
    assert WORKFLOW["permissions"] == {"contents": "read"}
    assert {name: job.get("permissions") for name, job in WORKFLOW["jobs"].items()} == {
        "build": None,
        "publish": {"id-token": "write"},
    }
    assert WORKFLOW["jobs"]["publish"]["environment"] == "pypi"
    assert not any("run" in step for step in steps("publish"))
    assert "secrets." not in TEXT


def test_actions_are_pinned_and_commands_hold_no_expressions() -> None:
    found = re.findall(r"uses: (\S+)", TEXT)
    assert found
    assert all(re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", action) for action in found)
    assert not any(
        "${{" in step.get("run", "") for job in ("build", "publish") for step in steps(job)
    )


def test_the_build_checks_the_tag() -> None:
    (step,) = (step for step in steps("build") if step.get("run", "").startswith("nox"))
    assert shlex.split(step["run"]) == ["nox", "-s", "build", "--", "--tag", "$TAG"]
    assert step["env"] == {"TAG": "${{ github.ref_name }}"}


def test_the_version_is_the_same_everywhere() -> None:
    assert list(release.version_problems(ROOT, kvconform.__version__, None)) == []
    assert list(release.version_problems(ROOT, "9.9.9", None))
    said = CliRunner().invoke(app, ["--version"])
    assert (said.exit_code, said.output) == (0, f"kvconform {kvconform.__version__}\n")


@pytest.mark.parametrize("name", ["MANIFEST.in", "CHANGELOG.md"])
def test_files_of_the_source_distribution_exist(name: str) -> None:
    assert name in release.BESIDE and Path(ROOT / name).is_file()
