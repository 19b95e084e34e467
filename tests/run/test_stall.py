# SPDX-License-Identifier: Apache-2.0
"""Tests of time: leases that run out on the virtual clock, slow threads, and what a stall says."""

from __future__ import annotations

import contextlib
import itertools
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from time import monotonic
from types import SimpleNamespace
from typing import Any

import pytest

from core_rig import check_ok, run_case, select
from kvconform.config.target import Target
from kvconform.contract.loader import load_spec
from kvconform.contract.trace import Trace
from kvconform.judge.describe import describe
from kvconform.judge.records import Verdict
from kvconform.process import clock
from kvconform.refimpl.connector import ReferenceConnector
from kvconform.run import stall
from kvconform.run.case import run_and_judge

RUN: dict[str, Any] = {"run": {}}
ONE = [{"add": {"req": "a", "prompt": 9, "max_tokens": 2}}, RUN]


class Leases(ReferenceConnector):
    """Holds the blocks of a request that has ended for a lease of a minute."""

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, Any]:
        super().request_finished(request, block_ids)
        return True, None

    def get_finished(self, finished_req_ids: set[str]) -> tuple[Any, Any]:
        ends = self.__dict__.setdefault("_ends", {})
        ends.update(dict.fromkeys(finished_req_ids, time.monotonic() + 60))
        over = {req for req, end in ends.items() if time.monotonic() > end}
        self._ends = {req: end for req, end in ends.items() if req not in over}
        return over, super().get_finished(finished_req_ids)[1]


class Imported(Leases):
    """Reads the clock by a name that this module has imported."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[Any, Any]:
        ends = self.__dict__.setdefault("_ends", {})
        ends.update(dict.fromkeys(finished_req_ids, monotonic() + 60))
        over = {req for req, end in ends.items() if monotonic() > end}
        self._ends = {req: end for req, end in ends.items() if req not in over}
        return over, super(Leases, self).get_finished(finished_req_ids)[1]


class Slow(Leases):
    """Releases them from a thread, after twice the stall time of its test."""

    seconds = 1.0

    def get_finished(self, finished_req_ids: set[str]) -> tuple[Any, Any]:
        done = self.__dict__.setdefault("_done", set())
        if finished_req_ids:
            threading.Timer(self.seconds, done.update, [set(finished_req_ids)]).start()
        over = set(done)
        done -= over
        return over, super(Leases, self).get_finished(finished_req_ids)[1]


class Never(Leases):
    """Holds them for ever."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[Any, Any]:
        return set(), super(Leases, self).get_finished(finished_req_ids)[1]


@pytest.mark.parametrize("engine", ["reference", "vllm"])
@pytest.mark.parametrize("connector", ["Leases", "Imported"])
def test_a_lease_runs_out_in_a_moment(connector: str, engine: str, tmp_path: Path) -> None:
    before = clock.monotonic()
    run = run_case(f"{__name__}:{connector}", ONE, tmp_path, engine=engine)
    assert clock.monotonic() - before < 30
    check_ok(run)
    assert select(run.trace, "transfer.reported", direction="send")
    assert {e["why"] for e in select(run.trace, "clock.advanced")} == {"stall"}


def test_a_slow_thread_is_waited_for_in_real_time(tmp_path: Path) -> None:
    run = run_case(f"{__name__}:Slow", ONE, tmp_path, stall=0.5)
    check_ok(run)
    assert select(run.trace, "transfer.reported", direction="send")


def test_time_passes_in_idle_steps(tmp_path: Path) -> None:
    def released_while_idle(seconds: int) -> bool:
        steps = [*ONE[:1], {"step": 4}, {"idle": {"steps": 3, "seconds": seconds}}]
        run = run_case(f"{__name__}:Leases", steps, tmp_path / str(seconds))
        idle = select(run.trace, "clock.advanced", why="idle")[0]
        assert idle["seconds"] == seconds
        (sent,) = select(run.trace, "transfer.reported", direction="send")
        assert sent["seq"] > idle["seq"]
        return bool(sent["step"] <= idle["step"] + 3)

    assert released_while_idle(90) and not released_while_idle(10)


