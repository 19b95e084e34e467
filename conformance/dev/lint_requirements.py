# SPDX-License-Identifier: Apache-2.0
"""Lint of requirements: wording, sources, and whether each check accepts and rejects its examples.

The examples (`good`, `bad`) are traces, evaluated with stand-in constants. An example names only
the fields that its check reads. Before the events of a trace, `{cap: {...}}` sets capabilities and
`{kind: run.start, ...}` sets constants of the run.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from kvconform.compat import installed, interface
from kvconform.contract import references
from kvconform.contract.capabilities import complete
from kvconform.contract.events import COMMON_FIELDS, EVENTS
from kvconform.contract.loader import Spec
from kvconform.contract.requirement import KEYWORDS, Requirement, Source, version_key
from kvconform.dev import coverage, drift
from kvconform.errors import Location, did_you_mean
from kvconform.judge.evaluate import evaluate
from kvconform.judge.monitor import Monitor
from kvconform.judge.relation import relate_runs

RULE_NUMBERS = range(1, 231)
BUG_NUMBERS = range(1, 161)

UPDATE = "`python -m kvconform.dev.drift update` reads vLLM's source again"

CFG: dict[str, Any] = {
    "seed": 0,
    "engine": "reference",
    "case": "example",
    "scheduling": "async",
    "runner": "v1",
    "depth": 2,
    "vllm": "0.33.0",
    "device": "cpu",
    "slow": None,
    "block_size": 4,
    "num_blocks": 32,
    "policies": [],
    "connector": "example:Example",
    "spec_tokens": 0,
    "role": "kv_both",
    "groups": 1,
    "ranks": 1,
    "stages": 1,
    "context_ranks": 1,
    "drafter": False,
    "pooling": False,
}
"""`cfg` of an example that does not set it."""

CAPS: tuple[dict[str, Any], ...] = (
    {
        "store": True,
        "persistent": True,
        "saves": "all",
        "async_load": True,
        "hma": True,
        "fault_injection": True,
    },
    {},
    {"store": True, "saves": "all", "lossy": 0.1, "non_prefix_reuse": True, "synthesises_kv": True},
)
"""`cap` of an example that does not set it: the first of these that the requirement applies to."""


@dataclass(frozen=True, slots=True, order=True)
class Finding:
    """One breach of a lint rule. A `warning` is no failure; `where` may be an id without a line."""

    where: Location
    code: str
    message: str
    warning: bool = False

    def __str__(self) -> str:
        return f"{self.where}: {self.code} {'(warning) ' if self.warning else ''}{self.message}"


def place_of(spec: Spec, kind: str, name: str) -> Location:
    """Return where an item of the specification is: `kind` is "requirement", "case" or the like."""
    return spec.places.get(f"{kind}:{name}", Location(name))


# -- examples


@dataclass(frozen=True, slots=True)
class Outcome:
    """Evaluation of one example of a requirement. `name` is `good[0]` and the like."""

    name: str
    which: Literal["good", "bad"]
    monitor: Monitor

    @property
    def as_wanted(self) -> bool:
        """Whether a good example is accepted, or a bad one rejected, without an error."""
        return self.monitor.error is None and (self.monitor.count == 0) == (self.which == "good")


def outcomes(req: Requirement) -> Iterator[Outcome]:
    """Evaluate every example of a requirement."""
    for which in ("good", "bad"):
        for index, trace in enumerate(req.traces(which)):  # type: ignore[arg-type]
            yield Outcome(f"{which}[{index}]", which, _evaluate(req, trace))  # type: ignore[arg-type]


def _evaluate(req: Requirement, trace: Any) -> Monitor:
    if req.relate is not None:
        sides = [_prepare(side) for side in trace]
        cap, cfg = _constants(req, [event for side in trace for event in side])
        found = relate_runs(req, dict(zip(req.relate.runs, sides, strict=True)), cap, cfg)
        assert found is not None
        return found
    cap, cfg = _constants(req, trace)
    return evaluate([req], _prepare(trace), cap, cfg)[req.id]


def _constants(
    req: Requirement, trace: list[dict[str, Any]]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return `cap` and `cfg` of an example."""
    declared: dict[str, Any] = {}
    cfg = dict(CFG)
    for event in trace:
        declared |= event.get("cap", {})
        if event.get("kind") == "run.start":
            cfg |= event
    choices = [complete({**caps, **declared}) for caps in CAPS]
    return next((caps for caps in choices if req.applies_to(caps)), choices[0]), cfg


