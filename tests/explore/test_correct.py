# SPDX-License-Identifier: Apache-2.0
"""Tests of campaigns on correct connectors: they count, resume, and save what fails."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest

from kvconform.contract import yaml12
from kvconform.contract.case import Case
from kvconform.dev import explore_correct
from kvconform.dev.explore_correct import Batch, State, Turn, batches, main, run
from kvconform.execute.choice import LOCAL
from kvconform.explore.outcome import Outcome
from kvconform.explore.workload import Workload
from kvconform.refimpl.variants import registry
from kvconform.run.isolation import RESEEDED

pytest.importorskip("vllm")


def test_a_correct_connector_fails_nothing() -> None:
    found = run(Turn(0, "sync", 3, 6, simple=True, guided=False))
    assert (found.workloads, found.unsupported, found.failures) == (6, 0, [])


def test_what_fails_is_kept_as_a_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(
        registry.VARIANTS, "bad", ("kvconform.refimpl.defects.loads:NoKeywords", {})
    )
    monkeypatch.setattr(explore_correct, "ENGINES", ["reference"])
    found = run(Turn(0, "bad", 3, 12, simple=True, guided=False))
    assert found.workloads == 12 and found.failures
    explore_correct._keep(found, tmp_path)
    files = list(tmp_path.glob("bad-*.yaml"))
    assert len(files) == len(found.failures) == len(capsys.readouterr().out.splitlines())
    assert Case.model_validate(yaml12.parse(files[0].read_text(), "x")).engines == ["reference"]


def test_mutations_take_turns_with_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def outcome(workload: Workload, *_: object, **__: object) -> Outcome:
        seen.append("mutated" if ".like." in workload.data["id"] else "drawn")
        return Outcome(pairs=[("new", str(len(seen)))])

    monkeypatch.setattr("kvconform.explore.outcome.outcome", outcome)
    for guided in (False, True):
        found = run(Turn(0, "sync", 4, 6, simple=True, guided=guided))
        assert found.workloads == 6
    assert seen == ["drawn"] * 6 + ["drawn", "mutated"] * 3


def test_workers_are_led_to_a_process_that_forks_for_other_hash_seeds() -> None:
    seen: list[bool] = []

    def turns() -> Iterator[Turn]:
        seen.append(RESEEDED in os.environ)
        yield from ()

    assert list(explore_correct._results(turns(), LOCAL, 1, time.monotonic() + 60.0)) == []
    assert seen == [True] and RESEEDED not in os.environ


def test_every_variant_has_its_turn_and_a_later_run_goes_on() -> None:
    turns = list(islice(batches(["a", "b"], 0), 5))
    assert turns == [("a", 0), ("b", 0), ("a", 1), ("b", 1), ("a", 2)]
    assert list(islice(batches(["a", "b"], 3), 2)) == turns[3:]
    assert list(islice(batches(["a", "b"], 1, 70), 2)) == [("b", 70), ("a", 71)]


def test_it_is_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = State()
    state.add(Batch(variant="a", workloads=5, unsupported=1, guarantees={"engine.x": 2}))
    assert (state.batches, state.workloads, state.unsupported, state.guarantees) == (
        1,
        5,
        1,
        {"engine.x": 2},
    )
    kept = tmp_path / "state.json"
    kept.write_text(state.model_dump_json())
    assert main(["--workloads", "5", "--state", str(kept)]) == 0
    assert "5 workloads (4 judged), 0 failures" in capsys.readouterr().out
    state.add(Batch(variant="a", failures=[("case", "text", "r.x", "it is wrong")]))
    kept.write_text(state.model_dump_json())
    assert main(["--workloads", "5", "--state", str(kept)]) == 1


def test_an_unknown_variant_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nobody"]) == 2
    assert "there is no variant 'nobody'; there are sync, async" in capsys.readouterr().err
