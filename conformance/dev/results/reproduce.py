# SPDX-License-Identifier: Apache-2.0
"""Runs what a finding says reproduces it, with the installed vLLM and packages, and looks whether its requirements fail."""

from __future__ import annotations

import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from kvconform.dev.results.finding import Finding
from kvconform.errors import UsageError
from kvconform.judge.verdict import Verdict
from kvconform.report.compare import reports

FAILED = (Verdict.FAIL, Verdict.XFAIL, Verdict.BLOCKED)
"""Verdicts that say that a requirement was violated; blocked: as a consequence of another one's."""
ANSWERED = (0, 1)
"""Exit codes of `kvconform run` that come with a report: conformant or not."""
LIMIT = 1200.0
"""Seconds for one finding."""


@dataclass(frozen=True)
class Reproduced:
    """What came of a finding's command. `missing`: its requirements that did not fail, as some show on another engine or case alone; `why`:
    why there is no answer, or None."""

    finding: Finding
    missing: tuple[str, ...] = ()
    why: str | None = None

    @property
    def disproved(self) -> bool:
        """Whether it is called confirmed, and nothing of it was seen."""
        return self.finding.status == "confirmed" and self.why is None and not self._seen

    @property
    def _seen(self) -> list[str]:
        return [name for name in self.finding.requirements if name not in self.missing]

    def __str__(self) -> str:
        if self.why is not None:
            return f"{self.finding.id}: not run: {self.why}"
        if not self._seen:
            return f"{self.finding.id} ({self.finding.status}): NOT reproduced: {', '.join(self.missing)} did not fail"
        rest = f"; not by this command: {', '.join(self.missing)}" if self.missing else ""
        return f"{self.finding.id}: reproduced ({', '.join(self._seen)}{rest})"


def chosen(findings: Iterable[Finding], names: Iterable[str]) -> list[Finding]:
    """Those with these ids, families or entries of the catalogue; all without names. UsageError for a name that none has."""
    known, wanted = list(findings), list(names)
    for name in wanted:
        if not any(name in (each.id, each.family, each.connector) for each in known):
            raise UsageError(f"there is no finding {name!r}, and none of such a connector")
    return [
        each for each in known if not wanted or {each.id, each.family, each.connector} & set(wanted)
    ]


def command(finding: Finding, report_dir: Path) -> list[str]:
    """Its `reproduce` line with this interpreter and a directory of its own."""
    program, *rest = shlex.split(finding.reproduce)
    if program != "kvconform":
        raise UsageError(
            f"{finding.id}: what reproduces it is no command of kvconform's: {finding.reproduce}"
        )
    return [sys.executable, "-m", "kvconform", *rest, "--report-dir", str(report_dir)]


def reproduce(
    finding: Finding, call: Callable[..., subprocess.CompletedProcess[str]] = subprocess.run
) -> Reproduced:
    """Run it, in a process of its own. Writes to a temporary directory alone."""
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
        if done.returncode not in ANSWERED:
            words = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            return Reproduced(finding, why=words[-1].removeprefix("kvconform: "))
        failed = _failed(Path(tmp))
    return Reproduced(finding, tuple(name for name in finding.requirements if name not in failed))


def _failed(report_dir: Path) -> set[str]:
    return {
        requirement
        for (requirement, _), verdict in reports.read(str(report_dir)).verdicts.items()
        if verdict in FAILED
    }
