# SPDX-License-Identifier: Apache-2.0
"""From rows to the overall verdict: a status per requirement, and one verdict for the connector.

Also finds the claimed capabilities that no run has shown, and applies expected failures and
waivers: FAIL becomes XFAIL, and PASS becomes XPASS where an expected failure did not occur. A
connector's entries (profile.Expected) come from its own repository and concern requirements. The
suite's waivers (profile.Waiver) concern guarantees that a vLLM version is known to break.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from typing import Any

from kvconform.contract.capabilities import CAPABILITIES, has
from kvconform.contract.loader import Spec
from kvconform.contract.profile import Expected, Waiver
from kvconform.judge.records import Overall, Row, Verdict

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
"""The status of a requirement is the first of these verdicts that any of its rows has.

It is PASS if the requirement was exercised in some run and no row is worse.
"""

TITLES = {
    "conformant": "CONFORMANT",
    "partial": "PARTLY CONFORMANT",
    "nonconformant": "NOT CONFORMANT",
    "error": "NO VERDICT",
}
"""The overall verdicts, as reports print them."""

EXERCISED = {Verdict.PASS, Verdict.FAIL, Verdict.XFAIL, Verdict.XPASS, Verdict.BLOCKED}
"""Verdicts of a row whose requirement was exercised."""

NOTHING = "NOTHING JUDGED"
"""How reports print the verdict `partial` if no requirement was exercised."""


@dataclass
class Aggregate:
    """The result of all rows of a session.

    `status` is per requirement id. `counts` has the number of rows of each verdict, also if zero.
    `failed` holds the ids whose FAIL counts against the connector, `engine_failed` the guarantees
    that the engine broke, `unexplained` those of them that no known bug of vLLM explains in one of
    the runs. What does not count without --strict: `risks` holds the ids that fail only in
    situations that no vLLM brings about, `advisory` violated SHOULD and MAY. `unreached` has, per
    requirement, the runs that are about it and did not reach their situation, if it was not
    exercised there. `stores_nothing`: the connector declares `store`, and no run has loaded
    anything. `reasons` are sentences about why `verdict` is not `conformant`.
    """

    status: dict[str, Verdict] = field(default_factory=dict)
    counts: dict[Verdict, int] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    engine_failed: list[str] = field(default_factory=list)
    unexplained: list[str] = field(default_factory=list)
    risks: list[str] = field(default_factory=list)
    advisory: list[str] = field(default_factory=list)
    unreached: dict[str, list[str]] = field(default_factory=dict)
    exercised: int = 0
    stores_nothing: bool = False
    cases: int = 0
    verdict: Overall = "error"
    reasons: list[str] = field(default_factory=list)

    @property
    def total(self) -> int:
        """The number of requirements."""
        return len(self.status)

    @property
    def title(self) -> str:
        """The verdict, as reports print it."""
        return called(self.verdict, bool(self.exercised))


def called(verdict: str, exercised: bool) -> str:
    """Return an overall verdict as reports print it; `exercised`: any requirement was exercised."""
    if verdict == "partial" and not exercised:
        return NOTHING
    return TITLES[verdict]


def aggregate(rows: Iterable[Row], *, problems: Iterable[str] = ()) -> Aggregate:
    """Compute the status per requirement, the counts and the overall verdict.

    `problems` are sentences about expected failures that are wrong. The overall verdict is

    error          if a row is ERROR, an expected failure is wrong, or there is no row
    nonconformant  else, if a gating row is FAIL or XPASS, or is BLOCKED by something that is
                   neither an expected failure nor the engine's fault
    partial        else, if a gating row is XFAIL, DISABLED or BLOCKED, or no gating row is PASS
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
    found.counts = {verdict: tally[verdict] for verdict in Verdict}
    failing = [row for row in rows if row.verdict is Verdict.FAIL]
    found.failed = _ids(row for row in failing if row.gating)
    broken = [row for row in failing if row.kind == "guarantee"]
    found.engine_failed = _ids(broken)
    found.unexplained = _ids(row for row in broken if not row.bugs)
    risks = _ids(row for row in failing if row.risk)
    found.risks = [name for name in risks if name not in found.failed]
    found.advisory = _ids(
        row for row in failing if not row.gating and row.kind == "requirement" and not row.risk
    )
    found.exercised = sum(bool(seen & EXERCISED) for seen in verdicts.values())
    found.cases = len({row.case for row in rows})
    found.verdict, found.reasons = _overall(rows, found, list(problems))
    return found


def _ids(rows: Iterable[Row]) -> list[str]:
    return list(dict.fromkeys(row.requirement for row in rows))


