# SPDX-License-Identifier: Apache-2.0
"""Tests of `kvconform run`: exit codes, reports and messages.

fake_runner stands in for the engine, so vLLM is not imported.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

import program_rig
from kvconform import cli
from kvconform.config.settings import Settings, load
from kvconform.errors import EnvironmentProblem
from kvconform.judge.records import Verdict
from kvconform.report.jsonl import ReportLine
from kvconform.report.summary import Summary
from kvconform.session import launch
from places import RIGS
from program_rig import FAKE, GUARANTEE, MUST, SPEC, Result

REPORTS = "kvconform-report"
CASES = [
    case.id
    for case in SPEC.cases.values()
    if len(case.variants(["reference"], ["sync"])) == 1 and not case.beyond
][:4]
SHOULD = next(
    r.id
    for r in SPEC.requirements.values()
    if r.kind == "requirement" and r.level.startswith("SHOULD")
)


def kvconform(
    tmp_path: Path,
    *arguments: str,
    orders: dict[str, Any] | None = None,
    cases: list[str] | None = None,
) -> Result:
    """Run the program in tmp_path on some cases, reference engine, sync, one worker."""
    command = ["run", "--engine", "reference", "--scheduling", "sync", "--workers", "1"]
    command += ["--extra-config", json.dumps(orders)] if orders is not None else []
    command += ["-k", ",".join(CASES[:2] if cases is None else cases)] if cases != [] else []
    others = {"PYTEST_ADDOPTS": "--no-such-option"}  # the settings of others do not matter
    done = program_rig.kvconform(*command, *arguments, cwd=tmp_path, env=FAKE | others)
    return Result(done, tmp_path / REPORTS)


def test_conformant(tmp_path: Path) -> None:
    result = kvconform(tmp_path, "json:Fake", orders={"unmet": [CASES[1]]})
    assert (result.code, result.err) == (0, "")
    assert "CONFORMANT" in result.out
    assert "(inferred)" not in result.out and "(declared)" not in result.out
    assert "1 run did not reach the situation it tests" in result.out
    adapter: TypeAdapter[Any] = TypeAdapter(ReportLine)
    kinds = [adapter.validate_python(line).type for line in result.lines]
    assert (kinds[0], kinds[-1]) == ("header", "footer")
    assert set(kinds[1:-1]) == {"run", "case"}
    assert Summary.model_validate(result.summary).verdict == "conformant"
    suite = ElementTree.parse(result.folder / "junit.xml").getroot()[0]
    assert (suite.get("name"), suite.get("tests"), suite.get("failures")) == ("kvconform", "2", "0")


def test_a_router_that_does_not_exist_is_refused_before_anything(tmp_path: Path) -> None:
    (tmp_path / "routers.py").write_text("class Router: ...\n", encoding="utf-8")
    for router, sentence in (
        ("no_such_package:Router", "there is no package 'no_such_package'"),
        (
            "routers.more:Router",
            "there is no module 'routers.more' (routers is no package), which",
        ),
        ("routers:Ruter", "has no class 'Ruter'; did you mean Router?"),
    ):
        (tmp_path / "kvconform.toml").write_text(
            f'router = "{router}"\npythonpath = ["."]\n', encoding="utf-8"
        )
        result = kvconform(tmp_path, "json:Fake")
        assert result.code == 2 and sentence in result.err
        assert result.out == "" and not result.folder.exists()


def test_what_goes_wrong_with_the_servers_of_a_worker_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "kvconform.toml").write_text(
        """
