# SPDX-License-Identifier: Apache-2.0
"""Tests of workers that are forked from one process, and of that process."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import execnet
import psutil
import pytest
from execnet import gateway_io

import warm_rig
from kvconform.config.settings import Settings
from kvconform.process.watchdog import START_SECONDS
from kvconform.session import gateways
from kvconform.session.gateways import PATH
from program_rig import kvconform

COLD = """
import socket, sys
from kvconform.session.warm import Warm
server = Warm()
server.join(socket.socket(fileno=int(sys.argv[1])))
server.serve()
"""
"""A process that forks workers, but has not imported vLLM."""
FACTS = """
import os, random, numpy
links = [f"/proc/self/fd/{each}" for each in os.listdir("/proc/self/fd")]
kinds = [os.readlink(each).partition(":")[0] for each in links if os.path.exists(each)]
channel.send({
    "pid": os.getpid(),
    "parent": os.getppid(),
    "leads": os.getsid(0) == os.getpid(),
    "sockets": kinds.count("socket"),
    "epoll": sum("eventpoll" in os.readlink(each) for each in links if os.path.lexists(each)),
    "here": os.getcwd(),
    "mark": os.environ.get("MARK"),
    "drawn": [random.random(), float(numpy.random.random())],
})
"""


FULL_ONCE = """
import errno, os
fork = os.fork
def full():
    os.fork = fork
    raise OSError(errno.EAGAIN, "no room for another process")
os.fork = full
"""
"""Has the first fork fail."""


@contextlib.contextmanager
def cold_process(before: str = "") -> Iterator[tuple[socket.socket, subprocess.Popen[bytes]]]:
    """Yield a channel to a process that runs the code `before`, and then forks workers."""
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            command = [sys.executable, "-c", before + COLD, str(theirs.fileno())]
            process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        try:
            yield ours, process
        finally:
            process.kill()
            process.wait()


@contextlib.contextmanager
def workers(channel: socket.socket) -> Iterator[execnet.Group]:
    """Yield a group whose gateways are forked workers."""
    group = execnet.Group(execmodel="main_thread_only")
    with gateways.forked_workers(lambda: channel):
        try:
            yield group
        finally:
            group.terminate(timeout=5)


def facts(group: execnet.Group) -> tuple[Any, dict[str, Any]]:
    """Return a new worker's gateway, and what the worker says of itself."""
    gateway = group.makegateway("popen")
    found: dict[str, Any] = gateway.remote_exec(FACTS).receive(timeout=30)
    return gateway, found


def test_workers_share_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with cold_process("import numpy.random\n") as (channel, process):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("MARK", "set after the process was started")
        with workers(channel) as group:
            first, second = facts(group)[1], facts(group)[1]
            drawn: set[float] = set()
            for found in (first, second):
                assert found.pop("parent") == process.pid
                drawn.update(found.pop("drawn"))
                pid = found.pop("pid")
                assert psutil.Process(pid).is_running()
                assert found == {
                    "leads": True,
                    "sockets": 0,
                    "epoll": 0,
                    "here": str(tmp_path),
                    "mark": "set after the process was started",
                }
            assert len(drawn) == 4
        channel.close()
        assert process.wait(30) == 0  # it ends with its controller and its workers


def test_a_worker_that_dies_is_noticed_and_replaced() -> None:
    with cold_process() as (channel, process), workers(channel) as group:
        gateway, found = facts(group)
        os.kill(found["pid"], signal.SIGKILL)
        assert gateway._io.wait() == -signal.SIGKILL
        gateway._io.kill()  # of a process that has ended: nothing
        assert facts(group)[1]["parent"] == process.pid


def test_a_fork_that_fails_is_reported_and_the_process_goes_on() -> None:
    with cold_process(FULL_ONCE) as (channel, process):
        with pytest.raises(EOFError):
            gateways.ForkedIO(channel, None)
        with workers(channel) as group:
            assert facts(group)[1]["parent"] == process.pid


def test_without_the_process_workers_are_interpreters() -> None:
    with cold_process() as (channel, process):
        process.kill()
        process.wait()
        with workers(channel) as group:
            assert facts(group)[1]["parent"] == os.getpid()


