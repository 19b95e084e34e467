# SPDX-License-Identifier: Apache-2.0
"""Tests of runs in another interpreter: it finds what this one finds."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from textwrap import indent
from typing import Any

import psutil
import pytest

pytest.importorskip("vllm")
from core_rig import REFERENCE, RESTART, ROUND_TRIP, check_ok, run_case, select
from elsewhere_rig import Polls
from kvconform.config.target import Target
from kvconform.contract.case import Variant
from kvconform.process import watchdog
from kvconform.run.isolation import OTHER_SEED, ElsewhereError, left_behind, run_elsewhere
from kvconform.run.promises import Plain, plain_case

CONNECTOR = '''
from kvconform.refimpl.connector import ReferenceConnector


class Connector(ReferenceConnector):
    """Found through --pythonpath only."""
'''


@pytest.mark.long
def test_an_interpreter_that_dies_before_it_has_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dies_at_once.py").write_text(
        f"{CONNECTOR}\n\nimport os, signal\n\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    variant = Variant(plain_case(Plain(9, 1, 9, 9), 4), "reference", "sync", "v1", 1, 4)
    with pytest.raises(ElsewhereError, match="another hash seed"):
        run_elsewhere(
            variant, Target("dies_at_once:Connector"), seed=0, tmp=tmp_path / "run", caps=None
        )


@pytest.fixture
def left_thread(tmp_path: Path) -> Iterator[None]:
    """The thread that an earlier run has left in this process."""
    check_ok(run_case("elsewhere_rig:Polls", ROUND_TRIP, tmp_path / "earlier"))
    assert "polls" in left_behind()
    yield
    assert Polls.asked is not None
    Polls.asked.put(None)
    Polls.asked = None


@pytest.mark.parametrize(
    ("steps", "relation"),
    [(RESTART, "connector"), pytest.param(ROUND_TRIP, "second-process", marks=pytest.mark.long)],
)
@pytest.mark.usefixtures("left_thread")
def test_a_process_with_a_connectors_threads_is_not_forked(
    steps: list[Any], relation: str, tmp_path: Path
) -> None:
    run = run_case("elsewhere_rig:Polls", steps, tmp_path / "run", relation=relation)
    check_ok(run)
    assert run.relation == relation
    assert [e["tokens"] for e in select(run.trace, "lookup", req="b")] == [12]


@pytest.mark.usefixtures("left_thread")
def test_a_fork_of_it_waits_for_a_thread_that_is_not_there(tmp_path: Path) -> None:
    """What the test above would see else."""
    run = run_case("elsewhere_rig:Polls", RESTART, tmp_path / "run", may_fork=True)
    assert [e["where"] for e in select(run.trace, "engine.crash")] == ["hook"]
    assert "nobody answers" in select(run.trace, "engine.crash")[0]["error"]


@pytest.mark.usefixtures("left_thread")
def test_a_fresh_interpreter_finds_what_a_fork_finds(tmp_path: Path) -> None:
    fresh = run_case(REFERENCE, RESTART, tmp_path / "run")
    forked = run_case(REFERENCE, RESTART, tmp_path / "run2", may_fork=True)
    assert [e["kind"] for e in fresh.trace] == [e["kind"] for e in forked.trace]
    assert fresh.unmet == forked.unmet


def test_a_hook_that_hangs_in_the_first_process_is_seen(tmp_path: Path) -> None:
    watchdog.start(3)
    try:
        run = run_case("elsewhere_rig:HangsAtFirst", RESTART, tmp_path)
    finally:
        watchdog.stop()
    assert run.harness_error is None
    assert [(e["where"], e["hook"]) for e in select(run.trace, "engine.crash")] == [
        ("hook", "wait_for_save")
    ]


@pytest.mark.parametrize(
    ("steps", "relation"),
    [(RESTART, "connector"), pytest.param(ROUND_TRIP, "hash-seed", marks=pytest.mark.long)],
)
def test_who_waits_for_a_process_that_hangs_for_good_ends_like_it(
    steps: list[Any], relation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a worker reports what hung, and where, to the process that started it."""

    class Ended(BaseException):
        """The error is not caught."""

    def ends(status: int) -> None:
        watchdog._watch.deadline = None  # it has passed: the thread would send a signal, too
        raise Ended(status)

    parent, leave = os.getpid(), os._exit
    monkeypatch.setattr(
        os, "_exit", lambda status: ends(status) if os.getpid() == parent else leave(status)
    )
    watchdog.start(3, tmp_path / "note", grace=0.5)
    try:
        with pytest.raises(Ended):
            run_case("elsewhere_rig:HoldsOn", steps, tmp_path / "run", relation=relation)
        found = watchdog.read_note(tmp_path / "note")
    finally:
        watchdog.stop()
    assert found is not None and found.hung and found.hook == "wait_for_save"


TALKS = """
import atexit
import os
import signal
import subprocess
import threading

print("connector: here")
atexit.register(os.kill, os.getpid(), signal.SIGKILL)
atexit.register(print, "connector: closed")
threading.Thread(target=threading.Event().wait).start()
subprocess.Popen(["sleep", "1000.PID"])
"""


def left_over(argument: str) -> list[psutil.Process]:
    """Running processes with the argument on their command line."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and argument in process.cmdline():
                found.append(process)
    return found


def test_what_a_connector_prints_and_leaves_and_how_it_ends_does_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its package is found where only --pythonpath names it."""
    script = f"if __import__('os').environ.get('PYTHONHASHSEED') == '{OTHER_SEED}':\n"
    seconds = f"1000.{os.getpid()}"  # of this test alone
    talks = indent(TALKS.replace("1000.PID", seconds), "    ")
    (tmp_path / "talks.py").write_text(CONNECTOR + "\n\n" + script + talks)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    variant = Variant(plain_case(Plain(9, 1, 9, 9), 4), "reference", "sync", "v1", 1, 4)
    target = Target("talks:Connector", extra_config={"store": "{tmp}"})
    run = run_elsewhere(variant, target, seed=0, tmp=tmp_path / "run", caps=None)
    assert run.harness_error is None
    assert not [e for e in run.trace if e["kind"] == "engine.crash"]
    assert any(e["kind"] == "run.end" and e["quiesced"] for e in run.trace)
    deadline = time.monotonic() + 20
    while left_over(seconds) and time.monotonic() < deadline:
        time.sleep(0.1)  # a process that was killed needs a moment to end
    assert not left_over(seconds)
