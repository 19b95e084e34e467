# SPDX-License-Identifier: Apache-2.0
"""What the monitors cost: `measure` on a trace at hand; `python -m kvconform.bench_monitors` on a synthetic one and all requirements."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from kvconform.evaluate import evaluate
from kvconform.events import EVENTS
from kvconform.examples import CAPS, CFG
from kvconform.requirement import Requirement

_SAMPLES: dict[str, Any] = {"s": "a", "i": 1, "b": False, "f": 1, "l": [], "d": {}, "a": None}


def synthetic(length: int) -> list[dict[str, Any]]:
    """A trace of `length` events: all kinds in turn with every field set, ever new requests and transfers."""
    events: list[dict[str, Any]] = []
    kinds = itertools.cycle(kind for kind in EVENTS.values() if kind.name not in ("run.start", "run.end", "engine.crash"))
    for seq in range(length):
        kind = next(kinds)
        event = {name: _SAMPLES[code[0]] for name, code in kind.fields.items()}
        event |= {name: f"r{seq // 200}" for name in ("req", "transfer") if isinstance(event.get(name), str)}
        events.append({"k": kind.name, "seq": seq, "step": seq // 20, **event})
    return events


def measure(
    events: Sequence[Mapping[str, Any]], requirements: Sequence[Requirement], caps: Mapping[str, Any] | None = None, repeat: int = 3
) -> dict[str, float]:
    """Best of `repeat`: seconds, events per second, evaluations (a monitor looked at an event), and microseconds per evaluation.

    `setup_us` is the cost of a run without events: building and indexing all monitors.
    """
    from kvconform.capabilities import complete

    cap = complete(dict(caps if caps is not None else CAPS[0]))
    watched = [req for req in requirements if req.relate is None]
    interested: dict[str, int] = {}
    for req in watched:
        for kind in req.kinds:
            interested[kind] = interested.get(kind, 0) + 1
    evaluations = sum(interested.get(event["k"], 0) for event in events)
    setup = min(_seconds(watched, [], cap) for _ in range(repeat))
    seconds = max(min(_seconds(watched, events, cap) for _ in range(repeat)) - setup, 1e-9)
    return {
        "events": len(events),
        "requirements": len(watched),
        "evaluations": evaluations,
        "seconds": seconds,
        "events_per_s": len(events) / seconds,
        "us_per_evaluation": seconds / max(evaluations, 1) * 1e6,
        "setup_us": setup * 1e6,
    }


def _seconds(requirements: Sequence[Requirement], events: Sequence[Mapping[str, Any]], cap: Mapping[str, Any]) -> float:
    start = time.perf_counter()
    evaluate(requirements, events, cap, CFG)
    return time.perf_counter() - start


def main() -> int:
    from kvconform.load import load_spec

    for name, value in measure(synthetic(20_000), list(load_spec().requirements.values())).items():
        print(f"{name:<20}{value:14.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
