# SPDX-License-Identifier: Apache-2.0
"""Compares what a run with a connector answered with what one without answered: events `live.tokens`.

Greedy tokens are equal unless KV was wrong, or rounding turned the scale: where prompts are computed in other pieces, sums are made in
another order, and where two logits are nearly equal the other token may win. Then the run without the connector says so: its second
choice was the other's first, and hardly less likely. What comes after such a place is not compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvconform.live.job import Answer, Outcome

AMBIGUOUS = 0.002
"""Two tokens whose log probabilities differ by less may change places. Between runs without a connector that differ in preemptions and
drafts, rounding of float32 moved them by less than 0.00001."""

Event = dict[str, Any]


def compare(plain: Mapping[str, Answer], outcome: Outcome) -> list[Event]:
    """One event per request that the run with the connector has answered."""
    found = []
    for phase in outcome.phases:
        found += [{"k": "live.tokens", "phase": phase.name, **_one(plain[a.id], a)} for a in phase.answers if a.id in plain]
    return found


def _one(plain: Answer, answer: Answer) -> Event:
    """The fields of one event."""
    aborted = answer.why == "abort" or plain.why == "abort"
    length = min(len(plain.tokens), len(answer.tokens))
    at = next((i for i in range(length) if plain.tokens[i] != answer.tokens[i]), None)
    if at is None and not aborted and len(plain.tokens) != len(answer.tokens):
        at = length
    end = length if at is None else at
    drift = [abs(plain.logprobs[i] - answer.logprobs[i]) for i in range(end) if i < len(answer.logprobs)]
    worst = max(range(len(drift)), key=drift.__getitem__) if drift else None
    told = at is not None and at < length
    ambiguous = at is not None and told and plain.gaps[at] <= AMBIGUOUS and plain.seconds[at] == answer.tokens[at]
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
    if event["k"] == "live.tokens" and not event["same"]:
        where = f"request {event['req']} (phase {event['phase']}, prompt of {event['prompt']} tokens)"
        if event["token"] is None:
            return f"{where} got {event['count']} tokens, without the connector {event['plain']}"
        gap = f"its second choice there was less likely by a factor of {2.718281828 ** event['gap']:.3g}"
        return f"{where}: token {event['at']} of the answer is {event['token']}, without the connector {event['instead']} ({gap})"
    if event["k"] == "live.tokens":
        where = f"request {event['req']} (phase {event['phase']}, prompt of {event['prompt']} tokens)"
        return (
            f"{where}: the log probability of token {event['drift_at']} of the answer, the same token as without the connector, "
            f"is off by {event['drift']:.3g}"
        )
    if event["k"] == "live.end" and event["how"] != "ended":
        after = f": {event['error']}" if event["error"] else ""
        what = {"crash": "vLLM ended with an error", "timeout": "vLLM did not go on", "killed": "vLLM's process died"}[event["how"]]
        return f"{what} in phase {event['phase'] or 'start'}{after}"
    if event["k"] == "live.end":
        left = [f"{name} {', '.join(map(str, event[name]))}" for name in ("processes", "ports", "files") if event[name]]
        return f"left behind: {'; '.join(left)}"
    if event["k"] == "live.load":
        bad = [f"{event[name]} {words}" for name, words in (("wrong", "hold other bytes"), ("missing", "were not written")) if event[name]]
        return f"of {event['blocks']} blocks loaded for {event['req']} ({event['granted']} tokens) {', '.join(bad) or 'none is wrong'}"
    if event["k"] == "live.phase":
        return f"before phase {event['phase']}, when all requests had long finished, vLLM could not empty its prefix cache: blocks are held"
    return None
