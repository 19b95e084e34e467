# SPDX-License-Identifier: Apache-2.0
"""Workers of pytest-xdist that a warm process forks, in place of new interpreters."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any
from unittest.mock import patch

from execnet import gateway_io
from execnet.gateway_base import Popen2IO

from kvconform.config.settings import HASH_SEED, Settings
from kvconform.process import scratch, watchdog, wire
from kvconform.process.alive import of_harness
from kvconform.process.server import has_placeholder
from kvconform.run.isolation import OTHER_SEED, RESEEDED

START_LIMIT = 600.0
QUIET = 60.0
"""Seconds of an import after which it is said that it takes long."""
PATH = "PYTHONPATH"


def start_limit() -> float:
    """Return the seconds that a warm process may take to import vLLM."""
    return watchdog.start_limit(START_LIMIT)


def unfit(settings: Settings) -> str | None:
    """Return why a run with these settings cannot be forked, as the end of a sentence, or None."""
    if sys.platform != "linux":
        return "on this system, where forked processes are not safe"
    if settings.device == "cuda":
        return "with --device cuda, because a process may use a GPU only if its parent does not"
    if settings.engine == "live":
        return "with --engine live, which starts vLLM in processes of its own"
    if settings.debug:
        return "with --debug"
    return None


def environment_of(settings: Settings) -> dict[str, str]:
    """Return the environment in which the run's workers would import vLLM.

    PYTHONPATH is this process's: the settings are applied in a worker that has started already.
    Values with a placeholder are left out, because each worker fills it in by itself.
    """
    own = {
        name: value
        for name, value in settings.env.items()
        if name != PATH and not has_placeholder(value)
    }
    return {**os.environ, **own}


def findable(environment: dict[str, str], path: Sequence[str] = ()) -> dict[str, str]:
    """Return the environment with kvconform on PYTHONPATH: this process may know it otherwise.

    `path`: directories that come first.
    """
    import kvconform

    root = str(Path(kvconform.__path__[0]).parent)
    first = [os.path.abspath(each) for each in path]  # "" is the working directory
    known: list[Any] = [environment.get(PATH)]
    return {**environment, PATH: os.pathsep.join([*first, *filter(None, known), root])}


class ForkedIO(Popen2IO):
    """The pipes of a worker that was forked; stands in for execnet's of a Popen.

    `channel`: to the warm process. OSError or EOFError if that has ended, or takes too long.
    """

    def __init__(self, channel: socket.socket, execmodel: Any) -> None:
        theirs_in, ours_out = os.pipe()
        ours_in, theirs_out = os.pipe()
        self._worker, theirs = socket.socketpair()
        self._exit: int | None = None
        try:
            request = wire.request_of("work") | {"arguments": ["-c"]}
            wire.send(channel, request, [theirs_in, theirs_out, 2, theirs.fileno()])
            theirs.close()
            _await(self._worker)
            self._worker.settimeout(start_limit())  # of the rest, if it comes in parts
            self._pid = int(wire.receive(self._worker)[0]["pid"])
            self._worker.settimeout(None)
        except BaseException:
            for end in (ours_out, ours_in):
                os.close(end)
            self._worker.close()
            theirs.close()
            raise
        finally:
            os.close(theirs_in)
            os.close(theirs_out)
        super().__init__(os.fdopen(ours_out, "wb"), os.fdopen(ours_in, "rb"), execmodel=execmodel)

    def wait(self) -> int | None:
        """Wait for the end of the worker. Return its status, or None if that is unknown."""
        if self._exit is None:
            with contextlib.suppress(OSError, EOFError):
                self._exit = int(wire.receive(self._worker)[0]["exit"])
        return self._exit

    def kill(self) -> None:
        """Kill the worker."""
        if self._exit is None:
            with contextlib.suppress(OSError):
                os.kill(self._pid, signal.SIGKILL)


def _await(answer: socket.socket) -> None:
    """Wait until there is an answer; say so if that takes long. TimeoutError after the limit."""
    limit = start_limit()
    quiet = min(QUIET, limit)
    poll = select.poll()  # unlike select, for any number of open files
    poll.register(answer, select.POLLIN)
    if poll.poll(quiet * 1000):
        return
    if quiet < limit:
        print(
            f"kvconform: importing vLLM takes more than {quiet:g} s; after {limit:g} s"
            f" ({watchdog.START_SECONDS}) the workers import it themselves",
            file=sys.stderr,
        )
        if poll.poll((limit - quiet) * 1000):
            return
    raise TimeoutError


@contextlib.contextmanager
def forked_workers(channel: Callable[[], socket.socket]) -> Iterator[None]:
    """Have this process get its workers through a channel, or, once that fails, new interpreters.

    `channel` is called for each worker until one fails: a process that has ended stays so, and one
    that takes too long to import vLLM is waited for once.
    """
    from xdist import plugin, workermanage

    before = gateway_io.create_io
    has_failed = False

    def create_io(spec: Any, execmodel: Any) -> Any:
        nonlocal has_failed
        if spec.popen and not has_failed:
            try:
                return ForkedIO(channel(), execmodel)
            except (OSError, EOFError):
                has_failed = True  # a new interpreter says what is wrong with the import of vLLM
        return before(spec, execmodel)

    # xdist gives its workers the import path of the moment in which it was imported itself.
    workermanage._sys_path = plugin._sys_path = list(sys.path)
    gateway_io.create_io = create_io
    try:
        yield
    finally:
        gateway_io.create_io = before


@contextlib.contextmanager
def private_server(settings: Settings, log: Path) -> Iterator[socket.socket]:
    """Start a process that imports vLLM, and yield a channel to it; end it afterwards.

    It finds the vLLM that this process would import. It imports in the background: the first worker
    is waited for. Its output goes to `log`.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    ours, theirs = socket.socketpair()
    with ours, log.open("wb") as output:
        with theirs:
            environment = findable(environment_of(settings), sys.path)
            process = _start_server("kvconform.session.warm", theirs, environment, output)
        try:
            yield ours
        finally:
            process.terminate()  # its workers have ended
            process.wait()


