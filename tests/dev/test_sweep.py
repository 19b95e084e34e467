# SPDX-License-Identifier: Apache-2.0
"""Tests of the sweep over correct connectors: what is run, what alarms, and when it ends."""

from __future__ import annotations

import time

import pytest
import typer
from typer.testing import CliRunner

from kvconform.contract.loader import load_spec
from kvconform.execute.answers import Death
from kvconform.execute.choice import Choice
from kvconform.refimpl.variants import registry

pytest.importorskip("vllm")

from kvconform.dev import sweep

RUNS = load_spec().cases["placeholders.decode-timeline"].variants(["reference"])
HERE = Choice("here")


def test_a_connector_that_is_wrong_alarms_and_a_correct_one_does_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = ("kvconform.refimpl.defects.boundaries:UnknownToken", {})
    monkeypatch.setitem(registry.VARIANTS, "wrong", wrong)
    run = next(run for run in RUNS if run.scheduling == "async")
    work = sweep.turns(["sync", "wrong"], [run], range(3, 5))
    found = []
    for seed, tally in sweep.sweep(work, HERE, None):
        found.append((seed, tally))
        said = capsys.readouterr().out
        assert said and all(str(alarm) in said for alarm in tally.alarms), "as they come"
    assert [(seed, tally.runs) for seed, tally in found] == [(3, 2), (4, 2)]
    for seed, tally in found:
        assert {(each.connector, each.seed) for each in tally.alarms} == {("wrong", seed)}


def test_every_seed_makes_other_runs() -> None:
    parts = [
        {turn.variant.id for turn in sweep.turns(["sync"], RUNS, [seed], share=2)}
        for seed in (0, 1)
    ]
    assert parts[0] | parts[1] == {run.id for run in RUNS} and not parts[0] & parts[1]


def test_a_death_is_an_alarm(monkeypatch: pytest.MonkeyPatch) -> None:
    [turn] = sweep.turns(["a", "b"], RUNS[:1], [7])
    [alarm] = sweep._died(turn, Death(-9)).alarms
    assert str(alarm).startswith(f"a or b  seed 7  {RUNS[0].id}  process.died: ")


def test_one_seed_is_always_run() -> None:
    assert list(sweep._until(time.monotonic() - 1, range(4, 9))) == [4]
    assert list(sweep._until(None, range(4, 9))) == [4, 5, 6, 7, 8]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--case", "chunked.boundarys"], "there is no case 'chunked.boundarys'; did you mean"),
        (["--variant", "plan"], "there is no variant 'plan'; did you mean plain"),
        (["--case", "lifecycle.hash-seed"], "--processes runs them"),
    ],
)
def test_what_selects_nothing_is_no_success(options: list[str], said: str) -> None:
    command = typer.Typer()
    command.command()(sweep.main)
    done = CliRunner().invoke(command, options)
    assert done.exit_code == 2 and said in done.output


def test_a_variant_that_is_not_recommended_alarms_with_nothing_else() -> None:
    (run,) = load_spec().cases["lifecycle.api"].variants(["reference"], ["sync"])[:1]
    work = sweep.turns([*registry.NOT_RECOMMENDED], [run], [0])
    assert [tally.alarms for _, tally in sweep.sweep(work, HERE, None)] == [[]]
