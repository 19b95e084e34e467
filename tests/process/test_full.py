# SPDX-License-Identifier: Apache-2.0
"""Tests of a disk that is full: writes are cut short, in C too, and what is printed is not lost."""

from __future__ import annotations

import os
import resource
import sqlite3
import subprocess
import sys
import time
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from kvconform.files import sizes_below
from kvconform.process.full import full

PROGRAM = """
import os, sys
from pathlib import Path
from kvconform.process.full import full
with full(100):
    print("x" * 500)
    os.write(2, b"from C " * 100)
    if sys.argv[1:] == ["ends"]:
        os._exit(7)
print("afterwards")
"""


def test_a_write_is_cut_short_and_the_next_one_fails(tmp_path: Path) -> None:
    file = tmp_path / "file"
    with full(100), file.open("wb", buffering=0) as out:
        assert out.write(bytes(150)) == 100
        with pytest.raises(OSError, match="File too large"):
            out.write(b"x")
    assert file.stat().st_size == 100
    file.write_bytes(bytes(150))
    assert file.stat().st_size == 150, "there is room again"


def test_a_library_in_another_language_meets_the_limit_too(tmp_path: Path) -> None:
    database = sqlite3.connect(tmp_path / "db")
    database.execute("CREATE TABLE t (b BLOB)")
    database.execute("INSERT INTO t VALUES (?)", (bytes(100_000),))
    with full(20_000), pytest.raises(sqlite3.OperationalError):
        database.commit()
    database.close()


def test_what_was_written_before_can_be_read(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"a" * 300)
    with full(10):
        assert file.read_bytes() == b"a" * 300


@pytest.mark.parametrize(("how", "code"), [("returns", 0), ("ends", 7)])
def test_what_is_printed_meanwhile_is_not_lost(how: str, code: int, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("wb") as out:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, how], stdout=out, stderr=out, timeout=60, check=False
        )
    assert done.returncode == code
    end = time.monotonic() + 30
    # Of a process that has ended, it may arrive later.
    while (said := log.read_text(encoding="utf-8")).count("from C") < 100:
        assert time.monotonic() < end, said
        time.sleep(0.01)
    assert ("afterwards" in said) == (code == 0)
    assert code or "x" * 500 in said


def test_what_python_prints_to_another_file_is_not_lost(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as log, redirect_stdout(log):
        print("before")
        with full(20):
            print("x" * 500)
    assert (tmp_path / "log").read_text() == "before\n" + "x" * 500 + "\n"


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="only Linux limits other processes")
def test_processes_of_connectors_meet_the_limit_only_meanwhile() -> None:
    def limit(process: subprocess.Popen[bytes]) -> int:
        return resource.prlimit(process.pid, resource.RLIMIT_FSIZE)[0]

    usual = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    with subprocess.Popen(command) as earlier:
        began = time.monotonic()
        with full(1000):
            later = subprocess.Popen(command)
            assert (limit(earlier), limit(later)) == (1000, 1000)
        assert (limit(earlier), limit(later)) == (usual, usual)
        assert time.monotonic() - began < 30
        for process in (earlier, later):
            process.kill()
            process.wait()


def test_sizes_are_those_of_regular_files(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_bytes(bytes(30))
    os.symlink(tmp_path / "folder" / "file", tmp_path / "link")
    assert sizes_below(tmp_path) == [30]
