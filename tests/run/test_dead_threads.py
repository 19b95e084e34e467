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
from kvconform.refimpl.variants.peer import Peer
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


def test_what_ends_on_purpose_is_no_death() -> None:
    go = threading.Event()

    def listen() -> None:
        go.wait()
        raise OSError("the socket is closed")

    def leave() -> None:
        raise SystemExit

    trace = Trace()
    with dead_threads.noticed(trace, Target(DIES).resolve()):
        left, listening = threading.Thread(target=leave), threading.Thread(target=listen)
        left.start()
        left.join()
        listening.start()
        dead_threads.excuse()  # the connector is being shut down
        go.set()
        listening.join()
        die("next")
        dead_threads.emit()
    assert [e["thread"] for e in trace.events] == ["next"]


def test_a_thread_of_the_run_around_is_that_run_s() -> None:
    go = threading.Event()
    outer, inner = Trace(), Trace()
    connector = Target(DIES).resolve()

    def late() -> None:
        go.wait()
        raise OSError("late")

    with dead_threads.noticed(outer, connector):
        thread = threading.Thread(target=late, name="late")
        thread.start()
        with dead_threads.noticed(inner, connector):
            go.set()
            thread.join()
            dead_threads.emit()
        dead_threads.emit()
    assert inner.events == []
    assert [e["thread"] for e in outer.events] == ["late"]


def test_a_hook_that_the_connector_sets_stays() -> None:
    def own(args: Any) -> None:
        """Do nothing."""

    with dead_threads.noticed(Trace(), Target(DIES).resolve()):
        threading.excepthook = own
    assert threading.excepthook is own


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


class DyingPeer(Peer):
    """A peer, one of whose threads dies as it begins to load."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        super().start_load_kv(forward_context, **kwargs)
        die("pulls")


def test_a_thread_of_one_of_two_engines(tmp_path: Path) -> None:
    variant = SPEC.cases["transfer.prompt"].variants(["reference"])[0]
    target = Target(f"{__name__}:DyingPeer")
    report = run_and_judge(variant, target, SPEC, seed=0, tmp=tmp_path, brief=True)
    row = next(row for row in report.rows if row.requirement == "lifecycle.threads-live")
    assert row.verdict == "FAIL" and "thread pulls of the connector" in row.message
