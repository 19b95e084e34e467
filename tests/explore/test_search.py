# SPDX-License-Identifier: Apache-2.0
"""Tests of the search for known-bad connectors without their cases."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from kvconform.dev import defects
from kvconform.judge.records import Row, Verdict
from kvconform.run import case

pytest.importorskip("vllm")

from kvconform.dev import explore_correct, explore_defects, sweep


def test_a_defect_is_found_by_what_it_breaks_and_made_small() -> None:
    found = explore_defects.search("saves-unknown-token", 60.0, 0, True)
    assert found.found == "save.plan-bound" and found.left_out is None
    case = json.loads(found.case or "")
    assert found.requests == sum("add" in step for step in case["steps"]) <= 2


def test_a_recommendation_counts() -> None:
    assert explore_defects.search("unlogged-statistics", 60.0, 0, False).found == "stats.logged"


def test_who_finds_nothing_in_time_says_so() -> None:
    found = explore_defects.search("loads-over-local-prefix", 0.01, 0, False)
    assert found.found is None and found.left_out is None and found.workloads < 3
    assert explore_defects.summarise([found]) == 1


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("coroutine-hook", "in the class or in vLLM itself"),
        ("kills-process", "may end the process"),
    ],
)
def test_what_no_workload_can_show_is_left_out(name: str, why: str) -> None:
    found = explore_defects.search(name, 60.0, 0, False)
    assert found.found is None and found.left_out is not None and why in found.left_out
    assert explore_defects.summarise([found]) == 0, "neither found nor missed"


def test_an_unknown_defect_is_told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert explore_defects.main(["nobody-knows-this", "--out", str(tmp_path / "o")]) == 2
    assert "there is no defect 'nobody-knows-this'" in capsys.readouterr().err


def test_the_options_are_those_of_other_commands(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "found.jsonl"
    assert explore_defects.main(["kills-process", "--executor", "here", "--out", str(out)]) == 0
    assert json.loads(out.read_text())["left_out"] == "may end the process that it runs in"
    for given, said in (
        (["--executor", "nowhere"], "there is no executor 'nowhere'"),
        (["--jobs", "0"], "0 is no number of workers"),
    ):
        with pytest.raises(SystemExit):
            explore_defects.main(["kills-process", *given])
        assert said in capsys.readouterr().err


def test_an_executor_that_cannot_be_used_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # not installed
    for command in (explore_defects.main, explore_correct.main, swept):
        assert command(["--executor", "ray"]) == 2
        assert capsys.readouterr().err.startswith("error: --executor ray needs the package ray: ")


def swept(arguments: list[str]) -> int:
    """Run a sweep of one case, and return its exit code."""
    with pytest.raises(SystemExit) as done:
        sweep.main(case=["preemption.in-decode"], where=arguments[1])
    return int(str(done.value.code))


def test_what_no_event_can_have_broken_is_not_broken(tmp_path: Path) -> None:
    """Exploration judges only what `at_stake` leaves; the rest must not fail in full judgement."""
    from kvconform.explore.draw import drawn
    from kvconform.judge.evaluate import at_stake
    from kvconform.run.case import run_and_judge

    spec, left_out, failed = defects.specification(), 0, set()
    for name in ("saves-unknown-token", "pops-on-lookup"):
        target = defects.target_of(defects.known_defects()[name], 4)
        for workload in drawn(
            ["reference", "vllm"], ["sync", "async"], None, first_seed=2, count=12
        ):
            report = run_and_judge(
                workload.variant(),
                target,
                spec,
                seed=0,
                tmp=tmp_path / "run",
                strict=True,
            )
            kept = {req.id for req in at_stake(spec.requirements.values(), report.trace)}
            said = {row.requirement: row.verdict for row in report.rows}
            assert {said[req] for req in set(said) - kept} <= {
                "NOT_EXERCISED",
                "UNSUPPORTED",
                "UNOBSERVABLE",
            }
            left_out += len(set(said) - kept)
            failed |= {req for req, verdict in said.items() if verdict == "FAIL"}
    assert left_out > 500 and "save.plan-bound" in failed


def test_a_check_that_cannot_be_evaluated_is_an_error_and_no_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvconform.config.target import Target
    from kvconform.explore import outcome
    from kvconform.explore.draw import drawn

    row = Row("lookup.answer-type", "c", "reference", "sync", "v1", 1, 4, Verdict.ERROR)
    row.message = "it reads x, which is not there"
    run = case.run_and_judge

    def judged(*args: Any, **kwargs: Any) -> Any:
        report = run(*args, **kwargs)
        report.rows.append(row)
        return report

    monkeypatch.setattr(outcome, "run_and_judge", judged)
    target = Target("kvconform.refimpl.connector:ReferenceConnector", {"store": "{tmp}"})
    [workload] = drawn(["reference"], ["sync"], None, first_seed=0, count=1, simple=True)
    found = outcome.outcome(workload, target, defects.specification(), tmp_path / "run")
    assert found.error == "lookup.answer-type: it reads x, which is not there"
