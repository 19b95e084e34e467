# SPDX-License-Identifier: Apache-2.0
"""The systems that the suite covers, by row (spec/systems.yaml), for docs/systems.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path

from pydantic import Field

from kvconform.contract.loader import Spec
from kvconform.contract.requirement import Model
from kvconform.contract.yaml12 import parse
from kvconform.dev.defect import Defect, load_defects
from kvconform.errors import UsageError

SECTIONS = {
    "A": "Asynchronous scheduling and placeholders",
    "B": "The adapter: scheduler half and worker half",
    "C": "The cache behind the connector",
    "D": "Uses",
}


class Row(Model):
    """One system, and what covers it.

    `missing` says what it lacks; None: nothing. `waived` says why nothing can cover it. `limits`
    says what a covered row leaves out.
    """

    row: str = Field(pattern=r"^[A-D][0-9]+$")
    about: str = Field(min_length=1)
    judged: list[str] = []
    provoked: list[str] = []
    built: list[str] = []
    bites: list[str] = []
    missing: str | None = None
    waived: str | None = None
    limits: str | None = None

    @property
    def is_done(self) -> bool:
        """Whether the row is covered and lacks nothing."""
        return self.missing is None and self.waived is None

    def problems(self, spec: Spec, root: Path) -> list[str]:
        """Return a sentence per name that does not exist, and per empty column of a done row."""
        known: dict[str, Collection[str]] = {
            "judged": spec.requirements,
            "provoked": {**spec.cases, **spec.scenarios},
            "built": (),
            "bites": spec.defects,
        }
        found = []
        for column, names in known.items():
            listed: list[str] = getattr(self, column)
            if self.is_done and not listed:
                found.append(
                    f"{self.row} has nothing in `{column}`, and does not say what is missing"
                )
            for name in listed:
                is_path = column in ("built", "provoked") and (root / name).exists()
                if name not in names and not is_path:
                    found.append(f"{self.row} names {name} in `{column}`, which does not exist")
        return found

    def strangers(self, defects: Mapping[str, Defect]) -> list[str]:
        """Return a sentence per defect and requirement of a done row that do not belong together.

        A defect has to fail a requirement of the row on a case of the row, and each requirement
        needs such a defect.
        """
        if not self.is_done:
            return []
        found, bitten = [], set()
        for name in self.bites:
            defect = defects[name]
            fails = set(defect.fails).intersection(self.judged)
            if fails and not set(defect.cases).isdisjoint(self.provoked):
                bitten |= fails
            else:
                found.append(
                    f"{self.row}: defect {name} fails no requirement of the row on a case of the"
                    f" row; it fails {', '.join(defect.fails)} on {', '.join(defect.cases)}"
                )
        found += [
            f"{self.row}: no defect of the row fails {name} on a case of the row"
            for name in self.judged
            if name not in bitten
        ]
        return found


def load(spec: Spec, root: Path) -> list[Row]:
    """Return the rows of spec/systems.yaml.

    UsageError for one that names what does not exist, or whose parts do not belong together.
    """
    text = (root / "spec" / "systems.yaml").read_text(encoding="utf-8")
    rows = [Row.model_validate(raw) for raw in parse(text, "spec/systems.yaml")]
    twice = [name for name, count in Counter(row.row for row in rows).items() if count > 1]
    problems = [f"{name} is listed twice" for name in twice]
    problems += [problem for row in rows for problem in row.problems(spec, root)]
    if not problems:
        defects = load_defects(spec)
        problems = [problem for row in rows for problem in row.strangers(defects)]
    if problems:
        raise UsageError(f"spec/systems.yaml: {problems[0]}")
    return rows
