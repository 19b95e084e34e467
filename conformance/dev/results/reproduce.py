# SPDX-License-Identifier: Apache-2.0
"""Reproduction of findings: run a finding's command, and check that its requirements fail.

The command uses the installed vLLM and packages.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from kvconform.dev.results.finding import Finding
from kvconform.dev.results.judge import unanswered
from kvconform.errors import UsageError
from kvconform.execute.answers import Death
from kvconform.execute.choice import Choice, executor
from kvconform.execute.work import Calls
from kvconform.judge.records import Verdict
from kvconform.report import jsonl

FAILED = (Verdict.FAIL, Verdict.XFAIL, Verdict.BLOCKED)
"""Verdicts of a violated requirement; BLOCKED: as a consequence of another violation."""
LIMIT = 1200.0
"""Seconds for one finding."""


@dataclass(frozen=True)
class Reproduced:
    """Outcome of a finding's command.

    `missing` are its requirements that did not fail; some fail only on another engine or case.
    `why` says why the command has no verdict; None if it has.
    """

    finding: Finding
    missing: tuple[str, ...] = ()
    why: str | None = None

    @property
    def disproved(self) -> bool:
        """Whether the finding is marked confirmed, and none of its requirements failed."""
        return self.finding.status == "confirmed" and self.why is None and not self._seen

    @property
    def _seen(self) -> list[str]:
        return [name for name in self.finding.requirements if name not in self.missing]

    def __str__(self) -> str:
        if self.why is not None:
            return f"{self.finding.id}: not run: {self.why}"
        if not self._seen:
            name = f"{self.finding.id} ({self.finding.status})"
            return f"{name}: NOT reproduced: {', '.join(self.missing)} did not fail"
        rest = f"; not by this command: {', '.join(self.missing)}" if self.missing else ""
        return f"{self.finding.id}: reproduced ({', '.join(self._seen)}{rest})"


def chosen(findings: Iterable[Finding], names: Iterable[str]) -> list[Finding]:
    """Return the findings with these ids, families or catalogue entries; all if there are no names.

    UsageError for a name that no finding has.
    """
    known = list(findings)
    wanted = list(names)
    for name in wanted:
        if not any(name in (each.id, each.family, each.connector) for each in known):
            raise UsageError(f"there is no finding {name!r}, and no finding about such a connector")
    return [
        each for each in known if not wanted or {each.id, each.family, each.connector} & set(wanted)
    ]


def command(finding: Finding, report_dir: Path) -> list[str]:
    """Return the finding's command, run by this interpreter, with a report directory of its own.

    UsageError if it is no command of kvconform.
    """
    program, *rest = shlex.split(finding.reproduce)
    if program != "kvconform":
        raise UsageError(f"{finding.id}: `reproduce` is no kvconform command: {finding.reproduce}")
    return [sys.executable, "-m", "kvconform", *rest, "--report-dir", str(report_dir)]


def run(findings: Iterable[Finding], where: Choice, jobs: int | None) -> Iterator[Reproduced]:
    """Reproduce the findings, and yield the outcomes in order."""
    with executor(where, Calls(reproduce, fresh=True), "reproduce", jobs) as workers:
        for finding, found in workers.run(findings):
            if isinstance(found, Death):
                found = Reproduced(finding, why=f"its process ended {found}")
            yield found


def reproduce(
    finding: Finding, call: Callable[..., subprocess.CompletedProcess[str]] = subprocess.run
) -> Reproduced:
    """Run a finding's command in a process of its own. Writes only to a temporary directory."""
    with tempfile.TemporaryDirectory(prefix="kvconform-") as tmp:
        try:
            done = call(
                command(finding, Path(tmp)),
                capture_output=True,
                text=True,
                timeout=LIMIT,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Reproduced(finding, why=f"no answer within {LIMIT:g} s")
        if (why := unanswered(done)) is not None:
            return Reproduced(finding, why=why)
        failed = _failed(Path(tmp))
    return Reproduced(finding, tuple(name for name in finding.requirements if name not in failed))


def _failed(report_dir: Path) -> set[str]:
    rows = jsonl.read(report_dir).rows.values()
    return {row.requirement for row in rows if row.verdict in FAILED}
