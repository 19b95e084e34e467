# SPDX-License-Identifier: Apache-2.0
"""What is reported of each failure of a run: what was found, what led to it, and the evidence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvconform.contract.events import SIZED, block_size_at
from kvconform.contract.requirement import Requirement
from kvconform.contract.trace import RANKED, Event
from kvconform.judge.backtrace import claimed, computed_in, excerpt, tell
from kvconform.judge.circumstances import absent
from kvconform.judge.describe import adds_to_itself, cause, describe, headline, hook_of, place
from kvconform.judge.identity import CLAIMED, another, apart, differing
from kvconform.judge.leases import lease_of
from kvconform.judge.ranks import reports_of
from kvconform.judge.records import AGAIN, FAILED_LOAD, Row, Verdict
from kvconform.judge.strays import loader


def narrate(
    rows: Sequence[Row], trace: Sequence[Event], requirements: Mapping[str, Requirement]
) -> None:
    """Fill in message, cause, place, hook and evidence of the rows that failed. Changes the rows.

    The new message begins with a sentence about the event, and one about where wrong bytes came
    from. What the row's message says about another run comes last; a message that only repeats the
    check is dropped.
    """
    for row in rows:
        if row.verdict is not Verdict.FAIL or row.event is None:
            if row.check == row.message:
                row.check = None
            continue
        event = trace[row.event]
        requirement = requirements[row.requirement]
        relate = requirement.relate
        again = requirement.count is not None and event["kind"] == "transfer.reported"
        row.cause = cause(event, again=again)
        row.place = place(event)
        row.hook = hook_of(event)
        row.absent = absent(trace, event)
        row.rank = event.get("rank") if event["kind"] in RANKED else None
        row.adds_to_itself = event["kind"] == "lookup" and adds_to_itself(event)
        if event["kind"] == "transfer.failed" and _named_before(trace, event):
            row.cause += (AGAIN,)
        parts: list[str | None] = []
        if relate is None or event["kind"] == relate.event:
            sentence = describe(event)
            story = tell(list(trace), event) if sentence is not None else None
            parts = [sentence, story.text if story is not None else None]
            row.side = story.side if story is not None else None
            if story is not None and story.outdated is not None:
                row.outdated = (story.req, story.outdated)
            if story is not None and story.suspected is not None:
                row.suspected = (story.req, story.suspected)
            if story is not None and story.failed:
                row.cause += (FAILED_LOAD,)
            outdated = row.outdated is not None
            row.headline = headline(
                event, row.requirement, row.side, outdated=outdated, again=again
            )
        if event["kind"] == "kv.wrong" or row.requirement == CLAIMED:
            _tell_apart(row, event, differing(trace, event), parts)
        if (owner := claimed(trace, event)) is not None:
            parts.append(owner[1])
        parts.append(computed_in(list(trace), event))
        if event["kind"] == "lookup.permitted" and _is_rounded(event, trace):
            parts.append(
                f"that is {event['prompts']}, the end of a prompt, rounded up to whole blocks"
            )
        if row.req is None and (loading := loader(trace, event)) is not None:
            row.req = loading
            parts.append(f"the only load at that time was that of {loading}")
        if requirement.respond is not None:
            parts.append(_stall_of(trace))
        awaited = requirement.respond.then.event if requirement.respond is not None else None
        if awaited == "transfer.reported" and event["kind"] == "alloc":
            row.headline = "an asynchronous load was never reported as finished"
            parts.append(_failure_of(trace, event))
        if awaited == "ranks.joined":
            parts.append(reports_of(trace, event))
        if awaited == "transfer.reported" or event["kind"] == "run.end":
            parts.append(lease_of(trace, event))
        if requirement.respond is not None or event["kind"] in ("run.end", "engine.stall"):
            parts += _dead_threads(trace)
        if row.message != row.check:
            parts.append(row.message)
        if any(parts):
            row.message = "; ".join(part for part in parts if part)
        else:
            row.check = None  # the message repeats it
        if row.requirement.startswith("hook."):
            row.evidence = evidence_of(event) or row.evidence


def _tell_apart(
    row: Row, event: Event, differs: Sequence[Mapping[str, str]], parts: list[str | None]
) -> None:
    """Fill in how the two requests of a row differ whose KV was mixed up. Changes the row.

    The first difference tells causes apart. The message about a lookup names it already.
    """
    if not differs:
        return
    row.differs = tuple(dict.fromkeys(each["kind"] for each in differs))
    row.cause += row.differs[:1]
    if event["kind"] == "lookup":
        row.headline = f"a hit on KV with {another(differs)}"
        return
    other = event["origin_req"]
    row.headline = f"loaded KV with {another(differs)}"
    parts.append(f"request {other} differs in {apart(differs, event['req'], other)}")


def _named_before(trace: Sequence[Event], report: Event) -> bool:
    """Return whether an earlier report had named all blocks that this one names beyond a load."""
    before = {
        block
        for e in trace
        if e["kind"] == "transfer.failed" and e["seq"] < report["seq"]
        if (e.get("on"), e["rank"]) == (report.get("on"), report["rank"])
        for block in e["blocks"]
    }
    return bool(report["outside_grant"]) and set(report["outside_grant"]) <= before


def _is_rounded(claim: Event, trace: Sequence[Event]) -> bool:
    """Return whether a claim ends where the block does in which the longest prompt ends."""
    size = block_size_at(trace, claim) if trace and trace[0]["kind"] in SIZED else None
    end, prompts = claim["end"], claim["prompts"]
    return bool(size and prompts is not None and prompts < end == -(-prompts // size) * size)


def _failure_of(trace: Sequence[Event], grant: Event) -> str | None:
    """Return in words that the load of a grant failed; None if it did not."""
    for e in trace:
        if e["kind"] == "transfer.failed" and e["transfer"] == grant["transfer"] is not None:
            return f"its load failed in step {e['step']}, which does not end it"
    return None


def _stall_of(trace: Sequence[Event]) -> str | None:
    """Return how long was waited for what did not come, in words; None if no run stalled."""
    stall = next((e for e in reversed(trace) if e["kind"] == "engine.stall"), None)
    return None if stall is None else describe(stall)


def _dead_threads(trace: Sequence[Event]) -> list[str | None]:
    """Return in words which thread of the connector died first, which may be why nothing came."""
    return [describe(e) for e in trace if e["kind"] == "thread.died"][:1]


def excerpts(rows: Sequence[Row], trace: Sequence[Event]) -> dict[str, list[Event]]:
    """Return the events that led to each failure, by requirement."""
    return {
        row.requirement: excerpt(list(trace), row.event, row.req)
        for row in rows
        if row.verdict is Verdict.FAIL and row.event is not None
    }


def evidence_of(event: Event) -> str | None:
    """Return where vLLM documents the hook of a `hook.returned` event, or None for other events."""
    if event["kind"] != "hook.returned":
        return None
    owner = (
        "SupportsHMA" if event["hook"] == "request_finished_all_groups" else "KVConnectorBase_V1"
    )
    return f"distributed/kv_transfer/kv_connector/v1/base.py: {owner}.{event['hook']}"
