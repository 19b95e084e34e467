# SPDX-License-Identifier: Apache-2.0
"""The example traces of requirements (`good`, `bad`), evaluated with stand-in constants: an example holds only what its check reads.

Before the events of a trace, `{cap: {...}}` sets capabilities and `{k: run.start, ...}` constants of the run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from kvconform.capabilities import complete
from kvconform.closest import did_you_mean
from kvconform.evaluate import evaluate
from kvconform.events import COMMON_FIELDS, EVENTS
from kvconform.monitor import Monitor
from kvconform.relation import relate_runs
from kvconform.requirement import Requirement

CFG: dict[str, Any] = {
    "seed": 0, "engine": "reference", "case": "example", "scheduling": "async", "runner": "v1", "depth": 2, "vllm": "0.33.0",
    "device": "cpu", "slow": None,
    "block_size": 4, "num_blocks": 32, "policies": [], "connector": "example:Example", "spec_tokens": 0, "role": "kv_both",
    "groups": 1, "ranks": 1, "stages": 1, "context_ranks": 1,
}  # fmt: skip
"""`cfg` where an example does not say."""

CAPS: tuple[dict[str, Any], ...] = (
    {"store": True, "saves": "all", "async_load": True, "layerwise": True, "hma": True, "fault_injection": True},
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


def _constants(req: Requirement, trace: list[dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    said: dict[str, Any] = {}
    cfg = dict(CFG)
    for event in trace:
        said |= event.get("cap", {})
        if event.get("k") == "run.start":
            cfg |= event
    choices = [complete({**caps, **said}) for caps in CAPS]
    return next((caps for caps in choices if req.applies_to(caps)), choices[0]), cfg


def _prepare(trace: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The events, numbered."""
    events = [event for event in trace if "k" in event]
    return [{"seq": seq, "step": 0, **event} for seq, event in enumerate(events)]


def misspelt(req: Requirement) -> Iterator[str]:
    """Sentences about events and fields in examples that the event list does not know."""
    for name in ("good", "bad"):
        for trace in req.traces(name):  # type: ignore[arg-type]
            for event in (event for side in trace for event in side) if req.relate is not None else trace:
                yield from _misspelt_event(name, event)


def _misspelt_event(name: str, event: Any) -> Iterator[str]:
    if not isinstance(event, dict) or not ("k" in event or event.keys() == {"cap"}):
        yield f"{name}: {event!r} is no event"
    elif "k" in event:
        kind = EVENTS.get(event["k"])
        if kind is None:
            yield f"{name}: unknown event {event['k']!r}{did_you_mean(str(event['k']), EVENTS)}"
        else:
            for field in event.keys() - kind.fields.keys() - set(COMMON_FIELDS):
                yield f"{name}: {kind.name} has no field {field!r}"
