# SPDX-License-Identifier: Apache-2.0
"""Judges a run of several engines: each engine's share of the trace is the trace of one engine; only what is about pairs sees it all.

Verdicts: what a run says about a requirement. `judge` is the only place that decides one (its rules: docstring of `judge`).

Whether many verdicts make a connector conformant is decided in kvconform.judge.aggregate, whether a failure was expected in kvconform.judge.aggregate.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from operator import attrgetter
from typing import Any, Protocol

from kvconform.contract.case import variant_id
from kvconform.contract.events import ENGINE_FIELD
from kvconform.contract.requirement import Requirement
from kvconform.judge.engine_bugs import lost
from kvconform.judge.evaluate import evaluate
from kvconform.judge.monitor import Event, Monitor, Violation
from kvconform.judge.relation import relate_runs

EVERYBODYS = ("engine.crash", "engine.stall")
"""Events of one engine that end the run for all of them."""


def about_pairs(requirement: Requirement) -> bool:
    """Whether it looks at several engines together."""
    return any(kind.startswith("pair.") for kind in requirement.kinds)


def evaluate_sides(
    requirements: Iterable[Requirement],
    trace: Sequence[Event],
    cap: Mapping[str, Any] | None = None,
    cfg: Mapping[str, Any] | None = None,
) -> dict[str, Monitor]:
    """As `evaluate`. With several engines, the outcomes of their shares are put together: violations in their order, counts added up."""
    roles = next((event["engines"] for event in trace[:2] if event["kind"] == "run.engines"), None)
    if roles is None:
        return evaluate(requirements, trace, cap, cfg)
    listed = list(requirements)
    found = evaluate([req for req in listed if about_pairs(req)], trace, cap, cfg)
    single = [req for req in listed if not about_pairs(req)]
    for name, role in roles.items():
        part = [
            event
            for event in trace
            if event.get(ENGINE_FIELD, name) == name or event["kind"] in EVERYBODYS
        ]
        for identifier, monitor in evaluate(
            single, part, cap, {**(cfg or {}), "role": role}
        ).items():
            found[identifier] = (
                _together(found[identifier], monitor) if identifier in found else monitor
            )
    return found


def _together(first: Monitor, second: Monitor) -> Monitor:
    seen = {(violation.seq, violation.event) for violation in first.violations}
    first.violations += [
        violation for violation in second.violations if (violation.seq, violation.event) not in seen
    ]
    first.violations.sort(key=lambda violation: violation.seq)
    first.exercised += second.exercised
    first.count = max(first.count + second.count, len(first.violations))
    first.unresolved += second.unresolved
    first.error = first.error or second.error
    return first


class Verdict(StrEnum):
    """What one run says about one requirement."""

    PASS = "PASS"
    FAIL = "FAIL"
    ERROR = "ERROR"  # the harness or the environment is at fault
    XFAIL = "XFAIL"  # failed, as expected
    XPASS = "XPASS"  # expected to fail, and did not
    UNSUPPORTED = "UNSUPPORTED"  # the connector does not declare the capability
    NOT_EXERCISED = "NOT_EXERCISED"  # its trigger never matched
    UNOBSERVABLE = "UNOBSERVABLE"  # the engine does not have the events
    BLOCKED = "BLOCKED"  # an earlier failure of the same run explains it
    DISABLED = "DISABLED"  # switched off by the operator


@dataclass(slots=True)
class Row:
    """The verdict of one requirement on one run. The fields after `verdict` are set when they matter (kvconform.report.models.RowLine)."""

    requirement: str
    case: str
    engine: str
    scheduling: str
    runner: str
    depth: int
    block_size: int
    verdict: Verdict
    slow: str | None = None
    kind: str = "requirement"
    level: str = "MUST"
    gating: bool = True
    exercised: int = 0
    count: int = 0
    step: int | None = None
    req: str | None = None
    event: int | None = None
    message: str | None = None
    evidence: str | None = None
    blocked_by: str | None = None

    @property
    def run(self) -> str:
        """Id of the run that it is about."""
        return variant_id(
            self.case,
            self.engine,
            self.scheduling,
            self.runner,
            self.depth,
            self.block_size,
            self.slow,
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON-able; what is None or a default after `verdict` is left out."""
        found: dict[str, Any] = dict(zip(_ALWAYS, _get_always(self), strict=True))
        found["verdict"] = str(self.verdict)
        for (name, default), value in zip(_IF_SET, _get_if_set(self), strict=True):
            if value is not default and value != default:
                found[name] = value
        return found

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Row:
        """The inverse of `to_dict`; a `type` key is ignored."""
        values = {key: value for key, value in data.items() if key != "type"}
        return cls(**{**values, "verdict": Verdict(values["verdict"])})


