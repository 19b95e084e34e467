# SPDX-License-Identifier: Apache-2.0
"""Threads of a connector that an exception ends are named in the trace and in what follows."""

from __future__ import annotations

import gc
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest

from kvconform.config.target import Target
from kvconform.contract.loader import load_spec
from kvconform.contract.trace import Trace
from kvconform.run import dead_threads
from kvconform.run.case import run_and_judge

SPEC = load_spec()
DIES = "kvconform.refimpl.defects.threads:DiesOfAFailedLoad"


def die(name: str) -> None:
    def work() -> None:
        raise OSError(f"{name} is broken")

    thread = threading.Thread(target=work, name=name)
    thread.start()
    thread.join()


@pytest.fixture(autouse=True)
def hook(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the threads whose exceptions would have been printed."""
    printed: list[str] = []

    def note(args: Any) -> None:
        printed.append(args.thread.name)

    monkeypatch.setattr(threading, "excepthook", note)
    return printed


def test_dead_threads_are_emitted_once_by_step_and_still_printed(hook: list[str]) -> None:
    before = threading.excepthook
    trace = Trace()
    with dead_threads.noticed(trace, Target(DIES).resolve()):
        trace.step = 3
        die("writer")
        die("reader")
        trace.step = 5
        dead_threads.emit()
        dead_threads.emit()
    assert [(e["thread"], e["in_step"], e["error"]) for e in trace.events] == [
        ("reader", 3, "OSError: reader is broken"),
        ("writer", 3, "OSError: writer is broken"),
    ]
    assert hook == ["writer", "reader"] and threading.excepthook is before
    dead_threads.emit()  # no run
    assert len(trace.events) == 2


def test_a_run_inside_another_one_keeps_its_own() -> None:
    outer, inner = Trace(), Trace()
    connector = Target(DIES).resolve()
    with dead_threads.noticed(outer, connector):
        with dead_threads.noticed(inner, connector):
            die("inner")
            dead_threads.emit()
        die("outer")
        dead_threads.emit()
    assert [e["thread"] for e in inner.events] == ["inner"]
    assert [e["thread"] for e in outer.events] == ["outer"]


def test_threads_of_earlier_runs_do_not_count_and_no_exception_is_kept() -> None:
    class Tensor:
        """What a frame of the thread refers to."""

    go = threading.Event()

    def late() -> None:
        go.wait()
        raise OSError("late")

    def failing() -> None:
        held = Tensor()
        alive.append(weakref.ref(held))
        raise OSError("now")

    alive: list[weakref.ref[Tensor]] = []
    earlier = threading.Thread(target=late)
    earlier.start()
    trace = Trace()
    with dead_threads.noticed(trace, Target(DIES).resolve()):
        now = threading.Thread(target=failing)
        now.start()
        now.join()
        go.set()
        earlier.join()
        gc.collect()
        assert [each() for each in alive] == [None]
        dead_threads.emit()
    assert [e["thread"] for e in trace.events] == ["Thread (failing)"]


def test_what_waits_for_a_dead_thread_says_so(tmp_path: Path) -> None:
    variant = SPEC.cases["lifecycle.fail-before-asking"].variants(["reference"])[0]
    # What is declared is not measured.
    declared = {"store": True, "saves": "all", "async_load": True} | dict.fromkeys(
        ("transfer", "persistent", "best_effort"), False
    )
    options = {"load": "async", "async_saves": True}
    target = Target(DIES, options, capabilities=declared, stall_seconds=0.2)
    report = run_and_judge(variant, target, SPEC, seed=0, tmp=tmp_path, brief=True)
    failed = {row.requirement: row for row in report.rows if row.verdict == "FAIL"}
    assert "thread copies of the connector ended in step" in failed["recv.completes"].message
    assert "KeyError" in failed["lifecycle.threads-live"].message
    assert failed["lifecycle.threads-live"].message.count("thread copies") == 1
