# SPDX-License-Identifier: Apache-2.0
"""Runs of kvconform, or of Python, in a process of their own; and what a run leaves behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvconform.contract.loader import load_spec
from kvconform.process.forking import forked_after_import
from kvconform.report import jsonl
from places import RIGS

FAKE = {
    "KVCONFORM_RUNNER": "fake_runner:judge",
    "PYTHONPATH": os.pathsep.join([str(RIGS), os.environ.get("PYTHONPATH", "")]),
}
"""Environment in which fake_runner stands in for the engine, so that vLLM is not imported."""
SPEC = load_spec()
MUST = [
    r.id
    for r in SPEC.requirements.values()
    if r.kind == "requirement" and r.level == "MUST" and r.id != "hook.terminates"
][:3]
GUARANTEE = next(r.id for r in SPEC.requirements.values() if r.kind == "guarantee")


def python(
    *arguments: str, cwd: Path, env: dict[str, str] | None = None, timeout: float = 300
) -> subprocess.CompletedProcess[str]:
    """Run Python without colours. `env` is added to the environment."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, "NO_COLOR": "1", **(env or {})},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def kvconform(
    *arguments: str, cwd: Path, env: dict[str, str] | None = None, timeout: float = 300
) -> subprocess.CompletedProcess[str]:
    """Run the program."""
    return python("-m", "kvconform", *arguments, cwd=cwd, env=env, timeout=timeout)


def forked(*arguments: str, cwd: Path, timeout: float = 300) -> tuple[int | None, str]:
    """Run the program in a process that has vLLM imported; return its status and what it said."""
    return _forked(_main, arguments, cwd, timeout)


def forked_python(text: str, cwd: Path, timeout: float = 300) -> tuple[int | None, str]:
    """Run Python in a process that has vLLM imported; return its status and what it said."""
    return _forked(exec, (text, {"__name__": "__main__"}), cwd, timeout)


def _forked(
    target: Callable[..., object], arguments: tuple[Any, ...], cwd: Path, timeout: float
) -> tuple[int | None, str]:
    said = cwd / "said"
    process = forked_after_import().Process(target=_quoted, args=(target, arguments, cwd, said))
    process.start()
    process.join(timeout)
    process.kill()
    text = said.read_text(encoding="utf-8")
    said.unlink()
    return process.exitcode, text


def _quoted(
    target: Callable[..., object], arguments: tuple[Any, ...], cwd: Path, said: Path
) -> None:
    """Call a function in a directory, with the output of this process in a file."""
    with said.open("w", encoding="utf-8") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    os.chdir(cwd)
    os.environ["NO_COLOR"] = "1"
    target(*arguments)


def _main(*arguments: str) -> None:
    """Run the program."""
    from kvconform.cli import main

    main(list(arguments))


@dataclass
class Result:
    """What a run said, and the directory of its report."""

    done: subprocess.CompletedProcess[str]
    folder: Path

    @property
    def code(self) -> int:
        return self.done.returncode

    @property
    def out(self) -> str:
        return self.done.stdout

    @property
    def err(self) -> str:
        return self.done.stderr

    @property
    def report(self) -> str:
        return (self.folder / "report.jsonl").read_text(encoding="utf-8")

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.report.splitlines()]

    def rows(self, verdict: str | None = None) -> list[dict[str, Any]]:
        """The rows, or those with this verdict."""
        rows = [row.to_dict() for row in jsonl.read(self.folder).rows.values()]
        return [row for row in rows if verdict is None or row["verdict"] == verdict]

    @property
    def summary(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(
            (self.folder / "summary.json").read_text(encoding="utf-8")
        )
        return found
