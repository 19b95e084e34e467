# SPDX-License-Identifier: Apache-2.0
"""Tests of a process that is killed in the midst of a save, at the same place in every run."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvconform.config.target import Target
from kvconform.contract.case import Case
from kvconform.contract.loader import load_spec
from kvconform.contract.steps import Killed
from kvconform.contract.trace import Trace
from kvconform.observe.probe import Probe
from kvconform.run.case import run_and_judge
from kvconform.run.killer import Killer

SPEC = load_spec()
REFERENCE = "kvconform.refimpl.connector:ReferenceConnector"
IN_PLACE = "kvconform.refimpl.defects.damage:HalfWritten"


class Stopped(BaseException):
    """Instead of the end of the process."""


def stop() -> None:
    raise Stopped


def saves(killer: Killer, file: Path, *pieces: bytes, at_once: bool = False) -> None:
    """A step in which a hook writes pieces to a file, or all at once under another name."""
    killer._begin(None)  # type: ignore[arg-type]
    killer._start(None)  # type: ignore[arg-type]
    if at_once:
        part = file.with_suffix(".part")
        part.write_bytes(b"".join(pieces))
        part.rename(file)
    else:
        out = file.open("wb", buffering=0)
        out.truncate(sum(map(len, pieces)))
        for piece in pieces:
            out.write(piece)
        out.close()
    killer._stop(None)  # type: ignore[arg-type]


def test_the_kill_leaves_a_file_of_the_right_size_with_other_bytes(tmp_path: Path) -> None:
    killer = Killer(Probe(Trace()), tmp_path, 0.9, stop)
    for name in ("first", "second"):
        saves(killer, tmp_path / name, b"aa", b"bb", b"cc")
    killer.arm()
    with pytest.raises(Stopped):
        saves(killer, tmp_path / "third", b"dd", b"ee", b"ff")
    left = (tmp_path / "third").read_bytes()
    assert len(left) == 6 and left != b"ddeeff"


def test_without_half_a_file_it_comes_after_a_share_of_the_calls(tmp_path: Path) -> None:
    for share in (0.01, 0.999):
        killer = Killer(Probe(Trace()), tmp_path, share, stop)
        saves(killer, tmp_path / "first", b"aa", at_once=True)
        saves(killer, tmp_path / "second", b"bb", at_once=True)
        killer.arm()
        with pytest.raises(Stopped):
            saves(killer, tmp_path / f"third-{share}", b"cc", at_once=True)
    assert not (tmp_path / "third-0.01").exists()
    assert (tmp_path / "third-0.999").read_bytes() == b"cc"


def test_without_an_earlier_save_there_is_no_kill(tmp_path: Path) -> None:
    killer = Killer(Probe(Trace()), tmp_path, 0.5, stop)
    killer.arm()
    saves(killer, tmp_path / "first", b"aa")
    assert (tmp_path / "first").read_bytes() == b"aa"


@pytest.mark.parametrize("connector", [REFERENCE, IN_PLACE])
def test_what_is_left_of_the_save_is_found(connector: str, tmp_path: Path) -> None:
    case = SPEC.cases["lifecycle.killed-midway"]
    kinds = [type(step.arg) for step in case.steps if step.op == "restart"]
    assert kinds == [Killed]
    variant = case.variants(["reference"], ["sync"])[0]
    target = Target(connector, {"store": "{tmp}/store"})
    reports = [
        run_and_judge(variant, target, SPEC, seed=0, tmp=tmp_path / str(number))
        for number in range(2)
    ]
    failed = [
        {row.requirement: row.message for row in report.rows if row.verdict == "FAIL"}
        for report in reports
    ]
    assert failed[0] == failed[1], "the same place in every run"
    assert set(failed[0]) == (set() if connector == REFERENCE else {"save.confirmed"})
    assert not [report.harness_error for report in reports if report.harness_error]


def test_steps_after_the_kill_follow_those_that_were_in_flight(tmp_path: Path) -> None:
    """Late workers are killed in a step behind which others are scheduled already."""
    policies, matrix = ["late-workers"], {"scheduling": ["async"], "depth": [3]}
    data = SPEC.cases["lifecycle.killed-midway"].model_dump(by_alias=True, exclude_defaults=True)
    for step in data["steps"]:
        if "add" in step:
            step["add"]["max_tokens"] = 4
    changes = {"policies": policies, "matrix": matrix, "expect": []}
    case = Case.model_validate(data | changes)
    target = Target(REFERENCE, {"store": "{tmp}/store"})
    report = run_and_judge(case.variants(["reference"])[0], target, SPEC, seed=0, tmp=tmp_path)
    assert not report.harness_error
    kill = next(i for i, event in enumerate(report.trace) if event.get("op") == "killed")
    before, after = report.trace[:kill], report.trace[kill + 1 :]
    last = max(event["step"] for event in before)
    assert last > report.trace[kill]["step"]
    assert min(event["step"] for event in after) >= last
    assert not [row.requirement for row in report.rows if row.verdict == "FAIL"]
