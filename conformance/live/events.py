# SPDX-License-Identifier: Apache-2.0
"""The `live.*` events that the parent of a live run adds to its trace.

They are the phases, the comparison of tokens with the baseline run, what happened how often, and
how the run ended.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from kvconform.compat.installed import check_vllm
from kvconform.contract.case import Variant
from kvconform.contract.events import run_start
from kvconform.contract.scenario import Scenario, Start
from kvconform.contract.trace import Event
from kvconform.live.engine import Made
from kvconform.live.job import Answer, Outcome, dtype
from kvconform.live.process import Ended

ROUNDING = {"float32": 0.002, "float16": 0.02}
"""What rounding may do to a log probability, by the model's number format.

Two tokens whose log probabilities differ by no more may change places. Between baseline runs that
differ in preemptions and drafts, log probabilities moved by less than 0.00001 on a CPU. On an H200
in 16 bits, they moved by 0.0076 where a correct connector loaded what was computed in the baseline.
"""
OF_A_VALUE = 10
"""So many times less may rounding do to a value of an embedding, a vector of length 1."""


def compare(
    plain: Mapping[str, Answer], outcome: Outcome, altered: Collection[str] = ()
) -> list[Event]:
    """Return one event per request that both runs have answered: live.tokens or live.embedding.

    `altered`: requests of which the engine got something else than was sent; they are left out.

    Greedy tokens are equal unless KV was wrong or rounding decided. A run that computes prompts in
    other pieces adds in another order; where two logits are nearly equal, the other token may win.
    The baseline run shows that: its second choice is the token of the other run, and is hardly less
    likely. Tokens after the first difference are not compared.
    """
    return [
        {"phase": phase.name, "req": a.id, "prompt": len(a.prompt)}
        | (_vector(plain[a.id], a) if a.embedding else _tokens(plain[a.id], a))
        for phase in outcome.phases
        for a in phase.answers
        if a.id in plain and a.id not in altered
    ]


def _vector(plain: Answer, answer: Answer) -> Event:
    """Return the fields of a live.embedding event, but for those that all answers have."""
    pairs = zip(plain.embedding, answer.embedding, strict=True)
    off = [abs(one - other) for one, other in pairs]
    worst = max(range(len(off)), key=off.__getitem__)
    return {
        "kind": "live.embedding",
        "count": len(off),
        "off": round(off[worst], 6),
        "at": worst,
        "rounding": ROUNDING[dtype()] / OF_A_VALUE,
    }


def _tokens(plain: Answer, answer: Answer) -> Event:
    """Return the fields of a live.tokens event, but for those that all answers have."""
    aborted = answer.why == "abort" or plain.why == "abort"
    length = min(len(plain.tokens), len(answer.tokens))
    at = next((i for i in range(length) if plain.tokens[i] != answer.tokens[i]), None)
    token = instead = gap = None
    ambiguous = False
    most = ROUNDING[dtype()]
    if at is not None:
        token = answer.tokens[at]
        instead = plain.tokens[at]
        gap = plain.gaps[at]
        ambiguous = gap <= most and plain.seconds[at] == token
    elif not aborted and len(plain.tokens) != len(answer.tokens):
        at = length  # one of the two answers stops here
    end = length if at is None else at
    drift = [
        abs(plain.logprobs[i] - answer.logprobs[i]) for i in range(end) if i < len(answer.logprobs)
    ]
    worst = max(range(len(drift)), key=drift.__getitem__) if drift else None
    return {
        "kind": "live.tokens",
        "count": len(answer.tokens),
        "plain": len(plain.tokens),
        "same": at is None,
        "ambiguous": ambiguous,
        "aborted": aborted,
        "at": at,
        "token": token,
        "instead": instead,
        "gap": gap,
        "drift": round(drift[worst], 6) if worst is not None else 0.0,
        "drift_at": worst,
        "rounding": most,
    }


def own_events(
    scenario: Scenario,
    outcome: Outcome,
    ended: Ended,
    plain: Mapping[str, Answer],
    failed_loads: int,
    hits: Collection[str],
    altered: Collection[str] = (),
) -> list[Event]:
    """Return all of these events, without `seq` and `step`.

    `plain`: the answers of the baseline run. `hits`: the phases in which loads are due. `altered`:
    see `compare`.
    """
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
                "restarted": phase.restarted,
                "asked": counts.external_queries,
                "loaded": counts.external_hits,
                "local": counts.local_hits,
                "preempted": counts.preemptions,
                "drafted": counts.drafts,
                "accepted": counts.accepted,
            }
        )
    found += compare(plain, outcome, altered)
    totals = happened(outcome, failed_loads)
    found += [
        {"kind": "live.happened", "what": what, "count": count, "due": what in scenario.due}
        for what, count in totals.items()
    ]
    return [*found, end_event(outcome, ended)]


def happened(outcome: Outcome, failed_loads: int) -> dict[str, int]:
    """Return how often each thing that can be due happened.

    The counts are vLLM's own counters, except for failed loads, for which vLLM has no metric.
    """
    counts = [phase.counts for phase in outcome.phases]
    return {
        "loads": sum(c.external_hits for c in counts),
        "preemptions": sum(c.preemptions for c in counts),
        "drafts": sum(c.accepted for c in counts),
        "failed_loads": failed_loads,
    }


def missing(scenario: Scenario, outcome: Outcome, failed_loads: int) -> list[str]:
    """Return, as messages, what was due and did not happen."""
    words = {
        "loads": "no token was loaded from the connector (vllm:external_prefix_cache_hits)",
        "preemptions": "no request was preempted (vllm:num_preemptions)",
        "drafts": "no draft was accepted (vllm:spec_decode_num_accepted_tokens)",
        "failed_loads": "no load failed",
    }
    found = [
        words[what]
        for what, count in happened(outcome, failed_loads).items()
        if what in scenario.due and not count
    ]
    late = [phase.name for phase in outcome.phases if phase.missed]
    return found + [f"phase {name} ended before its caches were reset" for name in late]


def thin(scenario: Scenario, outcome: Outcome, hits: Collection[str]) -> list[str]:
    """Return a message for every phase in `hits` in which nothing was loaded.

    The run says nothing about these phases. Empty if loads are not due in the scenario.
    """
    if "loads" not in scenario.due:
        return []
    found = [
        phase.name
        for phase in outcome.phases
        if phase.name in hits and not phase.counts.external_hits
    ]
    return [f"nothing was loaded in phase {name}" for name in found]


OWN = "vLLM's own process, which a thread keeps from ending"
"""Name, among the processes left behind, of the engine's process if it did not exit."""


def end_event(outcome: Outcome, ended: Ended) -> Event:
    """Return the event about how the engine and its processes ended.

    A process that shut vLLM down and did not exit counts as left behind. A process that a library
    crashed after it had written its last line ended normally.
    """
    stays = outcome.ended and ended.how == "timeout"
    error = None
    if outcome.ended:
        how = "ended"
    elif outcome.error:
        how = "timeout" if outcome.error.get("stalled") else "crash"
    else:
        how = "timeout" if ended.how == "timeout" else "killed"
    if outcome.error:
        error = outcome.error["text"]
    elif how != "ended":
        error = f"{ended.how} {ended.status or ''}".strip()
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


def bare(variant: Variant, start: dict[str, Any], made: Made) -> list[Event]:
    """Return the trace of a run from which the probe recorded nothing: its run.start."""
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