def test_a_process_that_takes_too_long_is_waited_for_once(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(START_SECONDS, "0.2")
    monkeypatch.setattr(gateways, "QUIET", 0.1)
    asked: list[socket.socket] = []
    ours, theirs = socket.socketpair()  # no process reads from `theirs`

    def channel() -> socket.socket:
        asked.append(ours)
        return ours

    group = execnet.Group(execmodel="main_thread_only")
    with ours, theirs, gateways.forked_workers(channel):
        try:
            assert [facts(group)[1]["parent"] for _ in range(2)] == [os.getpid()] * 2
        finally:
            group.terminate(timeout=5)
    assert len(asked) == 1
    sentence = "importing vLLM takes more than 0.1 s; after 0.2 s (KVCONFORM_START_SECONDS)"
    assert capfd.readouterr().err.count(sentence) == 1


def test_create_io_is_restored() -> None:
    before = gateway_io.create_io
    ours, theirs = socket.socketpair()
    with ours, theirs, gateways.forked_workers(lambda: ours):
        assert gateway_io.create_io is not before
    assert gateway_io.create_io is before


def test_a_process_finds_the_vllm_that_its_controller_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("here", "set"):
        (tmp_path / name / "vllm").mkdir(parents=True)
        stand_in = f"raise SystemExit('the vLLM that is {name}')"
        (tmp_path / name / "vllm" / "__init__.py").write_text(stand_in)
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(sys, "path", ["", *sys.path])  # as with `python -m`
    log = tmp_path / "imports.log"
    settings = Settings(env={"PYTHONPATH": str(tmp_path / "set")})
    before = set(psutil.Process().children())
    with gateways.private_server(settings, log):
        (process,) = {*psutil.Process().children()} - before
        process.wait(120)
    assert log.read_text() == "the vLLM that is here\n"


def test_only_filled_values_are_there_during_the_imports() -> None:
    env = {"A": "b{c}", "B": "x{port:store}", "C": "{python}", "D": "{server_tmp}/d", PATH: "/e"}
    found = gateways.environment_of(Settings(env=env))
    assert {name: found[name] for name in env if name in found and name != PATH} == {"A": "b{c}"}
    assert found.get(PATH) == os.environ.get(PATH)


def test_a_process_that_is_still_importing_ends_at_once(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "imports.log"
    before = set(psutil.Process().children())
    with gateways.private_server(Settings(), log):
        (process,) = {*psutil.Process().children()} - before
    assert not process.is_running()
    assert log.read_text() == ""


@pytest.mark.e2e
def test_a_run_imports_vllm_once_for_each_hash_seed(tmp_path: Path) -> None:
    says = """
import os
with open(f"/proc/{os.getppid()}/cmdline") as parent:
    line = parent.read()
kind = [name for name in ("warm", "reseeded") if f"kvconform.session.{name}" in line]
with open("births", "a") as file:
    print(os.getpid(), os.getppid(), *kind, os.environ.get("PYTHONHASHSEED"), file=file)
"""
    (tmp_path / "mine.py").write_text(says + warm_rig.RIGHT)
    extra = ["--extra-config", '{"store": "{tmp}"}', "--pythonpath", ".", "-n", "2", "--no-server"]
    runs = f"{warm_rig.RUN},lifecycle.restart-interpreter[reference-sync-v1-d1-b4]"
    before = time.time()
    done = kvconform("run", "mine:Mine", *extra, "-k", runs, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    births = [line.split() for line in (tmp_path / "births").read_text().splitlines()]
    workers = {(pid, parent) for pid, parent, *how in births if how == ["warm", "None"]}
    assert len(workers) == 2 and len({parent for _, parent in workers}) == 1, births
    (others,) = [each for each in births if each[0] not in {pid for pid, _ in workers}]
    assert others[2:] == ["reseeded", "None"], births
    assert all(warm_rig.has_ended(int(pid)) for each in births for pid in each[:2])
    left = psutil.process_iter(["create_time", "cwd"])
    assert not [
        each
        for each in left
        if each.info["create_time"] > before and each.info["cwd"] == str(tmp_path)
    ]