_ALWAYS = tuple(field.name for field in fields(Row))[:8]
_IF_SET = tuple((field.name, field.default) for field in fields(Row))[8:]
_get_always, _get_if_set = attrgetter(*_ALWAYS), attrgetter(*(name for name, _ in _IF_SET))


class VariantLike(Protocol):
    """What of kvconform.contract.case.Variant is needed here."""

    @property
    def case(self) -> Any: ...
    @property
    def axes(self) -> dict[str, Any]: ...


class RunLike(Protocol):
    """What of kvconform.run.records.Run is needed here."""

    @property
    def variant(self) -> VariantLike: ...
    @property
    def trace(self) -> Sequence[Event]: ...
    @property
    def channels(self) -> Collection[str]: ...
    @property
    def harness_error(self) -> str | None: ...


CRASH = "engine.crash"
"""`blocked_by` of what came after a crash that no requirement explains."""


def judge(
    requirements: Iterable[Requirement],
    runs: Mapping[str, RunLike],
    caps: Mapping[str, Any],
    *,
    strict: bool = False,
    disabled: Collection[str] = (),
) -> list[Row]:
    """One row per requirement, in the order given, for the run `connector` of a case (`relate` uses the other runs too).

    The first that applies: the harness failed -> ERROR; switched off -> DISABLED; capability not declared -> UNSUPPORTED; engine or channel
    missing, or a related run not made -> UNOBSERVABLE; the check itself raised -> ERROR; trigger never matched -> NOT_EXERCISED; violated
    -> FAIL, or BLOCKED if all its violations are explained by something earlier; obligations cut short by a crash -> BLOCKED; else PASS.

    A violation is explained by the crash of the engine if it came to light after it, and, for a `consequence`, by any FAIL of a MUST that
    came to light no later. What came after the engine lost track of a request (kvconform.judge.engine_bugs) is UNSUPPORTED. SHOULD and MAY get the same
    verdicts, but only with `strict` do they count (`gating`); a guarantee never does.
    """
    main = runs["connector"]
    rows: list[Row] = []
    watched: list[tuple[Requirement, Row]] = []
    about = {"case": main.variant.case.id, **main.variant.axes}
    broken = next(
        (run.harness_error for run in runs.values() if run.harness_error is not None), None
    ) or _harness_crash(main.trace)
    channels = {*main.channels, "harness"}
    for req in requirements:
        row = _row(req, about, strict)
        rows.append(row)
        if broken is not None:
            row.verdict, row.message = Verdict.ERROR, broken
        elif req.id in disabled:
            row.verdict, row.message = Verdict.DISABLED, "switched off by the operator"
        elif not req.capability_expr.bind(caps)({}):
            row.verdict, row.message = Verdict.UNSUPPORTED, f"needs {req.capability}"
        elif row.engine not in req.engines:
            row.verdict, row.message = (
                Verdict.UNOBSERVABLE,
                f"is judged on {' and '.join(req.engines)} only",
            )
        elif not req.channels <= channels:
            row.verdict, row.message = (
                Verdict.UNOBSERVABLE,
                f"needs events of {', '.join(sorted(req.channels - channels))}",
            )
        elif req.relate is not None and any(name not in runs for name in req.relate.runs):
            row.verdict, row.message = (
                Verdict.UNOBSERVABLE,
                f"needs the runs {' and '.join(req.relate.runs)}",
            )
        else:
            watched.append((req, row))
    if watched:
        _judge_watched(watched, runs, caps)
        _excuse(watched, runs)
    return rows


def _excuse(watched: list[tuple[Requirement, Row]], runs: Mapping[str, RunLike]) -> None:
    """What the connector did after the engine had lost track of its requests is not judged, nor is what is compared with such a run."""
    since = {name: found for name, run in runs.items() if (found := lost(run.trace)) is not None}
    for req, row in watched if since else ():
        here = (
            since.get("connector")
            if req.relate is None
            else next((since[name] for name in req.relate.runs if name in since), None)
        )
        if (
            here is None
            or req.kind == "guarantee"
            or row.verdict not in (Verdict.FAIL, Verdict.BLOCKED)
        ):
            continue
        if req.relate is not None or row.event is None or row.event >= here[0]:
            row.verdict, row.message, row.blocked_by = (
                Verdict.UNSUPPORTED,
                f"not judged: {here[1]}",
                None,
            )


def new_row(
    req: Requirement, variant: VariantLike, *, strict: bool = False, verdict: Verdict = Verdict.PASS
) -> Row:
    """A row with everything but the findings filled in."""
    return _row(req, {"case": variant.case.id, **variant.axes}, strict, verdict)


def _row(
    req: Requirement, about: Mapping[str, Any], strict: bool, verdict: Verdict = Verdict.PASS
) -> Row:
    gating = req.kind == "requirement" and (req.level in ("MUST", "MUST NOT") or strict)
    return Row(
        requirement=req.id, verdict=verdict, kind=req.kind, level=req.level, gating=gating, **about
    )


