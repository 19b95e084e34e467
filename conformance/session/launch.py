# SPDX-License-Identifier: Apache-2.0
"""Starts pytest for `kvconform run`: our plugin and xdist, nothing else that happens to be installed or configured where it is started."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvconform.config.settings import Settings
from kvconform.errors import EnvironmentProblem
from kvconform.report.terminal import make_console
from kvconform.session.controller import Controller
from kvconform.session.plugin import PRESET


class _Preset:
    """Hands our controller to the plugin (which finds it by this name)."""

    __name__ = PRESET

    def __init__(self, controller: Controller) -> None:
        self.controller = controller


def run(settings: Settings) -> int:
    """Judge; returns the exit code. Raises KvconformError if the run could not be made or not be completed."""
    controller = Controller(settings, make_console(), quiet_workers=not settings.debug)
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        with hermetic(settings.debug, "xdist.plugin,kvconform.session.plugin"):
            status = int(
                pytest.main(_arguments(settings, controller), plugins=[_Preset(controller)])
            )
    finally:
        signal.signal(signal.SIGTERM, before)
        controller.clean_up()
    if controller.problem is not None:
        raise controller.problem
    if controller.exit_code is None:
        raise EnvironmentProblem(
            f"pytest ended with status {status} before anything was run (--debug shows what it said)"
        )
    return controller.exit_code


def _interrupt(*_: object) -> None:
    """A request to end is answered as Ctrl-C is: with what was found out so far, and nothing left behind."""
    raise KeyboardInterrupt


def _arguments(settings: Settings, controller: Controller) -> list[str]:
    return [
        "--pyargs",
        "kvconform.session",
        f"--connector={settings.connector}",
        f"-n{settings.workers}",
        f"--dist={'worksteal' if settings.engine == 'live' else 'load'}",  # a live run that is made smaller takes minutes
        f"--max-worker-restart={1000 + len(controller.collector.selection.variants)}",  # one whose hook hung is replaced
        "--import-mode=importlib",
        f"-c{os.devnull}",
        f"--rootdir={Path.cwd()}",
        "--noconftest",
        "-pno:cacheprovider",
        "-s",
        f"--junitxml={Path(settings.report_dir) / 'junit.xml'}",
        "-ojunit_suite_name=kvconform",
        "-ojunit_duration_report=call",  # else a worker that was replaced has an entry, without a name
    ]


@contextlib.contextmanager
def hermetic(debug: bool, plugins: str) -> Iterator[None]:
    """No plugins but these and no options of others; pytest's own output goes nowhere (the controller writes to the real one)."""
    others = ("PYTEST_ADDOPTS", "PYTEST_PLUGINS", "PYTEST_DISABLE_PLUGIN_AUTOLOAD")
    before = {name: os.environ.pop(name, None) for name in others}
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
