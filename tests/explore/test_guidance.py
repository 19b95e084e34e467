# SPDX-License-Identifier: Apache-2.0
"""Tests of guidance: what a workload reached, how it is varied, and what nothing exercised."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvconform.contract.capabilities import complete
from kvconform.contract.loader import load_spec
from kvconform.errors import UsageError
from kvconform.explore.dice import Dice
from kvconform.explore.draw import drawn
from kvconform.explore.mutate import mutated
from kvconform.explore.outcome import judgeable, never, pairs_of
from kvconform.explore.workload import Workload
from kvconform.files import check_writable
from kvconform.judge.records import Row, Verdict

BOTH = ["reference", "vllm"]
MODES = ["sync", "async"]


def some(count: int, seed: int = 1) -> list[Workload]:
    return list(drawn(BOTH, MODES, None, first_seed=seed, count=count))


def test_dice_are_the_same_everywhere() -> None:
    dice = Dice("x")
    # Of another process, and for good: the hash of a string differs from process to process.
    assert [dice.number(0, 9) for _ in range(12)] == [1, 3, 7, 9, 2, 5, 6, 7, 6, 3, 5, 6]
    rolls = [Dice(seed).number(1, 6) for seed in range(300)]
    assert set(rolls) == {1, 2, 3, 4, 5, 6}


def test_small_workloads_are_small() -> None:
    for workload in drawn(["reference"], MODES, None, first_seed=1, count=60, simple=True):
        assert (
            workload.size[0] <= 3
            and workload.variant().engine == "reference"
            and not workload.data.get("policies")
        )


def test_changes_keep_a_workload_legal_and_do_change_it() -> None:
    changed = 0
    for number, workload in enumerate(some(150)):
        other = mutated(f"t/{number}", workload, BOTH, MODES)
        other.variant()
        assert mutated(f"t/{number}", workload, BOTH, MODES) == other
        flying = 0
        # no more is in flight than may be, and nothing befalls it that could not
        for step in other.data["steps"]:
            assert flying == 0 or not {"step", "run", "idle", "drop-local"} & set(step)
            flying = 0 if "land" in step else flying + step.get("schedule", 0)
            assert flying <= (
                other.data["matrix"]["depth"][0]
                if other.data["matrix"]["scheduling"] == ["async"]
                else 1
            )
        changed += {**other.data, "id": ""} != {**workload.data, "id": ""}
    assert changed > 100


def test_pairs_tell_what_was_put_to_the_test_where() -> None:
    [workload] = [each for each in some(40) if each.data["engines"] == ["vllm"]][:1]
    rows = [
        Row(name, "c", "vllm", "sync", "v1", 1, 4, Verdict.PASS, exercised=exercised)
        for name, exercised in (("save.x", 2), ("load.y", 0))
    ]
    trace = [
        {"kind": "lookup", "req": "a"},
        {"kind": "req.state", "req": "a", "from": "WAITING", "to": "RUNNING", "by": "admit"},
        {"kind": "hold", "req": "a"},
    ]
    found = pairs_of(workload.data, rows, trace)
    mode = f"scheduling {workload.data['matrix']['scheduling'][0]}"
    assert {
        ("save.x", "engine vllm"),
        ("lookup in WAITING", mode),
        ("hold in RUNNING", mode),
        ("WAITING > RUNNING, admit", mode),
    } <= set(found)
    assert not any(what == "load.y" for what, _ in found)
    assert never(["save.x", "load.y"], found) == ["load.y"]


@pytest.mark.parametrize("name", ["a-file", "a-file/below"])
def test_a_folder_that_cannot_be_made_is_told_before_anything_runs(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / "a-file").write_text("")
    with pytest.raises(UsageError, match="--out .*a-file is not a directory"):
        check_writable("--out", tmp_path / name)
    check_writable("--out", tmp_path / "new" / "folder")
    assert not (tmp_path / "new").exists(), "the check leaves nothing"


def test_what_the_connector_does_not_support_is_no_gap() -> None:
    requirements = load_spec().requirements.values()
    everything = judgeable(requirements, {})
    caps = complete({"store": True})
    some = judgeable(requirements, caps)
    assert "restart.keeps" in everything
    assert "restart.keeps" not in some < everything
    assert "restart.keeps" in judgeable(requirements, {**caps, "persistent": True})
    assert all(req.id not in everything for req in requirements if req.engines == ["live"])
