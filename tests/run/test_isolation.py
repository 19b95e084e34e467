# SPDX-License-Identifier: Apache-2.0
"""Tests of which threads count as left behind by a connector."""

from __future__ import annotations

import ctypes
import multiprocessing
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

from kvconform.process import alive, watchdog
from kvconform.run import isolation


def _in_fork(connection: Connection) -> None:
    over = threading.Event()

    def start(name: str) -> None:
        threading.Thread(target=over.wait, name=name, daemon=True).start()

    start("harness")
    before = isolation.left_behind()
    alive.remember()
    remembered = isolation.left_behind()
    start("connector")
    alive.remember()  # not the first time, so it changes nothing
    connection.send((before, remembered, isolation.left_behind()))
    over.set()


def test_a_forked_process_has_threads_of_its_own() -> None:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_in_fork, args=(theirs,))
    process.start()
    theirs.close()
    assert ours.recv() == (["harness"], [], ["connector"])
    process.join()


def test_in_the_process_of_the_import_nothing_changes() -> None:
    over = threading.Event()
    threading.Thread(target=over.wait, name="connector", daemon=True).start()
    alive.remember()
    assert "connector" in isolation.left_behind()
    over.set()


def _native_in_fork(connection: Connection, note: Path) -> None:
    alive.remember()
    watchdog.start(note=note)  # `faulthandler` has a thread of its own then
    while watchdog.timer_thread() is None:
        time.sleep(0.01)
    library = ctypes.CDLL(None)

    def start() -> None:
        library.pthread_create(ctypes.byref(ctypes.c_ulong()), None, library.pause, None)

    with alive.of_harness():
        start()
    before = len(isolation.left_behind())
    start()
    connection.send((before, len(isolation.left_behind())))


def test_threads_of_native_libraries_count(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_native_in_fork, args=(theirs, tmp_path / "note"))
    process.start()
    theirs.close()
    assert ours.recv() == (0, 1)
    process.join()
