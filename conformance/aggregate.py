# SPDX-License-Identifier: Apache-2.0
"""From rows to an answer: one status per requirement over all its runs, and one word for the connector."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvconform.verdict import Row, Verdict

WORST_FIRST = (
    Verdict.ERROR,
    Verdict.FAIL,
    Verdict.XPASS,
    Verdict.BLOCKED,
    Verdict.XFAIL,
    Verdict.PASS,
    Verdict.DISABLED,
    Verdict.NOT_EXERCISED,
    Verdict.UNOBSERVABLE,
    Verdict.UNSUPPORTED,
)
"""The status of a requirement is the first of these that any of its rows has: PASS if it was exercised somewhere and nothing is worse."""


ANSWERS = {"conformant": "CONFORMANT", "partial": "PARTLY CONFORMANT", "nonconformant": "NOT CONFORMANT", "error": "NO ANSWER"}
"""What a verdict is called in front of people."""
EXERCISED = {Verdict.PASS, Verdict.FAIL, Verdict.XFAIL, Verdict.XPASS, Verdict.BLOCKED}
"""Verdicts of a requirement that something was seen of."""
NOTHING = "NOTHING JUDGED"
"""What a partial one is called of which no requirement was exercised."""


@dataclass
class Aggregate:
    """`status` per requirement id; `counts` of rows per verdict (all verdicts, also zero); `failed`: ids whose FAIL counts against the
    connector; `engine_failed`: guarantees that the engine broke; `advisory`: SHOULD and MAY that were violated without --strict."""

    status: dict[str, Verdict] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    engine_failed: list[str] = field(default_factory=list)
    advisory: list[str] = field(default_factory=list)
    exercised: int = 0
    cases: int = 0
    verdict: str = "error"
    reasons: list[str] = field(default_factory=list)

    @property
    def total(self) -> int:
        return len(self.status)

    @property
    def answer(self) -> str:
        """The verdict in front of people."""
        return called(self.verdict, bool(self.exercised))


def called(verdict: str, exercised: bool) -> str:
    """What people are told: `verdict` in words, and of a partial one whether any requirement was `exercised` at all."""
    return NOTHING if verdict == "partial" and not exercised else ANSWERS[verdict]


def aggregate(rows: Iterable[Row], *, problems: Iterable[str] = ()) -> Aggregate:
    """Status per requirement, counts and the overall verdict. `problems` are sentences about expected failures that are wrong.

    error          a row is ERROR, an expected failure is wrong, or there is no row
    nonconformant  a counting row is FAIL or XPASS, or is BLOCKED by something that is not an expected failure or the engine's fault
    partial        nothing of that, but a counting row is XFAIL, DISABLED or BLOCKED, or no requirement that counts was exercised at all
    conformant     otherwise
    """
    rows = list(rows)
    found = Aggregate()
    verdicts: dict[str, set[Verdict]] = {}
    for row in rows:
        verdicts.setdefault(row.requirement, set()).add(row.verdict)
    found.status = {name: next(v for v in WORST_FIRST if v in seen) for name, seen in verdicts.items()}
    tally = Counter(row.verdict for row in rows)
    found.counts = {verdict.value: tally[verdict] for verdict in Verdict}
    failing = [row for row in rows if row.verdict is Verdict.FAIL]
    found.failed = _ids(row for row in failing if row.gating)
    found.engine_failed = _ids(row for row in failing if row.kind == "guarantee")
    found.advisory = _ids(row for row in failing if not row.gating and row.kind == "requirement")
    found.exercised = sum(bool(seen & EXERCISED) for seen in verdicts.values())
    found.cases = len({row.case for row in rows})
    found.verdict, found.reasons = _overall(rows, found, list(problems))
    return found


def _ids(rows: Iterable[Row]) -> list[str]:
    return list(dict.fromkeys(row.requirement for row in rows))


def _overall(rows: list[Row], found: Aggregate, problems: list[str]) -> tuple[str, list[str]]:
    """(verdict, the reasons for it in words)."""
    if not rows:
        return "error", ["nothing was judged"]
    if found.counts["ERROR"] or problems:
        count = found.counts["ERROR"]
        return "error", [*problems, *([f"{count} verdicts are ERROR: the harness or the environment is at fault"] if count else [])]
    counting = [row for row in rows if row.gating]
    excused = _excused(rows)
    bad = [(v, [r for r in counting if r.verdict is v]) for v in (Verdict.FAIL, Verdict.XPASS)]
    bad.append((Verdict.BLOCKED, [r for r in counting if r.verdict is Verdict.BLOCKED and _run(r, r.blocked_by) not in excused]))
    reasons = _reasons(bad)
    if reasons:
        return "nonconformant", reasons
    mild = [(v, [r for r in counting if r.verdict is v]) for v in (Verdict.XFAIL, Verdict.DISABLED, Verdict.BLOCKED)]
    reasons = _reasons(mild)
    if not any(row.verdict is Verdict.PASS for row in counting):
        reasons.append("no requirement that counts was exercised")
    return ("partial", reasons) if reasons else ("conformant", [])


def _reasons(found: list[tuple[Verdict, list[Row]]]) -> list[str]:
    """One line per verdict, the worst first; a requirement is named once, by the worst of its runs."""
    lines: list[str] = []
    named: set[str] = set()
    for verdict, rows in found:
        ids = [name for name in _ids(rows) if name not in named]
        named.update(ids)
        lines += [f"{verdict}: {', '.join(ids)}"] if ids else []
    return lines


def _run(row: Row, requirement: str | None) -> tuple[object, ...]:
    """A requirement on the run that a row is about."""
    return requirement, row.run


def _excused(rows: list[Row]) -> set[tuple[object, ...]]:
    """The failures that may block others without making the connector nonconformant: expected ones, and the engine's own."""
    engine = {Verdict.FAIL, Verdict.XFAIL}
    return {
        _run(row, row.requirement) for row in rows if row.verdict is Verdict.XFAIL or (row.kind == "guarantee" and row.verdict in engine)
    }
