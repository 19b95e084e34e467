# SPDX-License-Identifier: Apache-2.0
"""From rows to an answer: one status per requirement over all its runs, and one word for the connector.

Capabilities that a connector claims, and whether a run has shown them: what was never exercised is not claimed with success.

Expected failures and waivers: FAIL becomes XFAIL, and an expectation that nothing fulfils becomes XPASS. Strict, and never silent.

A connector's entries (profile.Expected) come from its own repository and concern requirements. The suite's waivers (profile.Waiver)
concern guarantees that a vLLM version is known to break.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from typing import Any

from kvconform.contract.capabilities import CAPABILITIES, has
from kvconform.contract.loader import Spec
from kvconform.contract.profile import Expected, Waiver
from kvconform.judge.verdict import Row, Verdict

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


ANSWERS = {
    "conformant": "CONFORMANT",
    "partial": "PARTLY CONFORMANT",
    "nonconformant": "NOT CONFORMANT",
    "error": "NO ANSWER",
}
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
    found.status = {
        name: next(v for v in WORST_FIRST if v in seen) for name, seen in verdicts.items()
    }
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
        return "error", [
            *problems,
            *(
                [f"{count} verdicts are ERROR: the harness or the environment is at fault"]
                if count
                else []
            ),
        ]
    counting = [row for row in rows if row.gating]
    excused = _excused(rows)
    bad = [(v, [r for r in counting if r.verdict is v]) for v in (Verdict.FAIL, Verdict.XPASS)]
    bad.append(
        (
            Verdict.BLOCKED,
            [
                r
                for r in counting
                if r.verdict is Verdict.BLOCKED and _run(r, r.blocked_by) not in excused
            ],
        )
    )
    reasons = _reasons(bad)
    if reasons:
        return "nonconformant", reasons
    mild = [
        (v, [r for r in counting if r.verdict is v])
        for v in (Verdict.XFAIL, Verdict.DISABLED, Verdict.BLOCKED)
    ]
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
        _run(row, row.requirement)
        for row in rows
        if row.verdict is Verdict.XFAIL or (row.kind == "guarantee" and row.verdict in engine)
    }


DECLARED = "declared"


def claimed(capabilities: Mapping[str, Any], sources: Mapping[str, str]) -> list[str]:
    """Names of the capabilities that the connector itself declares to have."""
    return [
        name
        for name in CAPABILITIES
        if sources.get(name, "").startswith(DECLARED) and has(capabilities.get(name))
    ]


def void(
    capabilities: Mapping[str, Any],
    sources: Mapping[str, str],
    rows: Sequence[Row],
    spec: Spec,
    vllm: str = "999",
) -> list[str]:
    """Claims of which nothing was shown: every row of a requirement or a case that asks for the capability was skipped or not exercised.

    A capability that nothing asks for, in this vLLM version, cannot be shown, and is not void.
    """
    shown = {row.requirement for row in rows if row.verdict in EXERCISED}
    ran = {row.case for row in rows if row.verdict in EXERCISED}
    found = []
    for name in claimed(capabilities, sources):
        requirements = {
            req.id
            for req in spec.requirements.values()
            if req.kind == "requirement" and asks(req.capability_expr.source, name)
        }
        cases = {
            case.id
            for case in spec.cases.values()
            if asks(case.needs_expr.source, name) and case.in_force(vllm)
        }
        if (requirements or cases) and not requirements & shown and not cases & ran:
            found.append(name)
    return found


def asks(condition: str, name: str) -> bool:
    """Whether a capability condition asks for `name` (and not for its absence)."""
    uses = re.finditer(rf"(not\s+|!\s*)?(?:cap\.)?\b{re.escape(name)}\b", condition)
    return any(use.group(1) is None for use in uses)


def mismatches(sources: Mapping[str, str]) -> list[str]:
    """Sentences about declarations that what was seen contradicts, and about what could not be seen: sources of more than one word."""
    return [f"{name} is {source}" for name, source in sorted(sources.items()) if "," in source]


def unasked(capabilities: Mapping[str, Any], sources: Mapping[str, str]) -> list[str]:
    """Sentences about what is not asked of a connector because of something that its author may have overlooked."""
    if not capabilities:
        return []
    found = []
    loads = any(has(capabilities.get(name)) for name in ("store", "transfer", "synthesises_kv"))
    if sources.get("store") == "inferred" and not loads:
        found.append(
            "in plain runs it returned no KV, so nothing about loads is asked of it; if it should, declare `store = true` ([capabilities])"
        )
    if loads and not has(capabilities.get("fault_injection")):
        found.append(
            "nothing about failed loads was judged: that needs a method kvconform_fail_load (docs/guide-connector-authors.md)"
        )
    return found


def contradicted(declared: Any, seen: Any) -> str:
    """The source of a declared capability of which something else was seen."""
    return f"{DECLARED}, but seen to be {_plain(seen)} and not {_plain(declared)}"


def _plain(value: Any) -> str:
    return (
        {True: "yes", False: "no"}.get(value, str(value)) if isinstance(value, bool) else str(value)
    )


def reasons(names: Iterable[str]) -> list[str]:
    """What the verdict says about void claims."""
    listed = ", ".join(names)
    return (
        [f"claimed and not shown, as none of their requirements and cases was exercised: {listed}"]
        if listed
        else []
    )


def apply_expected(
    rows: Sequence[Row], entries: Iterable[Expected], *, today: date, complete: bool = True
) -> list[str]:
    """Change the rows that the entries cover, in place, and return one sentence per entry that is wrong.

    An entry whose rows contain a FAIL makes these XFAIL; one whose rows are exercised and all PASS makes them XPASS. Wrong is an entry that
    covers no row at all (unless not `complete`: part of the suite was left out) and one that has expired, which then changes nothing.
    """
    problems: list[str] = []
    for entry in entries:
        name = f"expected failure of {entry.requirement} on {entry.case}"
        covered = [row for row in rows if entry.matches(row.requirement, row.case)]
        if entry.expired(today):
            problems.append(f"{name} expired on {entry.expires}")
        elif covered:
            settle(covered, entry)
        elif complete:
            problems.append(f"{name} matches nothing")
    return problems


def apply_waivers(
    rows: Sequence[Row], waivers: Iterable[Waiver], *, vllm: str, today: date
) -> list[str]:
    """The same for the suite's waivers, on guarantees only. One that concerns other engines or versions is no error."""
    problems: list[str] = []
    for waiver in waivers:
        covered = [
            row for row in rows if row.kind == "guarantee" and waiver.applies(row.to_dict(), vllm)
        ]
        if waiver.expired(today):
            problems.append(f"waiver of {waiver.requirement} expired on {waiver.expires}")
        elif covered:
            settle(covered, waiver)
    return problems


def settle(covered: Sequence[Row], entry: Expected) -> None:
    """FAIL -> XFAIL; if none failed, PASS -> XPASS."""
    failed = [row for row in covered if row.verdict in (Verdict.FAIL, Verdict.XFAIL)]
    for row in failed:
        row.verdict = Verdict.XFAIL
    if not failed:
        for row in covered:
            if row.verdict is Verdict.PASS:
                row.verdict = Verdict.XPASS
                row.message = f"was expected to fail: {entry.reason}"
