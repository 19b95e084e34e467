# SPDX-License-Identifier: Apache-2.0
"""Says in words what the event that broke a requirement means: which bytes, which request, what the connector did."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

Event = dict[str, Any]


def spans(numbers: Iterable[int]) -> str:
    """`12-15, 20` from a list of integers."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in found[:6]) + (
        ", ..." if len(found) > 6 else ""
    )


def _positions(numbers: Iterable[int]) -> str:
    """`position 12 was`, `positions 12-15 were`."""
    some = list(numbers)
    return f"position {spans(some)} was" if len(some) == 1 else f"positions {spans(some)} were"


_VIA = {
    "external": "loaded by the connector",
    "local": "found in the local prefix cache",
    "own": "computed by the request itself",
}
_SLOTS = {
    "shared": "belong to the local prefix cache hit of the request, which other requests may share",
    "over_computed": "hold KV that the engine had already computed",
    "null_block": "belong to the null block",
    "not_transferred": "belong to a group that is not transferred",
    "unallocated": "belong to no request",
    "other_request": "belong to another request",
}


def _layer(e: Event) -> str:
    """The layer of an event, with its group where there are several."""
    return f"layer {e['layer']}" + (
        f" of KV cache group {e['group']}" if e.get("group") is not None else ""
    )


def _wrong(e: Event) -> str:
    last = e["pos"] + e["count"] - 1
    where = f"position {e['pos']}" if e["count"] == 1 else f"positions {e['pos']}-{last}"
    side = {"k": "K", "v": "V", "both": "K and V"}[e["kv"]]
    what = (
        "KV of another request" if e["found"] == "other_request" else e["found"].replace("_", " ")
    )
    return f"{side} of {where} of request {e['req']} ({_layer(e)}, block {e['block']}, {_VIA[e['via']]}) hold {what}: {e['origin']}"


def _changed(e: Event) -> str:
    bad = [f"slots {spans(e[kind])} {text}" for kind, text in _SLOTS.items() if e.get(kind)]
    return f"{e['after_hook']} wrote where it must not ({_layer(e)}, for {', '.join(e['req']) or 'nobody'}): {'; '.join(bad)}"


