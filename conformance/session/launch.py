# SPDX-License-Identifier: Apache-2.0
"""Starts pytest for `kvconform run`, with the plugin of kvconform and xdist only.

Other installed plugins, and pytest settings of the working directory, have no effect.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest.mock import patch

import pytest
from rich.console import Console

from kvconform.config.settings import HASH_SEED, Settings
from kvconform.errors import EnvironmentProblem
from kvconform.report.merge import JUNIT
from kvconform.report.terminal import make_console
from kvconform.run.isolation import needs_another_seed
from kvconform.session.controller import INTERRUPTS, Controller, Listener
from kvconform.session.gateways import (
    environment_of,
    forked_workers,
    private_server,
    reseeded_server,
    unfit,
)
from kvconform.session.plugin import PRESET
from kvconform.session.worker import RUNNER


class _Preset:
    """Pytest plugin that carries the controller; the kvconform plugin finds it by its name."""

    __name__ = PRESET

    def __init__(self, controller: Controller) -> None:
        self.controller = controller


def run(
    settings: Settings,
    *,
    first: Sequence[str] = (),
    traced: Sequence[str] = (),
    untraced: Sequence[str] = (),
    listener: Listener | None = None,
    quiet: bool = False,
    channel: socket.socket | None = None,
) -> int:
    """Judge the connector of `settings`, and return the exit code.

    `first`: ids of runs that are made before the others. `traced`: folders; the lines that a run
    executes in files below them are recorded, except in the runs `untraced`. `listener` gets each
    result as it comes. `quiet`: print nothing. `channel` leads to a process that forks the workers;
    by default, this run starts one of its own. None of these changes the reports.

    Raises KvconformError if the run could not start or could not be completed.
    """
    console = Console(file=io.StringIO()) if quiet else make_console()
    controller: Controller | None = None

    def interrupt(*_: object) -> None:
        """Report the results so far, and clean up; once the verdict is known, only end."""
        if controller is None or controller.exit_code is None:
            raise KeyboardInterrupt

    before = {each: signal.signal(each, interrupt) for each in INTERRUPTS}
    try:
        controller = Controller(
            settings,
            console,
            quiet_workers=not settings.debug,
            first=first,
            traced=traced,
            untraced=untraced,
            listener=listener,
        )
        _judge(controller, channel)
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
        if controller is not None:
            controller.clean_up()
    if controller.problem is not None:
        raise controller.problem
    assert controller.exit_code is not None
    return controller.exit_code


def _judge(controller: Controller, channel: socket.socket | None) -> None:
    """Run pytest; write the report here if pytest has ended before it had a session to finish.

    A run that is interrupted while its workers start is such a run. UsageError if the report cannot
    be written.
    """
    settings = controller.settings
    controller.open_report()
    status = 0
    # An interpreter reads its hash seed when it starts, before its settings are applied.
    seed = {name: value for name, value in settings.env.items() if name == HASH_SEED}
    try:
        with (
            patch.dict(os.environ, seed),
            _source_of_workers(controller, channel),
            hermetic(settings.debug, "xdist.plugin,kvconform.session.plugin"),
        ):
            status = int(
                pytest.main(_arguments(settings, controller), plugins=[_Preset(controller)])
            )
    except KeyboardInterrupt:
        controller.problem = controller.problem or EnvironmentProblem("interrupted")
    if controller.exit_code is None:
        controller.problem = controller.problem or EnvironmentProblem(
            f"pytest ended with status {status} before anything was run (--debug shows its output)"
        )
        controller.exit_code = controller.finish()


@contextlib.contextmanager
def _source_of_workers(controller: Controller, channel: socket.socket | None) -> Iterator[None]:
    """Have the workers forked by the process at `channel`, or by one that this run starts.

    Where that is impossible, or the workers do not import vLLM, they are new interpreters.
    """
    settings = controller.settings
    if channel is not None:
        with forked_workers(lambda: channel):
            yield
    elif RUNNER in os.environ or unfit(settings) is not None:
        yield
    else:
        with contextlib.ExitStack() as stack:
            log = controller.folder / "logs" / "imports.log"
            server = functools.cache(lambda: stack.enter_context(private_server(settings, log)))
            if not settings.setup:  # the commands may install something that vLLM imports
                with contextlib.suppress(OSError):  # then the workers are new interpreters
                    server()
                    variants = controller.collector.selection.variants
                    if HASH_SEED not in settings.env and any(map(needs_another_seed, variants)):
                        output = stack.enter_context(log.with_name("reseeded.log").open("wb"))
                        stack.enter_context(reseeded_server(environment_of(settings), output))
            with forked_workers(server):
                yield


def _arguments(settings: Settings, controller: Controller) -> list[str]:
    """Return pytest's arguments."""
    # A live run takes minutes when its failing workload is reduced, so idle workers steal runs.
    dist = "worksteal" if settings.engine == "live" else "load"
    # Every run may end its worker: a worker whose hook hung is replaced.
    restarts = 1000 + len(controller.collector.selection.variants)
    return [
        "--pyargs",
        "kvconform.session",
        f"--connector={settings.connector}",
        f"-n{settings.workers}",
        f"--dist={dist}",
        f"--max-worker-restart={restarts}",
        "--import-mode=importlib",
        f"-c{os.devnull}",
        f"--rootdir={Path.cwd()}",
        "--noconftest",
        "-pno:cacheprovider",
        # It keeps what was logged: an exception among the arguments keeps the frames of the hook
        # that raised it, and so the request, which would count as the connector's own reference.
        "-pno:logging",
        "-s",
        f"--junitxml={Path(settings.report_dir) / JUNIT}",
        "-ojunit_suite_name=kvconform",
        # Otherwise a replaced worker has an entry without a name.
        "-ojunit_duration_report=call",
        # A worker's runs come in pieces; small ones keep the order in which they are wanted.
        *(["--maxschedchunk=1"] if controller.first else []),
    ]


@contextlib.contextmanager
def hermetic(debug: bool, plugins: str) -> Iterator[None]:
    """Isolate pytest from the environment: load only `plugins`, and ignore PYTEST_ADDOPTS.

    Standard output and error are discarded unless `debug`; the controller has the real standard
    output. The environment is restored at the end.
    """
    variables = ("PYTEST_ADDOPTS", "PYTEST_PLUGINS", "PYTEST_DISABLE_PLUGIN_AUTOLOAD")
    before = {name: os.environ.pop(name, None) for name in variables}
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    os.environ["PYTEST_PLUGINS"] = plugins
    try:
        with contextlib.ExitStack() as stack:
            if not debug:
                sink = stack.enter_context(open(os.devnull, "w"))
                stack.enter_context(contextlib.redirect_stdout(sink))
                stack.enter_context(contextlib.redirect_stderr(sink))
            yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        sys.stdout.flush()
