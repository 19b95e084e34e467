# SPDX-License-Identifier: Apache-2.0
"""Judges a run of several engines: each engine's share of the trace is the trace of one engine; only what is about pairs sees it all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvconform.evaluate import evaluate
from kvconform.events import ENGINE_FIELD
from kvconform.monitor import Event, Monitor
from kvconform.requirement import Requirement

EVERYBODYS = ("engine.crash", "engine.stall")
"""Events of one engine that end the run for all of them."""


def about_pairs(requirement: Requirement) -> bool:
    """Whether it looks at several engines together."""
    return any(kind.startswith("pair.") for kind in requirement.kinds)


def evaluate_sides(
    requirements: Iterable[Requirement], trace: Sequence[Event], cap: Mapping[str, Any] | None = None, cfg: Mapping[str, Any] | None = None
) -> dict[str, Monitor]:
    """As `evaluate`. With several engines, the outcomes of their shares are put together: violations in their order, counts added up."""
    roles = next((event["engines"] for event in trace[:2] if event["k"] == "run.engines"), None)
    if roles is None:
        return evaluate(requirements, trace, cap, cfg)
    listed = list(requirements)
    found = evaluate([req for req in listed if about_pairs(req)], trace, cap, cfg)
    single = [req for req in listed if not about_pairs(req)]
    for name, role in roles.items():
        part = [event for event in trace if event.get(ENGINE_FIELD, name) == name or event["k"] in EVERYBODYS]
        for identifier, monitor in evaluate(single, part, cap, {**(cfg or {}), "role": role}).items():
            found[identifier] = _together(found[identifier], monitor) if identifier in found else monitor
    return found


def _together(first: Monitor, second: Monitor) -> Monitor:
    seen = {(violation.seq, violation.event) for violation in first.violations}
    first.violations += [violation for violation in second.violations if (violation.seq, violation.event) not in seen]
    first.violations.sort(key=lambda violation: violation.seq)
    first.exercised += second.exercised
    first.count = max(first.count + second.count, len(first.violations))
    first.unresolved += second.unresolved
    first.error = first.error or second.error
    return first
