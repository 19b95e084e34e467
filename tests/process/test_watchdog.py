# SPDX-License-Identifier: Apache-2.0
"""Tests of the watchdog: soft time-out, hard exit, and the note of a dead process."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvconform.process import watchdog


@pytest.fixture
def watching(tmp_path: Path) -> Iterator[Path]:
    note = tmp_path / "w.note"
    watchdog.start(0.2, note, grace=0.5)
    yield note
    watchdog.stop()


def test_a_sleeping_hook_raises(watching: Path) -> None:
    began = time.monotonic()
    with (
        pytest.raises(watchdog.HookTimeout, match=r"start_load_kv did not return within 0\.2 s"),
        watchdog.hook("start_load_kv"),
    ):
        time.sleep(30)
    assert time.monotonic() - began < 20  # it did not sleep to the end


def test_except_exception_does_not_swallow_it(watching: Path) -> None:
    def hook() -> None:
        with contextlib.suppress(Exception):
            time.sleep(30)

    with pytest.raises(watchdog.HookTimeout), watchdog.hook("wait_for_save"):
        hook()


def test_nested_hooks_belong_to_the_outermost(watching: Path) -> None:
    with watchdog.case("a.b[x]"), watchdog.hook("outer", step=3):
        with watchdog.hook("inner", step=4):
            pass
        note = watchdog.read_note(watching)
    assert note == watchdog.Note("a.b[x]", "outer", 3, 0.2, False)
    assert watchdog.read_note(watching) == watchdog.Note(None, None, 4, 0.0, False)


def test_fast_hooks_are_left_alone(watching: Path) -> None:
    watchdog.stop()
    watchdog.start(2.0, watching, grace=0.5)
    for _ in range(25):  # together they take longer than one may
        with watchdog.hook("get_finished"):
            time.sleep(0.1)


def test_without_start_nothing_is_needed() -> None:
    with watchdog.case("a"), watchdog.hook("x"):
        pass


DYING = """
import ctypes, os, sys, time
from pathlib import Path
from kvconform.process import watchdog
watchdog.start({limit}, Path(sys.argv[1]), grace=0.3)
with watchdog.case("some.case[v]"), watchdog.hook("save_kv_layer", step=7):
    {body}
print("alive")
"""


LOCK_TWICE = (
    "m = ctypes.create_string_buffer(64); "
    "lock = ctypes.{dll}(None).pthread_mutex_lock; lock(m); lock(m)"
)
"""Never returns, whatever signal arrives."""


@pytest.mark.parametrize(
    ("body", "hung"),
    [
        (LOCK_TWICE.format(dll="CDLL"), True),
        ("while True:\n        try: time.sleep(60)\n        except BaseException: pass", True),
        ("os._exit(5)", False),
    ],
    ids=["stuck-in-c", "swallows-everything", "exits"],
)
def test_the_note_survives(tmp_path: Path, body: str, hung: bool) -> None:
    done = subprocess.run(
        [sys.executable, "-c", DYING.format(body=body, limit=0.3), str(tmp_path / "n")],
        capture_output=True,
        timeout=60,
    )
    assert done.returncode == (watchdog.EXIT_HANG if hung else 5)
    note = watchdog.read_note(tmp_path / "n")
    assert note is not None
    assert (note.case, note.hook, note.step, note.hung) == (
        "some.case[v]",
        "save_kv_layer",
        7,
        hung,
    )


def test_c_code_that_keeps_the_interpreter_lock(tmp_path: Path) -> None:
    # On a busy machine, the daemon thread takes a while to see that a hook has begun.
    seen = "while watchdog._watch.fires > time.monotonic() + 60: time.sleep(0.01)"
    body = f"exec({seen!r}); " + LOCK_TWICE.format(dll="PyDLL")
    done = subprocess.run(
        [sys.executable, "-c", DYING.format(body=body, limit=2), str(tmp_path / "n")],
        capture_output=True,
        timeout=60,
    )
    assert done.returncode == 1
    note = watchdog.read_note(tmp_path / "n")
    assert note is not None
    assert note.hook == "save_kv_layer"
    assert note.hung


def test_no_note(tmp_path: Path) -> None:
    assert watchdog.read_note(tmp_path / "none") is None


STOPPING = """
import sys, threading, time
from pathlib import Path
from kvconform.process import watchdog
begun = threading.Event()
push_back = watchdog._Watch.push_back
def slowly(watch, deadline, now):
    begun.set()
    time.sleep(0.5)
    push_back(watch, deadline, now)
watchdog._Watch.push_back = slowly
watchdog.start(0.1, Path(sys.argv[1]), grace=0.1)
with watchdog.case("some.case[v]"):
    begun.wait()
    watchdog.stop()
    time.sleep(4.5)  # longer than the timer of faulthandler
print("alive")
"""


def test_a_watchdog_that_is_stopped_ends_no_process_later(tmp_path: Path) -> None:
    """`stop` may come while the daemon thread is about to set the timer again."""
    done = subprocess.run(
        [sys.executable, "-c", STOPPING, str(tmp_path / "n")],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (0, "alive\n"), done.stderr
