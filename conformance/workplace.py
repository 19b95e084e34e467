# SPDX-License-Identifier: Apache-2.0
"""What every process with a connector begins with: a log, the connector's path and environment, a temporary directory, and its servers."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from kvconform.servers import Servers
from kvconform.settings import Settings


def settle_in(settings: Settings, scratch: Path, name: str, logs: Path, *, redirect: bool = True) -> tuple[Servers, Settings]:
    """(the process's servers, not started yet; the settings with their ports filled in). Changes this process: its output goes to a log in
    `logs` (`redirect`), its path, environment and temporary directory are those of the run, below `scratch`."""
    if redirect:
        _redirect(logs / f"{name}.log")
    for folder in settings.pythonpath:
        if folder not in sys.path:
            sys.path.append(folder)
    servers = Servers(settings, scratch / f"{name}-servers", logs, f"{name}-server-")
    settings = servers.settle(settings)
    os.environ.update(settings.env)
    temporary = scratch / "tmp"  # what the connector and others leave behind goes with the run
    temporary.mkdir(exist_ok=True)
    os.environ["TMPDIR"] = tempfile.tempdir = str(temporary)
    return servers, settings


def _redirect(log: Path) -> None:
    """Send the process's standard output and error, also those of C code, to a file."""
    log.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for stream in (1, 2):
        os.dup2(handle, stream)
    os.close(handle)
