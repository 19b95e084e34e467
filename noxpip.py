# SPDX-License-Identifier: Apache-2.0
"""Running pip, or uv in its place: quietly, with a log, and a line about progress now and then.

noxenv imports this module. Nox's Python does not have the project's dependencies, so this module
must not need them.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

EVERY = 10.0
"""Seconds between two lines about progress."""
CPU_BUILDS = "https://download.pytorch.org/whl/cpu"
"""PyTorch's index of builds without CUDA, which PyPI does not have."""
SHORT_WAIT = ("--timeout", "10", "--retries", "1")
"""Options of pip for an index that cannot be reached from everywhere."""
OLDEST_UV = (0, 5)
"""The first uv releases know the variables below by other names."""
MEANS_NOTHING_TO_UV = {
    "disable-pip-version-check",
    "no-color",
    "no-input",
    "progress-bar",
    "quiet",
    "retries",
    "root-user-action",
    "verbose",
}
"""Settings of pip that do not change what is installed, or from where."""
UNITS = {"B": 1, "kB": 1e3, "KiB": 2**10, "MB": 1e6, "MiB": 2**20, "GB": 1e9, "GiB": 2**30}


class Progress:
    """What pip or uv has said so far."""

    def __init__(self, folder: Path, about: str = "") -> None:
        """Follow an installation into `folder` that needs `about` (a size for people)."""
        self.folder, self.about = folder, about
        self.fetched = 0.0
        self.now = "looking for packages"
        self.writing = False

    def hear(self, line: str) -> None:
        """Take in a line of output."""
        found = re.match(r"\s*Downloading (\S+) \(([\d.]+) ?([kKMG]?i?B)\)", line)
        if found is not None:
            self.fetched += float(found[2]) * UNITS.get(found[3], 0)
            self.now = f"now {found[1].rpartition('/')[2]} ({found[2]} {found[3]})"
        elif re.match(r"Installing collected packages|Prepared \d+ packages", line):
            self.writing = True

    def line(self) -> str:
        """Return what has been done, and what is left."""
        if self.writing and self.about:
            return f"{size(written(self.folder))} of about {self.about} installed"
        if self.writing:
            return "installing"
        return f"{size(self.fetched)} downloaded, {self.now}"


def size(count: float) -> str:
    """Return a number of bytes for people."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


def written(folder: Path) -> int:
    """Return how many bytes the files in `folder` have; it may be changing."""
    total = 0
    for top, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(top, name)).st_size
            except OSError:
                continue
    return total


def run(
    command: list[str],
    *,
    progress: Progress,
    say: Callable[[str], None],
    log: Path,
    cwd: Path,
    env: dict[str, str] | None = None,
) -> str | None:
    """Run pip or uv; return None, or the end of its output if it failed.

    Appends its output to `log`, and says every `EVERY` seconds how far it is. PYTHONPATH is not in
    force: pip would take what is there for installed.
    """
    name = "pip" if command[1] == "-m" else Path(command[0]).name
    inherited = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    begun = time.monotonic()
    ended = threading.Event()

    def tell() -> None:
        while not ended.wait(EVERY):
            say(f"{name}, {time.monotonic() - begun:.0f} s: {progress.line()}")

    teller = threading.Thread(target=tell, daemon=True)
    output: list[str] = []
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        cwd=cwd,
        env={**inherited, **(env or {}), "PYTHONUNBUFFERED": "1"},
    ) as process:
        assert process.stdout is not None
        teller.start()
        try:
            for line in process.stdout:
                output.append(line)
                progress.hear(line)
        finally:
            ended.set()
            teller.join()
    text = "".join(output)
    with log.open("a", encoding="utf-8") as file:
        file.write(f"$ {shlex.join(command)}\n{text}\n")
    return None if process.returncode == 0 else text[-3000:]


def uv_for(settings: str) -> tuple[str, dict[str, str]] | None:
    """Return uv's path, and the variables that make it install what pip would from where.

    `settings` is the output of `pip config list`; uv does not read pip's settings itself. None if
    uv is not on the path, is too old, or if pip has a setting that has no counterpart here.
    """
    program = shutil.which("uv")
    if program is None:
        return None
    said = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    version = re.search(r"(\d+)\.(\d+)", said.stdout)
    variables = as_variables(in_force(settings.splitlines()))
    if version is None or (int(version[1]), int(version[2])) < OLDEST_UV or variables is None:
        return None
    return program, variables


def in_force(lines: Iterable[str]) -> dict[str, str]:
    """Return pip's settings for `install`; a variable wins over a section of that name."""
    found: dict[str, dict[str, str]] = {"global": {}, "install": {}, ":env:": {}}
    for line in lines:
        name, equals, value = line.partition("=")
        section, _, key = name.rpartition(".")
        if equals and section in found:
            found[section][key] = str(ast.literal_eval(value))
    return {**found["global"], **found["install"], **found[":env:"]}


def as_variables(settings: dict[str, str]) -> dict[str, str] | None:
    """Return uv's variables for pip's settings; None if one of them has no counterpart."""
    # pip takes the best version of all indexes; uv would take the first index with the package.
    variables = {"UV_INDEX_STRATEGY": "unsafe-best-match", "UV_NO_CONFIG": "1"}
    variables["UV_LINK_MODE"] = "copy"  # a change of installed files must not reach uv's cache
    for key, value in settings.items():
        items = value.split()
        match key:
            case "index-url":
                variables["UV_DEFAULT_INDEX"] = value
            case "extra-index-url":
                variables["UV_INDEX"] = " ".join(items)
            case "find-links":
                variables["UV_FIND_LINKS"] = ",".join(items)
            case "constraint":
                variables["UV_CONSTRAINT"] = " ".join(items)
            case "cert":
                variables["SSL_CERT_FILE"] = value
            case "timeout" | "default-timeout":
                variables["UV_HTTP_TIMEOUT"] = value
            case _ if key not in MEANS_NOTHING_TO_UV:
                return None
    return variables