def _overall(rows: list[Row], found: Aggregate, problems: list[str]) -> tuple[Overall, list[str]]:
    """Return the overall verdict, and the reasons for it as sentences."""
    if not rows:
        return "error", ["nothing was judged"]
    errors = found.counts[Verdict.ERROR]
    if errors or problems:
        reasons = list(problems)
        if errors:
            reasons.append(
                f"{errors} verdicts are ERROR: the harness or the environment is at fault"
            )
        return "error", reasons
    gating: dict[Verdict, list[Row]] = {verdict: [] for verdict in Verdict}
    for row in rows:
        if row.gating:
            gating[row.verdict].append(row)
    excused = _excused(rows)
    unexcused = [row for row in gating[Verdict.BLOCKED] if (row.blocked_by, row.run) not in excused]
    reasons = _reasons(
        [
            (Verdict.FAIL, gating[Verdict.FAIL]),
            (Verdict.XPASS, gating[Verdict.XPASS]),
            (Verdict.BLOCKED, unexcused),
        ]
    )
    if reasons:
        return "nonconformant", reasons
    mild = (Verdict.XFAIL, Verdict.DISABLED, Verdict.BLOCKED)
    reasons = _reasons([(verdict, gating[verdict]) for verdict in mild])
    if not gating[Verdict.PASS]:
        reasons.append(_why_nothing(rows))
    return ("partial", reasons) if reasons else ("conformant", [])


def _why_nothing(rows: list[Row]) -> str:
    """Return why no requirement that counts was exercised, in a clause."""
    nothing = "no requirement that counts was exercised"
    asked = [row for row in rows if row.kind == "requirement"]
    if asked and all(row.verdict is Verdict.UNSUPPORTED for row in asked):
        because = dict.fromkeys(row.message for row in asked if row.message)
        return f"{nothing}: {next(iter(because))}" if because else nothing
    if any(row.verdict is Verdict.PASS and not row.gating and row.beyond for row in asked):
        return f"{nothing}: this vLLM does not bring about what was run (--strict counts it)"
    return nothing


def _reasons(found: list[tuple[Verdict, list[Row]]]) -> list[str]:
    """Return one line per verdict with its requirements, in the order given.

    A requirement is named once, under the first verdict that it has.
    """
    lines: list[str] = []
    named: set[str] = set()
    for verdict, rows in found:
        ids = [name for name in _ids(rows) if name not in named]
        named.update(ids)
        if ids:
            lines.append(f"{verdict}: {', '.join(ids)}")
    return lines


def _excused(rows: list[Row]) -> set[tuple[str | None, str]]:
    """Return the (requirement, run) pairs whose failure excuses the rows that it blocks.

    These are expected failures, and guarantees that the engine broke.
    """
    engine = {Verdict.FAIL, Verdict.XFAIL}
    return {
        (row.requirement, row.run)
        for row in rows
        if row.verdict is Verdict.XFAIL or (row.kind == "guarantee" and row.verdict in engine)
    }


DECLARED = "declared"
"""Source of a capability that the connector itself declares."""


SHOWN_BY = {"async_load": "recv.completes"}
"""Requirements that alone show a capability: without it, its cases run, too, and are judged."""


def claimed(capabilities: Mapping[str, Any], sources: Mapping[str, str]) -> list[str]:
    """Return the names of the capabilities that the connector itself declares to have."""
    return [
        name
        for name in CAPABILITIES
        if sources.get(name) == DECLARED and has(capabilities.get(name))
    ]


def void(
    capabilities: Mapping[str, Any],
    sources: Mapping[str, str],
    rows: Sequence[Row],
    spec: Spec,
    vllm: str = "999",
    selected: Collection[str] | None = None,
) -> tuple[list[str], list[str]]:
    """Return the claimed capabilities that no run has shown, and those that were not looked at.

    The first are the claims for which no requirement or case that asks for the capability was
    exercised, or not the requirement of `SHOWN_BY`. A capability that nothing asks for in this vLLM
    version is left out: it cannot be shown. One was not looked at if cases ask for it, and none of
    these is `selected` (ids; None: all cases).
    """
    shown = {row.requirement for row in rows if row.verdict in EXERCISED}
    hidden = {row.requirement for row in rows if row.verdict is Verdict.UNOBSERVABLE} - shown
    ran = {row.case for row in rows if row.verdict in EXERCISED}
    found: list[str] = []
    unseen: list[str] = []
    for name in claimed(capabilities, sources):
        requirements = {
            req.id
            for req in spec.requirements.values()
            if req.kind == "requirement"
            and name in req.capability_expr.wanted
            and req.in_force(vllm)
        }
        cases = {
            case.id
            for case in spec.cases.values()
            if name in case.needs_expr.wanted and case.in_force(vllm)
        }
        shows = SHOWN_BY.get(name)
        if shows in hidden:
            shows = None
        is_shown = shows in shown if shows else requirements & shown or cases & ran
        if not (requirements or cases) or is_shown:
            continue
        if name == "saves" and capabilities.get("best_effort"):
            continue  # nothing that must come back shows it
        left_out = selected is not None and cases and not cases & set(selected)
        (unseen if left_out else found).append(name)
    return found, unseen


