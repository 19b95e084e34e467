# SPDX-License-Identifier: Apache-2.0
"""A time limit per hook, and a note of what was running that survives the death of the process.

`hook(name)` around a call costs about a microsecond: it writes a deadline and a few bytes of a memory-mapped file. Three lines of defence
stand behind it:

1. a daemon thread sees the deadline pass and sends SIGUSR2 to the thread that called `start`, whose handler raises `HookTimeout` there;
2. if that thread does not come back within the grace period (stuck in C, or it swallowed the exception), the process exits: `EXIT_HANG`;
3. if Python does not run at all (C code holds the interpreter lock), the timer of `faulthandler`, which needs no lock and which the daemon
   thread keeps pushing back, ends the process.

The note (see `read_note`) is a memory-mapped file: whoever finds the process dead knows the case, hook and step, even after `os._exit`.
"""

from __future__ import annotations

import faulthandler
import mmap
import os
import signal
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Any

EXIT_HANG = 86
DEFAULT_LIMIT = 10.0
CASE_LIMIT = 300.0
"""Seconds for a run and those that it is compared with. One in another interpreter has a limit of its own, shorter, and no verdict."""
START_SECONDS = "KVCONFORM_START_SECONDS"
"""Environment variable: seconds that importing vLLM, and then the connector, may take."""
THREAD = "kvconform-watchdog"
_SIGNAL = signal.SIGUSR2
_HEAD = struct.Struct("<ddiBBH")
"""When the hook began (monotonic clock, s), its limit (s), step, whether killed as a hang, length of the hook's name, of the case's."""
_HOOK, _CASE = 128, 512
_SIZE = _HEAD.size + _HOOK + _CASE


def case_limit(hook_timeout: float) -> float:
    """Seconds that a case may take whose hooks may take `hook_timeout` seconds each."""
    return max(CASE_LIMIT, 12 * hook_timeout)


class HookTimeout(BaseException):
    """A hook did not return in time. Not an `Exception`: a connector's `except Exception` must not swallow it."""

    def __init__(self, hook: str, limit: float) -> None:
        super().__init__(f"{hook} did not return within {limit:g} s")
        self.hook, self.limit = hook, limit


@dataclass(frozen=True)
class Note:
    """What a dead process was doing: `hook` is None if it was in none. `hung`: it had been in it for longer than allowed."""

    case: str | None
    hook: str | None
    step: int
    limit: float
    hung: bool


class _Watch:
    """The one watch of a process. `serial` numbers the hooks, so that a late signal cannot hit the next one."""

    def __init__(self) -> None:
        self.limit = DEFAULT_LIMIT
        self.grace = 2.0
        self.serial = 0
        self.deadline: float | None = None
        self.name = ""
        self.allowed = 0.0
        self.step = 0
        self.case = ""
        self.case_deadline: float | None = None
        self.expired: tuple[int, float] | None = None
        self.note: mmap.mmap | None = None
        self.owner: int | None = None
        self.running = False
        self.log: IO[Any] | None = None

    def enter(self, name: str, limit: float) -> None:
        self.serial += 1
        self.name, self.allowed = name, limit
        began = time.monotonic()
        self.write(began, limit, name)
        self.deadline = began + limit

    def leave(self) -> None:
        self.deadline = None
        self.write(0.0, 0.0, "")

    def write(self, began: float, limit: float, name: str, hung: bool = False) -> None:
        if self.note is None:
            return
        hook = name.encode()[:_HOOK]
        _HEAD.pack_into(
            self.note, 0, began, limit, self.step, hung, len(hook), len(self.case.encode()[:_CASE])
        )
        self.note[_HEAD.size : _HEAD.size + len(hook)] = hook

    def write_case(self) -> None:
        if self.note is not None:
            text = self.case.encode()[:_CASE]
            self.note[_HEAD.size + _HOOK : _HEAD.size + _HOOK + len(text)] = text
            self.write(0.0, 0.0, "")

    def patrol(self) -> None:
        """The daemon thread."""
        while self.running:
            time.sleep(0.1)
            if not self.running:
                return
            deadline, serial, now = self.deadline, self.serial, time.monotonic()
            self.push_back(deadline, now)
            if self.case_deadline is not None and now > self.case_deadline:
                self.die(now)
            if deadline is None or now < deadline:
                continue
            if self.expired is None or self.expired[0] != serial:
                self.expired = (serial, now)
                if self.owner is not None:
                    signal.pthread_kill(self.owner, _SIGNAL)
            elif (
                now > self.expired[1] + self.grace
                and serial == self.serial
                and self.deadline is not None
            ):
                self.die(now)

    def die(self, now: float) -> None:
        self.write(now, self.allowed, self.name if self.deadline is not None else "", hung=True)
        os._exit(EXIT_HANG)

    def push_back(self, deadline: float | None, now: float) -> None:
        """The last resort gets longer than the first two lines need, and much longer while no hook runs (imports hold the lock)."""
        allowance = deadline - now if deadline is not None else (self.limit if self.case else 120.0)
        if self.log is not None:
            faulthandler.dump_traceback_later(
                max(allowance, 0.0) + self.grace + 3.0, exit=True, file=self.log
            )

    def on_signal(self, _number: int, _frame: FrameType | None) -> None:
        if (
            self.deadline is not None
            and self.expired is not None
            and self.expired[0] == self.serial
        ):
            raise HookTimeout(self.name, self.allowed)


