# SPDX-License-Identifier: Apache-2.0
"""Results of a run, collected in the controller: a report per variant, and the overall verdict."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from typing import Any

from kvconform.config.selection import Selection
from kvconform.config.settings import Settings
from kvconform.contract.case import Variant
from kvconform.contract.loader import Spec
from kvconform.judge import aggregate as claims
from kvconform.judge.aggregate import Aggregate, aggregate, apply_expected, apply_waivers
from kvconform.judge.records import CaseReport, Row, Verdict
from kvconform.judge.verdict import rows_for, unreached

LOADED = "load.complete-or-failed"
"""Requirement that is exercised whenever the engine relies on loaded KV."""
KINDS = {
    "state": "recurrent layers",
    "sliding": "a sliding window",
    "local": "chunked local attention",
    "latent": "latent attention",
}
"""Kinds of KV cache groups in a case's configuration, in words."""
EXIT_CODES = {"conformant": 0, "partial": 0, "nonconformant": 1, "error": 3}
"""Exit code per overall verdict."""


class Collector:
    """The reports of all runs, and what they say about the connector.

    `reports` is keyed by variant id. `finish` applies expected failures and decides the overall
    verdict; call it once.
    """

    def __init__(self, spec: Spec, settings: Settings, selection: Selection, vllm: str) -> None:
        self.spec = spec
        self.settings = settings
        self.selection = selection
        self.vllm = vllm
        self.variants: dict[str, Variant] = {
            v.id: v for v in (*selection.variants, *selection.switched_off)
        }
        self.reports: dict[str, CaseReport] = {}
        self.capabilities: dict[str, Any] = {}
        self.sources: dict[str, str] = {}
        self.doubts: dict[str, str] = {}
        self.places: dict[str, str] = {}
        self.problems: list[str] = []
        self.shown = set(selection.shown)
        requirements = [spec.requirements[name] for name in selection.shown]
        for variant in selection.switched_off:
            why = "switched off by the operator"
            rows = rows_for(requirements, variant, Verdict.DISABLED, why, strict=settings.strict)
            self.reports[variant.id] = CaseReport(variant.id, rows=rows)

    def add(self, report: CaseReport) -> CaseReport:
        """Add the report of a run, replace an earlier one of the same run, and return it.

        Changes the report: rows of requirements that were not selected are dropped, unless they
        are about a process that died.
        """
        report.rows = [
            row
            for row in report.rows
            if row.requirement in self.shown or row.requirement not in self.selection.judged
        ]
        self.capabilities = self.capabilities or report.capabilities
        self.sources = self.sources or report.sources
        self.doubts = self.doubts or report.doubts
        self.places = self.places or report.places
        self.reports[report.variant] = report
        return report

    def only(self, ids: set[str]) -> None:
        """Narrow the selection to these variants (pytest's own -k deselected the others)."""
        if ids < {variant.id for variant in self.selection.variants}:
            self.selection.variants = [
                variant for variant in self.selection.variants if variant.id in ids
            ]
            self.selection.narrowed = True
            self.variants = {
                v.id: v for v in (*self.selection.variants, *self.selection.switched_off)
            }

    def ordered(self) -> list[Row]:
        """Return all rows, sorted by case (in the specification's order), run and requirement."""
        position = self.selection.order()
        rows = [row for report in self.reports.values() for row in report.rows]
        return sorted(
            rows, key=lambda row: (position.get(row.case, 0), *_axes(row), row.requirement)
        )

    def ordered_reports(self) -> list[CaseReport]:
        """Return the report of each run, in the selection's order."""
        variants = (*self.selection.variants, *self.selection.switched_off)
        place = {variant.id: index for index, variant in enumerate(variants)}
        return sorted(self.reports.values(), key=lambda report: place.get(report.variant, 0))

    def missing(self) -> list[str]:
        """Return the ids of the variants without a report: their rows were never delivered."""
        return [name for name in self.variants if name not in self.reports]

    def finish(self, today: date, *, complete: bool) -> tuple[list[Row], Aggregate]:
        """Return the final rows and the overall verdict. `complete`: every variant was run.

        Changes rows in place: failures that are expected or waived become XFAIL or XPASS.
        """
        rows = self.ordered()
        everything = complete and not self.selection.partial
        entries = self.settings.expected_failures
        failing = [row for row in rows if row.verdict is Verdict.FAIL]
        if everything:
            self.problems += apply_expected(rows, entries, today=today)
        else:
            # An expected failure that is absent from a part of the suite means nothing.
            self.problems += apply_expected(failing, entries, today=today, complete=False)
        waived = failing if self.selection.shard is not None else rows
        vllm = self.vllm if self.vllm != "unknown" else "0"
        expired = apply_waivers(waived, self.spec.waivers, vllm=vllm, today=today)
        found = aggregate(rows, problems=self.problems)
        found.unreached = self._unreached(rows)
        # An expired waiver is a defect of the suite (`kvconform lint` fails for it) and does not
        # change the verdict on the connector.
        found.reasons += [f"note: {sentence}" for sentence in expired]
        if self.settings.half != "both" and found.verdict == "conformant":
            found.verdict = "partial"
            found.reasons.append("only the scheduler half was judged")
        loaded = _loaded(rows)
        if everything and found.verdict == "conformant" and not loaded:
            found.verdict = "partial"
            found.reasons.append("it loaded no KV, so what it stores and loads was not judged")
            found.stores_nothing = "store" in claims.claimed(self.capabilities, self.sources)
            if found.stores_nothing:
                found.reasons.append("it says that it stores KV: can its store be reached?")
        elif everything and loaded:
            found.reasons += [
                f"note: of models with {kind} it loaded no KV, so what it stores of them was not"
                " judged"
                for kind in self._never_loaded()
            ]
        profile = self.spec.profiles.get(self.settings.profile)
        if everything and self.capabilities and profile and not profile.suits(self.capabilities):
            if found.verdict == "conformant":
                found.verdict = "partial"
            found.reasons.append(
                f"profile {profile.id} is for connectors with {profile.capability},"
                " which this one is not seen to be"
            )
        void: list[str] = []
        unseen: list[str] = []
        if everything:
            cases = self.selection.order()
            void, unseen = claims.void(
                self.capabilities, self.sources, rows, self.spec, self.vllm, cases
            )
        if found.verdict in ("conformant", "partial"):
            found.reasons += claims.reasons(void)
            if unseen:
                where = f"profile {self.settings.profile}"
                found.reasons.append(f"note: {where} does not look at {', '.join(unseen)}")
        if void and found.verdict == "conformant":
            found.verdict = "partial"
        if not complete:
            found.verdict = "error"
            found.reasons.append(
                f"{len(self.missing())} of {len(self.variants)} runs were not made"
            )
        return rows, found

    def _unreached(self, rows: Sequence[Row]) -> dict[str, list[str]]:
        """Return per requirement the runs about it that did not reach their situation."""
        found: dict[str, list[str]] = {}
        for row in rows:
            requirement = self.spec.requirements[row.requirement]
            if self.reports[row.run].unmet and unreached(row, self.variants[row.run], requirement):
                found.setdefault(row.requirement, []).append(row.run)
        return found

    def _never_loaded(self) -> list[str]:
        """Return the kinds of models that were judged, and of which nothing was loaded."""
        found = []
        for kind, words in KINDS.items():
            runs = [each for each in self.reports.values() if kind in self._groups(each)]
            rows = [row for each in runs for row in each.rows]
            if any(row.exercised for row in rows) and not _loaded(rows):
                found.append(words)
        return found

    def _groups(self, report: CaseReport) -> Sequence[str]:
        """Return the KV cache groups of a run's case; none of a scenario."""
        case = self.spec.cases.get(self.variants[report.variant].case.id)
        return case.config.groups if case is not None else ()

    def exit_code(self, found: Aggregate) -> int:
        """Return 0 for conformant or partly conformant, 1 for nonconformant, 3 for an error.

        A failure outweighs an error. A run in which nothing was exercised ends with 1, unless it is
        a shard: a shard on its own needs no verdict. So does one of a connector that says that it
        stores and of which nothing was loaded.
        """
        if found.failed or found.stores_nothing:
            return 1
        if found.verdict == "partial" and not found.exercised and self.selection.shard is None:
            return 1
        return EXIT_CODES[found.verdict]


def _loaded(rows: Sequence[Row]) -> bool:
    """Return whether the engine relied on loaded KV in any run."""
    return any(row.requirement == LOADED and row.exercised for row in rows)


def _axes(row: Row) -> tuple[str, str, str, int, int, str]:
    """Return the axes of a row's run, as a sort key."""
    return row.engine, row.scheduling, row.runner, row.depth, row.block_size, row.slow or ""
