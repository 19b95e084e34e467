# SPDX-License-Identifier: Apache-2.0
"""Tests of a connector in many releases.

They check what is compared and reported, and that no release is left out.
"""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvconform.compat import installed, interface
from kvconform.config.selection import select
from kvconform.config.settings import Settings
from kvconform.contract.loader import load_spec
from kvconform.execute.choice import Choice
from kvconform.judge.aggregate import aggregate
from kvconform.judge.records import CaseReport, Verdict
from kvconform.judge.verdict import new_row
from kvconform.snapshots import difference
from kvconform.snapshots.document import Run
from kvconform.snapshots.value import Value
from kvconform.versions import changes, matrix, observe, page
from kvconform.versions.__main__ import exit_code, main
from kvconform.versions.changes import EngineChange, compare, first_difference, grouped, order
from kvconform.versions.matrix import RELEASES, Release
from places import ROOT

SPEC = load_spec()
VARIANTS = select(SPEC, Settings(engine="vllm", profile="smoke"), "0.32.0").variants
RUN, OTHER = VARIANTS[0].id, VARIANTS[1].id
MUST = [r for r in SPEC.requirements.values() if r.kind == "requirement" and r.level == "MUST"][:3]
TRACE: list[dict[str, Any]] = [
    {
        "kind": "step.scheduled",
        "step": 1,
        "total": 5,
        "new": ["a"],
        "cached": [],
        "resumed": [],
        "preempted": [],
        "finished": [],
    },
    {
        "kind": "req.scheduled",
        "step": 1,
        "req": "a",
        "listed_as": "new",
        "computed": 0,
        "scheduled": 5,
        "placeholders": 0,
        "known": 9,
        "drafts": 0,
        "table": [1, 2],
    },
    {
        "kind": "req.state",
        "step": 1,
        "req": "a",
        "from": None,
        "to": "RUNNING",
        "reason": "admit",
        "computed": 5,
        "known": 9,
    },
    {"kind": "sample", "step": 2, "req": "a", "index": 0, "token": 7},
    {
        "kind": "req.finished",
        "step": 3,
        "req": "a",
        "status": "FINISHED_LENGTH_CAPPED",
        "computed": 10,
        "known": 10,
    },
]


def snapshot(answer: Value) -> Run:
    """A run with one call that returns `answer`."""
    return {
        "steps": [{"at": [1, 1], "calls": [{"call": "build_connector_meta", "returned": answer}]}]
    }


def release(name: str, **verdicts: Verdict) -> Release:
    """A release with one run, in which MUST[0] to MUST[2] have verdicts v0 to v2, or PASS."""
    rows = [
        new_row(req, VARIANTS[0], verdict=verdicts.get(f"v{i}", Verdict.PASS))
        for i, req in enumerate(MUST)
    ]
    found = aggregate(rows)
    return Release(
        name,
        name,
        signatures={"get_finished": "(self) -> None"},
        fields=["SchedulerOutput.a"],
        found=found,
        verdicts={RUN: {row.requirement: row.verdict.value for row in rows}},
        hooks={RUN: [[1, ["start_load_kv", "wait_for_save", "get_finished"]]]},
        engine={RUN: observe.engine(TRACE)},
        snapshots={RUN: {"metadata": snapshot(1), "answers": snapshot(1), "stored": {}}},
    )


def test_two_that_are_the_same() -> None:
    change = compare(release("0.31.0"), release("0.32.0"), SPEC)
    assert (change.compared, change.engine_same, change.engine_compared, change.snapshots) == (
        1,
        1,
        1,
        1,
    )
    empty = changes.as_data(change)
    counts = (
        "old",
        "new",
        "compared",
        "order_compared",
        "engine_same",
        "engine_compared",
        "snapshots",
    )
    assert not any(value for key, value in empty.items() if key not in counts)
    assert page.line(change).endswith(": nothing changed")


def test_a_requirement_that_flips() -> None:
    change = compare(release("0.31.0"), release("0.32.0", v1=Verdict.FAIL), SPEC)
    assert change.flipped == {MUST[1].id: ("PASS", "FAIL")} and change.runs_flipped == {
        MUST[1].id: 1
    }
    old = release("0.31.0")
    assert old.found is not None
    del old.found.status[MUST[0].id]
    change = compare(old, release("0.32.0"), SPEC)
    assert change.begin == [MUST[0].id] and not change.flipped