def test_a_stall_says_how_long_and_which_setting_changes_it(tmp_path: Path) -> None:
    run = run_case(f"{__name__}:Never", ONE, tmp_path)
    (stall,) = select(run.trace, "engine.stall")
    assert (stall["limit"], stall["threads"]) == (0.1, 0)
    said = describe(stall)
    assert "60 steps and 0.1 s (setting stall_seconds)" in said
    assert "a: FINISHED_LENGTH_CAPPED" in said
    again = run_case(f"{__name__}:Never", ONE, tmp_path / "again")
    assert again.trace == run.trace


def test_the_wall_clock_is_right_again_after_a_run(tmp_path: Path) -> None:
    file = tmp_path / "file"
    with clock.of_run():
        monotonic, wall = time.monotonic(), time.time()
        clock.advance(500)
        assert time.monotonic() - monotonic > 499
        assert time.time() - wall > 499
        assert time.time_ns() / 1e9 - wall > 499
        after = time.monotonic()
    file.touch()
    assert abs(time.time() - file.stat().st_mtime) < 60
    assert time.monotonic() >= after, "a monotonic clock does not go back"


def test_a_case_whose_point_was_not_reached_says_so(tmp_path: Path) -> None:
    """Of the producer without a lease, nothing can be said about what comes after it."""
    spec = load_spec()
    variant = spec.cases["transfer.late"].variants(["reference"])[0]
    target = Target("kvconform.refimpl.variants.peer:Peer", {})
    report = run_and_judge(variant, target, spec, seed=0, tmp=tmp_path / "run")
    (row,) = (row for row in report.rows if row.requirement == "transfer.fail-closed")
    assert report.unmet
    assert row.verdict is Verdict.NOT_EXERCISED
    assert row.message is not None
    assert row.message.startswith("the case did not reach its situation: given-up: releases")


class SlowNotes(Slow):
    """Takes longer than a run waits before it sets the clock forward, if nothing is at work."""

    seconds = 2.0


