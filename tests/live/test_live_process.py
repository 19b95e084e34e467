# SPDX-License-Identifier: Apache-2.0
"""Tests that a child of the live engine leaves nothing behind, and that leftovers are reported."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from kvconform.live import process
from kvconform.live.job import Outcome
from kvconform.process.supervisor import LEFT

SERVER = (
    "import socket, time; s = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen(); "
    "open({ready!r}, 'w').close(); time.sleep(300)"
)


def child(tmp_path: Path, then: str) -> str:
    """A program that starts a server in a session of its own, and then does something."""
    server = SERVER.format(ready=str(tmp_path / "ready"))
    wait = f"while not os.path.exists({str(tmp_path / 'ready')!r}): time.sleep(0.02)"
    start = f"subprocess.Popen([sys.executable, '-c', {server!r}], start_new_session=True)"
    return f"import os, subprocess, sys, time\n{start}\n{wait}\n{then}\n"


def run(tmp_path: Path, then: str, limit: float = 60.0) -> process.Ended:
    command = [sys.executable, "-c", child(tmp_path, then)]
    return process.run(
        command, limit=limit, log=tmp_path / "log", environment=os.environ, cwd=tmp_path
    )


def nothing_left(tmp_path: Path) -> bool:
    """No process knows of the test's directory any more."""
    for other in psutil.process_iter():
        try:
            if other.pid != os.getpid() and any(
                str(tmp_path / "ready") in part for part in other.cmdline()
            ):
                return False
        except (psutil.Error, OSError):
            continue
    return True


def test_a_server_that_outlives_the_child_is_told_and_ended(
    tmp_path: Path, monkeypatch: object
) -> None:
    found = run(tmp_path, "pass")
    assert (found.how, found.status, len(found.processes), len(found.ports), found.stuck) == (
        "exit",
        0,
        1,
        1,
        [],
    )
    assert nothing_left(tmp_path)


def test_nothing_is_left_after_a_crash(tmp_path: Path) -> None:
    found = run(tmp_path, "os.kill(os.getpid(), 9)")
    assert (found.how, found.status) == ("signal", signal.SIGKILL)
    assert nothing_left(tmp_path)


def test_nothing_is_left_after_the_time_limit_and_the_log_says_where_it_hung(
    tmp_path: Path,
) -> None:
    found = run(tmp_path, "import faulthandler; faulthandler.enable(); time.sleep(300)", limit=8.0)
    assert found.how == "timeout" and found.seconds < 40
    assert nothing_left(tmp_path)
    assert "line" in (tmp_path / "log").read_text()


def test_shared_memory_that_is_left_is_told_and_removed(tmp_path: Path) -> None:
    name = f"kvconform-test-{os.getpid()}"
    code = (
        f"import mmap, time\nf = open('/dev/shm/{name}', 'wb+'); f.truncate(4096); "
        "m = mmap.mmap(f.fileno(), 4096); time.sleep(1.5)"
    )
    command = [sys.executable, "-c", code]
    found = process.run(
        command, limit=60, log=tmp_path / "log", environment=os.environ, cwd=tmp_path
    )
    assert found.files == [f"/dev/shm/{name}"] and not os.path.exists(f"/dev/shm/{name}")


def test_a_store_in_memory_is_no_shared_memory(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        file = Path(folder) / "block"
        code = (
            f"import mmap, time\nf = open({str(file)!r}, 'wb+'); f.truncate(4096); "
            "m = mmap.mmap(f.fileno(), 4096); time.sleep(1.5)"
        )
        command = [sys.executable, "-c", code]
        found = process.run(
            command, limit=60, log=tmp_path / "log", environment=os.environ, cwd=tmp_path
        )
        assert found.files == [] and file.exists()


def test_nothing_is_left_when_the_parent_is_killed(tmp_path: Path) -> None:
    own = (
        "import os, sys; from pathlib import Path; from kvconform.live import process\n"
        f"process.run([sys.executable, '-c', {child(tmp_path, 'time.sleep(300)')!r}], "
        f"limit=300, log=Path({str(tmp_path / 'log')!r}),"
        f" environment=os.environ, cwd=Path({str(tmp_path)!r}))"
    )
    parent = subprocess.Popen([sys.executable, "-c", own])
    limit = time.monotonic() + 60
    while not (tmp_path / "ready").exists() and time.monotonic() < limit:
        time.sleep(0.05)
    assert (tmp_path / "ready").exists() and not nothing_left(tmp_path)
    parent.kill()
    parent.wait()
    while not nothing_left(tmp_path) and time.monotonic() < limit:
        time.sleep(0.2)
    assert nothing_left(tmp_path)


def test_a_child_that_has_said_its_last_word_and_stays_is_ended_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "LEAVE", 1.0)
    out = tmp_path / "out.jsonl"
    lines = '{"kind": "begin"}\n{"kind": "end"}\n'
    last = f"open({str(out)!r}, 'w').write({lines!r})"
    command = [sys.executable, "-c", child(tmp_path, f"{last}\ntime.sleep(300)")]
    assert not Outcome.over(out)
    found = process.run(
        command,
        limit=120,
        log=tmp_path / "log",
        environment=os.environ,
        cwd=tmp_path,
        over=lambda: Outcome.over(out),
    )
    assert Outcome.over(out) and found.how == "timeout" and found.seconds < 60
    assert nothing_left(tmp_path)