_watch = _Watch()
_logs: list[IO[Any]] = []
"""Log files are kept for good: if faulthandler drops the last reference to one while it sets a new timer, closing it releases the
interpreter lock, and a second thread that sets the timer meanwhile makes the first wait for that timer with the lock held."""


class hook:
    """Context: the hook `name` runs and must return within the limit. Nested hooks belong to the outermost one. Raises HookTimeout."""

    __slots__ = ("limit", "name", "outermost")

    def __init__(self, name: str, step: int | None = None, limit: float | None = None) -> None:
        self.name = name
        self.limit = _watch.limit if limit is None else limit
        if step is not None:
            _watch.step = step

    def __enter__(self) -> None:
        self.outermost = _watch.deadline is None
        if self.outermost:
            _watch.enter(self.name, self.limit)

    def __exit__(self, *exc: object) -> None:
        if self.outermost:
            _watch.leave()


@contextmanager
def case(case_id: str, limit: float | None = None) -> Iterator[None]:
    """Context: hooks belong to this case from now on. If it takes longer than `limit` seconds (s), in hooks or not, the process exits."""
    _watch.case, _watch.step = case_id, 0
    _watch.write_case()
    _watch.case_deadline = None if limit is None else time.monotonic() + limit
    try:
        yield
    finally:
        _watch.case, _watch.case_deadline = "", None
        _watch.write_case()


def start(limit: float = DEFAULT_LIMIT, note: Path | None = None, grace: float = 2.0) -> None:
    """Watch the calling thread's hooks from now on. `note`: file for the note of death; it and the log next to it are created.

    Without `start`, `hook` only keeps the books. Changes the handler of SIGUSR2 when called in the main thread.
    """
    stop()
    _watch.limit, _watch.grace, _watch.expired = limit, grace, None
    if note is not None:
        _open_note(note)
        _watch.log = note.with_suffix(".log").open("w")
        _logs.append(_watch.log)
    if threading.current_thread() is threading.main_thread():
        _watch.owner = threading.get_ident()
        signal.signal(_SIGNAL, _watch.on_signal)
    _watch.running = True
    threading.Thread(target=_watch.patrol, name=THREAD, daemon=True).start()


def after_fork(note: Path) -> None:
    """Watch on in a forked child, whose parent watched: its thread is not here. `note`: file for the note of its death. Without the timer
    of `faulthandler`, which waits for a thread that is not here either when it is told to end."""
    global _watch
    if not _watch.running:
        return
    _watch, before = _Watch(), _watch
    _watch.case = before.case
    start(before.limit, grace=before.grace)
    _open_note(note)


def die_like(last: Note) -> None:
    """A process that this one waited for hung, and is gone. This one ends as it did, if there is somebody who reads its own note."""
    if _watch.note is None:
        return
    if last.hook is not None:
        _watch.name, _watch.allowed, _watch.step, _watch.deadline = (
            last.hook,
            last.limit,
            last.step,
            0.0,
        )
    _watch.die(time.monotonic())


def _open_note(note: Path) -> None:
    note.write_bytes(bytes(_SIZE))
    with note.open("r+b") as file:
        _watch.note = mmap.mmap(file.fileno(), _SIZE)


def stop() -> None:
    """Stop watching (the daemon thread ends by itself within its next tick)."""
    global _watch
    if not _watch.running:
        return
    _watch.running = False
    faulthandler.cancel_dump_traceback_later()
    if _watch.owner is not None:
        signal.signal(_SIGNAL, signal.SIG_DFL)
    _watch = _Watch()


def has_expired() -> bool:
    """Whether a hook took too long in this process since `start`."""
    return _watch.expired is not None


def leave_word(text: str) -> None:
    """What the note says from now on in place of a case: this process is about to end."""
    _watch.case = text
    _watch.write_case()


def limit() -> float:
    """Seconds that a hook may take here."""
    return _watch.limit


def read_note(note: Path) -> Note | None:
    """What the process that wrote `note` is or was doing; None if there is no note. Meant for another process."""
    try:
        data = note.read_bytes()
    except OSError:
        return None
    if len(data) < _SIZE:
        return None
    began, limit, step, killed, hook_length, case_length = _HEAD.unpack_from(data)
    name = data[_HEAD.size : _HEAD.size + hook_length].decode(errors="replace")
    where = data[_HEAD.size + _HOOK : _HEAD.size + _HOOK + case_length].decode(errors="replace")
    hung = bool(killed) or (bool(name) and limit > 0 and time.monotonic() - began >= limit)
    return Note(where or None, name or None, step, limit, hung)