class Answers(Leases):
    """Releases blocks when a server has answered, which it polls for; it has no thread."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[Any, Any]:
        asked = self.__dict__.setdefault("_asked", {})
        for req in finished_req_ids:
            ours, theirs = socket.socketpair()
            ours.setblocking(False)
            asked[req] = ours
            subprocess.Popen(["sh", "-c", "sleep 2; echo done"], stdout=theirs.fileno())
            theirs.close()
        over = {req for req, ours in asked.items() if _answered(ours)}
        for req in over:
            asked.pop(req).close()
        return over, super(Leases, self).get_finished(finished_req_ids)[1]


def _answered(ours: socket.socket) -> bool:
    with contextlib.suppress(BlockingIOError):
        return bool(ours.recv(100))
    return False


@pytest.mark.parametrize("connector", ["SlowNotes", "Answers"])
def test_blocks_are_held_while_something_of_the_connector_is_at_work(
    connector: str, tmp_path: Path
) -> None:
    """The clock is not set forward, which would let a lease run out."""
    run = run_case(f"{__name__}:{connector}", ONE, tmp_path, stall=4.0)
    check_ok(run)
    assert select(run.trace, "transfer.reported", direction="send")
    assert not select(run.trace, "clock.advanced")


class Pooled(Leases):
    """Releases blocks from a thread of a pool that the whole process shares."""

    pool: ThreadPoolExecutor

    def get_finished(self, finished_req_ids: set[str]) -> tuple[Any, Any]:
        works: dict[str, Future[None]] = self.__dict__.setdefault("_works", {})
        for req in finished_req_ids:
            works[req] = self.pool.submit(time.sleep, 1.25)
        over = {req for req, work in works.items() if work.done()}
        self._works = {req: work for req, work in works.items() if req not in over}
        return over, super(Leases, self).get_finished(finished_req_ids)[1]


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        monkeypatch.setattr(Pooled, "pool", pool, raising=False)
        yield pool


def test_a_pool_of_an_earlier_run_is_waited_for(pool: ThreadPoolExecutor, tmp_path: Path) -> None:
    """With one thread, the second run starts none."""
    for name in ("first", "second"):
        run = run_case(f"{__name__}:Pooled", ONE, tmp_path / name, stall=4.0)
        check_ok(run)
        assert select(run.trace, "transfer.reported", direction="send")
        assert not select(run.trace, "clock.advanced"), name


class Detector:
    """A detector of stalls, in front of engines with these requests; seconds pass as it sleeps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, at_work: bool = False) -> None:
        self.now, self.at_work = 0.0, at_work
        self.requests: dict[str, Any] = {}
        self.queue: list[Any] = []
        self.trace = Trace()
        self.trace.step = 1
        self.target = Target("x:Y", {}, stall_seconds=2.0)
        scheduler = SimpleNamespace(
            requests=self.requests,
            has_unfinished_requests=lambda: (
                not all(r.is_finished() for r in self.requests.values())
            ),
        )
        self.all_engines = [SimpleNamespace(queue=self.queue, scheduler=scheduler)]
        monkeypatch.setattr(stall, "clock", SimpleNamespace(monotonic=self.real, advance=self.real))
        monkeypatch.setattr(stall, "time", SimpleNamespace(sleep=self.sleep))
        monkeypatch.setattr(stall._Spent, "seconds", 0.0)

    def real(self, _: float = 0) -> float:
        return self.now

    def sleep(self, _: float) -> None:
        self.now += 0.1

    def live_threads(self) -> int:
        return 0

    def may_work(self) -> bool:
        return self.at_work

    def has(self, **statuses: str) -> None:
        for name, status in statuses.items():
            ended = status.startswith("FINISHED")
            state = SimpleNamespace(name=status)
            self.requests[name] = SimpleNamespace(
                status=state, is_finished=lambda ended=ended: ended
            )

    def flies(self, *, tokens: int) -> None:
        output = SimpleNamespace(total_num_scheduled_tokens=tokens)
        self.queue[:] = [SimpleNamespace(output=output)]

    def stall(self) -> tuple[float, float]:
        """Return after how many seconds it is a stall, and how far the clock was set forward."""
        began, detector = self.now, stall.StallDetector(self)  # type: ignore[arg-type]
        for _ in itertools.takewhile(lambda _: not detector.stalled(), range(10_000)):
            pass
        return self.now - began, detector.leapt


def test_held_blocks_may_wait_for_a_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Detector(monkeypatch)
    driver.has(a="FINISHED_STOPPED", b="WAITING")
    assert driver.stall()[1] == stall.LEASE


def test_requests_that_wait_have_all_of_the_stall_time_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Then the clock is set forward for them, too: a load may have a time limit of its own."""
    driver = Detector(monkeypatch)
    driver.has(a="WAITING_FOR_REMOTE_KVS")
    seconds, leapt = driver.stall()
    assert (leapt, seconds) == (stall.LEASE, pytest.approx(2.0, abs=0.3))


def test_with_tokens_in_flight_no_lease_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Detector(monkeypatch)
    driver.has(a="FINISHED_STOPPED")
    driver.flies(tokens=1)
    assert driver.stall()[1] == 0
    driver.flies(tokens=0)
    assert driver.stall()[1] == stall.LEASE, "a step without tokens is none of its work"


def test_what_is_at_work_is_waited_for_until_patience_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = Detector(monkeypatch, at_work=True)
    driver.flies(tokens=1)
    assert driver.stall()[0] == pytest.approx(12.0, abs=0.5)
    seconds = [driver.stall()[0] for _ in range(10)]
    assert seconds[-1] == pytest.approx(2.0, abs=0.2)
    assert sum(seconds) + 12 == pytest.approx(11 * 2.0 + stall.PATIENCE, abs=3)