def test_shared_memory_of_somebody_else_is_not_touched(tmp_path: Path) -> None:
    before, server = Path("/dev/shm/kvconform-test-before"), Path("/dev/shm/kvconform-test-server")
    before.write_bytes(b"x" * 4096)
    hold = (
        "import mmap, time; f = open({path!r}, 'r+b'); m = mmap.mmap(f.fileno(), 4096); "
        "time.sleep({seconds})"
    )
    make = f"open({str(server)!r}, 'wb').write(b'x' * 4096)"
    holder = subprocess.Popen(
        [sys.executable, "-c", f"{make}; {hold.format(path=str(server), seconds=60)}"]
    )
    try:
        while not server.exists() or not server.stat().st_size:
            time.sleep(0.05)
        both = (
            "import mmap, time; ms = [mmap.mmap(open(p, 'r+b').fileno(), 4096) for p in "
            f"({str(before)!r}, {str(server)!r})]; time.sleep(1)"
        )
        found = process.run(
            [sys.executable, "-c", both],
            limit=60,
            log=tmp_path / "log",
            environment=os.environ,
            cwd=tmp_path,
        )
        assert (found.how, found.files) == ("exit", [])
        assert before.exists() and server.exists()
    finally:
        holder.kill()
        holder.wait()
        before.unlink()
        server.unlink(missing_ok=True)


def test_a_guard_tells_what_a_command_has_left(tmp_path: Path) -> None:
    told = tmp_path / "left.json"
    guard = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "kvconform.process.supervisor",
            "1",
            sys.executable,
            "-c",
            child(tmp_path, "pass"),
        ],
        stdin=subprocess.PIPE,
        env={**os.environ, LEFT: str(told)},
    )
    assert guard.wait(60) == 0
    found = json.loads(told.read_text(encoding="utf-8"))
    assert len(found["processes"]) == 1 and len(found["ports"]) == 1
    assert nothing_left(tmp_path)


TITLED = (
    "import setproctitle, time; setproctitle.setproctitle({title!r}); "
    "open({ready!r}, 'w').close(); time.sleep(300)"
)


TITLE = f"VLLM::EngineCore of {os.getpid()}"
"""No other test run has it."""


def with_title(tmp_path: Path, then: str) -> str:
    """Return a program that starts another in the same session, and goes on.

    The other program gives itself a title, as vLLM does.
    """
    other = TITLED.format(ready=str(tmp_path / "ready"), title=TITLE)
    wait = f"while not os.path.exists({str(tmp_path / 'ready')!r}): time.sleep(0.02)"
    return (
        f"import os, subprocess, sys, time\nsubprocess.Popen([sys.executable, '-c', {other!r}])\n"
        f"{wait}\n{then}\n"
    )


def is_titled() -> bool:
    """A process has the title."""
    lines = (p.info["cmdline"] or [""] for p in psutil.process_iter(["cmdline"]))
    return any(TITLE in line[0] for line in lines)


def test_a_process_that_gave_itself_a_title_is_found(tmp_path: Path) -> None:
    pytest.importorskip("setproctitle")
    command = [sys.executable, "-c", with_title(tmp_path, "pass")]
    found = process.run(
        command, limit=60, log=tmp_path / "log", environment=os.environ, cwd=tmp_path
    )
    assert len(found.processes) == 1 and found.stuck == []
    assert not is_titled()


def test_a_process_with_a_title_is_ended_when_its_parents_are_killed(tmp_path: Path) -> None:
    pytest.importorskip("setproctitle")
    inner = with_title(tmp_path, "time.sleep(300)")
    where = f"log=Path({str(tmp_path / 'log')!r}), environment=os.environ, cwd=Path('/')"
    run_it = f"process.run([sys.executable, '-c', {inner!r}], limit=60, {where})"
    outer = subprocess.Popen(
        [
            sys.executable,
            "-c",
            (
                "import os, sys\nfrom pathlib import Path\nfrom kvconform.live import process\n"
                f"{run_it}"
            ),
        ]
    )
    until = time.monotonic() + 60
    while not is_titled() and time.monotonic() < until:
        time.sleep(0.1)
    assert is_titled()
    outer.kill()
    outer.wait()
    while is_titled() and time.monotonic() < until:
        time.sleep(0.1)
    assert not is_titled()
