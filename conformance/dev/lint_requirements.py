# SPDX-License-Identifier: Apache-2.0
"""The example traces of requirements (`good`, `bad`), evaluated with stand-in constants: an example holds only what its check reads.

Before the events of a trace, `{cap: {...}}` sets capabilities and `{kind: run.start, ...}` constants of the run.


Lint of requirements: wording, sources, and that their checks do what their examples say.
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
from kvconform.contract.requirement import KEYWORDS, Requirement, version_key
from kvconform.dev import coverage, drift
from kvconform.errors import did_you_mean
from kvconform.judge.evaluate import evaluate
from kvconform.judge.monitor import Monitor
from kvconform.judge.relation import relate_runs

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
}
"""`cfg` where an example does not say."""

CAPS: tuple[dict[str, Any], ...] = (
    {
        "store": True,
        "saves": "all",
        "async_load": True,
        "layerwise": True,
        "hma": True,
        "fault_injection": True,
    },
    {},
    {"store": True, "saves": "all", "lossy": 0.1, "non_prefix_reuse": True, "synthesises_kv": True},
)
"""`cap` where an example does not say: the first of these that the requirement applies to."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a requirement says about one of its own examples. `name` is `good[0]` and the like."""

    name: str
    which: Literal["good", "bad"]
    monitor: Monitor

    @property
    def as_wanted(self) -> bool:
        """Accepted if good, rejected if bad, and evaluated without an error."""
        return self.monitor.error is None and (self.monitor.count == 0) == (self.which == "good")


def outcomes(req: Requirement) -> Iterator[Outcome]:
    """Every example of a requirement, evaluated."""
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
    said: dict[str, Any] = {}
    cfg = dict(CFG)
    for event in trace:
        said |= event.get("cap", {})
        if event.get("kind") == "run.start":
            cfg |= event
    choices = [complete({**caps, **said}) for caps in CAPS]
    return next((caps for caps in choices if req.applies_to(caps)), choices[0]), cfg


