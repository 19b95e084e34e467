# SPDX-License-Identifier: Apache-2.0
"""Tests that mutants are judged as they should: known kills by the right means, a known survivor.

One program judges them all, on three cases (tests/rigs/mutants_rig.py).
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from places import ROOT

pytestmark = [pytest.mark.e2e, pytest.mark.long]


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, Any]]:
    """The results of the rig's mutants, by a part of their site."""
    sources = {path: path.read_bytes() for path in (ROOT / "refimpl").glob("*.py")}
    command = [sys.executable, str(ROOT / "tests" / "rigs" / "mutants_rig.py")]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=600,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert {path: path.read_bytes() for path in sources} == sources
    results: dict[str, dict[str, Any]] = json.loads(done.stdout)
    return results


def of(found: dict[str, dict[str, Any]], part: str) -> dict[str, Any]:
    """The only result whose site contains `part`."""
    (name,) = (name for name in found if part in name)
    return found[name]


def test_the_original_fails_nothing(found: dict[str, dict[str, Any]]) -> None:
    assert found["original"] == {"failed": [], "errors": [], "runs": 6}


def test_a_key_without_the_salt_is_found_by_the_requirement_on_content(
    found: dict[str, dict[str, Any]],
) -> None:
    result = of(found, "request_key [drop-component #2]")
    assert (result["outcome"], result["means"]) == ("killed", "requirement")
    assert "identity.two-salts" in result["run"]
    assert any(
        name.startswith(("identity.", "lookup.", "load.")) for name in result["requirements"]
    )


@pytest.mark.parametrize(
    "part, means, requirement",
    [
        ("_extend_table [equality] elif", "raise", "hook.no-raise"),
        ("_extend_table [negate]", "raise", "hook.no-raise"),
        ("[1 / 0]", "raise", "hook.no-raise"),
        ("while True", "hang", "hook.terminates"),
    ],
)
def test_a_mutant_is_killed_by_the_expected_requirement(
    found: dict[str, dict[str, Any]], part: str, means: str, requirement: str
) -> None:
    result = of(found, part)
    assert (result["outcome"], result["means"]) == ("killed", means)
    assert requirement in result["requirements"]


def test_the_death_of_the_process_is_a_kill_of_its_own_kind(
    found: dict[str, dict[str, Any]],
) -> None:
    result = of(found, "os._exit(3)")
    assert (result["outcome"], result["means"]) == ("killed", "death")
    assert result["note"] == "exit code 3, build_connector_meta"


def test_a_connector_that_cannot_be_imported_is_a_kill_of_its_own_kind(
    found: dict[str, dict[str, Any]],
) -> None:
    assert (found["import"]["outcome"], found["import"]["means"]) == ("killed", "start")


def test_an_equivalent_mutant_survives_with_its_diff(found: dict[str, dict[str, Any]]) -> None:
    result = of(found, "[boundary] if matched <= 0:")
    assert result["outcome"] == "survived"
    assert [line.strip("+- ") for line in result["diff"]] == ["if matched <= 0:", "if matched < 0:"]
    assert result["runs"] == result["reached"] == 6


def test_what_a_limit_of_time_leaves_out_is_counted(found: dict[str, dict[str, Any]]) -> None:
    result = found["no time"]
    assert result["outcome"] == "survived" and "runs" not in result
    assert result["left"] == result["reached"] == 6
    assert "left" not in of(found, "[boundary] if matched <= 0:")
