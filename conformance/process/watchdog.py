# SPDX-License-Identifier: Apache-2.0
"""Time limits for hooks, and a note of the running hook that survives the death of the process.

`hook(name)` around a call costs about a microsecond: it writes a deadline and a few bytes of a
memory-mapped file. A hook that exceeds its limit is stopped in one of three ways:

1. A daemon thread sees the deadline pass and sends SIGUSR2 to the thread that called `start`. The
   signal's handler raises `HookTimeout` there.
2. If the hook still runs after the grace period (stuck in C, or it swallowed the exception), the
   process exits with `EXIT_HANG`.
3. If C code holds the interpreter lock, no Python code runs. `faulthandler` then ends the process:
   its timer needs no lock, and the daemon thread has stopped postponing it.

The note (see `read_note`) is a memory-mapped file. Another process can read the case, hook and step
from it, even after `os._exit`.
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

from kvconform.process import clock

EXIT_HANG = 86
DEFAULT_LIMIT = 10.0
CASE_LIMIT = 300.0
"""Seconds for a run and the runs it is compared with.

A run in another interpreter has a shorter limit of its own, and no verdict.
"""
START_SECONDS = "KVCONFORM_START_SECONDS"
"""Environment variable: seconds that importing vLLM, and then the connector, may take."""
THREAD = "kvconform-watchdog"
TASKS = Path("/proc/self/task")
_SIGNAL = signal.SIGUSR2
_HEAD = struct.Struct("<ddiBBH")
"""Header of a note.

The hook's start (monotonic clock, s), its limit (s), the step, whether the process was killed for a
hang, length of the hook's name, length of the case's name.
"""
_HOOK, _CASE = 128, 512
_SIZE = _HEAD.size + _HOOK + _CASE


def start_limit(default: float) -> float:
    """Return the seconds that a start may take: what the environment says, or `default`."""
    return float(os.environ.get(START_SECONDS) or default)


def case_limit(hook_timeout: float) -> float:
    """Return the seconds that a case may take if each hook may take `hook_timeout` seconds."""
    return max(CASE_LIMIT, 12 * hook_timeout)


def tasks() -> set[int]:
    """Return the ids of all threads of this process; an empty set where the system lists none."""
    return {int(name) for name in os.listdir(TASKS)} if TASKS.is_dir() else set()


class HookTimeout(BaseException):
    """Raised in a hook that did not return in time.

    Not an `Exception`, because a connector's `except Exception` must not swallow it.
    """

    def __init__(self, hook: str, limit: float) -> None:
        super().__init__(f"{hook} did not return within {limit:g} s")
        self.hook, self.limit = hook, limit


@dataclass(frozen=True)
class Note:
    """What a process was doing when it died.

    `hook` is None outside of hooks. `hung`: the hook had taken longer than its limit.
    """

    case: str | None
    hook: str | None
    step: int
    limit: float
    hung: bool


class _Watch:
    """The watchdog of a process, of which there is one.

    `serial` numbers the hooks, so that a late signal cannot hit the next hook.
    """

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
        self.rounds = threading.Lock()
        """Held during a round of the daemon thread: none may set a timer or signal after `stop`."""
        self.log: IO[Any] | None = None
        self.fires = 0.0
        """When the timer of `faulthandler` ends the process, unless it is postponed."""
        self.timer: int | None = None
        """The id of its thread, if the system tells."""

    def enter(self, name: str, limit: float) -> None:
        self.serial += 1
        self.name, self.allowed = name, limit
        began = clock.monotonic()
        if self.note is not None:
            self.write(began, limit, name)
        self.deadline = began + limit

    def leave(self) -> None:
        self.deadline = None
        if self.note is not None:
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
        """Check the deadlines until `stop`; the body of the daemon thread."""
        while self.running:
            time.sleep(0.1)
            with self.rounds:
                if self.running:
                    self.round()

    def round(self) -> None:
        """Check the deadlines once."""
        deadline, serial, now = self.deadline, self.serial, clock.monotonic()
        self.push_back(deadline, now)
        if self.case_deadline is not None and now > self.case_deadline:
            self.die(now)
        if deadline is None or now < deadline:
            return
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
        """Postpone the timer of `faulthandler` beyond the time that the other two ways need.

        Outside of cases it gets much longer, because imports hold the interpreter lock. Each time,
        `faulthandler` starts a thread: less than a second is not worth it.
        """
        if deadline is not None:
            allowance = deadline - now
        else:
            allowance = self.limit if self.case else 120.0
        wait = max(allowance, 0.0) + self.grace + 3.0
        if self.log is not None and abs(now + wait - self.fires) > 1.0:
            before = tasks()
            faulthandler.dump_traceback_later(wait, exit=True, file=self.log)
            new = tasks() - before
            self.timer = new.pop() if len(new) == 1 else None
            self.fires = now + wait

    def on_signal(self, _number: int, _frame: FrameType | None) -> None:
        if (
            self.deadline is not None
            and self.expired is not None
            and self.expired[0] == self.serial
        ):
            raise HookTimeout(self.name, self.allowed)


_watch = _Watch()
_logs: list[IO[Any]] = []
"""References that keep all log files open.

