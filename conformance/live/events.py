# SPDX-License-Identifier: Apache-2.0
"""What the parent of a live run adds to its trace: phases, tokens, what happened at all, and how it ended."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from kvconform.live.compare import compare
from kvconform.live.job import Answer, Outcome
from kvconform.live.process import Ended
from kvconform.live.scenario import Scenario

Event = dict[str, Any]


def own_events(
    scenario: Scenario, outcome: Outcome, ended: Ended, plain: Mapping[str, Answer], failed_loads: int, hits: Collection[str]
) -> list[Event]:
    """The events, without `seq` and `step`. `hits`: the phases in which loads are due."""
    found: list[Event] = []
    for phase in outcome.phases:
        counts = phase.counts
        found.append(
            {
                "k": "live.phase", "phase": phase.name, "answers": len(phase.answers), "reset": phase.reset_done, "due": phase.name in hits,
                "asked": counts.external_queries, "loaded": counts.external_hits, "local": counts.local_hits,
                "preempted": counts.preemptions, "drafted": counts.drafts, "accepted": counts.accepted,
            }
        )  # fmt: skip
    found += compare(plain, outcome)
    totals = happened(outcome, failed_loads)
    found += [{"k": "live.happened", "what": what, "count": count, "due": what in scenario.due} for what, count in totals.items()]
    return [*found, end_event(outcome, ended)]


def happened(outcome: Outcome, failed_loads: int) -> dict[str, int]:
    """How often each thing that can be due happened, by vLLM's own counters; failed loads by the scheduler's (vLLM has no metric)."""
    counts = [phase.counts for phase in outcome.phases]
    return {
        "loads": sum(c.external_hits for c in counts),
        "preemptions": sum(c.preemptions for c in counts),
        "drafts": sum(c.accepted for c in counts),
        "failed_loads": failed_loads,
    }


def missing(scenario: Scenario, outcome: Outcome, failed_loads: int) -> list[str]:
    """What was due and did not happen, in words."""
    words = {
        "loads": "no token was loaded from the connector (vllm:external_prefix_cache_hits)",
        "preemptions": "no request was preempted (vllm:num_preemptions)",
        "drafts": "no draft was accepted (vllm:spec_decode_num_accepted_tokens)",
        "failed_loads": "no load failed",
    }
    return [words[what] for what, count in happened(outcome, failed_loads).items() if what in scenario.due and not count]


def thin(scenario: Scenario, outcome: Outcome, hits: Collection[str]) -> list[str]:
    """The phases that were to load something and did not, where others did: the run says nothing about these."""
    if "loads" not in scenario.due:
        return []
    found = [phase.name for phase in outcome.phases if phase.name in hits and not phase.counts.external_hits]
    return [f"nothing was loaded in phase {name}" for name in found]


OWN = "vLLM's own process, which a thread keeps from ending"


def end_event(outcome: Outcome, ended: Ended) -> Event:
    """How the engine and its processes ended. A process that had shut vLLM down and did not end counts as left behind; one that some
    library took down after everything was said is nobody's loss."""
    stays = outcome.ended and ended.how == "timeout"
    if outcome.ended:
        how = "ended"
    elif outcome.error:
        how = "timeout" if outcome.error.get("stalled") else "crash"
    else:
        how = "timeout" if ended.how == "timeout" else "killed"
    error = outcome.error["text"] if outcome.error else None if how == "ended" else f"{ended.how} {ended.status or ''}".strip()
    processes = [*([OWN] if stays else []), *ended.processes]
    return {
        "k": "live.end", "how": how, "phase": None if how == "ended" else outcome.current, "error": error,
        "processes": processes, "ports": ended.ports, "files": [Path(name).name for name in ended.files],
    }  # fmt: skip