def _prepare(trace: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the events, numbered."""
    events = [event for event in trace if "kind" in event]
    return [{"seq": seq, "step": 0, **event} for seq, event in enumerate(events)]


def misspelt(req: Requirement) -> Iterator[str]:
    """Yield a sentence for each event, field or value in examples that no run can have."""
    for name in ("good", "bad"):
        for trace in req.traces(name):  # type: ignore[arg-type]
            sides = trace if req.relate is not None else [trace]
            for side in sides:
                for event in side:
                    yield from _misspelt_event(name, event)


def _misspelt_event(name: str, event: Any) -> Iterator[str]:
    if not isinstance(event, dict) or not ("kind" in event or event.keys() == {"cap"}):
        yield f"{name}: {event!r} is no event"
    elif "kind" in event:
        kind = EVENTS.get(event["kind"])
        if kind is None:
            close = did_you_mean(str(event["kind"]), EVENTS)
            yield f"{name}: unknown event {event['kind']!r}{close}"
        else:
            for field in event.keys() - kind.fields.keys() - set(COMMON_FIELDS):
                yield f"{name}: {kind.name} has no field {field!r}"
            # A bad example may have a value of a wrong type: that may be what is wrong.
            for field in event.keys() & kind.fields.keys() if name == "good" else ():
                expected = kind.fields[field]
                if not expected.accepts(event[field]):
                    or_none = " or null" if expected.optional else ""
                    yield (
                        f"{name}: {field} of {kind.name} is {expected.type}{or_none},"
                        f" so no run has {event[field]!r}"
                    )


# -- rules


def check(spec: Spec) -> Iterator[Finding]:
    """Yield all findings about requirements."""
    texts: dict[str, str] = {}
    items = _items(spec)
    for req in spec.requirements.values():
        where = place_of(spec, "requirement", req.id)
        for code, message in (
            *_wording(req),
            *_references(req, items),
            *_source(req, spec),
            *_examples(req),
        ):
            yield Finding(where, code, f"{req.id}: {message}")
        other = texts.setdefault(" ".join(req.text.split()), req.id)
        if other != req.id:
            yield Finding(where, "L024", f"{req.id}: has the text of {other}")
    for place in sorted(spec.sources.keys() - drift.cited(spec).keys()):
        sentence = f"no requirement and no situation rests on {place} any more; {UPDATE}"
        yield Finding(place_of(spec, "source", place), "L030", sentence)


def _wording(req: Requirement) -> Iterator[tuple[str, str]]:
    found = KEYWORDS.findall(req.text)
    if len(found) != 1:
        keywords = ", ".join(found) or "none"
        yield "L003", f"the text holds {len(found)} RFC 2119 keywords ({keywords}), not one"
    elif found[0] != req.level:
        yield "L004", f"the text says {found[0]}, the level is {req.level}"
    since, until = req.since, req.until
    if since is not None and until is not None and version_key(since) >= version_key(until):
        yield "L023", f"since {since} is not before until {until}"
    if not req.why:
        yield "L025", "says no reason (why)"


def _references(req: Requirement, items: Collection[str]) -> Iterator[tuple[str, str]]:
    yield from numbers(req.rules, req.bugs)
    for item in req.touches if items else ():
        if item not in items:
            sentence = f"touches {item}, which is no hook and no field of what connectors are given"
            yield "L031", sentence + did_you_mean(item, items)


def _items(spec: Spec) -> set[str]:
    """Return the hooks and fields that exist.

    Empty unless the installed vLLM is the version that the specification was read from.
    """
    read = {entry.version for entry in spec.sources.values()}
    if (installed.vllm_version() or "").split("+")[0] not in read:
        return set()
    try:
        return {*interface.items(), *coverage.LATER}
    except OSError:  # an incomplete vLLM
        return set()


def numbers(rules: list[str], bugs: list[str]) -> Iterator[tuple[str, str]]:
    """Yield L017, L015 and L024 for a list of rule numbers and one of bug ids."""
    for rule in rules:
        if int(rule[1:]) not in RULE_NUMBERS:
            yield "L017", f"there is no rule {rule}"
    for bug in bugs:
        if int(bug[1:]) not in BUG_NUMBERS:
            yield "L015", f"there is no bug {bug}"
    for name in {name for name in (*rules, *bugs) if (*rules, *bugs).count(name) > 1}:
        yield "L024", f"{name} is named twice"


def _source(req: Requirement, spec: Spec) -> Iterator[tuple[str, str]]:
    version = installed.vllm_version()
    if req.source is None:
        yield "L018", "names no source (file and symbol)"
        return
    unknown = version is None or version == installed.UNKNOWN
    yield from cited(req.source, spec, installed_has_it=unknown or req.in_force(str(version)))


def cited(source: Source, spec: Spec, *, installed_has_it: bool) -> Iterator[tuple[str, str]]:
    """Yield L019 and L030 for a place in vLLM's source."""
    if installed_has_it:
        problem = installed.missing(source.file, source.symbol)
        if problem is not None:
            yield "L019", problem
    if spec.sources and references.key(source) not in spec.sources:
        yield "L030", f"{references.key(source)} has no digest in spec/sources.yaml; {UPDATE}"


def _examples(req: Requirement) -> Iterator[tuple[str, str]]:
    problems = list(misspelt(req))
    if problems:
        yield from (("L011", problem) for problem in problems)
        return
    if _cannot_fail(req):
        yield "L006", "the check is a constant that no event can violate"
        return
    triggered = False
    for outcome in outcomes(req):
        if outcome.monitor.error is not None:
            yield "L012", f"{outcome.name}: {outcome.monitor.error}"
        elif not outcome.as_wanted and outcome.which == "good":
            yield "L010", f"{outcome.name} is rejected{_reason(outcome.monitor)}"
        elif not outcome.as_wanted:
            yield "L008", f"{outcome.name} is accepted{_reason(outcome.monitor)}"
        triggered = triggered or (outcome.which == "good" and outcome.monitor.exercised > 0)
    if not req.bad:
        yield "L007", "no bad example: nothing shows that the check can fail"
    if not req.good:
        if _can_be_good(req):
            yield "L009", "no good example"
    elif not triggered and _can_be_good(req):
        only = ", or its `exercised`" if req.exercised is not None else ""
        yield "L013", f"no good example triggers the check{only}"


def _reason(monitor: Monitor) -> str:
    if monitor.violations:
        return f": {monitor.violations[0].message}"
    return "" if monitor.exercised else " (never triggered)"


def _cannot_fail(req: Requirement) -> bool:
    """Return whether the check is the constant that the pattern demands.

    Such checks are `always: True` and `never: False`.
    """
    expression = req.expressions.get("check")
    return (
        expression is not None
        and expression.constant
        and bool(expression.bind()({})) is (req.always is not None)
    )


def _can_be_good(req: Requirement) -> bool:
    """Return whether a triggered good example can exist.

    It cannot if every occurrence is a violation (`never: True`).
    """
    expression = req.expressions.get("check")
    return req.exercised is not None or expression is None or not expression.constant