def _prepare(trace: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The events, numbered."""
    events = [event for event in trace if "kind" in event]
    return [{"seq": seq, "step": 0, **event} for seq, event in enumerate(events)]


def misspelt(req: Requirement) -> Iterator[str]:
    """Sentences about events and fields in examples that the event list does not know."""
    for name in ("good", "bad"):
        for trace in req.traces(name):  # type: ignore[arg-type]
            for event in (
                (event for side in trace for event in side) if req.relate is not None else trace
            ):
                yield from _misspelt_event(name, event)


def _misspelt_event(name: str, event: Any) -> Iterator[str]:
    if not isinstance(event, dict) or not ("kind" in event or event.keys() == {"cap"}):
        yield f"{name}: {event!r} is no event"
    elif "kind" in event:
        kind = EVENTS.get(event["kind"])
        if kind is None:
            yield f"{name}: unknown event {event['kind']!r}{did_you_mean(str(event['kind']), EVENTS)}"
        else:
            for field in event.keys() - kind.fields.keys() - set(COMMON_FIELDS):
                yield f"{name}: {kind.name} has no field {field!r}"


RULE_NUMBERS = range(1, 231)
BUG_NUMBERS = range(1, 133)


@dataclass(frozen=True, slots=True, order=True)
class Finding:
    """One breach of a lint rule: `where` is `file:line` (or an id if there is no place). A `warning` is no failure yet."""

    where: str
    code: str
    message: str
    warning: bool = False

    def __str__(self) -> str:
        return f"{self.where}: {self.code} {'(warning) ' if self.warning else ''}{self.message}"


UPDATE = "`python -m kvconform.dev.drift update` reads vLLM's source again"


def check(spec: Spec) -> Iterator[Finding]:
    """All findings about requirements."""
    texts: dict[str, str] = {}
    items = _items(spec)
    for req in spec.requirements.values():
        where = spec.places.get(f"requirement:{req.id}", req.id)
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
        yield Finding(
            spec.places.get(f"source:{place}", place),
            "L030",
            f"no requirement rests on {place} any more; {UPDATE}",
        )


def _wording(req: Requirement) -> Iterator[tuple[str, str]]:
    found = KEYWORDS.findall(req.text)
    if len(found) != 1:
        yield (
            "L003",
            f"the text holds {len(found)} RFC 2119 keywords ({', '.join(found) or 'none'}), not one",
        )
    elif found[0] != req.level:
        yield "L004", f"the text says {found[0]}, the level is {req.level}"
    if (
        req.since is not None
        and req.until is not None
        and version_key(req.since) >= version_key(req.until)
    ):
        yield "L023", f"since {req.since} is not before until {req.until}"
    if not req.why:
        yield "L025", "says no reason (why)"


def _references(req: Requirement, items: Collection[str]) -> Iterator[tuple[str, str]]:
    yield from numbers(req.rules, req.bugs)
    for item in req.touches if items else ():
        if item not in items:
            yield (
                "L031",
                f"touches {item}, which is no hook and no field of what connectors are given{did_you_mean(item, items)}",
            )


def _items(spec: Spec) -> set[str]:
    """The hooks and fields that there are; none where the vLLM is not installed that the specification was read from."""
    read = {entry.version for entry in spec.sources.values()}
    if (installed.source_version() or "").split("+")[0] not in read:
        return set()
    try:
        return {*interface.items(), *coverage.LATER}
    except OSError:  # a vLLM that is not whole
        return set()


def numbers(rules: list[str], bugs: list[str]) -> Iterator[tuple[str, str]]:
    """L017 and L015 for a list of rule numbers and bug ids."""
    yield from (
        ("L017", f"there is no rule {rule}") for rule in rules if int(rule[1:]) not in RULE_NUMBERS
    )
    yield from (
        ("L015", f"there is no bug {bug}") for bug in bugs if int(bug[1:]) not in BUG_NUMBERS
    )
    for name in {name for name in (*rules, *bugs) if (*rules, *bugs).count(name) > 1}:
        yield "L024", f"{name} is named twice"


def _source(req: Requirement, spec: Spec) -> Iterator[tuple[str, str]]:
    version = installed.source_version()
    if req.source is None:
        yield "L018", "names no source (file and symbol)"
    elif version is None or req.in_force(version):
        problem = installed.missing(req.source.file, req.source.symbol)
        if problem is not None:
            yield "L019", problem
    if spec.sources and req.source is not None and references.key(req.source) not in spec.sources:
        yield "L030", f"{references.key(req.source)} has no digest in spec/sources.yaml; {UPDATE}"


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
        monitor = outcome.monitor
        if monitor.error is not None:
            yield "L012", f"{outcome.name}: {monitor.error}"
        elif not outcome.as_wanted:
            first = (
                f": {monitor.violations[0].message}"
                if monitor.violations
                else ""
                if monitor.exercised
                else " (never triggered)"
            )
            yield (
                ("L010", f"{outcome.name} is rejected{first}")
                if outcome.which == "good"
                else ("L008", f"{outcome.name} is accepted{first}")
            )
        triggered = triggered or (outcome.which == "good" and monitor.exercised > 0)
    if not req.bad:
        yield "L007", "no bad example: nothing shows that the check can fail"
    if not req.good:
        if _can_be_good(req):
            yield "L009", "no good example"
    elif not triggered and _can_be_good(req):
        yield "L013", "no good example triggers the check"


def _cannot_fail(req: Requirement) -> bool:
    """A constant that is what the pattern wants: `always: True`, `never: False`."""
    expression = req.expressions.get("check")
    return (
        expression is not None
        and expression.constant
        and bool(expression.bind()({})) is (req.always is not None)
    )


def _can_be_good(req: Requirement) -> bool:
    """Whether a triggered good example can exist: not if every occurrence is a violation (`never: True`)."""
    expression = req.expressions.get("check")
    return req.exercised is not None or expression is None or not expression.constant
