# SPDX-License-Identifier: Apache-2.0
"""Verdicts: what the trace of a run says about each requirement, decided by `judge`.

In a run of several engines, each engine's part of the trace is judged as the trace of one engine.
Only requirements about pairs of engines see the whole trace. Whether the verdicts make a connector
conformant, and whether a failure was expected, is decided in kvconform.judge.aggregate.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from kvconform.contract.events import ENGINE_FIELD
from kvconform.contract.requirement import Requirement
from kvconform.contract.situation import situations
from kvconform.contract.trace import Event, settings_on
from kvconform.judge.engine_bugs import losses, lost
from kvconform.judge.evaluate import evaluate
from kvconform.judge.identity import tenant
from kvconform.judge.monitor import Monitor, Violation
from kvconform.judge.records import MUST, Row, Verdict
from kvconform.judge.relation import relate_runs

SHARED = ("engine.crash", "engine.stall")
"""Kinds of events of one engine that end the run for all engines."""


def about_pairs(requirement: Requirement) -> bool:
    """Return whether the requirement looks at several engines together."""
    return any(kind.startswith("pair.") for kind in requirement.kinds)


def evaluate_sides(
    requirements: Iterable[Requirement],
    trace: Sequence[Event],
    cap: Mapping[str, Any] | None = None,
    cfg: Mapping[str, Any] | None = None,
) -> dict[str, Monitor]:
    """Run the monitors of all requirements but `relate` over a trace, as `evaluate` does.

    With several engines, the outcomes of their parts are merged: violations in order, counts added.
    """
    engines = next((event for event in trace[:2] if event["kind"] == "run.engines"), None)
    if engines is None:
        return evaluate(requirements, trace, cap, cfg)
    listed = list(requirements)
    about_all = {**(cfg or {}), **settings_on(trace, None)}
    found = evaluate([req for req in listed if about_pairs(req)], trace, cap, about_all)
    single = [req for req in listed if not about_pairs(req)]
    for name, role in engines["engines"].items():
        part = [
            event
            for event in trace
            if event.get(ENGINE_FIELD, name) == name or event["kind"] in SHARED
        ]
        own = {**(cfg or {}), **settings_on(trace, name), "role": role}
        monitors = evaluate(single, part, cap, own)
        for identifier, monitor in monitors.items():
            if identifier in found:
                _merge(found[identifier], monitor)
            else:
                found[identifier] = monitor
    return found


def _merge(into: Monitor, other: Monitor) -> None:
    """Add the findings of another monitor of the same requirement. Changes `into`."""
    seen = {(violation.seq, violation.event) for violation in into.violations}
    into.violations += [
        violation for violation in other.violations if (violation.seq, violation.event) not in seen
    ]
    into.violations.sort(key=lambda violation: violation.seq)
    into.exercised += other.exercised
    into.count = max(into.count + other.count, len(into.violations))
    into.unresolved += other.unresolved
    into.error = into.error or other.error


class VariantLike(Protocol):
    """The part of kvconform.contract.case.Variant that is needed here."""

    @property
    def case(self) -> Any:
        """The case or scenario; only its `id` is read."""

    @property
    def axes(self) -> dict[str, Any]:
        """The fields of a Row that name the run of the case."""

    @property
    def beyond(self) -> tuple[str, ...]:
        """Situations of the run that the contract allows and vLLM does not bring about."""


class RunLike(Protocol):
    """The part of kvconform.run.records.Run that is needed here."""

    @property
    def variant(self) -> VariantLike:
        """The case and the axes of the run."""

    @property
    def trace(self) -> Sequence[Event]:
        """The events of the run."""

    @property
    def channels(self) -> Collection[str]:
        """The channels of events that the engine has."""

    @property
    def harness_error(self) -> str | None:
        """The failure of the harness that makes the run worthless, if there was one."""


CRASH = "engine.crash"
"""`blocked_by` of a row that is blocked by a crash which no requirement explains."""
RAISES = "hook.no-raise"
"""Requirement on hooks that raise."""
CLAIMS = ("lookup.truth", "lookup.identity", "lookup.last-token")
"""Requirements on what a lookup claims: the engine believes it, and takes the request on by it."""
UNTOUCHED = ("meta.output-untouched", "hook.arguments-untouched")
"""Requirements that explain what the engine does with objects that the connector changed."""
GIVEN = (
    *("lookup.truth", "lookup.identity"),
    *("identity.", "layout.", "load.content", "load.position"),
)
"""Requirements on the KV that a request is given: on what lookups claim, and loads bring."""
MISLEADING = (*UNTOUCHED, "load.errors-within-grant")
"""Requirements that explain what the engine does from then on.