def test_what_the_interface_gained_and_lost() -> None:
    old, new = release("0.31.0"), release("0.32.0")
    old.signatures |= {"gone": "(self)"}
    new.signatures = {"get_finished": "(self, ids: set[str]) -> None", "come": "(self)"}
    new.fields = ["SchedulerOutput.b"]
    change = compare(old, new, SPEC)
    assert change.hooks_new == {"come": "(self)"} and change.hooks_gone == {"gone": "(self)"}
    assert change.signatures == {
        "get_finished": ("(self) -> None", "(self, ids: set[str]) -> None")
    }
    assert (change.fields_new, change.fields_gone) == (["SchedulerOutput.b"], ["SchedulerOutput.a"])


def test_the_order_of_hooks() -> None:
    before = [[1, ["a", "b", "c"]], [2, ["a", "b"]]]

    def sentences(after: list[list[Any]]) -> list[str]:
        return [one.sentence() for one in order(before, after)]

    assert sentences([[1, ["a", "c", "b"]], [2, ["a", "b"]]]) == ["step 1: c is called before b"]
    assert sentences([[1, ["a", "b", "c"]], [2, ["a", "b", "d"]]]) == ["step 2: d is called"]
    assert sentences([[1, ["a", "b", "c"]]]) == [
        "step 2: a is not called",
        "step 2: b is not called",
    ]
    assert sentences([[1, ["a", "b", "c"]], [2, ["d", "a", "b", "d"]]]) == [
        "step 2: d is called (2 times)"
    ]
    assert sentences([[1, ["a", "b", "b", "c"]], [2, ["a", "b"]]]) == ["step 1: calls of b: 1 -> 2"]
    new = release("0.32.0")
    new.hooks[RUN] = [[1, ["start_load_kv", "get_finished", "wait_for_save"]]]
    (group,) = compare(release("0.31.0"), new, SPEC).order
    assert group.what == "step 1: get_finished is called before wait_for_save" and group.where == [
        RUN
    ]


def test_metadata_and_stored_kv() -> None:
    new = release("0.32.0")
    new.snapshots[RUN]["metadata"] = snapshot(2)
    change = compare(release("0.31.0"), new, SPEC)
    (group,) = change.metadata
    assert group.what == "step 1, build_connector_meta().answer: 1 -> 2"
    assert not change.stored and not change.answers


@pytest.mark.parametrize(
    ("event", "field", "value", "aspect"),
    [
        (0, "total", 4, "schedule"),
        (1, "scheduled", 4, "schedule"),
        (1, "table", [1, 3], "blocks"),
        (2, "to", "WAITING", "requests"),
        (3, "token", 8, "tokens"),
        (4, "status", "FINISHED_STOPPED", "requests"),
    ],
)
def test_the_engine_itself(event: int, field: str, value: Any, aspect: str) -> None:
    new = release("0.32.0")
    new.engine[RUN] = observe.engine(
        [{**e, field: value} if i == event else e for i, e in enumerate(TRACE)]
    )
    change = compare(release("0.31.0"), new, SPEC)
    assert change.engine_same == 0 and list(change.engine) == [aspect]
    assert str(value) in change.engine[aspect][0].what.partition(" instead of ")[0]


def sample(step: int, token: int = 7, req: str = "a") -> observe.EngineEvent:
    return {"kind": "sample", "step": step, "req": req, "index": 0, "token": token}


def test_a_trace_that_is_longer() -> None:
    def sentence(old: list[observe.EngineEvent], new: list[observe.EngineEvent]) -> str:
        found = first_difference(old, new)
        assert found is not None
        return found.sentence()

    one, two = sample(1), sample(2)
    assert sentence([one], [one, two]) == "step 2: a output 0 = 7 is new"
    assert sentence([one, two], [one]) == "step 2: a output 0 = 7 is gone"
    other = "step 1: a output 0 = 8 instead of step 1: a output 0 = 7"
    assert sentence([one, two], [sample(1, 8), two]) == other
    assert first_difference([one], [one]) is None


