# SPDX-License-Identifier: Apache-2.0
"""What a workload has reached: pairs of a requirement that was put to the test and a value of an axis, and pairs of an event and the state
that its request was in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kvconform.explore.workload import Data

NOTED = {
    "lookup", "alloc", "load.due", "hold", "release", "req.finished", "req.scheduled", "req.updated", "transfer.reported",
    "transfer.failed", "kv.computed", "sample",
}  # fmt: skip
"""Events of one request that are worth knowing in which of its states they came."""


def axes_of(data: Data) -> list[str]:
    """The values of the axes of a workload, and what else is special about its engine."""
    found = [f"{name} {data['matrix'][name][0]}" for name in ("scheduling", "runner", "depth")]
    found += [f"engine {each}" for each in data["engines"]] + [f"policy {each}" for each in data.get("policies", [])]
    config = data.get("config", {})
    special = set(config) - {"block_size", "budget", "max_seqs", "num_blocks"}
    found += [f"{name} {config[name]}" if isinstance(config[name], (str, bool)) else name for name in sorted(special)]
    found += [f"block_size {config[name]}" for name in ("block_size",) if name in config]
    return found + [f"beside {each}" for each in data.get("relations", [])]


def pairs_of(data: Data, rows: Iterable[Mapping[str, Any]], trace: Iterable[Mapping[str, Any]]) -> list[str]:
    """Sorted. Rows and trace are those of its run."""
    axes = axes_of(data)
    found = {f"{row['requirement']} | {axis}" for row in rows if row.get("exercised") for axis in axes}
    states: dict[str, str] = {}
    for event in trace:
        kind = event["k"]
        if kind == "req.state":
            found.add(f"{event['from']} > {event['to']}, {event['by']} | {axes[0]}")
            states[event["req"]] = event["to"]
        elif kind in NOTED and isinstance(event.get("req"), str):
            found.add(f"{kind} in {states.get(event['req'], 'WAITING')} | {axes[0]}")
    return sorted(found)


def never(requirements: Iterable[str], reached: Iterable[str]) -> list[str]:
    """Those of the requirements that no workload has put to the test: situations that nobody draws."""
    seen = {pair.partition(" | ")[0] for pair in reached}
    return sorted(set(requirements) - seen)