It also computes again what a connector reports as failed, if no load was to bring it.
"""


def judge(
    requirements: Iterable[Requirement],
    runs: Mapping[str, RunLike],
    caps: Mapping[str, Any],
    *,
    strict: bool = False,
    disabled: Collection[str] = (),
) -> list[Row]:
    """Return one row per requirement, in the order given, for the run `connector` of a case.

    `relate` requirements use the other runs, too. The first of these rules that applies decides:

    ERROR          the harness failed
    DISABLED       the requirement is switched off
    UNSUPPORTED    the connector does not declare the capability
    UNOBSERVABLE   it is for another engine, or events or a run that it needs are missing
    ERROR          the check itself raised
    NOT_EXERCISED  the trigger never matched
    FAIL           it is violated; BLOCKED if something earlier explains all its violations
    BLOCKED        a crash cut obligations short
    PASS           otherwise

    A violation detected after a crash of the engine is explained by the crash. A violation of a
    `consequence` requirement is also explained by any MUST that failed at the same event or
    earlier. A violation of a guarantee is also explained by an earlier change of the same engine's
    objects, by an earlier report of blocks as failed that no load was to fill, or by a wrong claim
    of a lookup of its request: the engine goes on with these. What follows after the engine lost
    track of a request (kvconform.judge.engine_bugs) is UNSUPPORTED, unless it is about what a
    request of another tenant is given. SHOULD and MAY get the same verdicts, and so do requirements
    in a situation that no vLLM brings about (`beyond`), but these count (`gating`) only with
    `strict`. A guarantee never counts.
    """
    main = runs["connector"]
    rows: list[Row] = []
    watched: list[tuple[Requirement, Row]] = []
    errors = (run.harness_error for run in runs.values() if run.harness_error is not None)
    broken = next(errors, None) or _harness_crash(main.trace)
    channels = {*main.channels, "harness"}
    for req in requirements:
        row = new_row(req, main.variant, strict=strict)
        rows.append(row)
        if broken is not None:
            row.verdict = Verdict.ERROR
            row.message = broken
        elif req.id in disabled:
            row.verdict = Verdict.DISABLED
            row.message = "switched off by the operator"
        elif req.capability != "core" and not req.capability_expr.bind(caps)({}):
            row.verdict = Verdict.UNSUPPORTED
            row.message = f"needs {req.capability}"
        elif row.engine not in req.engines:
            row.verdict = Verdict.UNOBSERVABLE
            row.message = f"is judged on {' and '.join(req.engines)} only"
        elif not req.channels <= channels:
            row.verdict = Verdict.UNOBSERVABLE
            row.message = f"needs events of {', '.join(sorted(req.channels - channels))}"
        elif req.relate is not None and any(name not in runs for name in req.relate.runs):
            row.verdict = Verdict.UNOBSERVABLE
            row.message = f"needs the runs {' and '.join(req.relate.runs)}"
        else:
            watched.append((req, row))
    if watched:
        found, blame = _judge_watched(watched, runs, caps)
        _excuse(watched, runs, found, blame)
    return rows


def _excuse(
    watched: list[tuple[Requirement, Row]],
    runs: Mapping[str, RunLike],
    found: Mapping[str, Monitor],
    blame: _Blame,
) -> None:
    """Take back failures that were detected after the engine lost track of a request.

    An obligation that was open then may be one that the engine gave no more chance to meet. This
    also concerns comparisons with such a run. What a request is given is no such obligation if it
    can have nothing of those that were lost (`_strangers`). Guarantees keep their verdicts, but
    what is taken back did not mislead the engine. An engine whose objects the connector had changed
    before is no excuse. Changes the rows.
    """
    bad = (Verdict.FAIL, Verdict.BLOCKED)
    if not any([row.verdict in bad and req.kind != "guarantee" for req, row in watched]):
        return
    since = {name: loss for name, run in runs.items() if (loss := lost(run.trace)) is not None}
    if "connector" in since and blame.changed_before(since["connector"].seq):
        del since["connector"]
    if not since:
        return
    excused: set[str] = set()
    kept: list[Row] = []
    for req, row in watched:
        if req.kind == "guarantee" or row.verdict not in bad:
            continue
        names = ["connector"] if req.relate is None else req.relate.runs
        loss = next((since[name] for name in names if name in since), None)
        if loss is None:
            continue
        about_all = req.relate is not None or row.event is None
        if not about_all and blame.detected[req.id] < loss.seq:
            continue
        if not about_all:
            violation = next(_strangers(runs["connector"].trace, req, found[req.id]), None)
            if violation is not None:
                blame.settle_on(req, row, violation)
                kept.append(row)
                continue
        row.verdict = Verdict.UNSUPPORTED
        row.message = f"not judged: {loss.why}"
        row.check = None
        row.blocked_by = None
        excused.add(req.id)
    for row in kept:
        if row.blocked_by in excused:
            row.verdict, row.blocked_by = Verdict.FAIL, None
    for req, row in watched:
        if req.kind == "guarantee" and row.blocked_by in excused.intersection(MISLEADING):
            row.verdict, row.blocked_by = Verdict.FAIL, None


def _strangers(trace: Sequence[Event], req: Requirement, monitor: Monitor) -> Iterator[Violation]:
    """Yield the violations about what a request is given that has nothing of a lost request.

    It has another cache salt or another adapter than all of these, so that neither vLLM nor a
    connector may give it any of the KV that came of the loss.
    """
    if not req.id.startswith(GIVEN):
        return
    found = list(losses(trace))
    if any(loss.who is None for loss in found):
        return
    lost_tenants = {tenant(trace, trace[loss.seq]) for loss in found}
    for violation in monitor.violations:
        if violation.req is not None and tenant(trace, trace[violation.event]) not in lost_tenants:
            yield violation


def new_row(
    req: Requirement, variant: VariantLike, *, strict: bool = False, verdict: Verdict = Verdict.PASS
) -> Row:
    """Return a row with everything but the findings filled in."""
    beyond = tuple(each for each in variant.beyond if situations()[each].makes_a_risk_of(req.id))
    counts = strict or (req.level in MUST and not beyond)
    return Row(
        requirement=req.id,
        case=variant.case.id,
        verdict=verdict,
        kind=req.kind,
        level=req.level,
        gating=req.kind == "requirement" and counts,
        beyond=beyond,
        **variant.axes,
    )


def unreached(row: Row, variant: VariantLike, requirement: Requirement) -> bool:
    """Return whether a run, which missed its situation, left out a requirement that it is about.

    False on engine live, where what a run missed concerns the run as a whole.
    """
    left_out = row.verdict is Verdict.NOT_EXERCISED and row.engine != "live"
    return left_out and variant.case.is_about(requirement)


def rows_for(
    requirements: Iterable[Requirement],
    variant: VariantLike,
    verdict: Verdict,
    message: str,
    *,
    strict: bool = False,
) -> list[Row]:
    """Return a row with the same verdict for every requirement.

    This is for a case that was not run (UNSUPPORTED, DISABLED) or whose worker died (ERROR).
    """
    rows = [new_row(req, variant, strict=strict, verdict=verdict) for req in requirements]
    for row in rows:
        row.message = message
    return rows


def _harness_crash(trace: Sequence[Event]) -> str | None:
    """Return the error of an `engine.crash` that is the harness's own fault, or None."""
    found = next(
        (e for e in trace if e["kind"] == "engine.crash" and e["where"] == "harness"), None
    )
    return None if found is None else f"the harness failed: {found['error']}"


