# SPDX-License-Identifier: Apache-2.0
"""Tests of where a warm server listens, and to whom it belongs."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvconform.compat import installed
from kvconform.process import wire
from kvconform.watch import place


@pytest.fixture(autouse=True)
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    # Not pytest's own directory: the path of a socket must be short.
    with tempfile.TemporaryDirectory(prefix="kvw-", dir="/tmp") as name:
        monkeypatch.setenv("XDG_RUNTIME_DIR", name)
        yield Path(name)


def test_the_directory_is_private(runtime: Path) -> None:
    assert place.directory() == runtime / "kvconform"
    assert not place.directory().exists()
    place.make_directory()
    assert stat.S_IMODE((runtime / "kvconform").stat().st_mode) == 0o700


def test_without_a_runtime_directory_it_is_temporary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert place.directory().name == f"kvconform-{os.getuid()}"


def test_a_directory_that_others_may_enter_is_refused(runtime: Path) -> None:
    (runtime / "kvconform").mkdir()
    (runtime / "kvconform").chmod(0o750)
    with pytest.raises(place.NotPrivate, match="mode 0700"):
        place.socket_of({})


def test_a_link_is_refused(runtime: Path) -> None:
    (runtime / "elsewhere").mkdir(mode=0o700)
    (runtime / "kvconform").symlink_to("elsewhere")
    with pytest.raises(place.NotPrivate):
        place.make_directory()


def test_a_directory_of_another_user_is_refused(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (runtime / "kvconform").mkdir(mode=0o700)
    other = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: other)
    with pytest.raises(place.NotPrivate):
        place.socket_of({})


def test_each_environment_has_its_own_server() -> None:
    same = {"VLLM_USE_V1": "1", "COLUMNS": "80", "PWD": "/a"}
    assert place.socket_of(same) == place.socket_of({**same, "COLUMNS": "99", "PWD": "/b"})
    assert place.socket_of(same) != place.socket_of({**same, "VLLM_USE_V1": "0"})
    assert place.socket_of(same) != place.socket_of({**same, "LD_PRELOAD": "x.so"})


def test_a_path_that_is_too_long_is_refused(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = runtime / ("x" * 100)
    long.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    with pytest.raises(place.NotPrivate, match="too long"):
        place.socket_of({})


def test_messages_carry_file_descriptors(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, (tmp_path / "file").open("w+b") as file:
        assert wire.is_own(ours)
        wire.send(ours, {"text": "ü"}, [file.fileno()])
        message, (fd,) = wire.receive(theirs)
        os.write(fd, b"written")
        os.close(fd)
        assert message == {"text": "ü"}
        assert (tmp_path / "file").read_bytes() == b"written"
        ours.close()
        with pytest.raises(EOFError):
            wire.receive(theirs)


def test_another_vllm_has_another_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that starts in a checkout of vLLM may import that one."""
    before = place.socket_of({})
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").touch()
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    installed.vllm_root.cache_clear()
    try:
        assert place.socket_of({}) != before
    finally:
        installed.vllm_root.cache_clear()


def test_a_command_that_has_not_imported_vllm_finds_the_same_server() -> None:
    """Importing vLLM sets environment variables, and the environment tells servers apart."""
    code = (
        "from kvconform.config.settings import Settings\n"
        "from kvconform.watch import client\n"
        "print(client.path_for(Settings()))\n"
        "import kvconform.session.worker\n"
        "print(client.path_for(Settings()))\n"
    )
    unset = ("VLLM_", "TOKENIZERS_PARALLELISM", "HF_HUB_OFFLINE")
    env = {name: value for name, value in os.environ.items() if not name.startswith(unset)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    )
    first, second = done.stdout.split()
    assert first == second and first.endswith(".sock")
