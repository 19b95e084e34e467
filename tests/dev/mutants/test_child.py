# SPDX-License-Identifier: Apache-2.0
"""Tests of the process that judges one mutant."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvconform.contract.loader import load_spec
from kvconform.dev.mutants import child
from kvconform.judge.records import CaseReport, Row, Verdict
from kvconform.process import clock


def test_a_limit_is_real_time_although_runs_set_the_clock_forward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    def judged(run: Any, *_: Any) -> CaseReport:
        made.append(run.id)
        clock.advance(1000.0)
        return CaseReport(run.id)

    monkeypatch.setattr(child, "_judge", judged)
    runs: list[Any] = [SimpleNamespace(id=name, setup="only") for name in "ab"]
    job = child.Job(None, tmp_path, runs, {}, tmp_path, [], 1.0, 0.0, "only", limit=500.0)
    sent: list[child.Message] = []
    connection: Any = SimpleNamespace(send=sent.append)
    targets: dict[str, Any] = {"only": None}
    with clock.of_run():
        left = child._mutant(connection, job, load_spec(), targets)
    assert (made, left) == (["a", "b"], 0)
    assert all(message["seconds"] < 100 for message in sent)


def test_a_mutant_that_refuses_what_the_original_takes_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    sentence = "the connector refuses groups [full, sliding]: no windows"

    def row(verdict: Verdict, **fields: Any) -> Row:
        return Row("a.b", "c", "reference", "sync", "v1", 1, 4, verdict, **fields)

    def judged(run: Any, *_: Any) -> CaseReport:
        made.append(run.id)
        taken = row(Verdict.PASS, exercised=1)
        refused = row(Verdict.UNSUPPORTED, message=sentence)
        return CaseReport(run.id, rows=[taken if run.id == "a" else refused])

    monkeypatch.setattr(child, "_judge", judged)
    runs: list[Any] = [SimpleNamespace(id=name, setup="only") for name in "abcd"]
    skipped = frozenset("b")  # the original refuses that, too
    job = child.Job(None, tmp_path, runs, {}, tmp_path, [], 1.0, 0.0, "only", skipped=skipped)
    sent: list[child.Message] = []
    connection: Any = SimpleNamespace(send=sent.append)
    targets: dict[str, Any] = {"only": None}
    left = child._mutant(connection, job, load_spec(), targets)
    assert (made, left) == (["a", "b", "c"], 0)
    assert sent[-1] == {"start": sentence}