def _crash_time(trace: Sequence[Event]) -> int | None:
    """Return the seq after which everything is explained by a crash; None if there was no crash.

    A run that the case itself ended, by a shutdown with work left, has no crash.
    """
    for event in trace:
        if event["kind"] == "engine.crash":
            return int(event["seq"])
    if not trace:
        return None
    last = trace[-1]
    if last["kind"] != "run.end" or not last.get("crashed"):
        return None
    shut_down = any(
        event["kind"] == "engine.lifecycle" and event["op"] == "shutdown" for event in trace
    )
    return None if shut_down else int(last["seq"]) - 1


def _judge_watched(
    watched: list[tuple[Requirement, Row]], runs: Mapping[str, RunLike], caps: Mapping[str, Any]
) -> tuple[dict[str, Monitor], _Blame]:
    """Fill in the rows of the requirements that this run can be judged by.

    Returns the monitors and the blame. Changes the rows.
    """
    trace = runs["connector"].trace
    cfg = trace[0] if trace and trace[0]["kind"] == "run.start" else {}
    found = evaluate_sides((req for req, _ in watched), trace, caps, cfg)
    traces = {name: run.trace for name, run in runs.items()}
    for req, _ in watched:
        if req.relate is not None:
            relation = relate_runs(req, traces, caps, cfg)
            assert relation is not None  # judge() made sure that the runs exist
            found[req.id] = relation
    crash = _crash_time(trace)
    blame = _Blame(crash)
    violated = [
        (req, row)
        for req, row in watched
        if found[req.id].violations and found[req.id].error is None
    ]
    # Consequences come last, in the order of their detection, because one may explain the next.
    violated.sort(key=lambda pair: (pair[0].consequence, found[pair[0].id].violations[0].seq))
    for req, row in violated:
        blame.settle(req, row, found[req.id])
    for req, row in violated:
        if req.kind == "guarantee" and row.verdict is Verdict.FAIL:
            blame.settle_again(req, row, found[req.id])
    for req, row in watched:
        _fill(row, req, found[req.id], crash, blame)
    return found, blame


