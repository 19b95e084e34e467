# SPDX-License-Identifier: Apache-2.0
"""Tests of the servers of a configuration: start, ports, clearing, kill, restart.

No process is left, whatever happens.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import psutil
import pytest

import warm_rig
from kvconform.config.settings import Settings, load
from kvconform.errors import EnvironmentProblem, UsageError
from kvconform.process.servers import Commands, Ports, Servers, clear_all, is_free
from places import RIGS

STORE = """
import http.server, os, signal, sys
class Handler(http.server.BaseHTTPRequestHandler):
    known = []
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(",".join(self.known).encode())
    def do_POST(self):
        if self.path == "/clear": self.known.clear()
        else: self.known.append(self.path[1:] + \
self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode())
        self.send_response(204); self.end_headers()
    def log_message(self, *_): pass
def asked(*_):
    print("asked to end", flush=True)
    os._exit(0)
signal.signal(signal.SIGTERM, asked)
print("store of", os.getpid(), flush=True)
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
BACKGROUND = """
import os, subprocess, sys, time
# one child of the same session, one that leaves it and whose parent ends: a daemon
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)  # MARK"])
subprocess.Popen([sys.executable, "-c", "import os, time\\nif os.fork(): os._exit(0)\\n\
os.setsid(); time.sleep(600)  # MARK"]).wait()
time.sleep(600)
"""


@pytest.fixture
def mark(tmp_path: Path) -> str:
    """A word in the command lines of a test's processes; none of them may be left."""
    return f"kvconform-test-{tmp_path.name}-{os.getpid()}"