def test_changes_of_one_sort_are_listed_once() -> None:
    found = grouped(
        [
            ("r1", EngineChange(sample(3), sample(3, 8))),
            ("r2", EngineChange(sample(5), None)),
            ("r3", EngineChange(sample(7, req="victim"), sample(8, 9, req="victim"))),
            ("r3", EngineChange(sample(8), sample(8, 1))),
        ]
    )
    assert [(group.what, group.where) for group in found] == [
        ("step 3: a output 0 = 8 instead of step 3: a output 0 = 7", ["r1", "r3"]),
        ("step 5: a output 0 = 7 is gone", ["r2"]),
    ]


def test_the_wording_does_not_decide_what_is_of_one_sort(monkeypatch: pytest.MonkeyPatch) -> None:
    old = [[step, ["a", "b"]] for step in range(1, 6)]
    new = [[1, ["a", "b", "c"]], [2, ["b", "a"]], [3, ["a"]], [4, ["a", "b", "b"]], [5, ["a", "b"]]]
    hooks = [(f"run-{i}", one) for i in (1, 2) for one in order(old, new)]
    engine = [("run-1", EngineChange(sample(1), sample(2)))]

    def shape() -> list[list[str]]:
        return [group.where for group in grouped([*hooks, *engine])]

    before = shape()
    assert len(before) == 5 and before[0] == ["run-1", "run-2"]
    for kind in difference.SENTENCES:
        monkeypatch.setitem(difference.SENTENCES, kind, "something else")
    monkeypatch.setattr(changes, "_described", lambda event: "something else")
    assert shape() == before


def test_hooks_that_the_engine_calls() -> None:
    call = {"kind": "hook.called", "depth": 0, "thread": "main"}
    trace = [
        {**call, "step": 0, "hook": "a"},
        {**call, "step": 1, "hook": "b"},
        {**call, "step": 1, "hook": "c", "depth": 1},
        {**call, "step": 1, "hook": "d", "thread": "other"},
        {**call, "step": 1, "hook": "e"},
    ]
    assert observe.hooks(trace) == [[0, ["a"]], [1, ["b", "e"]]]


def test_the_page_has_everything_but_times() -> None:
    releases = [
        release("0.31.0"),
        replace(
            release("0.32.0", v0=Verdict.FAIL),
            messages={MUST[0].id: "wrong | here"},
            harness={"Oops: x": [RUN]},
            seconds=5.5,
        ),
    ]
    releases.append(Release("0.33.0", problem="No matching distribution found for vllm==0.33.0"))
    found = changes.neighbours(releases, SPEC)
    assert [(change.old, change.new) for change in found] == [("0.31.0", "0.32.0")]
    text = page.markdown(releases, found, Settings(engine="vllm"), snapshots=False, all_runs=False)
    for words in (
        "| 0.31.0 | conformant | 1 |",
        f"| 0.32.0 | nonconformant | 1 | 3 of 3 | `{MUST[0].id}` |",
        "| 0.33.0 | not run |",
        "**0.33.0 was not run**: No matching distribution found",
        f"`{MUST[0].id}` was PASS, is FAIL",
        "wrong \\| here",
        f"0.32.0: the harness failed in `{RUN}`: Oops: x",
        "Left out: engine reference; ",
        "snapshots (metadata and stored KV)",
    ):
        assert words in text
    assert "5.5" not in text
    assert (
        exit_code(releases) == 1
        and exit_code(releases[:1]) == 0
        and exit_code([releases[0], releases[2]]) == 3
    )