If faulthandler dropped the last reference to one while it sets a new timer, closing the file would
release the interpreter lock. If a second thread then set the timer, the first would wait for that
timer with the lock held.
"""


class hook:
    """Context in which the hook `name` runs and must return within the limit.

    Nested hooks count as part of the outermost one. Raises HookTimeout.
    """

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
    """Enter a context whose hooks belong to this case.

    If it takes longer than `limit` seconds, in hooks or not, the process exits.
    """
    _watch.case, _watch.step = case_id, 0
    _watch.write_case()
    _watch.case_deadline = None if limit is None else clock.monotonic() + limit
    try:
        yield
    finally:
        _watch.case, _watch.case_deadline = "", None
        _watch.write_case()


def start(limit: float = DEFAULT_LIMIT, note: Path | None = None, grace: float = 2.0) -> None:
    """Watch the calling thread's hooks from now on.

    `note`: file for the note; it and a log with the same stem are created. Without `start`, `hook`
    only records what runs. Changes the handler of SIGUSR2 when called in the main thread.
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
    # C code that keeps the interpreter lock from now on lets the thread do nothing.
    _watch.push_back(None, clock.monotonic())
    threading.Thread(target=_watch.patrol, name=THREAD, daemon=True).start()


def after_fork(note: Path) -> None:
    """Restart the watchdog in a forked child, which does not have its parent's thread.

    Does nothing if the parent had none. `note`: file for the child's note. The timer of
    `faulthandler` stays off: to stop it would mean waiting for a thread that the child lacks too.
    """
    global _watch
    if not _watch.running:
        return
    _watch, before = _Watch(), _watch
    _watch.case = before.case
    start(before.limit, grace=before.grace)
    _open_note(note)


def die_like(last: Note) -> None:
    """End this process as one that it waited for ended: by a hang, which `last` describes.

    Returns if this process has no note that another one could read.
    """
    if _watch.note is None:
        return
    if last.hook is not None:
        _watch.name, _watch.allowed, _watch.step, _watch.deadline = (
            last.hook,
            last.limit,
            last.step,
            0.0,
        )
    _watch.die(clock.monotonic())


def _open_note(note: Path) -> None:
    note.write_bytes(bytes(_SIZE))
    with note.open("r+b") as file:
        _watch.note = mmap.mmap(file.fileno(), _SIZE)


def stop() -> None:
    """Stop watching; the daemon thread ends by itself before its next round."""
    global _watch
    if not _watch.running:
        return
    with _watch.rounds:
        _watch.running = False
        faulthandler.cancel_dump_traceback_later()
    if _watch.owner is not None:
        signal.signal(_SIGNAL, signal.SIG_DFL)
    _watch = _Watch()


def timer_thread() -> int | None:
    """Return the id of the thread of `faulthandler` that waits in this process, if there is one."""
    return _watch.timer


def has_expired() -> bool:
    """Return whether a hook took too long in this process since `start`."""
    return _watch.expired is not None


def leave_word(text: str) -> None:
    """Write `text` to the note in place of the case, before this process ends."""
    _watch.case = text
    _watch.write_case()


def limit() -> float:
    """Return the seconds that a hook may take in this process."""
    return _watch.limit


def read_note(note: Path) -> Note | None:
    """Return what the process that writes `note` is or was doing; None if there is no note.

    Meant for another process.
    """
    try:
        data = note.read_bytes()
    except OSError:
        return None
    if len(data) < _SIZE:
        return None
    began, limit, step, killed, hook_length, case_length = _HEAD.unpack_from(data)
    name = data[_HEAD.size : _HEAD.size + hook_length].decode(errors="replace")
    where = data[_HEAD.size + _HOOK : _HEAD.size + _HOOK + case_length].decode(errors="replace")
    hung = bool(killed) or (bool(name) and limit > 0 and clock.monotonic() - began >= limit)
    return Note(where or None, name or None, step, limit, hung)