class _Blame:
    """The failures of one run so far, and its crash.

    No failure is later than the crash, which explains what follows it.
    """

    def __init__(self, crash: int | None) -> None:
        self.crash = crash
        self.failures: list[tuple[int, str]] = []
        self.detected: dict[str, int] = {}  # requirement -> when its first violation was detected
        # engine and requirement -> when failing the requirement first misled the engine
        self.misled: dict[tuple[str | None, str], int] = {}
        # engine and request -> the first wrong claim of a lookup, and the requirement that it fails
        self.claims: dict[tuple[str | None, str | None], tuple[int, str]] = {}

    def settle(self, req: Requirement, row: Row, monitor: Monitor) -> None:
        """Set FAIL with the first violation that nothing explains, or BLOCKED if there is none.

        Changes the row.
        """
        own = next((v for v in monitor.violations if self.explanation(req, v) is None), None)
        first = own or monitor.violations[0]
        if own is None:
            row.verdict = Verdict.BLOCKED
            row.blocked_by = self.explanation(req, first)
        else:
            row.verdict = Verdict.FAIL
            if req.level in MUST:
                self.failures.append((first.seq, req.id))
            if req.level in MUST and req.id in CLAIMS:
                for violation in monitor.violations:
                    whose, claim = (violation.engine, violation.req), (violation.event, req.id)
                    self.claims[whose] = min(claim, self.claims.get(whose, claim))
            if req.id in MISLEADING:
                for violation in monitor.violations:
                    key = violation.engine, req.id
                    self.misled[key] = min(violation.seq, self.misled.get(key, violation.seq))
        self.detected[req.id] = first.seq
        _tell(row, first)

    def settle_on(self, req: Requirement, row: Row, violation: Violation) -> None:
        """Set FAIL, or BLOCKED, with this violation. Changes the row."""
        row.blocked_by = self.explanation(req, violation)
        row.verdict = Verdict.FAIL if row.blocked_by is None else Verdict.BLOCKED
        _tell(row, violation)

    def settle_again(self, req: Requirement, row: Row, monitor: Monitor) -> None:
        """Set BLOCKED if wrong claims of lookups, which are all known now, explain a guarantee.

        Changes the row.
        """
        claims = [self.claims.get((each.engine, each.req)) for each in monitor.violations]
        pairs = zip(claims, monitor.violations, strict=True)
        if all(claim is not None and claim[0] < each.event for claim, each in pairs):
            row.verdict = Verdict.BLOCKED
            row.blocked_by = claims[0][1] if claims[0] is not None else None

    def explanation(self, req: Requirement, violation: Violation) -> str | None:
        """Return the requirement, or CRASH, that explains a violation, or None.

        An earlier failure explains a consequence, and what follows a crash; otherwise the crash
        does. A guarantee is explained by what misled the engine before. How the complete vLLM
        ended is judged by itself: a user sees it, whatever led to it.
        """
        if req.event == "live.end":
            return None
        after_crash = self.crash is not None and violation.seq > self.crash
        if req.consequence or after_crash:
            causes = [
                (seq, name)
                for seq, name in self.failures
                if seq <= violation.seq and name != req.id
            ]
            if causes:
                return min(causes)[1]
        if req.kind == "guarantee":
            misled = [
                (seq, name)
                for (engine, name), seq in self.misled.items()
                if engine == violation.engine and seq < violation.seq
            ]
            if misled:
                return min(misled)[1]
        return CRASH if after_crash else None

    def changed_before(self, seq: int) -> bool:
        """Return whether the connector had changed an engine's objects before this time."""
        return any(name in UNTOUCHED and first < seq for (_, name), first in self.misled.items())

    def before_crash(self) -> str:
        """Return the requirement, or CRASH, that explains why the run was cut short.

        A hook that raised crashes the engine; else the first failure may have led to it.
        """
        raised = [failure for failure in self.failures if failure[1] == RAISES]
        return max(raised)[1] if raised else min(self.failures, default=(0, CRASH))[1]


def _tell(row: Row, violation: Violation) -> None:
    """Fill in what a violation is about. Changes the row."""
    row.step = violation.step
    row.req = violation.req
    row.event = violation.event
    row.message = violation.message
    row.check = violation.check


def _fill(row: Row, req: Requirement, monitor: Monitor, crash: int | None, blame: _Blame) -> None:
    """Fill in the part of a row that does not depend on blame. Changes the row."""
    row.exercised = monitor.exercised
    row.count = monitor.count
    if monitor.error is not None:
        row.verdict = Verdict.ERROR
        row.message = monitor.error
    elif not monitor.violations and monitor.exercised == 0:
        row.verdict = Verdict.NOT_EXERCISED
    elif not monitor.violations and monitor.unresolved and crash is not None:
        row.verdict = Verdict.BLOCKED
        row.blocked_by = blame.before_crash()
        row.message = f"{monitor.unresolved} still open when the engine crashed"
    if row.verdict == Verdict.BLOCKED and row.blocked_by == CRASH:
        # Consequences that were settled later may explain the crash.
        row.blocked_by = blame.before_crash()
    if row.verdict in (Verdict.FAIL, Verdict.ERROR) and req.source is not None:
        row.evidence = f"{req.source.file}: {req.source.symbol}"
