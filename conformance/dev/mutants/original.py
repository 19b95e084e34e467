# SPDX-License-Identifier: Apache-2.0
"""What the original connector does: what it fails, how long it takes, which lines it executes."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from kvconform.files import replace


@dataclass
class Original:
    """A subject without a change.

    - `seconds`: of each run; `skipped`: runs that judge nothing of this connector.
    - `failed`: `run requirement` of what it fails already, which kills no mutant.
    - `found`: causes that exploration finds in the original.
    - `lines`: numbers of the runs that execute a line, by module and line. `runs`: their ids.
    """

    key: str
    seconds: dict[str, float] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    found: list[str] = field(default_factory=list)
    runs: list[str] = field(default_factory=list)
    lines: dict[str, dict[str, list[int]]] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)

    def add_lines(self, run: str, module: str, executed: set[int]) -> None:
        """Record the lines of a module that a run executed."""
        if run not in self.runs:
            self.runs.append(run)
        number = self.runs.index(run)
        table = self.lines.setdefault(module, {})
        for line in sorted(executed):
            table.setdefault(str(line), []).append(number)

    def reaching(self, module: str, lines: tuple[int, int] | None) -> set[str]:
        """Return the runs that execute any of the lines; all for code that runs on import."""
        if lines is None:
            return set(self.seconds) - set(self.skipped)
        table = self.lines.get(module, {})
        first, last = lines
        numbers = {n for line in range(first, last + 1) for n in table.get(str(line), ())}
        return {self.runs[number] for number in numbers}

    def save(self, path: Path) -> None:
        """Write it to a file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        replace(path, json.dumps(asdict(self)))


def read(path: Path, key: str) -> Original | None:
    """Return what a file has about the original with this key, or None."""
    try:
        found = Original(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
    return found if found.key == key else None