def _due(e: Event) -> str:
    groups = [
        f"KV cache group {number} ({size} tokens per block) lacks {spans(positions)} in blocks {spans(blocks)} of its table {table}"
        for number, size, positions, table in e.get("by_group", ())
        if (blocks := {table[position // size] for position in positions})
    ]
    return (
        f"of the {e['granted']} tokens granted to {e['req']} from position {e['local']}, {_positions(e['missing'])} never written"
        f" and no failure was reported" + "".join(f"; {each}" for each in groups)
        if e["missing"]
        else f"of {e['req']}, {_positions(e['wrong'])} loaded with something else than was computed; copies read what the compute stream"
        f" wrote only afterwards: {'; '.join(e['early_reads'])}"
        if e["wrong"] and e.get("early_reads")
        else f"the load of {e['req']} was due"
    )


_NOTES = {
    "sync": "made the host wait for the device",
    "read_early": "read device memory too early",
    "freed_device": "gave device memory back while work of another stream still uses it",
    "freed_pinned": "gave host memory back while a queued copy still uses it",
}


def _note(e: Event) -> str:
    where = f" of {e['layer']}" if e["layer"] else ""
    return f"{e['hook']}{where} {_NOTES.get(e['what'], e['what'])}: {e['text']}"


def _lookup(e: Event) -> str:
    tokens, local = e["tokens"], e["local"]
    whole = isinstance(tokens, int) and not isinstance(tokens, bool)
    answer = (
        "None"
        if tokens is None
        else f"{tokens} tokens"
        if whole
        else f"{tokens!r}, a {type(tokens).__name__}"
    )
    asked = f"asked for {e['req']} ({e['known']} tokens, {local} of them local), the connector answered {answer}"
    asked += " (asynchronous)" if tokens is not None and e["is_async"] else ""
    if e.get("computed_before_reset"):
        return f"{asked}; of what it promises, {e['computed_before_reset']} tokens are from before a reset of its cache"
    if whole and tokens > 0 and not e["is_async"] and local + tokens >= e["known"]:
        asked += (
            ", which leaves nothing to compute"
            if local + tokens == e["known"]
            else ", more than the request has"
        )
    if whole and local + tokens <= min(e["ever_computed"], e["ever_plain"]):
        return asked
    return f"{asked}; {e['ever_computed']} tokens of this request were ever computed under its identity, {e['ever_plain']} under any"


def _hook(e: Event) -> str:
    layer = f" for {e['layer']}" if e["layer"] else ""
    if e["error"] is not None:
        return f"{e['hook']}{layer} raised {e['error_text']}"
    return f"{e['hook']}{layer} returned {e['value']}"


def _promise(e: Event) -> str:
    return f"{e['req']} repeats {e['of']}: {e['promised']} tokens should have come back, {e['reloadable']} did"


def _alloc(e: Event) -> str:
    tables = e.get("tables", ())
    return (
        f"{e['req']} was granted {e['external']} external tokens after {e['local']} local ones, in blocks "
        + (
            f"{e['blocks']}"
            if len(tables) < 2
            else "; ".join(f"{table[2]} of KV cache group {n}" for n, table in enumerate(tables))
        )
    )


def _queries(e: Event) -> str:
    skipping = f"; {', '.join(e['skipping'])} read no cache" if e["skipping"] else ""
    return (
        f"the step's statistics say {e['requests']} lookups of {e['tokens']} tokens, {e['hits']} of them found; admitted were"
        f" {e['due_requests']} of {e['due_tokens']}, with {e['due_hits']} granted{skipping}"
    )


def _end(e: Event) -> str:
    parts = []
    if e["unfinished"]:
        parts.append(f"requests {', '.join(e['unfinished'])} are still there")
    if e["free_blocks"] != e["free_blocks_at_start"]:
        parts.append(
            f"{e['free_blocks']} blocks are free, {e['free_blocks_at_start']} were at the start"
        )
    if e["request_objects_alive"]:
        parts.append(
            f"Request objects of {', '.join(e['request_objects_alive'])} are still referenced"
        )
    if e["threads"]:
        parts.append(f"{e['threads']} threads are still running after the shutdown")
    return "at the end of the run " + ("; ".join(parts) or "nothing was left over")


def _reported(e: Event) -> str:
    kind = "finished_recving" if e["direction"] == "recv" else "finished_sending"
    text = f"{kind} named {e['req']}, which the engine was {'' if e['held'] else 'not '}waiting for"
    if not e.get("second"):
        return text
    other = "send" if e["direction"] == "recv" else "load"
    return f"{text}; its {other}, which the engine waited for at the same time, had been reported, and that was enough"


def _failed(e: Event) -> str:
    return f"blocks {spans(e['blocks'])} were reported as failed, of which {spans(e['outside_grant']) or 'none'} were in no load"


def _crash(e: Event) -> str:
    return e["error"] + (f" (in {e['hook']})" if e["hook"] else "")


def _built(e: Event) -> str:
    what = "None" if e["none"] else f"metadata (pickling: {e['pickle_error'] or 'fine'})"
    return f"build_connector_meta returned {what}" + (
        "; it changed the SchedulerOutput" if e["output_mutated"] else ""
    )


def _bound(e: Event) -> str:
    return f"the metadata that reached the worker is{'' if e['same_as_built'] else ' not'} what build_connector_meta returned"


def _plan(e: Event) -> str:
    return (
        f"the connector plans to {e['op']} positions {e['start']}-{e['end'] - 1} of {e['req']} ({e['timing'].replace('_', ' ')})"
        f" with {e['computed']} tokens computed, {e['scheduled']} scheduled, {e['placeholders']} placeholders and {e['known']} known"
    )


def _events_lookup(e: Event) -> str:
    text = f"{e['req']} got {e['got']} tokens ({e['local']} of them local), {e['announced']} were announced by KV events"
    text += f"; announced and not there: blocks {spans(e['missing'])}" if e["missing"] else ""
    return text + (
        f"; there and never announced: blocks {spans(e['untold'])}" if e["untold"] else ""
    )


def _kv_event(e: Event) -> str:
    what = f"a KV event says {e['op']}" + (f": blocks {spans(e['keys'])}" if e["keys"] else "")
    return (
        what
        + (f"; {e['problem']}" if e["problem"] else "")
        + ("; it was published before" if e["repeated"] else "")
    )


_STATS = {
    "merge": "aggregate",
    "encode": "to_dict",
    "rebuild": "building them again",
    "observe": "the metrics",
}


def _stats(e: Event) -> str:
    problems = [f"{what} raised {e[name]}" for name, what in _STATS.items() if e[name]]
    problems += ["they are the object of the last time"] if e["kept"] else []
    return f"the statistics of the {e['half']} half: " + (
        "; ".join(problems) or ("empty" if e["empty"] else "fine")
    )


def _pair_lookup(e: Event) -> str:
    source = f", handed over by {e['of']}" if e["of"] else ""
    source += f" (a reference that is {e['stale']})" if e["stale"] else ""
    answer = f"the connector answered {e['tokens']} tokens after {e['local']} local ones"
    return f"engine {e['on']} ({e['role']}) asked for {e['req']}{source}: {answer}"


def _pair_params(e: Event) -> str:
    what = (
        "nothing"
        if e["none"]
        else "parameters" + (f" that JSON turns into {e['json']}" if e["json"] else "")
    )
    return f"{e['of']} ended with {what}, handed to {e['req']} on engine {e['on']}"


def _pair_request(e: Event) -> str:
    fate = f"loaded {e['loaded']} of {e['promised']} promised tokens"
    fate = "loaded wrong bytes" if e["wrong"] else "failed to load" if e["failed"] else fate
    late = ", after they had been released" if e["gone"] else ""
    released = "released" if e["released"] else "not released"
    return f"{e['req']} on engine {e['on']} {fate}{late}; the blocks of {e['of']} were {released}"


def _joined(e: Event) -> str:
    done = f"sent: {e['sent']}, of all: {e['all_sent']}; received: {e['received']}, of all: {e['all_received']}"
    lost = f"blocks not loaded: {e['invalid']}, by any: {e['errors']}; failed: {e['failed']}, by all: {e['failures']}"
    return f"{e['expected']} ranks' reports of each were waited for; {done}; {lost}"


_TEXT: dict[str, Callable[[Event], str]] = {
    "kv.wrong": _wrong,
    "kv.changed": _changed,
    "load.due": _due,
    "device.note": _note,
    "queries": _queries,
    "lookup": _lookup,
    "hook.returned": _hook,
    "profile.expectation": _promise,
    "alloc": _alloc,
    "run.end": _end,
    "transfer.reported": _reported,
    "transfer.failed": _failed,
    "meta.built": _built,
    "meta.bound": _bound,
    "plan": _plan,
    "engine.crash": _crash,
    "hold": lambda e: (
        f"the engine has been holding {e['req']} ({e['direction']}) since {e['cause']}"
    ),
    "case.expectation": lambda e: f"the case expected {e['what']}: {e['detail']}",
    "engine.stall": lambda e: f"no progress; waiting: {', '.join(e['waiting_on']) or 'nobody'}",
    "engine.lifecycle": lambda e: f"{e['op']} raised {e['error']}" if e["error"] else e["op"],
    "cache.reset": lambda e: (
        f"reset_cache {e['phase']}" + (f" {e['returned']}" if e["phase"] == "returned" else "")
    ),
    "api": lambda e: f"{e['item']}: {e['detail']}",
    "engine.api": lambda e: f"{e['item']}: {e['detail'] or 'as it should be'}",
    "events.lookup": _events_lookup,
    "kv.event": _kv_event,
    "stats.taken": _stats,
    "handshake": lambda e: (
        f"the handshake metadata {'is None' if e['none'] else 'cannot be pickled: ' + (e['detail'] or '')}"
    ),
    "pair.engine": lambda e: (
        f"engine {e['on']} is a {e['role']}, its connector's requires_kv_delivery is {e['delivery']}"
    ),
    "pair.lookup": _pair_lookup,
    "pair.params": _pair_params,
    "pair.request": _pair_request,
    "engine.id": lambda e: (
        f"the {e['half']} half of rank {e['rank']} has {'the' if e['kept'] else 'another'} engine id that was given"
    ),
    "ranks.joined": _joined,
    "report.landed": lambda e: (
        f"changed after they were reported: {', '.join(e['changed']) or 'nothing'}"
    ),
    "state.offered": lambda e: (
        f"the state of {e['req']} after {e['tokens']} tokens is offered in block {e['block']} of group {e['group']}"
        f"{'' if e['in_table'] else ', which is not in its table'}{', again' if e['again'] else ''}"
    ),
    "kv.registered": lambda e: (
        f"layout {e['layout']} (required: {e['required']}, possible: {e['possible'] or 'any'}); the first tensor has shape {e['shape']} and"
        f" strides {e['strides']}, by vLLM's own code {e['own_shape']} and {e['own_strides']}"
    ),
    "hook.called": lambda e: (
        f"when {e['hook']} of the {e['half']} half was called, {'a' if e['bound'] else 'no'} step's metadata was bound"
        f" (has_connector_metadata() was {e['bound']})"
        if e["bound"] is not None
        else f"{e['hook']} of the {e['half']} half was called"
    ),
    "sample": lambda e: f"token {e['index']} of {e['req']}'s output is {e['token']}",
}


def describe(event: Event) -> str | None:
    """One sentence about an event, or None if its kind says enough by itself."""
    text = _TEXT.get(event["kind"])
    return text(event) if text is not None else None
