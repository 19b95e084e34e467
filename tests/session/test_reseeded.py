# SPDX-License-Identifier: Apache-2.0
"""Tests of the process with another hash seed that forks for runs."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import warm_rig
from kvconform.contract.loader import load_spec
from kvconform.process import alive, wire
from kvconform.run import isolation
from kvconform.run.isolation import HASH_SEED, OTHER_SEED, RESEEDED, needs_another_seed
from kvconform.session.gateways import reseeded_server

COLD = """
import json, os, socket, sys
from pathlib import Path
from kvconform.run import child
from kvconform.session.reseeded import Reseeded

def main(folder):
    job = json.loads((folder / "job.json").read_text())
    print("said", file=sys.stderr, flush=True)
    exec(job["does"])
    facts = {name: os.environ.get(name) for name in ("PYTHONHASHSEED", "TMPDIR", "MARK")}
    (folder / "answer").write_text(json.dumps([facts, os.getcwd(), hash("a"), os.getpid()]))
    os._exit(0)

child.main = main
Reseeded().listen(socket.socket(fileno=int(sys.argv[1])))
"""
"""Such a process that has not imported vLLM, and does what its jobs say."""


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[bytes]]:
    place = str(tmp_path / "socket")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(place)
        listener.listen()
        process = subprocess.Popen(
            [sys.executable, "-c", COLD, str(listener.fileno())],
            env=os.environ | {HASH_SEED: OTHER_SEED},
            pass_fds=[listener.fileno()],
        )
    monkeypatch.setenv(RESEEDED, place)
    yield process
    process.kill()
    process.wait()


def does(what: str, folder: Path, seed: str | None = OTHER_SEED) -> tuple[str, int | None]:
    """Do a job; `seed`: the hash seed that it is to have, or None for any."""
    folder.mkdir()
    own = {} if seed is None else {HASH_SEED: seed}
    job: dict[str, Any] = {"does": what}
    return isolation._interpreter(job, folder, own, () if seed is not None else (HASH_SEED,))


def test_a_run_has_the_seed_and_all_else_is_the_callers(
    server: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MARK", "callers")
    monkeypatch.chdir(tmp_path)
    environment = {**os.environ, HASH_SEED: OTHER_SEED}
    command = [sys.executable, "-c", "print(hash('a'))"]
    expected = int(subprocess.run(command, env=environment, capture_output=True).stdout)
    pids = set()
    for number, seed in enumerate((OTHER_SEED, None)):
        folder = tmp_path / str(number)
        assert does("pass", folder, seed) == ("said\n", 0)
        facts, here, found, pid = json.loads((folder / "answer").read_text())
        assert facts == {HASH_SEED: seed, "TMPDIR": str(folder), "MARK": "callers"}
        assert (here, found) == (str(tmp_path), expected)
        pids.add(pid)
    assert len(pids) == 2 and server.pid not in pids
    assert all(warm_rig.has_ended(pid) for pid in pids)


def test_another_seed_needs_a_new_interpreter(
    server: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    said, status = does("pass", tmp_path / "job", "7")
    assert status == 1 and "KeyError" in said, "the job is none for kvconform.run.child"


def test_the_status_is_that_of_the_run(server: subprocess.Popen[bytes], tmp_path: Path) -> None:
    assert does("os._exit(9)", tmp_path / "exits") == ("said\n", 9)
    said, status = does("raise LookupError('lost')", tmp_path / "raises")
    assert status == 70 and said.splitlines()[-1] == "LookupError: lost"
    assert does("os.kill(os.getpid(), 9)", tmp_path / "dies") == ("said\n", -9)


def test_a_run_that_does_not_end_is_killed(
    server: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(isolation, "HOOKS", 0)
    hangs = f"import time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))"
    for limit in (3.0, 30.0):  # on a busy machine, forking may take longer than the first one
        monkeypatch.setattr(isolation, "LIMIT", limit)
        said = does(f"{hangs}; time.sleep(600)", tmp_path / f"hangs {limit}")
        if (tmp_path / "pid").exists():
            break
    assert said == ("said\n", None)
    pid = int((tmp_path / "pid").read_text())
    warm_rig.wait_for(lambda: warm_rig.has_ended(pid))


def test_a_run_ends_with_its_client(server: subprocess.Popen[bytes], tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    job = {"does": "import time; time.sleep(600)"}
    (tmp_path / "job" / "job.json").write_text(json.dumps(job))
    with socket.socket(socket.AF_UNIX) as client, open(os.devnull, "r+b") as nothing:
        client.connect(os.environ[RESEEDED])
        request = wire.request_of("run") | {"folder": str(tmp_path / "job")}
        wire.send(client, request, [nothing.fileno()] * 3)
        pid = wire.receive(client)[0]["pid"]
        assert psutil.Process(pid).is_running()
    warm_rig.wait_for(lambda: warm_rig.has_ended(pid))
    assert server.poll() is None
    assert does("pass", tmp_path / "next")[1] == 0, "others are served on"


def test_without_the_process_a_run_has_a_new_interpreter(
    server: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    server.send_signal(signal.SIGKILL)
    server.wait()
    said, status = does("pass", tmp_path / "job")
    assert status == 1 and "KeyError" in said, "the job is none for kvconform.run.child"


def test_where_it_is_needed() -> None:
    variants = [variant for case in load_spec().cases.values() for variant in case.variants()]
    assert {each.case.id for each in variants if needs_another_seed(each)} >= {
        "lifecycle.hash-seed",
        "lifecycle.restart-interpreter",
    }
    assert not all(map(needs_another_seed, variants))


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short path."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        yield Path(name)


@pytest.mark.parametrize("length", [1, 120])
def test_where_a_path_is_too_long_for_a_socket_nothing_is_started(
    length: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(RESEEDED, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(folder / ("d" * length)))
    Path(tempfile.gettempdir()).mkdir()
    me = psutil.Process()
    before = {*me.children()}
    with reseeded_server(os.environ, late=True):
        assert (RESEEDED in os.environ) is (length == 1)
        assert not alive.of_connectors().children & {each.pid for each in me.children()}
        assert len({*me.children()} - before) == int(length == 1)
    assert RESEEDED not in os.environ and {*me.children()} <= before
