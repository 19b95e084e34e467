# SPDX-License-Identifier: Apache-2.0
"""Everything that a run has found out, collected in the controller: rows, what else is known per variant, and the answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import date
from typing import Any

from kvconform.config.selection import Selection
from kvconform.config.settings import Settings
from kvconform.contract.case import Variant
from kvconform.contract.loader import Spec
from kvconform.judge import aggregate as claims
from kvconform.judge.aggregate import Aggregate, aggregate, apply_expected, apply_waivers
from kvconform.judge.verdict import Row, Verdict, rows_for

EXIT_CODES = {"conformant": 0, "partial": 0, "nonconformant": 1, "error": 3}


@dataclass
class CaseNotes:
    """What is known about one run besides its rows."""

    variant: str
    unmet: list[str] = field(default_factory=list)
    timelines: dict[str, list[str]] = field(default_factory=dict)
    trace: list[str] = field(default_factory=list)
    harness_error: str | None = None
    story: str | None = None


class Collector:
    """Rows and notes by variant. `finish` applies expected failures and gives the answer; it may be called once."""

    def __init__(self, spec: Spec, settings: Settings, selection: Selection, vllm: str) -> None:
        self.spec, self.settings, self.selection, self.vllm = spec, settings, selection, vllm
        self.variants: dict[str, Variant] = {
            v.id: v for v in (*selection.variants, *selection.switched_off)
        }
        self.rows: dict[str, list[Row]] = {}
        self.notes: dict[str, CaseNotes] = {}
        self.capabilities: dict[str, Any] = {}
        self.sources: dict[str, str] = {}
        self.places: dict[str, str] = {}
        self.problems: list[str] = []
        self.shown = set(selection.shown)
        requirements = [spec.requirements[name] for name in selection.shown]
        for variant in selection.switched_off:
            why = "switched off by the operator"
            self.rows[variant.id] = rows_for(
                requirements, variant, Verdict.DISABLED, why, strict=settings.strict
            )

    def add(self, payload: dict[str, Any]) -> list[Row]:
        """Take in a worker's payload; returns its rows."""
        variant = payload["variant"]
        rows = [Row.from_dict(row) for row in payload["rows"]]
        self.capabilities = self.capabilities or payload.get("capabilities", {})
        self.sources = self.sources or payload.get("sources", {})
        self.places = self.places or payload.get("places", {})
        self.notes[variant] = CaseNotes(
            variant,
            payload.get("unmet", []),
            payload.get("timelines", {}),
            payload.get("trace", []),
            payload.get("harness_error"),
            payload.get("story"),
        )
        return self.put(variant, rows)

    def put(self, variant: str, rows: list[Row]) -> list[Row]:
        """Rows of a variant; those of requirements that were not asked for are dropped, unless they are about a dead process."""
        kept = [
            row
            for row in rows
            if row.requirement in self.shown or row.requirement not in self.selection.judged
        ]
        self.rows[variant] = kept
        return kept

    def only(self, ids: set[str]) -> None:
        """Only these runs will be made (pytest's own -k left out the others)."""
        if ids < {variant.id for variant in self.selection.variants}:
            self.selection.variants = [
                variant for variant in self.selection.variants if variant.id in ids
            ]
            self.selection.narrowed = True
            self.variants = {
                v.id: v for v in (*self.selection.variants, *self.selection.switched_off)
            }

    def ordered(self) -> list[Row]:
        """All rows, by case (in the specification's order), run and requirement."""
        position = self.selection.order()
        rows = [row for group in self.rows.values() for row in group]
        return sorted(
            rows, key=lambda row: (position.get(row.case, 0), *_axes(row), row.requirement)
        )

    def ordered_notes(self) -> list[CaseNotes]:
        """The notes in the same order."""
        place = {
            variant.id: i
            for i, variant in enumerate((*self.selection.variants, *self.selection.switched_off))
        }
        return sorted(self.notes.values(), key=lambda note: place.get(note.variant, 0))

    def missing(self) -> list[str]:
        """Variants that nothing is known about: their rows were never delivered."""
        return [name for name in self.variants if name not in self.rows]

    def finish(self, today: date, *, complete: bool) -> tuple[list[Row], Aggregate]:
        """The final rows and the answer. `complete`: every variant was run."""
        rows = self.ordered()
        partial = self.selection.partial
        entries = self.settings.expected_failures
        failing = [row for row in rows if row.verdict is Verdict.FAIL]
        if (
            partial or not complete
        ):  # that an expected failure did not happen means nothing when only a part was run
            self.problems += apply_expected(failing, entries, today=today, complete=False)
        else:
            self.problems += apply_expected(rows, entries, today=today)
        waivers = self.spec.waivers
        waived = failing if self.selection.shard is not None else rows
        expired = apply_waivers(
            waived, waivers, vllm=self.vllm if self.vllm != "unknown" else "0", today=today
        )
        found = aggregate(rows, problems=self.problems)
        # The suite's own affair, which `kvconform lint` fails for: a connector's answer does not change by it.
        found.reasons += [f"note: {sentence}" for sentence in expired]
        if self.settings.half != "both" and found.verdict == "conformant":
            found.verdict = "partial"
            found.reasons.append("only the scheduler half was judged")
        void = (
            claims.void(self.capabilities, self.sources, rows, self.spec, self.vllm)
            if complete and not partial
            else []
        )
        found.reasons += claims.reasons(void) if found.verdict in ("conformant", "partial") else []
        if void and found.verdict == "conformant":
            found.verdict = "partial"
        if not complete:
            found.verdict = "error"
            found.reasons.append(
                f"{len(self.missing())} of {len(self.variants)} runs were not made"
            )
        return rows, found

    def exit_code(self, found: Aggregate) -> int:
        """0 conformant (also partly), 1 not, 3 if the harness is at fault. A failure that was found outweighs an error.

        That nothing was exercised is no answer, but for a shard, which need not give one.
        """
        if found.failed:
            return 1
        if found.verdict == "partial" and not found.exercised and self.selection.shard is None:
            return 1
        return EXIT_CODES[found.verdict]


def _axes(row: Row) -> tuple[str, str, str, int, int, str]:
    return row.engine, row.scheduling, row.runner, row.depth, row.block_size, row.slow or ""