def test_the_page_lists_what_changed_and_how_much_more() -> None:
    def found(count: int) -> list[changes.Group]:
        return [
            changes.Group(EngineChange(sample(step), None), [RUN, OTHER])
            for step in range(1, count + 1)
        ]

    change = changes.Change(
        "0.31.0",
        "0.32.0",
        snapshots=2,
        flipped={MUST[0].id: ("NOT_EXERCISED", "FAIL")},
        runs_flipped={MUST[0].id: 3, MUST[1].id: 1, MUST[2].id: 2},
        begin=[f"new.{i}" for i in range(2 * page.LISTED + 1)],
        hooks_new={"come": "(self)"},
        signatures={"get_finished": ("(self)", "(self, ids)")},
        order=found(page.LISTED + 2),
        order_compared=5,
        engine={"tokens": found(page.LISTED)},
        engine_compared=5,
    )
    text = page.markdown([], [change], Settings(engine="vllm"), snapshots=True, all_runs=True)
    gone = f"- step {{}}: a output 0 = 7 is gone (`{RUN}` and 1 more)\n".format
    assert "- new hook `come`: `(self)`\n- `get_finished` was `(self)`, is `(self, ids)`\n" in text
    assert f"- `{MUST[0].id}` was not exercised, is FAIL\n- in force from here: `new.0`, " in text
    assert "`new.19` and 1 more\n" in text
    single = f"the requirement's did not: `{MUST[2].id}` (2), `{MUST[1].id}` (1)\n\nHooks of 5 runs"
    assert single in text
    assert f"\n{gone(10)}- and 2 more sorts of changes, in versions.json\n\nMetadata" in text
    assert "Stored KV of 2 runs: the same.\n\nThe engine without a connector: 0 of 5" in text
    assert f"- what is sampled: 2 runs\n    {gone(1)}" in text
    assert text.endswith(f"    {gone(page.LISTED // 2)}")


def test_the_committed_page_is_of_all_releases() -> None:
    text = (ROOT / "docs" / "versions.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| (\d[\d.]*) \| ([a-z ]+) \|", text, re.M))
    assert list(rows) == list(RELEASES)
    assert set(rows.values()) <= {"conformant", "partial"}


def test_one_run_per_case_scheduling_and_runner() -> None:
    selection = select(SPEC, Settings(engine="vllm"), "0.32.0")
    few = observe.chosen(selection, all_runs=False)
    keys = {(v.case.id, v.scheduling, v.runner) for v in selection.variants}
    assert (
        len(few)
        == len(keys)
        == len({(v.case.id, v.scheduling, v.runner) for v in few})
        < len(selection.variants)
    )
    assert observe.chosen(selection, all_runs=True) == selection.variants


def test_what_is_asked_for_must_be(capsys: pytest.CaptureFixture[str]) -> None:
    def said(*arguments: str) -> int:
        code = main(list(arguments))
        assert len(capsys.readouterr().err.splitlines()) == 1
        return code

    assert said() == 2
    assert said("--at", "0.31.0") == 2
    assert said("--at", "nightly=x") == 2
    assert said("--at", "0.31.0=x", "--engine", "live") == 2
    assert said("--at", "0.31.0=x", "--no-such-option") == 2
    assert said("--at", "0.31.0=x", "--at", "0.31.0=y") == 2
    assert said("--at", "0.31.0=x", "--plan", "/no/such/file") == 2
    assert said("--at", "0.31.0=x", "-k", "no.such.case") == 2
    assert said("--at", "0.31.0=x", "--jobs", "0") == 2
    assert said("--at", "0.31.0=x", "--connector", "nopackage:Conn") == 2


def test_the_default_releases_are_enough_and_in_order() -> None:
    assert len(RELEASES) >= 12 and RELEASES[-1] == "0.33.0"
    assert list(RELEASES) == sorted(
        RELEASES, key=lambda name: [int(part) for part in name.split(".")]
    )


STAND_IN = """#!{python}
import json, os, sys
job, out = sys.argv[-2:]
written = open(out).read() if os.path.exists(out) else ""
with open(out, "a") as file:
    def line(**data): file.write(json.dumps(data) + "\\n")
    if "release" not in written:
        line(type="release", vllm="0.31.0", warnings=[], fields=[],
             signatures={{"get_finished": "(self)"}})
    for name, report in {reports!r}.items():
        if name not in written:
            line(type="start", variant=name)
            if name == {fatal!r}:
                file.flush()
                os._exit(1)
            line(type="run", variant=name, report=report, hooks=[], engine={{}})
    line(type="end", seconds=1)
"""


def stand_in(tmp_path: Path, runs: list[str], fatal: str | None = None) -> str:
    """A program that writes what the observer would: MUST[0] passes in all runs."""
    path = tmp_path / "python"
    reports = {
        v.id: CaseReport(v.id, rows=[new_row(MUST[0], v)]).to_dict()
        for v in VARIANTS
        if v.id in runs
    }
    path.write_text(
        STAND_IN.format(python=sys.executable, reports=reports, fatal=fatal),
        encoding="utf-8",
    )
    path.chmod(0o755)
    return str(path)