[[servers]]
name = "store"
command = "exec sleep 600"
ready = {command = "true"}
stop = "false"
"""
    )
    result = kvconform(tmp_path, "json:Fake", "--workers", "2")
    assert result.code == 0
    sentence = "stop command `false` of server store failed"
    assert result.out.count(f"warning     {sentence}") == 1
    assert result.lines[0]["warnings"].count(sentence) == 1


def test_the_folder_of_a_killed_run_is_removed_by_the_next(tmp_path: Path) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    env = {**FAKE, "TMPDIR": str(temporary)}
    command = ["run", "json:Fake", "-k", CASES[0], "--engine", "reference", "--workers", "1"]
    hanging = [*command, "--extra-config", json.dumps({"hang": [CASES[0]]})]
    with subprocess.Popen(
        [sys.executable, "-m", "kvconform", *hanging, "--report-dir", "first"],
        cwd=tmp_path,
        env={**os.environ, **env},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as killed:
        until = time.monotonic() + 60
        while not list(temporary.glob("kvconform-run-*/.owner")) and time.monotonic() < until:
            time.sleep(0.02)
        killed.kill()
        folders = [*temporary.glob("kvconform-run-*")]
    assert len(folders) == 1 and folders[0].exists()
    program_rig.kvconform(*command, cwd=tmp_path, env=env)
    assert not [*temporary.glob("kvconform-run-*")]


def test_a_failure_is_shown_once_with_all_that_is_known(tmp_path: Path) -> None:
    result = kvconform(
        tmp_path,
        "json:Fake",
        orders={"fail": {MUST[0]: CASES[:2], SHOULD: CASES[:1], GUARANTEE: CASES[:1]}},
    )
    assert result.code == 1
    for text in (
        "wrong bytes in {tmp}/store by <object at 0x…>",
        "v1/core.py: Scheduler.schedule",
        "step 2",
        "request a",
        "STALL",
    ):
        assert text in result.out
    assert result.out.count(f"── 1. {MUST[0]} ─") == 1
    assert "1 more run: " in result.out
    assert f"2. {GUARANTEE}: " in result.out and "[the engine's, not" in result.out
    assert f"3. {SHOULD}: " in result.out and "[recommended" in result.out
    command = f"kvconform run json:Fake -k {CASES[0]} --engine reference --scheduling sync --seed 0"
    assert command in " ".join(result.out.replace(" \\\n", " ").split())
    assert result.summary["requirements"]["failed"] == [MUST[0]]
    assert "\x1b" not in result.out


def test_a_recommendation_counts_only_when_strict(tmp_path: Path) -> None:
    orders = {"fail": {SHOULD: CASES[:1]}}
    assert kvconform(tmp_path, "json:Fake", orders=orders).code == 0
    assert kvconform(tmp_path, "json:Fake", "--strict", orders=orders).code == 1


def test_a_failure_where_vllm_does_not_go_is_a_risk(tmp_path: Path) -> None:
    orders = {"fail": {MUST[0]: ["lifecycle.id-again"]}}
    cases = ["lifecycle.id-again", CASES[0]]
    result = kvconform(tmp_path, "json:Fake", "-v", orders=orders, cases=cases)
    assert result.code == 0
    words = " ".join(result.out.split())
    assert "saves=all (inferred), store=yes (declared)" in words
    assert "[risk: this vLLM does not bring it about; it counts with --strict]" in words
    assert "reused-id, which the contract allows and vLLM does not do" in words
    assert "InputProcessor.assign_request_id" in words
    assert f"risks, where vLLM does not go today: {MUST[0]}" in result.out
    assert result.out.rstrip().splitlines()[-2].startswith("CONFORMANT")
    assert (result.summary["verdict"], result.summary["extra"]["exit_code"]) == ("conformant", 0)
    extra = result.summary["extra"]
    assert (extra["risks"], extra["advisory"]) == ([MUST[0]], [])
    (row,) = result.rows(Verdict.FAIL)
    assert (row["beyond"], row["gating"]) == (["reused-id"], False)
    suite = ElementTree.parse(result.folder / "junit.xml").getroot()[0]
    assert suite.get("failures") == "0"
    assert [each.get("name") for each in suite.iter("property")] == ["risk"]
    page = (result.folder / "report.html").read_text(encoding="utf-8")
    assert "never does" in page
    strict = kvconform(tmp_path, "json:Fake", "--strict", orders=orders, cases=cases)
    assert strict.code == 1
    assert "[risk" not in strict.out


def test_a_requirement_that_also_fails_where_vllm_goes_is_no_risk(tmp_path: Path) -> None:
    orders = {"fail": {MUST[0]: ["lifecycle.id-again", CASES[0]]}}
    result = kvconform(tmp_path, "json:Fake", orders=orders, cases=["lifecycle.id-again", CASES[0]])
    assert result.code == 1
    assert result.summary["requirements"]["failed"] == [MUST[0]]
    assert result.summary["extra"]["risks"] == []


def test_two_runs_do_not_write_into_one_directory(tmp_path: Path) -> None:
    folder = tmp_path / "kvconform-report"
    folder.mkdir()
    with (folder / "report.jsonl").open("a", encoding="utf-8") as file:
        file.write("the first run's\n")
        file.flush()
        fcntl.flock(file, fcntl.LOCK_EX)
        done = kvconform(tmp_path, "json:Fake")
    assert done.code == 2
    assert "kvconform-report: wait for it, or name another --report-dir" in done.err
    assert (folder / "report.jsonl").read_text(encoding="utf-8") == "the first run's\n"
    assert kvconform(tmp_path, "json:Fake").code == 0


def test_broken_guarantees_stand_in_the_last_lines(tmp_path: Path) -> None:
    result = kvconform(tmp_path, "json:Fake", orders={"fail": {GUARANTEE: CASES[:1]}})
    assert result.code == 0
    last = " ".join(result.out.split())
    text = "guarantees of the engine that did not hold, explained by no finding"
    assert last.endswith(f" {text}: {GUARANTEE}")
    orders = {"fail": {GUARANTEE: CASES[:1]}, "bugs": {GUARANTEE: ["starved-retry"]}}
    result = kvconform(tmp_path, "json:Fake", orders=orders)
    last = " ".join(result.out.split())
    why = "as a known bug does (docs/engine-findings.md)"
    assert last.endswith(f" guarantees that the engine broke, {why}: {GUARANTEE}")


def test_a_requirement_alone_hints_at_the_cases_in_which_it_failed(tmp_path: Path) -> None:
    orders = {"fail": {MUST[0]: [CASES[2]]}}
    assert kvconform(tmp_path, "json:Fake", orders=orders, cases=CASES).code == 1
    result = kvconform(tmp_path, "json:Fake", "--profile", "smoke", cases=[MUST[0]])
    hint = f"to run only the cases in which it failed last time: -k {CASES[2]}"
    assert hint in " ".join(result.out.split())


def test_dead_workers_cost_one_run_each(tmp_path: Path) -> None:
    orders = {"exit": [CASES[0]], "hang": [CASES[2]], "fail": {MUST[0]: [CASES[3]]}}
    result = kvconform(
        tmp_path, "json:Fake", "--hook-timeout", "2", "--workers", "2", orders=orders, cases=CASES
    )
    assert result.code == 1
    failed = {
        (row["requirement"], row["case"]): row["message"] for row in result.rows(Verdict.FAIL)
    }
    assert failed == {
        (
            "hook.keeps-process",
            CASES[0],
        ): "the process ended in get_finished (os._exit, or a fatal signal)",
        (
            "hook.terminates",
            CASES[2],
        ): "get_finished did not return within 2 s and could not be interrupted",
        (MUST[0], CASES[3]): "wrong bytes in {tmp}/store by <object at 0x…>",
    }
    assert len(result.rows(Verdict.PASS)) > 100
    assert result.lines[-1]["type"] == "footer"


@pytest.mark.long
@pytest.mark.parametrize("workers", ["4"])
def test_the_number_of_workers_does_not_matter(tmp_path: Path, workers: str) -> None:
    orders = {"fail": {MUST[0]: CASES[1:3], MUST[1]: CASES[:1]}, "unmet": [CASES[3]]}
    arguments = ("json:Fake", "--engine", "all", "--scheduling", "all")
    reports = []
    for number in ("1", workers):
        result = kvconform(tmp_path, *arguments, "--workers", number, orders=orders, cases=CASES)
        assert result.code == 1
        reports.append((result.folder / "report.jsonl").read_bytes())
    assert reports[0] == reports[1]


def test_a_bug_of_the_harness_is_no_verdict(tmp_path: Path) -> None:
    result = kvconform(tmp_path, "json:Fake", orders={"raise": [CASES[0]]})
    assert result.code == 3
    assert "Traceback" not in result.out + result.err
    assert "a bug of the harness" in result.out, result.err
    assert {row["case"] for row in result.rows(Verdict.PASS)} == {CASES[1]}
    assert {row["case"] for row in result.rows(Verdict.ERROR)} == {CASES[0]}


def test_what_cannot_be_judged_ends_the_run_with_a_sentence(tmp_path: Path) -> None:
    result = kvconform(tmp_path, "json:Fake", orders={"usage": "the server is not there"})
    assert (result.code, result.err) == (2, "kvconform: the server is not there\n")


ORDER = """
import json, sys
from kvconform.config.settings import Settings
from kvconform.session import launch
runs, settings, options = [], Settings.model_validate_json(sys.argv[1]), json.loads(sys.argv[2])
launch.run(
    settings,
    listener=lambda found, lines, _: runs.append((found.variant, sorted(lines))),
    quiet=True,
    **options,
)
print(json.dumps(runs))
"""


def test_which_runs_are_made_first_and_which_are_traced(tmp_path: Path) -> None:
    """So `kvconform watch` begins with what failed, and knows what changed lines reach."""
    chosen = CASES[:3]
    settings = Settings(connector="json:Fake", engine="reference", scheduling="sync", workers=1)
    settings.select, settings.report_dir = chosen, str(tmp_path)
    runs = [f"{name}[reference-sync-v1-d1-b4]" for name in chosen]
    options = {"first": runs[2:], "traced": [str(RIGS)], "untraced": runs[:1]}
    given = (settings.model_dump_json(), json.dumps(options))
    done = program_rig.python("-c", ORDER, *given, cwd=tmp_path, env=FAKE)
    assert done.returncode == 0, done.stderr
    made = {run: files for run, files in json.loads(done.stdout)}
    assert [*made] == [runs[2], *(run for run in made if run != runs[2])] and {*made} == {*runs}
    rig = str(RIGS / "fake_runner.py")
    assert (rig in made[runs[0]], rig in made[runs[1]], rig in made[runs[2]]) == (False, True, True)


def test_only_a_requirement(tmp_path: Path) -> None:
    result = kvconform(
        tmp_path, "json:Fake", "-k", MUST[1], orders={"fail": {MUST[0]: CASES[:1]}}, cases=[]
    )
    assert result.code == 0 and "CONFORMANT in what was selected" in result.out
    assert {row["requirement"] for row in result.rows()} == {MUST[1]}


def test_a_requirement_beside_a_case_hides_nothing(tmp_path: Path) -> None:
    result = kvconform(tmp_path, "json:Fake", "-k", MUST[1], orders={"fail": {MUST[0]: CASES[:1]}})
    assert result.code == 1
    assert {MUST[0], MUST[1]} <= {row["requirement"] for row in result.rows()}


def test_trace(tmp_path: Path) -> None:
    result = kvconform(tmp_path, "json:Fake", "--trace", CASES[0], orders={}, cases=[])
    assert result.code == 0
    assert f"{CASES[0]}[reference-sync-v1-d1-b4]" in result.out
    assert "engine      start" in result.out


SETTINGS = """
connector = "json:Fake"
extra-config = {{fail = {{"{must}" = ["{case}"]}}}}
setup = ["echo up >> log", "test -d $KVCONFORM_TMP"]
teardown = ["echo down >> log", "false"]
disable = ["{off}"]
[[expected-failures]]
requirement = "{must}"
case = "{expected}"
reason = "known"
expires = {expires}
"""


def settings(tmp_path: Path, **changes: str) -> None:
    values = {
        "must": MUST[0],
        "case": CASES[0],
        "expected": CASES[0],
        "off": CASES[1],
        "expires": "2999-01-01",
        **changes,
    }
    (tmp_path / "kvconform.toml").write_text(SETTINGS.format(**values), encoding="utf-8")


def test_an_expected_failure(tmp_path: Path) -> None:
    settings(tmp_path)
    result = kvconform(tmp_path)
    assert result.code == 0
    assert "PARTLY CONFORMANT" in result.out
    assert [row["requirement"] for row in result.rows(Verdict.XFAIL)] == [MUST[0]]
    assert {row["case"] for row in result.rows(Verdict.DISABLED)} == {CASES[1]}
    assert "tear-down command `false` failed with status 1" in result.out
    assert (tmp_path / "log").read_text() == "up\ndown\n"


def test_tear_down_commands_run_whatever_workers_have_left(tmp_path: Path) -> None:
    settings(tmp_path)
    broken = 'setup = ["echo up >> log", "echo { > $KVCONFORM_TMP/gw0.servers.json"]'
    file = tmp_path / "kvconform.toml"
    before = 'setup = ["echo up >> log", "test -d $KVCONFORM_TMP"]'
    file.write_text(file.read_text().replace(before, broken), encoding="utf-8")
    result = kvconform(tmp_path)
    assert result.code == 0
    assert "servers of worker gw0 cannot be read" in result.out
    assert (tmp_path / "log").read_text() == "up\ndown\n"


def test_kv_of_other_runs_ends_the_run_without_rows(tmp_path: Path) -> None:
    result = kvconform(tmp_path, orders={"foreign": [CASES[1]]}, cases=CASES[:2])
    assert result.code == 2
    assert "the store is shared" in result.err and "the store is shared" not in result.out
    assert result.rows(Verdict.ERROR) == []
    assert "CONFORMANT" not in result.out


def test_an_expected_failure_that_has_expired(tmp_path: Path) -> None:
    settings(tmp_path, expires="2020-01-01")
    result = kvconform(tmp_path)
    assert result.code == 1
    assert "expired on 2020-01-01" in result.out


def test_set_up_fails(tmp_path: Path) -> None:
    settings(tmp_path)
    text = (
        (tmp_path / "kvconform.toml")
        .read_text()
        .replace('"test -d $KVCONFORM_TMP"', '"echo no server; exit 4"')
    )
    (tmp_path / "kvconform.toml").write_text(text)
    result = kvconform(tmp_path)
    assert result.code == 3
    assert (
        result.err
        == "kvconform: set-up command `echo no server; exit 4` failed with status 4: no server\n"
    )
    assert (tmp_path / "log").read_text() == "up\ndown\n"
    assert (result.summary["verdict"], result.summary["extra"]["exit_code"]) == ("error", 3)


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long)]
)
def test_a_signal_while_the_run_starts_leaves_a_summary(
    tmp_path: Path, number: signal.Signals
) -> None:
    """Exit status, summary and last line agree, and nothing is left of an earlier verdict."""
    assert kvconform(tmp_path, "json:Fake", orders={}).code == 0
    (tmp_path / "kvconform.toml").write_text('setup = ["echo up >> log; sleep 60"]\n')
    process = subprocess.Popen(
        [sys.executable, "-m", "kvconform", "run", "json:Fake", "-k", CASES[0]],
        cwd=tmp_path,
        env={**os.environ, **FAKE},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    while not (tmp_path / "log").exists() and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    result = Result(subprocess.CompletedProcess([], process.returncode), tmp_path / REPORTS)
    assert (process.returncode, err) == (3, "kvconform: interrupted\n")
    assert (result.summary["verdict"], result.summary["extra"]["exit_code"]) == ("error", 3)
    assert "interrupted" in result.summary["extra"]["reasons"]
    assert result.lines[-1]["verdict"] == "error"


def test_a_signal_before_pytest_has_a_session_leaves_a_summary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KVCONFORM_RUNNER", FAKE["KVCONFORM_RUNNER"])
    monkeypatch.setattr(pytest, "main", interrupted)
    folder = tmp_path / REPORTS
    with pytest.raises(EnvironmentProblem, match="interrupted"):
        launch.run(load({"connector": "json:Fake", "report_dir": str(folder)}))
    found = Result(subprocess.CompletedProcess([], 3), folder).summary
    assert (found["verdict"], found["extra"]["exit_code"]) == ("error", 3)


def test_ctrl_c_outside_of_a_run_is_an_interruption(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The option parser calls it status 130 and says nothing."""

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kvconform.commands.show", interrupted)
    with pytest.raises(SystemExit) as done:
        cli.main(["list"])
    assert (done.value.code, capsys.readouterr().err) == (3, "kvconform: interrupted\n")