@contextlib.contextmanager
def reseeded_server(
    environment: Mapping[str, str], output: IO[bytes] | None = None, *, late: bool = False
) -> Iterator[None]:
    """Start a process that forks for the runs with another hash seed; end it afterwards.

    It imports vLLM while other processes do, or, if `late`, for the first such run. Until the end,
    RESEEDED leads this process and those that it starts there. `output`: None: this process's.
    Nothing is started where forked processes are not safe, or where the temporary directory's path
    is too long for a socket.
    """
    if sys.platform != "linux":
        yield
        return
    with scratch.temporary("reseeded") as folder, contextlib.ExitStack() as stack:
        place = str(folder / "socket")
        with socket.socket(socket.AF_UNIX) as listener, contextlib.suppress(OSError):
            listener.bind(place)
            listener.listen()
            known = findable({**environment, HASH_SEED: OTHER_SEED}, sys.path)
            options = ["--late"] if late else []
            process = _start_server("kvconform.session.reseeded", listener, known, output, *options)
            stack.callback(process.wait)
            stack.callback(process.kill)  # first
            stack.enter_context(patch.dict(os.environ, {RESEEDED: place}))
        yield


def _start_server(
    module: str,
    end: socket.socket,
    environment: Mapping[str, str],
    output: IO[bytes] | None,
    *options: str,
) -> subprocess.Popen[bytes]:
    """Start a module that serves at a socket, in this environment.

    Its output goes to `output`; None: to this process's.
    """
    with of_harness():
        return subprocess.Popen(
            [sys.executable, "-P", "-m", module, str(end.fileno()), *options],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment,
            pass_fds=[end.fileno()],
            start_new_session=True,
        )