def matrix_of(tmp_path: Path, *places: matrix.Place, select: list[str]) -> list[Release]:
    settings = Settings(engine="vllm", select=select)
    observing = matrix.Observing(settings, False, True, tmp_path / "work")
    return matrix.run(
        places, observing, at_once=None, report=lambda release: None, where=Choice("here")
    )


def test_a_connector_that_ends_the_process_costs_one_run(tmp_path: Path) -> None:
    names = [RUN, OTHER]
    place = matrix.Place("0.31.0", stand_in(tmp_path, names, fatal=RUN))
    (found,) = matrix_of(tmp_path, place, select=names)
    assert found.deaths == [RUN] and found.problem is None and found.verdict == "nonconformant"
    assert found.found is not None and "hook.keeps-process" in found.found.failed
    assert set(found.verdicts) == set(names)


def test_a_python_that_is_not_there_or_says_nothing(tmp_path: Path) -> None:
    silent = tmp_path / "silent"
    silent.write_text("#!/bin/sh\necho no vllm here >&2\nexit 1\n", encoding="utf-8")
    silent.chmod(0o755)
    places = [
        matrix.Place("0.30.0", problem="not installed"),
        matrix.Place("0.31.0", str(tmp_path / "no")),
        matrix.Place("0.32.0", str(silent)),
    ]
    found = matrix_of(tmp_path, *places, select=[RUN])
    assert [release.verdict for release in found] == ["not run"] * 3
    assert found[0].problem == "not installed" and "cannot be started" in (found[1].problem or "")
    assert found[2].problem == "the process ended before it was done: no vllm here"


def test_a_run_that_is_not_selected_is_reported(tmp_path: Path) -> None:
    (found,) = matrix_of(
        tmp_path, matrix.Place("0.31.0", stand_in(tmp_path, [RUN, OTHER])), select=[RUN]
    )
    assert OTHER in (found.problem or "") and exit_code([found]) == 3


def test_a_run_that_is_missing_is_no_answer(tmp_path: Path) -> None:
    (found,) = matrix_of(
        tmp_path, matrix.Place("0.31.0", stand_in(tmp_path, [RUN])), select=[RUN, OTHER]
    )
    assert found.verdict == "error" and exit_code([found]) == 3


@pytest.mark.skipif(installed.vllm_root() is None, reason="needs vLLM")
@pytest.mark.e2e
@pytest.mark.long
def test_a_matrix_of_the_installed_release(tmp_path: Path) -> None:
    arguments = [
        "--at",
        f"0.31.0={sys.executable}",
        "--at",
        f"0.32.0={sys.executable}",
        "--at",
        "0.33.0=/no/such/python",
    ]
    command = [
        sys.executable,
        "-m",
        "kvconform.versions",
        *arguments,
        "-k",
        "preemption.in-decode",
        "--jobs",
        "1",
        "--report-dir",
        "out",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=400)
    assert done.returncode == 3, done.stdout + done.stderr
    assert "0.31.0 -> 0.32.0: nothing changed" in done.stdout and "0.33.0   NOT RUN" in done.stdout
    data = json.loads((tmp_path / "out" / "versions.json").read_text(encoding="utf-8"))
    assert [entry["verdict"] for entry in data["releases"]] == [
        "conformant",
        "conformant",
        "not run",
    ]
    (change,) = data["changes"]
    assert (
        change["compared"] >= 1
        and change["engine_same"] == change["engine_compared"] >= 1
        and change["snapshots"] >= 1
    )
    assert "| 0.33.0 | not run |" in (tmp_path / "out" / "versions.md").read_text(encoding="utf-8")


@pytest.mark.skipif(installed.vllm_root() is None, reason="needs vLLM")
def test_signatures_are_those_of_the_class() -> None:
    from kvconform.compat.vllm_api import KVConnectorBase_V1

    found = interface.signatures()
    for name, member in vars(KVConnectorBase_V1).items():
        function = getattr(
            member, "__func__", member.fget if isinstance(member, property) else member
        )
        if name.startswith("_") or not inspect.isfunction(function):
            continue
        named = found[name].partition("(")[2]
        assert all(parameter in named for parameter in inspect.signature(function).parameters), name
    assert found["get_required_kvcache_layout"].startswith("classmethod (")
    assert found["role"].startswith("property (")
