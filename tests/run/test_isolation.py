# SPDX-License-Identifier: Apache-2.0
"""Tests of which threads count as left behind by a connector."""

from __future__ import annotations

import ctypes
import multiprocessing
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

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


def forked(target: Callable[..., None], *arguments: Any) -> Any:
    """Run a function in a forked process, and return what it sends."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs, *arguments))
    process.start()
    theirs.close()
    sent = ours.recv()
    process.join()
    return sent


def test_a_forked_process_has_threads_of_its_own() -> None:
    assert forked(_in_fork) == (["harness"], [], ["connector"])


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
    assert forked(_native_in_fork, tmp_path / "note") == (0, 1)