def mismatches(sources: Mapping[str, str], doubts: Mapping[str, str]) -> list[str]:
    """Return a sentence per declaration that the runs contradict or could not confirm."""
    return [f"{name} is {sources[name]}, {doubt}" for name, doubt in sorted(doubts.items())]


def unasked(
    capabilities: Mapping[str, Any], sources: Mapping[str, str], doubts: Mapping[str, str]
) -> list[str]:
    """Return sentences about what was not judged for a reason that the author may overlook."""
    if not capabilities:
        return []
    found = []
    loads = any(has(capabilities.get(name)) for name in ("store", "transfer", "synthesises_kv"))
    if sources.get("store") == "inferred" and "store" not in doubts and not loads:
        found.append(
            "in plain runs it returned no KV, so nothing about loads is asked of it;"
            " if it should, declare `store = true` ([capabilities])"
        )
    excused = sources.get("best_effort") == "inferred" and has(capabilities.get("best_effort"))
    if excused and "best_effort" not in doubts:
        found.append(
            "that all of what it has stored comes back, as less did in a plain run; if it loses"
            " nothing, declare `best_effort = false` ([capabilities])"
        )
    if loads and not has(capabilities.get("fault_injection")):
        found.append(
            "of failed loads, only those from a damaged store are judged:"
            " others need a method kvconform_fail_load (docs/guide-connector-authors.md)"
        )
    return found


def contradicted(declared: Any, seen: Any) -> str:
    """Return the doubt about a declared capability whose observed value is another one."""
    if isinstance(declared, bool) and isinstance(seen, bool):
        return "but was seen" if seen else "but was not seen"
    return f"but seen to be {_plain(seen)} and not {_plain(declared)}"


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)


def reasons(names: Sequence[str]) -> list[str]:
    """Return the reasons that void claims (`names`) add to the overall verdict."""
    listed = ", ".join(name for name in names if name not in SHOWN_BY)
    text = "claimed and not shown, as none of their requirements and cases was exercised"
    found = [f"{text}: {listed}"] if listed else []
    return found + [
        f"{name} is claimed and not shown, as {SHOWN_BY[name]} was never exercised"
        for name in names
        if name in SHOWN_BY
    ]


def apply_expected(
    rows: Sequence[Row], entries: Iterable[Expected], *, today: date, complete: bool = True
) -> list[str]:
    """Apply expected failures to the rows that they cover, and return a sentence per wrong entry.

    Changes the rows: if any row of an entry is FAIL, its FAIL rows become XFAIL; otherwise its PASS
    rows become XPASS. An entry that has expired is wrong, and changes nothing. One that covers no
    row is wrong, too, unless part of the suite was left out (not `complete`).
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
    """Apply the suite's waivers to the rows of guarantees, as `apply_expected` does.

    An expired waiver is wrong. One that covers no row is not: it may be for another engine, or for
    another version of vLLM.
    """
    problems: list[str] = []
    for waiver in waivers:
        covered = [
            row
            for row in rows
            if row.kind == "guarantee"
            and waiver.applies(row.engine, row.scheduling, vllm)
            and waiver.matches(row.requirement, row.case)
        ]
        if waiver.expired(today):
            problems.append(f"waiver of {waiver.requirement} expired on {waiver.expires}")
        elif covered:
            settle(covered, waiver)
    return problems


def settle(covered: Sequence[Row], entry: Expected) -> None:
    """Make FAIL rows XFAIL; if there are none, make PASS rows XPASS. Changes the rows."""
    failed = [row for row in covered if row.verdict in (Verdict.FAIL, Verdict.XFAIL)]
    for row in failed:
        row.verdict = Verdict.XFAIL
    if not failed:
        for row in covered:
            if row.verdict is Verdict.PASS:
                row.verdict = Verdict.XPASS
                row.message = f"was expected to fail: {entry.reason}"
