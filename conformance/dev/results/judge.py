# SPDX-License-Identifier: Apache-2.0
"""Judging entries of the catalogue: `kvconform run` on each, and the digests of its report."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from kvconform.config import catalogue
from kvconform.contract.loader import load_spec
from kvconform.dev.results.digest import Digest, digests
from kvconform.errors import KvconformError
from kvconform.execute.answers import Death
from kvconform.execute.choice import Choice, executor
from kvconform.execute.work import Calls

ANSWERED = (0, 1)
"""Exit codes of `kvconform run` with a complete report: conformant, and not conformant."""


@dataclass(frozen=True)
class Turn:
    """A piece of work: one entry.

    `date`: of its digests. `options`: more arguments of `kvconform run`. `reports`: absolute path
    of a folder that gets the report, as a folder with the entry's name; None: it is not kept.
    """

    entry: str
    date: str
    options: tuple[str, ...] = ()
    reports: Path | None = None


@dataclass(frozen=True)
class Judged:
    """Outcome of an entry: a digest per engine. `why`: why there is none, or None."""

    entry: str
    digests: tuple[Digest, ...] = ()
    why: str | None = None

    def __str__(self) -> str:
        if self.why is not None:
            return f"{self.entry}: not judged: {self.why}"
        return "\n".join(
            f"{self.entry} on {each.engine}: {each.verdict}, {each.runs} runs"
            for each in self.digests
        )


def run(turns: Iterable[Turn], where: Choice, jobs: int | None) -> Iterator[Judged]:
    """Judge the entries, and yield the outcomes in order."""
    with executor(where, Calls(judge, fresh=True), "judge", jobs) as workers:
        for turn, found in workers.run(turns):
            if isinstance(found, Death):
                found = Judged(turn.entry, why=f"its process ended {found}")
            yield found


def judge(
    turn: Turn, call: Callable[..., subprocess.CompletedProcess[str]] = subprocess.run
) -> Judged:
    """Run the suite on an entry in a process of its own, if its packages are installed."""
    entry = catalogue.named(turn.entry)
    if absent := catalogue.absent(entry.requires):
        install = catalogue.pip_install(entry.requires)
        return Judged(turn.entry, why=f"it needs {', '.join(absent)}: {install}")
    with tempfile.TemporaryDirectory(prefix="kvconform-") as tmp:
        folder = (turn.reports or Path(tmp)) / turn.entry
        name = f"{catalogue.PREFIX}{turn.entry}"
        command = [sys.executable, "-m", "kvconform", "run", name, *turn.options]
        done = call([*command, "--report-dir", str(folder)], capture_output=True, text=True)
        if (why := unanswered(done)) is not None:
            return Judged(turn.entry, why=why)
        try:
            found = digests(folder, turn.entry, entry.requires, turn.date, load_spec())
        except KvconformError as error:
            return Judged(turn.entry, why=error.message)
    return Judged(turn.entry, tuple(found))


def unanswered(done: subprocess.CompletedProcess[str]) -> str | None:
    """Return why `kvconform run` has made no complete report, in its own words, or None."""
    if done.returncode in ANSWERED:
        return None
    words = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    return words[-1].removeprefix("kvconform: ")
