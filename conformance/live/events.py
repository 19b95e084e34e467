# SPDX-License-Identifier: Apache-2.0
"""Compares what a run with a connector answered with what one without answered: events `live.tokens`.

Greedy tokens are equal unless KV was wrong, or rounding turned the scale: where prompts are computed in other pieces, sums are made in
another order, and where two logits are nearly equal the other token may win. Then the run without the connector says so: its second
choice was the other's first, and hardly less likely. What comes after such a place is not compared.


What the parent of a live run adds to its trace: phases, tokens, what happened at all, and how it ended.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from kvconform.contract.case import Variant
from kvconform.contract.events import run_start
from kvconform.contract.scenario import Scenario, Start
from kvconform.live.engine import Made
from kvconform.live.job import Answer, Outcome
from kvconform.live.process import Ended

AMBIGUOUS = 0.002
"""Two tokens whose log probabilities differ by less may change places. Between runs without a connector that differ in preemptions and
drafts, rounding of float32 moved them by less than 0.00001."""

Event = dict[str, Any]


def compare(plain: Mapping[str, Answer], outcome: Outcome) -> list[Event]:
    """One event per request that the run with the connector has answered."""
    found = []
    for phase in outcome.phases:
        found += [
            {"kind": "live.tokens", "phase": phase.name, **_one(plain[a.id], a)}
            for a in phase.answers
            if a.id in plain
        ]
    return found


def _one(plain: Answer, answer: Answer) -> Event:
    """The fields of one event."""
    aborted = answer.why == "abort" or plain.why == "abort"
    length = min(len(plain.tokens), len(answer.tokens))
    at = next((i for i in range(length) if plain.tokens[i] != answer.tokens[i]), None)
    if at is None and not aborted and len(plain.tokens) != len(answer.tokens):
        at = length
    end = length if at is None else at
    drift = [
        abs(plain.logprobs[i] - answer.logprobs[i]) for i in range(end) if i < len(answer.logprobs)
    ]
    worst = max(range(len(drift)), key=drift.__getitem__) if drift else None
    told = at is not None and at < length
    ambiguous = (
        at is not None
        and told
        and plain.gaps[at] <= AMBIGUOUS
        and plain.seconds[at] == answer.tokens[at]
    )
    return {
        "req": answer.id,
        "prompt": len(answer.prompt),
        "count": len(answer.tokens),
        "plain": len(plain.tokens),
        "same": at is None,
        "ambiguous": ambiguous,
        "aborted": aborted,
        "at": at,
        "token": answer.tokens[at] if at is not None and told else None,
        "instead": plain.tokens[at] if at is not None and told else None,
        "gap": plain.gaps[at] if at is not None and told else None,
        "drift": round(drift[worst], 6) if worst is not None else 0.0,
        "drift_at": worst,
    }


def describe(event: Event) -> str | None:
    """In words, what a `live.*` event that broke a requirement says; None for another."""
    if event["kind"] == "live.tokens" and not event["same"]:
        where = (
            f"request {event['req']} (phase {event['phase']}, prompt of {event['prompt']} tokens)"
        )
        if event["token"] is None:
            return f"{where} got {event['count']} tokens, without the connector {event['plain']}"
        gap = f"its second choice there was less likely by a factor of {2.718281828 ** event['gap']:.3g}"
        return f"{where}: token {event['at']} of the answer is {event['token']}, without the connector {event['instead']} ({gap})"
    if event["kind"] == "live.tokens":
        where = (
            f"request {event['req']} (phase {event['phase']}, prompt of {event['prompt']} tokens)"
        )
        return (
            f"{where}: the log probability of token {event['drift_at']} of the answer, the same token as without the connector, "
            f"is off by {event['drift']:.3g}"
        )
    if event["kind"] == "live.end" and event["how"] != "ended":
        after = f": {event['error']}" if event["error"] else ""
        what = {
            "crash": "vLLM ended with an error",
            "timeout": "vLLM did not go on",
            "killed": "vLLM's process died",
        }[event["how"]]
        return f"{what} in phase {event['phase'] or 'start'}{after}"
    if event["kind"] == "live.end":
        left = [
            f"{name} {', '.join(map(str, event[name]))}"
            for name in ("processes", "ports", "files")
            if event[name]
        ]
        return f"left behind: {'; '.join(left)}"
    if event["kind"] == "live.load":
        bad = [
            f"{event[name]} {words}"
            for name, words in (("wrong", "hold other bytes"), ("missing", "were not written"))
            if event[name]
        ]
        return f"of {event['blocks']} blocks loaded for {event['req']} ({event['granted']} tokens) {', '.join(bad) or 'none is wrong'}"
    if event["kind"] == "live.phase":
        return f"before phase {event['phase']}, when all requests had long finished, vLLM could not empty its prefix cache: blocks are held"
    return None


def own_events(
    scenario: Scenario,
    outcome: Outcome,
    ended: Ended,
    plain: Mapping[str, Answer],
    failed_loads: int,
    hits: Collection[str],
) -> list[Event]:
    """The events, without `seq` and `step`. `hits`: the phases in which loads are due."""
    found: list[Event] = []
    for phase in outcome.phases:
        counts = phase.counts
        found.append(
            {
                "kind": "live.phase",
                "phase": phase.name,
                "answers": len(phase.answers),
                "reset": phase.reset_done,
                "due": phase.name in hits,
                "asked": counts.external_queries,
                "loaded": counts.external_hits,
                "local": counts.local_hits,
                "preempted": counts.preemptions,
                "drafted": counts.drafts,
                "accepted": counts.accepted,
            }
        )
    found += compare(plain, outcome)
    totals = happened(outcome, failed_loads)
    found += [
        {"kind": "live.happened", "what": what, "count": count, "due": what in scenario.due}
        for what, count in totals.items()
    ]
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
    return [
        words[what]
        for what, count in happened(outcome, failed_loads).items()
        if what in scenario.due and not count
    ]


def thin(scenario: Scenario, outcome: Outcome, hits: Collection[str]) -> list[str]:
    """The phases that were to load something and did not, where others did: the run says nothing about these."""
    if "loads" not in scenario.due:
        return []
    found = [
        phase.name
        for phase in outcome.phases
        if phase.name in hits and not phase.counts.external_hits
    ]
    return [f"nothing was loaded in phase {name}" for name in found]


OWN = "vLLM's own process, which a thread keeps from ending"


def end_event(outcome: Outcome, ended: Ended) -> Event:
    """How the engine and its processes ended. A process that had shut vLLM down and did not end counts as left behind; one that some
    library took down after everything was said is nobody's loss.
    """
    stays = outcome.ended and ended.how == "timeout"
    if outcome.ended:
        how = "ended"
    elif outcome.error:
        how = "timeout" if outcome.error.get("stalled") else "crash"
    else:
        how = "timeout" if ended.how == "timeout" else "killed"
    error = (
        outcome.error["text"]
        if outcome.error
        else None
        if how == "ended"
        else f"{ended.how} {ended.status or ''}".strip()
    )
    processes = [*([OWN] if stays else []), *ended.processes]
    return {
        "kind": "live.end",
        "how": how,
        "phase": None if how == "ended" else outcome.current,
        "error": error,
        "processes": processes,
        "ports": ended.ports,
        "files": [Path(name).name for name in ended.files],
    }


def _bare(variant: Variant, start: dict[str, Any], made: Made) -> list[dict[str, Any]]:
    """A trace of a run that the probe saw nothing of."""
    from kvconform.compat.installed import check_vllm

    engine: Start = variant.case.start  # type: ignore[attr-defined]
    fields = run_start(
        **start,
        scheduling=variant.scheduling,
        runner=variant.runner,
        depth=variant.depth,
        vllm=check_vllm()[0],
        block_size=variant.block_size,
        num_blocks=engine.blocks,
        spec_tokens=engine.spec_tokens,
    )
    return [{"kind": "run.start", "seq": 0, "step": 0, **fields}]
