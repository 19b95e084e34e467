# SPDX-License-Identifier: Apache-2.0
"""Tests that temporary folders of killed processes are removed, and no others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvconform.process import scratch

OWNER = """
import os, sys, time
from kvconform.process import scratch
folder = scratch.make("run", keep="keep" in sys.argv)
(folder / "store").write_text("data")
if "fork" in sys.argv and os.fork():
    os._exit(0)  # as a process that is killed; its child goes on
print(folder, os.getpid(), flush=True)
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(scratch, "MEMORY", str(tmp_path))
    return tmp_path


@pytest.fixture
def owners() -> Iterator[list[subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    for each in started:
        each.kill()
        each.wait()
        assert each.stdout is not None
        each.stdout.close()


def owned(owners: list[subprocess.Popen[str]], *how: str) -> tuple[Path, int]:
    """Return the folder of a new process, and the process that uses it."""
    command = [sys.executable, "-c", OWNER, *how]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    owners.append(process)
    assert process.stdout is not None
    folder, number = process.stdout.readline().split()
    return Path(folder), int(number)


def test_the_folder_of_a_killed_process_is_removed(owners: list[subprocess.Popen[str]]) -> None:
    (dead, _), (alive, _) = owned(owners), owned(owners)
    scratch.remove_abandoned()
    assert (dead / "store").exists()
    owners[0].kill()
    owners[0].wait()
    scratch.remove_abandoned()
    assert not dead.exists()
    assert (alive / "store").exists()


def test_a_folder_that_a_child_still_uses_stays(owners: list[subprocess.Popen[str]]) -> None:
    folder, child = owned(owners, "fork")
    owners[0].wait()
    assert child != owners[0].pid
    scratch.remove_abandoned()
    assert (folder / "store").exists()
    os.kill(child, signal.SIGKILL)
    assert owners[0].stdout is not None
    assert owners[0].stdout.read() == ""  # its output ends with the child
    scratch.remove_abandoned()
    assert not folder.exists()


def test_the_kept_folder_of_a_debug_run_stays(owners: list[subprocess.Popen[str]]) -> None:
    kept, _ = owned(owners, "keep")
    owners[0].kill()
    owners[0].wait()
    scratch.remove_abandoned()
    assert (kept / "store").exists()


def test_what_this_module_has_not_made_stays(root: Path) -> None:
    unmarked = root / "kvconform-run-older"
    unmarked.mkdir()
    elsewhere = root / "other"
    elsewhere.mkdir()
    (elsewhere / scratch.OWNER).touch()
    (root / "kvconform-link").symlink_to(elsewhere)
    scratch.remove_abandoned()
    assert {each.name for each in root.iterdir()} == {
        "kvconform-run-older",
        "kvconform-link",
        "other",
    }


def test_a_folder_ends_with_its_block(root: Path) -> None:
    with scratch.temporary("peek") as folder:
        scratch.remove_abandoned()
        assert folder.parent == root and folder.exists()
    assert not folder.exists()
    scratch.discard(folder)
