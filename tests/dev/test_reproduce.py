# SPDX-License-Identifier: Apache-2.0
"""Tests of `python -m kvconform.dev.results reproduce`.

Findings can still fail, fail no longer, or not be run.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvconform.dev.results import finding
from kvconform.dev.results.__main__ import main
from kvconform.dev.results.reproduce import LIMIT, chosen, command, reproduce
from kvconform.errors import UsageError
from results_rig import HERE, ROWS, report

Call = Callable[..., subprocess.CompletedProcess[str]]
FINDING = next(each for each in finding.read(HERE) if each.id == "example-chunked-prefill")
NAMES = ["save.confirmed", "load.only-grant"]
SAVE, LOAD, BOTH = (
    FINDING.model_copy(update={"requirements": names}) for names in (NAMES[:1], NAMES[1:], NAMES)
)


def answering(code: int, rows: list[dict[str, Any]], stderr: str = "") -> Call:
    def call(arguments: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        report(Path(arguments[arguments.index("--report-dir") + 1]), rows)
        return subprocess.CompletedProcess(arguments, code, "", stderr)

    return call


def test_the_command_is_run_with_this_interpreter(tmp_path: Path) -> None:
    assert command(FINDING, tmp_path)[:4] == [sys.executable, "-m", "kvconform", "run"]
    with pytest.raises(UsageError, match="is no kvconform command"):
        command(FINDING.model_copy(update={"reproduce": "make it fail"}), tmp_path)


def test_what_fails_is_reproduced() -> None:
    found = reproduce(SAVE, answering(1, ROWS))
    assert (
        str(found) == "example-chunked-prefill: reproduced (save.confirmed)" and not found.disproved
    )


def test_a_requirement_that_does_not_fail_any_more_is_named() -> None:
    found = reproduce(LOAD, answering(1, ROWS))
    assert (
        str(found)
        == "example-chunked-prefill (confirmed): NOT reproduced: load.only-grant did not fail"
        and found.disproved
    )
    assert not reproduce(
        LOAD.model_copy(update={"status": "open question"}), answering(1, ROWS)
    ).disproved
    part = reproduce(BOTH, answering(1, ROWS))
    assert (
        str(part).endswith(": reproduced (save.confirmed; not by this command: load.only-grant)")
        and not part.disproved
    )


def test_what_cannot_be_run_is_no_answer() -> None:
    found = reproduce(
        SAVE, answering(3, ROWS, "kvconform: there is no such package here: install it\n")
    )
    assert (
        str(found).endswith("not run: there is no such package here: install it")
        and not found.disproved
    )

    def hangs(arguments: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        raise subprocess.TimeoutExpired(arguments, LIMIT)

    assert reproduce(SAVE, hangs).why == "no answer within 1200 s"


def test_findings_are_chosen_by_id_page_or_entry() -> None:
    known = finding.read(HERE)
    assert chosen(known, []) == known and [each.id for each in chosen(known, [FINDING.id])] == [
        FINDING.id
    ]
    assert {each.family for each in chosen(known, ["nixl", "mooncake-store"])} == {
        "nixl",
        "mooncake",
    }
    with pytest.raises(UsageError, match="no finding 'nobody'"):
        chosen(known, ["nobody"])


@pytest.mark.long
def test_a_finding_of_an_installed_connector_is_reproduced(
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("vllm")
    assert main(["--root", str(HERE), "reproduce", "example-negative-answer"]) == 0
    assert "example-negative-answer: reproduced" in capsys.readouterr().out