def rows_for(
    requirements: Iterable[Requirement],
    variant: VariantLike,
    verdict: Verdict,
    message: str,
    *,
    strict: bool = False,
) -> list[Row]:
    """The same verdict for all: for a case that was not run (UNSUPPORTED, DISABLED) or whose worker died (ERROR)."""
    rows = [new_row(req, variant, strict=strict, verdict=verdict) for req in requirements]
    for row in rows:
        row.message = message
    return rows


def _harness_crash(trace: Sequence[Event]) -> str | None:
    """The error of an `engine.crash` that is the harness's own fault."""
    found = next(
        (e for e in trace if e["kind"] == "engine.crash" and e["where"] == "harness"), None
    )
    return None if found is None else f"the harness failed: {found['error']}"


def _crash_time(trace: Sequence[Event]) -> int | None:
    """The seq after which everything is explained by the crash; None without one, also if the case shut the engine down with work left."""
    for event in trace:
        if event["kind"] == "engine.crash":
            return int(event["seq"])
    last = trace[-1] if trace else {"kind": ""}
    cut = any(
        event["kind"] == "engine.lifecycle" and event["op"] == "shutdown_again" for event in trace
    )
    return (
        int(last["seq"]) - 1
        if last["kind"] == "run.end" and last.get("crashed") and not cut
        else None
    )


def _judge_watched(
    watched: list[tuple[Requirement, Row]], runs: Mapping[str, RunLike], caps: Mapping[str, Any]
) -> None:
    trace = runs["connector"].trace
    cfg = trace[0] if trace and trace[0]["kind"] == "run.start" else {}
    found: dict[str, Monitor] = dict(evaluate_sides((req for req, _ in watched), trace, caps, cfg))
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
    # What cannot be a consequence first; then consequences in the order in which they came to light, as one may explain the next.
    violated.sort(key=lambda pair: (pair[0].consequence, found[pair[0].id].violations[0].seq))
    for req, row in violated:
        blame.settle(req, row, found[req.id])
    for req, row in watched:
        _fill(row, req, found[req.id], crash, blame)


class _Blame:
    """The failures of one run so far, and the crash. None of them is later than it: the crash explains what comes after."""

    def __init__(self, crash: int | None) -> None:
        self.crash = crash
        self.failures: list[tuple[int, str]] = []

    def settle(self, req: Requirement, row: Row, monitor: Monitor) -> None:
        """FAIL with the first violation that nothing explains, or BLOCKED if everything is explained."""
        own = next((v for v in monitor.violations if self.explanation(req, v) is None), None)
        if own is None:
            first = monitor.violations[0]
            row.verdict, row.blocked_by = Verdict.BLOCKED, self.explanation(req, first)
        else:
            first = own
            row.verdict = Verdict.FAIL
            if req.level in ("MUST", "MUST NOT"):
                self.failures.append((first.seq, req.id))
        row.step, row.req, row.event, row.message = (
            first.step,
            first.req,
            first.event,
            first.message,
        )

    def explanation(self, req: Requirement, violation: Violation) -> str | None:
        """What explains a violation: an earlier failure for a consequence, else the crash (or the failure before it). How all of vLLM ended
        is judged by itself: that is what a user sees, whatever led to it."""
        if req.event == "live.end":
            return None
        after_crash = self.crash is not None and violation.seq > self.crash
        if req.consequence or after_crash:
            earlier = min(
                (f for f in self.failures if f[0] <= violation.seq and f[1] != req.id), default=None
            )
            if earlier is not None:
                return earlier[1]
        return CRASH if after_crash else None

    def before_crash(self) -> str:
        """What explains that things were cut short."""
        return min(self.failures, default=(0, CRASH))[1]


def _fill(row: Row, req: Requirement, monitor: Monitor, crash: int | None, blame: _Blame) -> None:
    """Everything about a row that does not depend on who is to blame."""
    row.exercised, row.count = monitor.exercised, monitor.count
    if monitor.error is not None:
        row.verdict, row.message = Verdict.ERROR, monitor.error
    elif not monitor.violations and monitor.exercised == 0:
        row.verdict = Verdict.NOT_EXERCISED
    elif not monitor.violations and monitor.unresolved and crash is not None:
        row.verdict, row.blocked_by = Verdict.BLOCKED, blame.before_crash()
        row.message = f"{monitor.unresolved} still open when the engine crashed"
    if (
        row.verdict == Verdict.BLOCKED and row.blocked_by == CRASH
    ):  # consequences settled later may have explained the crash after all
        row.blocked_by = blame.before_crash()
    if row.verdict in (Verdict.FAIL, Verdict.ERROR) and req.source is not None:
        row.evidence = f"{req.source.file}: {req.source.symbol}"
