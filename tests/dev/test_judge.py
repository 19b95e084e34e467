# SPDX-License-Identifier: Apache-2.0
"""Tests of `python -m kvconform.dev.results judge`: entries are judged and recorded, or named."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvconform.config import catalogue
from kvconform.dev.results import digest, judge
from kvconform.dev.results.__main__ import main
from kvconform.execute.answers import Death
from results_rig import ROWS, report

Call = Callable[..., subprocess.CompletedProcess[str]]
TURN = judge.Turn("example", "2026-01-01", ("--engine", "vllm"))


def answering(code: int, rows: list[dict[str, Any]], stderr: str = "") -> Call:
    def call(arguments: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        assert arguments[:5] == [sys.executable, "-m", "kvconform", "run", "catalogue:example"]
        assert "--engine vllm --report-dir" in " ".join(arguments)
        report(Path(arguments[-1]), rows)
        return subprocess.CompletedProcess(arguments, code, "", stderr)

    return call


def test_a_report_becomes_digests() -> None:
    found = judge.judge(TURN, answering(1, ROWS))
    assert [(each.engine, each.date) for each in found.digests] == [
        ("reference", "2026-01-01"),
        ("vllm", "2026-01-01"),
    ]
    assert str(found).splitlines()[1] == "example on vllm: nonconformant, 1 runs"


def test_a_run_without_a_complete_report_is_not_recorded() -> None:
    found = judge.judge(TURN, answering(3, ROWS, "warning\nkvconform: no vLLM\n"))
    assert str(found) == "example: not judged: no vLLM" and not found.digests
    assert "has no runs" in str(judge.judge(TURN, answering(0, [])))


def test_an_entry_without_its_packages_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = catalogue.Named(text="x", connector="x:X", requires=["no-such-package>=1"])
    monkeypatch.setattr(catalogue, "named", lambda name: entry)
    found = judge.judge(TURN, answering(0, ROWS))
    assert found.why == "it needs no-such-package: pip install 'no-such-package>=1'"


def test_what_is_judged_is_recorded_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done = judge.judge(TURN, answering(1, ROWS))

    def run(turns: list[judge.Turn], *_: object) -> Iterator[judge.Judged]:
        assert [(turn.entry, turn.options) for turn in turns] == [("example", ("-k", "x"))]
        yield done
        assert digest.read(tmp_path) == list(done.digests)
        yield judge.Judged("example", why="it does not run")

    monkeypatch.setattr(judge, "run", run)
    assert main(["--root", str(tmp_path), "judge", "example", "--options=-k x"]) == 1
    assert "example: not judged: it does not run" in capsys.readouterr().out
    assert (tmp_path / "README.md").exists()
    assert main(["--root", str(tmp_path), "judge", "no-such-entry"]) == 2


def test_a_worker_that_dies_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Workers:
        def __enter__(self) -> Workers:
            return self

        def __exit__(self, *_: object) -> None: ...

        def run(self, turns: list[judge.Turn]) -> list[tuple[judge.Turn, Death]]:
            return [(turn, Death(-9)) for turn in turns]

    monkeypatch.setattr(judge, "executor", lambda *_: Workers())
    [found] = judge.run([TURN], judge.Choice("here"), 1)
    assert found.why == "its process ended (exit code -9)"
