# SPDX-License-Identifier: Apache-2.0
"""Tests of `kvconform gpu`: order, time limit, what is kept, and how a call goes on."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from gpu_rig import BARE
from kvconform.errors import EnvironmentProblem, UsageError
from kvconform.gpu import child, command, session
from kvconform.gpu.parts import Part, Reading, Setting, Stage
from kvconform.gpu.result import NAME, Machine, Result, load


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "SHORTEST", 0.5)


def part(name: str, code: str, problem: str = "", lacks: str | None = None) -> Part:
    return Part(
        name,
        f"The part {name}",
        lambda setting: [[sys.executable, "-c", code]],
        lambda setting: lacks,
        lambda setting: Reading({"figure": 1}, problem),
    )


def run(folder: Path, *parts: Part, minutes: float = 1, machine: Machine = BARE, **more: object):
    said: list[str] = []
    setting = Setting(machine, folder)
    result = session.run(setting, minutes, said.append, parts=parts, **more)  # type: ignore[arg-type]
    assert load(folder / NAME) == result
    return {each.part: (each.status, each.reason) for each in result.parts}, said, result.code


def test_every_outcome_has_its_status_and_reason(tmp_path: Path) -> None:
    found, said, code = run(
        tmp_path,
        part("good", "pass"),
        part("bad", "print('what it says'); raise SystemExit(3)"),
        part("wrong", "pass", problem="a requirement failed"),
        part("absent", "pass", lacks="there is no tool"),
    )
    assert found == {
        "good": ("done", ""),
        "bad": ("failed", "status 3: what it says"),
        "wrong": ("failed", "a requirement failed"),
        "absent": ("not run", "there is no tool"),
    }
    assert code == 1 and said[0] == "good: The part good"
    page = (tmp_path / "gpu.md").read_text(encoding="utf-8")
    assert "| The part absent | NOT MEASURED |" in page and "figure 1" in page
    assert "what it says" in (tmp_path / "bad.log").read_text(encoding="utf-8")


def test_what_passed_gives_status_0_and_what_was_not_run_does_not_count(tmp_path: Path) -> None:
    _, _, code = run(tmp_path, part("good", "pass"), part("absent", "", lacks="there is no tool"))
    assert code == 0


def end_once_written(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the time of calls be over as soon as the file has something in it."""
    before = child.left

    def left(until: float) -> float:
        return 0 if file.exists() and file.stat().st_size else before(until)

    monkeypatch.setattr(child, "left", left)


def test_a_part_is_killed_at_the_limit_with_all_that_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = tmp_path / "pid"
    code = (
        "import subprocess, sys, time, pathlib\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'],"
        " start_new_session=True)\n"
        f"pathlib.Path({str(started)!r}).write_text(str(child.pid))\n"
        "time.sleep(600)"
    )
    end_once_written(started, monkeypatch)
    found, _, status = run(tmp_path, part("slow", code), part("late", "pass"))
    assert found["slow"][0] == "timed out" and found["late"] == ("not run", session.NO_TIME)
    assert status == 1
    assert not psutil.pid_exists(int(started.read_text()))


def test_the_next_call_goes_on_and_a_timed_out_part_comes_last(tmp_path: Path) -> None:
    first, second = part("first", "import time; time.sleep(600)"), part("second", "pass")
    before, _, _ = run(tmp_path, first, second, minutes=3 / 60)
    assert before == {
        "first": ("timed out", before["first"][1]),
        "second": ("not run", "no time was left"),
    }
    found, said, _ = run(tmp_path, part("first", "pass"), second)
    assert [line for line in said if ": The part" in line] == [
        "second: The part second",
        "first: The part first",
    ]
    assert found == {"first": ("done", ""), "second": ("done", "")}
    _, said, _ = run(tmp_path, first, second)
    assert said == []
    _, said, _ = run(tmp_path, part("first", "pass"), second, afresh=True)
    assert len(said) == 4
    _, said, _ = run(tmp_path, first, second, only=["second"])
    assert said[0] == "second: The part second"


def test_a_repeated_part_that_does_not_end_leaves_the_earlier_outcome(tmp_path: Path) -> None:
    run(tmp_path, part("first", "pass"))
    slow = part("first", "import time; time.sleep(600)")
    found, said, _ = run(tmp_path, slow, only=["first"], minutes=3 / 60)
    assert found == {"first": ("done", "")} and "timed out" in said[-1]


def test_a_timed_out_part_of_an_earlier_stage_comes_last_too(tmp_path: Path) -> None:
    gate = replace(part("gate", "import time; time.sleep(600)"), stage=Stage.GATES)
    rest = part("rest", "pass")
    run(tmp_path, gate, rest, minutes=3 / 60)
    _, said, _ = run(tmp_path, replace(part("gate", "pass"), stage=Stage.GATES), rest, jobs=2)
    assert [line for line in said if ": The part" in line] == [
        "rest: The part rest",
        "gate: The part gate",
    ]