def test_a_run_begins_without_the_verdict_of_an_earlier_one(tmp_path: Path) -> None:
    """A run that is killed leaves a report without a verdict, and no file with another one."""
    assert kvconform(tmp_path, "json:Fake", orders={}).code == 0
    text = f'setup = ["ls {REPORTS} > seen"]\n'
    (tmp_path / "kvconform.toml").write_text(text)
    assert kvconform(tmp_path, "json:Fake", orders={}).code == 0
    assert set((tmp_path / "seen").read_text().split()) == {"logs", "report.jsonl"}


def test_a_report_directory_that_cannot_be_written(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for folder in ("file/x", "file"):
        result = kvconform(tmp_path, "json:Fake", "--report-dir", folder, orders={})
        assert result.code == 2
        assert f"/{folder}: {file} is not a directory; name another folder\n" in result.err


def test_a_run_is_given_up_when_hooks_hang_again_and_again(tmp_path: Path) -> None:
    """Each of them costs a minute here, and the patience is three."""
    cases = [
        case.id
        for case in SPEC.cases.values()
        if len(case.variants(["reference"], ["sync"])) == 1 and not case.beyond
    ][:5]
    orders = {"fail": {"hook.terminates": cases}}
    options = ("json:Fake", "--hook-timeout", "55")
    result = kvconform(tmp_path, *options, orders=orders, cases=cases)
    assert result.code == 1 and "gave up: hook.terminates fails again and again" in result.err
    out = " ".join(result.out.split())
    assert "NOT CONFORMANT" in out and "2 of 5 runs were not made" in out
    assert Summary.model_validate(result.summary).verdict == "nonconformant"
    (tmp_path / "kvconform.toml").write_text(
        '[[expected_failures]]\nrequirement = "hook.terminates"\nreason = "known"\n',
        encoding="utf-8",
    )
    result = kvconform(tmp_path, *options, orders=orders, cases=cases)
    assert result.code == 0 and "gave up" not in result.err