def processes(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if mark in " ".join(process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def gone(mark: str, seconds: float = 10.0) -> bool:
    until = time.monotonic() + seconds
    while processes(mark) and time.monotonic() < until:
        time.sleep(0.05)
    return not processes(mark)


def store(mark: str, **more: Any) -> dict[str, Any]:
    url = "http://127.0.0.1:{port:store}"
    command = ["{python}", "-c", f"{STORE}# {mark}", "{port:store}"]
    return {
        "name": "store",
        "command": command,
        "ready": {"http": f"{url}/"},
        "clear": {"http": f"{url}/clear", "method": "POST"},
        **more,
    }


def servers(tmp_path: Path, *specs: dict[str, Any], **settings: Any) -> Servers:
    return Servers(
        Settings.model_validate({"servers": list(specs), **settings}),
        tmp_path / "of-servers",
        tmp_path / "logs",
    )


def get(port: int, path: str = "/", method: str = "GET") -> str:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", method=method)
    with urllib.request.urlopen(request, timeout=5) as answer:
        return str(answer.read().decode())


def test_a_server_that_is_in_use_can_be_made_to_forget_in_another_way(
    tmp_path: Path, mark: str
) -> None:
    lose = {
        "http": "http://127.0.0.1:{port:store}/lose-",
        "method": "POST",
        "body": {"force": False},
    }
    group = servers(tmp_path, store(mark, lose=lose))
    with group:
        group.all["store"].lose()
        assert get(group.ports.numbers["store"]) == 'lose-{"force": false}'
        group.clear()
        assert get(group.ports.numbers["store"]) == ""
    bare = store(mark)
    with servers(tmp_path, bare) as group:
        get(group.ports.numbers["store"], "/something", "POST")
        group.all["store"].lose()
        assert get(group.ports.numbers["store"]) == "", "as clear"


def test_a_server_is_found_where_the_connector_looks_for_it(tmp_path: Path, mark: str) -> None:
    given = {
        "extra_config": {"url": "http://127.0.0.1:{port:store}", "port": "{port:store}"},
        "env": {"STORE": "at {port:store}"},
    }
    group = servers(tmp_path, store(mark), **given)
    with group:
        settings = group.settle(Settings.model_validate(given))
        port = settings.extra_config["port"]
        assert (
            isinstance(port, int)
            and settings.extra_config["url"].endswith(f":{port}")
            and settings.env["STORE"] == f"at {port}"
        )
        assert get(port) == ""
        assert len(processes(mark)) == 2  # the server and its guard
    assert not processes(mark) and is_free(port)
    said = (tmp_path / "logs" / "server-store.log").read_text()
    assert "store of" in said and "asked to end" in said


def test_clearing_is_what_a_run_begins_with(tmp_path: Path, mark: str) -> None:
    with servers(tmp_path, store(mark)) as group:
        port = group.ports.numbers["store"]
        get(port, "/key", "POST")
        assert get(port) == "key"
        clear_all()
        assert get(port) == ""
    clear_all()  # nothing runs: nothing happens


def test_a_server_that_cannot_be_cleared_is_told(tmp_path: Path, mark: str) -> None:
    with (
        servers(tmp_path, store(mark, clear={"command": "false"})) as group,
        pytest.raises(EnvironmentProblem, match="store cannot be cleared"),
    ):
        group.clear()


def test_faults(tmp_path: Path, mark: str) -> None:
    with servers(tmp_path, store(mark)) as group:
        port = group.ports.numbers["store"]
        get(port, "/key", "POST")
        group.restart("store")
        assert get(port) == ""  # the same port, another process
        group.kill("store")
        assert not processes(mark)
        with pytest.raises(OSError):
            get(port)
        clear_all()  # the next run has it again
        assert get(port) == ""
    assert not processes(mark)


@pytest.mark.parametrize("shell", [False, True])
def test_what_a_server_sends_into_the_background_ends_with_it(
    tmp_path: Path, mark: str, shell: bool
) -> None:
    text = BACKGROUND.replace("MARK", mark)
    (tmp_path / "server.py").write_text(text)
    command: Any = (
        f"{sys.executable} {tmp_path}/server.py {mark} & sleep 600"
        if shell
        else [sys.executable, f"{tmp_path}/server.py", mark]
    )
    with servers(
        tmp_path,
        {
            "name": "odd",
            "command": command,
            "ready": {"command": f"test $(pgrep -fc {mark}) -ge 4"},
            "grace": 0.5,
        },
    ):
        assert len(processes(mark)) >= 3
    assert gone(mark, 1)


def test_one_that_does_not_want_to_end_is_killed(tmp_path: Path, mark: str) -> None:
    text = (
        f"import signal, time; signal.signal(15, signal.SIG_IGN); open(r'{tmp_path}/up', 'w'); "
        f"time.sleep(600)  # {mark}"
    )
    spec = {
        "name": "stubborn",
        "command": ["{python}", "-c", text],
        "ready": {"command": f"test -e {tmp_path}/up"},
        "grace": 0.3,
    }
    with servers(tmp_path, spec):
        assert processes(mark)
    assert not processes(mark)


def test_a_stop_command_is_asked_first(tmp_path: Path, mark: str) -> None:
    group = servers(
        tmp_path,
        store(mark, stop="touch $KVCONFORM_TMP/stopped"),
        {
            "name": "other",
            "command": f"touch {tmp_path}/up; exec sleep 600 # {mark}",
            "ready": {"command": f"test -e {tmp_path}/up"},
            "stop": "false",
        },
    )
    group.up()
    assert group.down() == ["stop command `false` of server other failed"]
    assert (tmp_path / "of-servers" / "stopped").exists() and not processes(mark)


def test_one_that_has_ended_by_itself_is_named(tmp_path: Path, mark: str) -> None:
    """Its stop command has nothing to stop, so it does not fail either."""
    short = {
        "name": "short",
        "command": f"touch {tmp_path}/up; while test -e {tmp_path}/up; do sleep 0.05; done; exit 3",
        "ready": {"command": f"test -e {tmp_path}/up"},
        "stop": "false",
    }
    group = servers(tmp_path, short, store(mark))
    group.up()
    (tmp_path / "up").unlink()
    until = time.monotonic() + 30
    while group.all["short"].running and time.monotonic() < until:
        time.sleep(0.05)
    group.kill("store")  # a fault of the harness is not named
    log = tmp_path / "logs" / "server-short.log"
    assert group.down() == [f"server short had ended by itself with status 3 (its output: {log})"]
    assert group.down() == [] and not processes(mark)


def test_one_that_ends_before_it_is_ready(tmp_path: Path) -> None:
    spec = {
        "name": "broken",
        "command": "echo no licence; exit 7",
        "ready": {"tcp": "127.0.0.1:{port:a}"},
    }
    with pytest.raises(
        EnvironmentProblem,
        match=(
            r"server broken ended with status 7 before it was ready: no licence \(its "
            r"output: .*\)"
        ),
    ):
        servers(tmp_path, spec).up()


def test_one_that_does_not_get_ready_takes_the_others_down(tmp_path: Path, mark: str) -> None:
    slow = {
        "name": "slow",
        "command": f"sleep 600 # {mark}",
        "ready": {"tcp": "127.0.0.1:{port:slow}"},
        "timeout": 0.5,
    }
    with pytest.raises(EnvironmentProblem, match="server slow was not ready within 0.5 s"):
        servers(tmp_path, store(mark), slow).up()
    assert not processes(mark)


def test_ports_are_one_processes_own() -> None:
    ports = Ports()
    numbers = [ports.choose(f"p{i}") for i in range(40)]
    assert len(set(numbers)) == 40 and ports.choose("p7") == numbers[7]
    asked = (
        "from kvconform.process.servers import _lock; import sys; "
        "print(_lock(int(sys.argv[1])) is not None)"
    )

    def other() -> str:
        return subprocess.run(
            [sys.executable, "-c", asked, str(numbers[0])],
            capture_output=True,
            text=True,
            timeout=60,
        ).stdout.strip()

    assert other() == "False"
    ports.close()
    assert other() == "True"


PARENT = """
import signal, sys, time
from pathlib import Path
from kvconform.process.servers import Servers
from kvconform.config.settings import load
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored by what a shell has put into \
the background, tests included
servers = Servers(load({}, file=sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[2]))
servers.up()
print("up", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_outlives_a_process_that_ends_badly(tmp_path: Path, mark: str, number: int) -> None:
    (tmp_path / "server.py").write_text(BACKGROUND.replace("MARK", mark))
    (tmp_path / "kvconform.toml").write_text(f"""
[[servers]]
name = "odd"
command = ["{{python}}", "{tmp_path}/server.py", "{mark}"]
ready = {{command = "test $(pgrep -fc {mark}) -ge 4"}}
grace = 0.5
""")
    command = [sys.executable, "-c", PARENT, str(tmp_path / "kvconform.toml"), str(tmp_path)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as parent:
        assert parent.stdout is not None and parent.stdout.readline() == "up\n"
        assert len(processes(mark)) >= 3
        os.killpg(parent.pid, number)
        try:
            parent.wait(20)
        finally:
            parent.kill()  # leaving the block waits for it
    assert gone(mark)


def test_nothing_outlives_a_killed_guard(tmp_path: Path, mark: str) -> None:
    group = servers(tmp_path, store(mark))
    group.up()
    guard = group.all["store"]._guard
    assert guard is not None
    guard.kill()
    assert gone(mark)
    group.down()


SLOW = """
import pathlib, time
def judge(*_, **__):
    pathlib.Path("judging").touch()
    time.sleep(60)
"""


@pytest.mark.e2e
@pytest.mark.parametrize("ending", ["", pytest.param("interrupt", marks=pytest.mark.long), "kill"])
def test_every_worker_has_its_own_and_the_run_leaves_none(
    tmp_path: Path, mark: str, ending: str
) -> None:
    (tmp_path / "store.py").write_text(STORE)
    (tmp_path / "kvconform.toml").write_text(f"""
connector = "json:Fake"
extra_config = {{port = "{{port:store}}"}}
[[servers]]
name = "store"
command = ["{{python}}", "{tmp_path}/store.py", "{{port:store}}", "{mark}"]
ready = {{tcp = "127.0.0.1:{{port:store}}"}}
""")
    runner = "slow_runner:judge" if ending else "fake_runner:judge"
    if ending:
        (tmp_path / "slow_runner.py").write_text(
            "import time, pathlib\ndef judge(*a, **k):\n"
            "    pathlib.Path('judging').touch(); time.sleep(60)\n"
        )
    path = os.pathsep.join([str(tmp_path), str(RIGS)])
    environment = {**os.environ, "KVCONFORM_RUNNER": runner, "PYTHONPATH": path, "NO_COLOR": "1"}
    command = [
        sys.executable,
        "-m",
        "kvconform",
        "run",
        "--engine",
        "reference",
        "--workers",
        "2",
        "-k",
        "lifecycle",
    ]
    started = subprocess.Popen(
        command,
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # as above
    )
    with started:
        if ending:
            until, both = time.monotonic() + 60, tmp_path / "kvconform-report" / "logs"
            while time.monotonic() < until:
                said = [log.read_text() for log in both.glob("gw*-server-store.log")]
                if (
                    (tmp_path / "judging").exists()
                    and processes(mark)
                    and sum("store of" in text for text in said) == 2
                ):
                    break
                time.sleep(0.1)
            assert processes(mark)
            os.killpg(started.pid, signal.SIGINT if ending == "interrupt" else signal.SIGKILL)
        started.communicate(timeout=120)
    assert gone(mark)
    logs = sorted((tmp_path / "kvconform-report" / "logs").glob("gw*-server-store.log"))
    assert [log.name for log in logs if "store of" in log.read_text()] == [
        "gw0-server-store.log",
        "gw1-server-store.log",
    ]


@pytest.mark.parametrize(
    ("server", "sentence"),
    [
        ('name = "a"\nready = {tcp = "x:1"}', "servers.0.command: is missing"),
        ('name = "a"\ncommand = "x"\nready = {}', "give one of tcp, http and command"),
        ('name = "A b"\ncommand = "x"\nready = {tcp = "x:1"}', "should match pattern"),
        ('name = "a"\ncommand = "x"\nreddy = {tcp = "x:1"}', "servers.0"),
    ],
)
def test_a_server_that_is_described_wrongly(tmp_path: Path, server: str, sentence: str) -> None:
    (tmp_path / "kvconform.toml").write_text(f"[[servers]]\n{server}\n")
    with pytest.raises(UsageError, match=sentence):
        load({}, file=str(tmp_path / "kvconform.toml"))


def test_a_command_that_takes_too_long_ends_with_what_it_started(tmp_path: Path) -> None:
    seconds = f"1000.{os.getpid()}"  # of this test alone
    slow = f"sleep {seconds} & echo $! > {tmp_path / 'pid'}; wait"
    settings = Settings(setup=[slow], setup_timeout=5.0)
    with pytest.raises(EnvironmentProblem, match="did not end within 5 s"):
        Commands(settings, tmp_path, tmp_path / "log").up()
    pid = int((tmp_path / "pid").read_text())
    warm_rig.wait_for(lambda: warm_rig.has_ended(pid))


def test_what_a_command_leaves_in_the_background_stays(tmp_path: Path) -> None:
    settings = Settings(setup=[f"sleep 60 & echo $! > {tmp_path / 'pid'}"])
    Commands(settings, tmp_path, tmp_path / "log").up()
    process = psutil.Process(int((tmp_path / "pid").read_text()))
    assert process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    process.kill()