def test_an_interrupted_call_keeps_what_it_has(tmp_path: Path) -> None:
    def interrupt(setting: Setting) -> list[list[str]]:
        assert load(tmp_path / NAME).of("good").status == "done"  # type: ignore[union-attr]
        raise KeyboardInterrupt

    broken = Part("broken", "Interrupted", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, part("good", "pass"), broken)
    kept = load(tmp_path / NAME)
    assert kept is not None and kept.of("good").status == "done"
    assert kept.of("broken").status == "not run"


def test_parts_run_together_after_those_that_run_alone(tmp_path: Path) -> None:
    meets = (
        "import pathlib, time, sys\n"
        f"here, other = (pathlib.Path({str(tmp_path)!r}) / name for name in sys.argv[1:])\n"
        "here.touch()\n"
        "until = time.monotonic() + 30\n"
        "while not other.exists() and time.monotonic() < until: time.sleep(0.01)\n"
        "raise SystemExit(not other.exists())"
    )
    alone = f"import pathlib; raise SystemExit((pathlib.Path({str(tmp_path)!r}) / 'left').exists())"

    def pair(name: str, other: str) -> Part:
        return Part(name, name, lambda setting: [[sys.executable, "-c", meets, name, other]])

    last = replace(part("last", alone), stage=Stage.ALONE)
    found, said, _ = run(tmp_path, pair("left", "right"), pair("right", "left"), last, jobs=2)
    assert {status for status, _ in found.values()} == {"done"}
    assert said[0] == "last: The part last"


def test_an_interrupted_call_ends_the_parts_that_run(tmp_path: Path) -> None:
    begun = time.monotonic()

    def interrupt(setting: Setting) -> list[list[str]]:
        time.sleep(1)
        raise KeyboardInterrupt

    broken = Part("broken", "Interrupted", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, part("slow", "import time; time.sleep(600)"), broken, jobs=2)
    kept = load(tmp_path / NAME)
    while kept is None or "interrupted" not in kept.of("slow").reason:
        assert time.monotonic() - begun < 60
        time.sleep(0.1)
        kept = load(tmp_path / NAME)
    assert kept.of("slow").status == "not run"


def test_an_interrupt_does_not_hide_that_a_part_was_timed_out(tmp_path: Path) -> None:
    def interrupt(setting: Setting) -> list[list[str]]:
        time.sleep(1)
        raise KeyboardInterrupt

    slow, broken = part("slow", "import time; time.sleep(600)"), Part("broken", "", interrupt)
    run(tmp_path, slow, broken, only=["slow"], minutes=3 / 60)
    said: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        session.run(
            Setting(BARE, tmp_path),
            1,
            said.append,
            parts=(slow, broken),
            only=["slow", "broken"],
            jobs=2,
        )
    begun = time.monotonic()
    while not any("interrupted" in line for line in said):
        assert time.monotonic() - begun < 60
        time.sleep(0.1)
    kept = load(tmp_path / NAME)
    assert kept is not None and kept.of("slow").status == "timed out"


def test_files_that_cannot_be_read_fail_their_part(tmp_path: Path) -> None:
    def read(setting: Setting) -> Reading:
        return Reading(json.loads("{"))

    found, _, _ = run(tmp_path, Part("odd", "Odd", lambda setting: [], read=read))
    assert found["odd"][0] == "failed" and "its results cannot be read" in found["odd"][1]


def test_results_of_another_machine_are_not_mixed(tmp_path: Path) -> None:
    run(tmp_path, part("good", "pass"))
    other = BARE.model_copy(update={"torch": "3"})
    with pytest.raises(UsageError, match=r"another machine \(torch 2 -> 3\)"):
        run(tmp_path, part("good", "pass"), machine=other)


def test_an_unknown_part_and_a_file_that_is_no_result(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no part 'b'; there are a"):
        run(tmp_path, part("a", "pass"), only=["b"])
    (tmp_path / NAME).write_text('{"format": 2}', encoding="utf-8")
    with pytest.raises(UsageError, match="no result of this version.*--afresh"):
        run(tmp_path, part("a", "pass"))


def test_without_a_gpu_the_command_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = BARE.model_copy(update={"device": None})
    monkeypatch.setattr(session, "machine", lambda: nothing)
    with pytest.raises(EnvironmentProblem, match="needs a GPU") as raised:
        command.gpu(out=str(tmp_path / "out"))
    assert raised.value.code == 3 and not (tmp_path / "out").exists()
    for wrong in ({"minutes": 0.0}, {"device": "tpu"}):
        with pytest.raises(UsageError):
            command.gpu(out=str(tmp_path / "out"), **wrong)  # type: ignore[arg-type]


def test_this_machine_is_described() -> None:
    found = session.machine()
    assert found.torch and found.python.startswith("3.")


def test_a_result_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    result = Result(machine=BARE, parts=[])
    session.keep(result, Setting(BARE, tmp_path))
    assert load(tmp_path / NAME) == result and load(tmp_path / "none") is None
