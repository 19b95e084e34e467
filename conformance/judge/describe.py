# SPDX-License-Identifier: Apache-2.0
"""An event that broke a requirement, in words, and the kind of fault that it stands for.

`describe` returns a sentence for people. `cause` identifies the fault for programs: failures with
the same cause are shown once, and are compared between reports. It is made of the event's fields,
so a sentence can be reworded without changing which failures belong together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from kvconform.contract.events import ARGUMENTS, OF_ANOTHER_RANK, altered_in_entry
from kvconform.contract.trace import Event
from kvconform.errors import Place
from kvconform.judge.foreign import TRUTH, UNHEARD
from kvconform.judge.identity import CLAIMED, apart
from kvconform.words import many

CALLS_GET_FINISHED = ("get_transfer_results",)
"""Hooks of KVConnectorBase_V1 that call get_finished."""


def spans(numbers: Iterable[int]) -> str:
    """Return integers as ranges: `12-15, 20`. Only six ranges are written out."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    parts = [str(first) if first == last else f"{first}-{last}" for first, last in found[:6]]
    if len(found) > 6:
        parts.append("...")
    return ", ".join(parts)


def _positions(numbers: Iterable[int]) -> str:
    """Return `position 12 was`, or `positions 12-15 were`."""
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
    """Return the layer of an event, with its group and its rank if there are several."""
    group = f" of KV cache group {e['group']}" if e.get("group") is not None else ""
    return f"layer {e['layer']}{group}{_rank(e)}"


def _rank(e: Event) -> str:
    return f" on rank {e['rank']}" if e.get("rank") is not None else ""


_SPELT_OUT = ("other_request", "other_tokens", "other_identity", "other_prefix", "old_position")


def _wrong(e: Event) -> str:
    last = e["pos"] + e["count"] - 1
    where = f"position {e['pos']}" if e["count"] == 1 else f"positions {e['pos']}-{last}"
    side = {"k": "K", "v": "V", "both": "K and V"}[e["kv"]]
    origin = _VIA[e["via"]] if e["block"] or e["transfer"] else "the null block"
    memory = f"{_layer(e)}, block {e['block']}, {origin}"
    found = e["found"].replace("_", " ")
    if e["found"] in _SPELT_OUT:
        found = _FOUND[e["found"]]
    text = f"{side} of {where} of request {e['req']} ({memory}) hold {found}: {e['origin']}"
    return f"after damage to what was stored, {text}" if e.get("damaged") else text


def _changed(e: Event) -> str:
    bad = [f"slots {spans(e[kind])} {text}" for kind, text in _SLOTS.items() if e.get(kind)]
    who = ", ".join(e["req"]) or "no request"
    return f"{e['after_hook']} wrote where it must not ({_layer(e)}, for {who}): {'; '.join(bad)}"


def _due(e: Event) -> str:
    if e["missing"] and e["reported_failed"]:
        return (
            f"of the {many(e['granted'], 'token')} granted to {e['req']}"
            f" from position {e['local']}, {_positions(e['missing'])} reported as failed"
        )
    if e["missing"]:
        how = "never written"
        if e.get("partial"):
            how = "written only in part" if e["partial"] == e["missing"] else f"{how} completely"
        if e.get("layers"):
            how += f" in {'layer' if len(e['layers']) == 1 else 'layers'} {spans(e['layers'])}"
        return (
            f"of the {many(e['granted'], 'token')} granted to {e['req']}"
            f" from position {e['local']}, {_positions(e['missing'])} {how}{_rank(e)}"
            f" and {_said_of(e)}" + "".join(f"; {lack}" for lack in _lacking(e))
        )
    if e["wrong"] and e.get("early_reads"):
        return (
            f"of {e['req']}, {_positions(e['wrong'])} loaded with other KV than was computed;"
            " copies read what the compute stream wrote only afterwards:"
            f" {'; '.join(e['early_reads'])}"
        )
    return f"the load of {e['req']} was due"


def _said_of(e: Event) -> str:
    """Return what was reported of a load that lacks something, in words."""
    if e.get("reported"):
        return f"only {_positions(e['reported'])} reported as failed"
    return "no failure was reported"


def _lacking(e: Event) -> list[str]:
    """Return the blocks of each KV cache group that a load has not filled, in words."""
    lacking = []
    for number, size, positions, table in e.get("by_group", ()):
        blocks = {table[position // size] for position in positions}
        if blocks:
            lacking.append(
                f"KV cache group {number} ({size} tokens per block) lacks {spans(positions)}"
                f" in blocks {spans(blocks)} of its table {table}"
            )
    return lacking


_NOTES = {
    "sync": "made the host wait for the device",
    "read_early": "read device memory too early",
    "freed_device": "gave device memory back while work of another stream still uses it",
    "freed_pinned": "gave host memory back while a queued copy still uses it",
}


def _note(e: Event) -> str:
    where = f" of {e['layer']}" if e["layer"] else ""
    return f"{e['hook']}{where} {_NOTES.get(e['what'], e['what'])}: {e['text']}"


def _ahead(e: Event) -> str:
    return (
        f"{e['layer']} waited for the loads of {', '.join(e['ahead'])}, which the model reads later"
    )


def _layer_saved(e: Event) -> str:
    waited = ", and made the compute stream wait for all copies that it queued"
    return f"save_kv_layer of {e['layer']} was called{waited if e['joined'] else ''}"


def _lookup(e: Event) -> str:
    tokens = e["tokens"]
    local = e["local"]
    whole = isinstance(tokens, int) and not isinstance(tokens, bool)
    if tokens is None:
        answer = "None"
    elif whole:
        answer = many(tokens, "token")
    else:
        answer = f"{tokens!r}, a {type(tokens).__name__}"
    text = f"asked for {e['req']} ({many(e['known'], 'token')}, {local} of them local),"
    text += f" the connector answered {answer}"
    if tokens is not None and e["is_async"]:
        text += " (asynchronous)"
    if e.get("computed_before_reset"):
        return (
            f"{text}; of what it promises, {e['computed_before_reset']} tokens are from before"
            " a reset of its cache"
        )
    if whole and tokens > 0 and not e["is_async"]:
        if local + tokens == e["known"]:
            text += ", which leaves nothing to compute"
        elif local + tokens > e["known"]:
            text += ", more than the request has"
    if whole and local + tokens <= min(e["ever_computed"], e["ever_plain"]):
        return text
    if _unheard(e):
        return f"{text} though nothing of this request had been computed in this run"
    return (
        f"{text}; {e['ever_computed']} tokens of this request were ever computed under its"
        f" identity, {e['ever_plain']} under any"
    )


def _permitted(e: Event) -> str:
    bounds = [f"requests that permit to store it computed {many(e['allowed'], 'token')} of it"]
    if e["prompts"] is not None:
        bounds.append(f"{e['prompts']} were in a prompt")
    return (
        f"asked for {e['req']}, the connector claimed KV up to token {e['end']};"
        f" {', '.join(bounds)}"
    )


def _sources(e: Event) -> str:
    return (
        f"of {many(e['granted'], 'token')} granted to {e['req']}, {e['needed']} of them to be"
        f" loaded, {e['named']} were counted under host, p2p or disk"
    )


def _refused(e: Event) -> str:
    said = "without a sentence" if e["sentence"] is None else f"with: {e['sentence']}"
    return f"the connector does not start with {e['asked']}: it ended {said}"


def _published(e: Event) -> str:
    return (
        f"the output of a step published the blocks of {e['req']} up to token {e['tokens']},"
        f" which was {e['status']} before"
    )


def namesake(e: Event) -> str:
    """Return in words whose KV a lookup found, and how its request differs."""
    differs = apart(e["differs"], e["req"], e["of"])
    return f"{e['of']} begins with the same {e['tokens']} tokens and differs in {differs}"


def changed_argument(e: Event) -> str:
    """Return in words which argument a hook has changed."""
    hook = e["hook"]
    by = ", which calls get_finished unless it is overridden," if hook in CALLS_GET_FINISHED else ""
    return f"{hook}{by} changed the argument {ARGUMENTS[hook]}"


def _hook(e: Event) -> str:
    layer = f" for {e['layer']}" if e["layer"] else ""
    if e["error"] is not None:
        code = (e["error_at"] or [""])[-1]
        return f"{e['hook']}{layer} raised {e['error_text']}{f': {code}' if code else ''}"
    if e["mutated_args"]:
        return changed_argument(e)
    return f"{e['hook']}{layer} returned {e['value']}"


def _stall(e: Event) -> str:
    """Say how long the harness waited, and which setting changes that."""
    threads = ""
    if e["threads"]:
        threads = f", though {many(e['threads'], 'thread')} of the connector still ran"
    return (
        f"no progress in {many(e['steps'], 'step')} and {e['limit']:g} s"
        f" (setting stall_seconds){threads};"
        f" waiting: {', '.join(e['waiting_on']) or 'no request'}"
    )


def _promise(e: Event) -> str:
    again = f"{e['req']} repeats {e['of']}"
    if e["resumed"]:
        again = f"{e['req']}, resumed after a preemption, repeats {e['of']}"
    if e["restarted"]:
        again = f"after a restart, {again}: some of"
    elif e["across"]:
        again += ", which another engine has computed:"
    else:
        again += ":"
    return f"{again} {many(e['promised'], 'token')} should have come back, {e['reloadable']} did"


def _repaired(e: Event) -> str:
    again = f"{e['req']} repeats {e['of']}, which computed again what its load had lost"
    return f"{again}: {many(e['promised'], 'token')} should have come back, {e['reloadable']} did"


def _grown(e: Event) -> str:
    numbers = ", ".join(map(str, e["numbers"]))
    where = "holds more" if e["holder"] == "process" else "holds more in"
    return f"the {e['holder']} {where} {e['place']} after each third of identical rounds: {numbers}"


def _shrunk(e: Event) -> str:
    numbers = ", ".join(map(str, e["numbers"]))
    return (
        f"the {e['holder']} has less left in {e['place']} after each third of identical rounds:"
        f" {numbers}"
    )


def _served(e: Event) -> str:
    return (
        f"of a new prompt {many(e['first'], 'token')} came back at first, and {e['last']} after"
        f" {many(e['rounds'], 'round')} of other prompts"
        + (", which reset the connector's cache" if e["emptied"] else "")
    )


def _left(e: Event) -> str:
    numbers = ", ".join(map(str, e["numbers"]))
    return (
        f"engines that were shut down one after the other left more and more {e['what']}: {numbers}"
    )


def _alloc(e: Event) -> str:
    tables = e.get("tables", ())
    if len(tables) < 2:
        blocks = f"{e['blocks']}"
    else:
        blocks = "; ".join(f"{table[2]} of KV cache group {n}" for n, table in enumerate(tables))
    return (
        f"{e['req']} was granted {many(e['external'], 'external token')}"
        f" after {e['local']} local ones, in blocks {blocks}"
    )


def _queries(e: Event) -> str:
    skipping = f"; {', '.join(e['skipping'])} read no cache" if e["skipping"] else ""
    return (
        f"the step's statistics say {e['requests']} lookups of {e['tokens']} tokens,"
        f" {e['hits']} of them found; admitted were {e['due_requests']} of {e['due_tokens']},"
        f" with {e['due_hits']} granted{skipping}"
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
        parts.append(f"after the shutdown, {many(e['threads'], 'thread')} went on")
    return "at the end of the run " + ("; ".join(parts) or "nothing was left over")


def _named(e: Event) -> str:
    kind = "finished_recving" if e["direction"] == "recv" else "finished_sending"
    return f"{kind} named {e['req']}"


def _reported(e: Event) -> str:
    text = f"{_named(e)}, which the engine was {'' if e['held'] else 'not '}waiting for"
    if not e.get("second"):
        return text
    other = "send" if e["direction"] == "recv" else "load"
    return (
        f"{text}; its {other}, which the engine waited for at the same time, had been reported,"
        " and that was enough"
    )


def _withheld(e: Event) -> str:
    return f"{_named(e)}; the scheduler half took that out of the step's reports"


def _failed(e: Event) -> str:
    if e["req"] is not None and not e["blocks"]:
        loads = "a load in progress" if e["loading"] else "no load in progress"
        return f"{e['req']} was reported as failed, and has {loads}"
    one = len(e["blocks"]) == 1
    verb = "was" if one else "were"
    text = f"block{'' if one else 's'} {spans(e['blocks'])} {verb} reported as failed"
    if not e["outside_grant"]:
        return f"{text}; all of them belong to loads"
    one = len(e["outside_grant"]) == 1
    return (
        f"{text}; block{'' if one else 's'} {spans(e['outside_grant'])}"
        f" belong{'s' if one else ''} to no load"
    )


def _crash(e: Event) -> str:
    where = f" (in {e['hook']})" if e["hook"] else ""
    return f"{e['error']}{where}"


def _died(e: Event) -> str:
    at = place(e)
    where = f" at {at.file}:{at.line} in {at.function}" if at is not None else ""
    return (
        f"thread {e['thread']} of the connector ended in step {e['in_step']} with {e['error']}"
        f"{where}"
    )


def _built(e: Event) -> str:
    what = "None" if e["none"] else f"metadata (pickling: {e['pickle_error'] or 'fine'})"
    if e["block_state_kept"]:
        what = "metadata that holds the SchedulerOutput's kv_connector_block_state"
    changed = "changed the SchedulerOutput and " if e["output_mutated"] else ""
    return f"build_connector_meta {changed}returned {what}"


def _bound(e: Event) -> str:
    same = "is" if e["same_as_built"] else "is not"
    return f"the metadata that reached the worker {same} what build_connector_meta returned"


def _plan(e: Event) -> str:
    last = e["end"] - 1
    where = f"positions {e['start']}-{last}" if last >= e["start"] else "no position"
    return (
        f"the connector plans to {e['op']} {where} of {e['req']}"
        f" ({e['timing'].replace('_', ' ')}) with {many(e['computed'], 'token')} computed,"
        f" {e['scheduled']} scheduled, {e['placeholders']} placeholders and {e['known']} known"
    )


def _level(level: Mapping[str, Any]) -> str:
    bound = "" if level["bound"] is None else f" of at most {level['bound']}"
    if (most := level.get("bytes_bound")) is not None:
        bound += f", {many(level['bytes'], 'byte')} of at most {most}"
    return f"{level['name']} has {level['entries']}{bound} ({level['held']} held)"


def _is_within_bound(level: Mapping[str, Any]) -> bool:
    bound: float = math.inf if level["bound"] is None else level["bound"]
    most = level.get("bytes_bound")
    fits = most is None or level["bytes"] <= most
    return bool(level["entries"] <= level["held"] or (level["entries"] <= bound and fits))


def _cache_state(e: Event) -> str:
    # What is said first is the headline of a failure.
    by_fault = sorted(e["levels"], key=_is_within_bound)
    return f"{'; '.join(map(_level, by_fault))}; the cache has {many(e['held'], 'hold')}"


def _cache_lookup(e: Event) -> str:
    return (
        f"{e['req']} could load up to token {e['usable']} (its levels have {e['cached']} tokens),"
        f" and the connector answered {e['tokens']} tokens after {e['local']} local ones"
    )


def _cache_loaded(e: Event) -> str:
    return (
        f"{e['req']} was loaded up to token {e['end']}; in the end, the levels have {e['cached']}"
        " tokens of it, and the first one has room"
    )


def _cache_reached(e: Event) -> str:
    found = "; ".join(
        f"{each['req']} (there up to token {each['usable']}, above it and in the engine up to"
        f" {each['known']}, answered up to {each['claimed']})"
        for each in e["lookups"][:2]
    )
    return (
        f"{many(len(e['lookups']), 'lookup')} could have found more in {e['level']} than above it"
        + (f", first {found}" if found else "")
    )


def _cache_size(e: Event) -> str:
    files = "" if e["on_disk"] is None else f", and its files have {e['on_disk']}"
    return (
        f"{e['level']} reports {many(e['bytes'], 'byte')}{files}; in the engine, all KV of the run"
        f" takes {e['kv']}"
    )


def _controlled(e: Event) -> str:
    if e["error"]:
        return f"the controller's {e['do']} of {e['of']} raised {e['error']}"
    there = "" if e["there"] is None else f", {e['there']} of them at the {e['to']} level"
    return (
        f"the controller's {e['do']} of {e['of']}: it found {many(e['before'], 'token')} before,"
        f" and {e['after']} after{there}"
    )


def _control_result(e: Event) -> str:
    return (
        f"after the controller's {e['do']} of {e['of']}, when it found"
        f" {many(e['said'], 'token')}, {e['req']}, which repeats it (usable: {e['usable']}), was"
        f" answered {many(e['tokens'], 'token')} after {e['local']} local ones"
    )


def _events_lookup(e: Event) -> str:
    text = (
        f"{e['req']} got {many(e['got'], 'token')} ({e['local']} of them local),"
        f" {e['announced']} were announced by KV events"
    )
    if e["missing"]:
        text += f"; announced and not there: blocks {spans(e['missing'])}"
    if e["untold"]:
        text += f"; there and never announced: blocks {spans(e['untold'])}"
    return text


def _kv_event(e: Event) -> str:
    text = f"a KV event says {e['op']}"
    if e["keys"]:
        text += f": blocks {spans(e['keys'])}"
    if e["problem"]:
        text += f"; {e['problem']}"
    if e["repeated"]:
        text += "; it was published before"
    return text


_STATS = {
    "encode": "to_dict",
    "rebuild": "rebuilding them",
    "observe": "the metrics",
}


def _stats_sent(e: Event) -> str:
    problems = [f"{what} raised {e[name]}" for name, what in _STATS.items() if e[name]]
    text = "; ".join(problems) or ("empty" if e["empty"] else "fine")
    return f"the statistics of both halves, on their way to the log and the metrics: {text}"


def _stats(e: Event) -> str:
    problems = []
    if e["merge"]:
        problems.append(f"merged with a copy and reduced, they raised {e['merge']}")
    if e["kept"]:
        problems.append("they are the same object as last time")
    if e["lost"]:
        problems.append(f"merged with a copy of themselves, {e['lost']}")
    if e["cleared"] is False:
        problems.append("they are not empty after their reset")
    text = "; ".join(problems)
    if not problems:
        text = "empty" if e["empty"] else "fine"
    return f"the statistics of the {e['half']} half: {text}"


def _stats_total(e: Event) -> str:
    return (
        f"{e['filled']} of {e['returned']} statistics were not empty, {e['loaded']} loads wrote KV,"
        f" and metrics were given {e['moved']} values"
    )


def _stats_compared(e: Event) -> str:
    place = f" ({e['place']})" if e["place"] else ""
    counted = f"the connector counted {e['value']:g} as {e['name']}{place}"
    absent = "" if e["value"] else "; or it has no counter of that name"
    words = _SEEN.get(e["what"], f"{e['what']} was")
    if words.endswith("must be"):
        least = f"between {e['seen']:g} and " if e["seen"] < e["most"] else ""
        return f"{counted}, and {words} {least}{e['most']:g}{absent}"
    whole = f" ({e['most']} in whole blocks)" if e["most"] != e["seen"] else ""
    if e["what"] == "tokens_missed" and whole:
        whole = f" ({e['most']} with resumed requests)"
    return f"{counted}, and {words} {e['seen']}{whole}{absent}"


_SEEN = {
    "bytes_loaded": "the bytes that loads wrote were",
    "tokens_loaded": "the tokens that loads wrote were",
    "blocks_loaded": "the blocks of loads must be",
    "tokens_granted": "the tokens that the engine granted were",
    "tokens_missed": "the tokens that lookups of admitted requests did not find were",
    "bytes_saved": "the bytes that were saved must be",
    "tokens_saved": "the tokens that were saved must be",
    "evictions": "the entries that left a level must be",
    "load_seconds": "the seconds of the loads must be",
    "states_offered": "the states that steps offered were",
}


def _pair_lookup(e: Event) -> str:
    source = f", handed over by {e['of']}" if e["of"] else ""
    if e["stale"]:
        source += f" (a reference that is {e['stale']})"
    said = "not yet" if e["tokens"] is None else many(e["tokens"], "token")
    answer = f"the connector answered {said} after {e['local']} local ones"
    return f"engine {e['on']} ({e['role']}) asked for {e['req']}{source}: {answer}"


def _pair_params(e: Event) -> str:
    what = "parameters"
    if e["none"]:
        what = "nothing"
    elif e["json"]:
        what += f" that JSON turns into {e['json']}"
    return f"{e['of']} ended with {what}, handed to {e['req']} on engine {e['on']}"


def _pair_request(e: Event) -> str:
    fate = f"loaded {e['loaded']} of {e['promised']} promised tokens"
    if e["loaded"]:
        fate += f", had {e['local']}, and was handed {e['offered']}"
    if e["wrong"]:
        fate = "loaded wrong bytes"
    elif e["failed"]:
        fate = "failed to load"
    released = "were released" if e["released"] else "were not released"
    if e["gone"]:
        released = "had been released before"
    return f"{e['req']} on engine {e['on']} {fate}; the blocks of {e['of']} {released}"


def _relay(e: Event) -> str:
    what = ", ".join(e["what"])
    if e["way"] == "metadata":
        return f"the engine passed None for the step's metadata to {what}"
    return f"{what} of the worker half did not reach update_connector_output"


def _joined(e: Event) -> str:
    if e["surplus"]:
        verb = "was" if len(e["surplus"]) == 1 else "were"
        return (
            f"{', '.join(e['surplus'])} {verb} reported once more than by the {e['expected']} ranks"
            " whose reports the engine waits for"
        )
    return (
        f"{e['expected']} ranks' reports of each were waited for;"
        f" sent: {e['sent']}, of all: {e['all_sent']};"
        f" received: {e['received']}, of all: {e['all_received']};"
        f" blocks not loaded: {e['invalid']}, by any: {e['errors']};"
        f" failed: {e['failed']}, by all: {e['failures']};"
        f" reported once more by other ranks: {e['surplus']}"
    )


def _tokens(e: Event) -> str:
    where = f"request {e['req']} (phase {e['phase']}, prompt of {many(e['prompt'], 'token')})"
    if e["same"]:
        return (
            f"{where}: the log probability of token {e['drift_at']} of the answer, the same token"
            f" as without the connector, is off by {e['drift']:.3g}"
        )
    if e["token"] is None:
        return f"{where} got {many(e['count'], 'token')}, without the connector {e['plain']}"
    return (
        f"{where}: token {e['at']} of the answer is {e['token']}, without the connector"
        f" {e['instead']} (its second choice there was less likely by a factor of"
        f" {math.exp(e['gap']):.3g})"
    )


def _displaced(e: Event) -> str:
    text = f"request {e['req']}, computed to token {e['computed']}, lost its place in the step"
    if not e["published"]:
        return text
    noun = "block" if len(e["published"]) == 1 else "blocks"
    blocks = spans(e["published"])
    return f"{text}; the prefix cache keeps its {noun} {blocks}, which nothing computes to the end"


def _embedding(e: Event) -> str:
    return (
        f"request {e['req']} (phase {e['phase']}, prompt of {many(e['prompt'], 'token')}): value"
        f" {e['at']} of the embedding is off by {e['off']:.3g}"
    )


def _live_load(e: Event) -> str:
    bad = [
        f"{e[name]} {words}"
        for name, words in (("wrong", "hold other bytes"), ("missing", "were not written"))
        if e[name]
    ]
    return (
        f"of {many(e['blocks'], 'block')} loaded for {e['req']} ({many(e['granted'], 'token')})"
        f" {', '.join(bad) or 'none is wrong'}"
    )


_ENDED = {
    "crash": "vLLM ended with an error",
    "timeout": "vLLM made no progress",
    "killed": "vLLM's process died",
}


def _live_end(e: Event) -> str:
    if e["how"] != "ended":
        after = f": {e['error']}" if e["error"] else ""
        return f"{_ENDED[e['how']]} in phase {e['phase'] or 'start'}{after}"
    left = [
        f"{name} {', '.join(map(str, e[name]))}"
        for name in ("processes", "ports", "files")
        if e[name]
    ]
    return f"left behind: {'; '.join(left)}"


_ASKED = {
    "salt": "cache salt",
    "adapter": "LoRA adapter",
    "weights": "adapter's weights",
    "image": "image",
    "prompt": "prompt",
}
"""What the fields of a live.entered event are, in words."""


def _entered(e: Event) -> str:
    lost = [
        f"its {_ASKED[name]} is {e[name] or 'none'} in the engine, and was"
        f" {e[f'sent_{name}'] or 'none'}"
        for name in altered_in_entry(e)
    ]
    return f"request {e['sent']} entered at {e['entrypoint']}: " + ("; ".join(lost) or "as sent")


def _lost(e: Event) -> str:
    return " ".join(altered_in_entry(e))


def _hook_called(e: Event) -> str:
    if e["bound"] is None:
        return f"{e['hook']} of the {e['half']} half was called"
    return (
        f"when {e['hook']} of the {e['half']} half was called,"
        f" {'a' if e['bound'] else 'no'} step's metadata was bound"
        f" (has_connector_metadata() was {e['bound']})"
    )


def _reset(e: Event) -> str:
    returned = f" {e['returned']}" if e["phase"] == "returned" else ""
    return f"reset_cache {e['phase']}{returned}"


def _handshake(e: Event) -> str:
    problem = "is None" if e["none"] else f"cannot be pickled: {e['detail'] or ''}"
    return f"the handshake metadata {problem}"


def _engine_id(e: Event) -> str:
    which = "the engine id that was given" if e["kept"] else "another engine id than the given one"
    return f"the {e['half']} half of rank {e['rank']} has {which}"


def _offered(e: Event) -> str:
    text = f"the state of {e['req']} after {many(e['tokens'], 'token')} is offered"
    text += f" in block {e['block']} of group {e['group']}"
    if not e["in_table"] and not e["copied"]:
        text += ", which is not in its table"
    if e["again"]:
        text += ", again"
    return text


def _registered(e: Event) -> str:
    return (
        f"layout {e['layout']} (required: {e['required']}, possible: {e['possible'] or 'any'},"
        f" in the KVCacheConfig: {e['told'] or 'none'});"
        f" the first tensor has shape {e['shape']} and strides {e['strides']},"
        f" by vLLM's own code {e['own_shape']} and {e['own_strides']}"
    )


def _freed(e: Event) -> str:
    freed = f"the connector freed a reference to block {e['id']} of the engine's pool"
    if e["held"] >= 0:
        return freed
    tables = many(e["refs"] - e["held"], "block table")
    return f"{freed}, which leaves {many(e['refs'], 'reference')} for {tables}"


_TEXT: dict[str, Callable[[Event], str]] = {
    "block.freed": _freed,
    "kv.wrong": _wrong,
    "kv.changed": _changed,
    "load.due": _due,
    "device.note": _note,
    "load.ahead": _ahead,
    "layer.save": _layer_saved,
    "queries": _queries,
    "lookup": _lookup,
    "lookup.permitted": _permitted,
    "hit.sources": _sources,
    "start.refused": _refused,
    "block.published": _published,
    "hook.returned": _hook,
    "profile.expectation": _promise,
    "profile.repaired": _repaired,
    "soak.grown": _grown,
    "soak.shrunk": _shrunk,
    "soak.served": _served,
    "restart.grown": _left,
    "alloc": _alloc,
    "run.end": _end,
    "live.tokens": _tokens,
    "live.embedding": _embedding,
    "req.displaced": _displaced,
    "live.load": _live_load,
    "live.end": _live_end,
    "live.entered": _entered,
    "live.phase": lambda e: (
        f"before phase {e['phase']}, when all requests had long finished, vLLM could not empty"
        " its prefix cache: blocks are held"
    ),
    "transfer.reported": _reported,
    "transfer.withheld": _withheld,
    "transfer.failed": _failed,
    "meta.built": _built,
    "worker.reports": lambda e: (
        f"a worker reported {', '.join(e['what'])}; pickling: {e['pickle_error'] or 'fine'}"
    ),
    "meta.bound": _bound,
    "plan": _plan,
    "control.done": _controlled,
    "control.result": _control_result,
    "cache.lookup": _cache_lookup,
    "cache.loaded": _cache_loaded,
    "cache.reached": _cache_reached,
    "cache.state": _cache_state,
    "cache.ended": _cache_state,
    "cache.size": _cache_size,
    "load.blended": lambda e: (
        f"the load of {e['req']} brought KV of {many(e['reused'], 'token')} from another context;"
        f" from the first of them on, {many(e['again'], 'token')} are computed in their own"
    ),
    "engine.crash": _crash,
    "hold": lambda e: (
        f"the engine has been holding {e['req']} ({e['direction']}) since {e['cause']}"
    ),
    "case.expectation": lambda e: f"the case expected {e['what']}: {e['detail']}",
    "engine.stall": _stall,
    "thread.died": _died,
    "engine.lifecycle": lambda e: f"{e['op']} raised {e['error']}" if e["error"] else e["op"],
    "cache.reset": _reset,
    "api": lambda e: f"{e['item']}: {e['detail']}",
    "engine.api": lambda e: f"{e['item']}: {e['detail'] or 'as it should be'}",
    "events.lookup": _events_lookup,
    "kv.event": _kv_event,
    "stats.taken": _stats,
    "stats.sent": _stats_sent,
    "stats.total": _stats_total,
    "stats.compared": _stats_compared,
    "handshake": _handshake,
    "pair.engine": lambda e: (
        f"engine {e['on']} is a {e['role']},"
        f" its connector's requires_kv_delivery is {e['delivery']}"
    ),
    "pair.lookup": _pair_lookup,
    "pair.params": _pair_params,
    "pair.request": _pair_request,
    "engine.id": _engine_id,
    "ranks.joined": _joined,
    "relay.broken": _relay,
    "report.landed": lambda e: (
        f"changed after they were reported: {', '.join(e['changed']) or 'nothing'}"
    ),
    "state.offered": _offered,
    "kv.registered": _registered,
    "hook.called": _hook_called,
    "sample": lambda e: f"token {e['index']} of {e['req']}'s output is {e['token']}",
}


def describe(event: Event) -> str | None:
    """Return a sentence about an event, or None if its kind needs no explanation."""
    text = _TEXT.get(event["kind"])
    return text(event) if text is not None else None


_FOUND = {
    "poison": "memory that had been wiped",
    "torn": "KV that is half old and half new",
    "other_request": "KV of another request",
    "other_tokens": "KV of other tokens",
    "other_position": "KV of other positions",
    "other_layer": "KV of another layer",
    "other_group": "KV of another KV cache group",
    "other_identity": "KV of another identity (salt, adapter, image)",
    "other_prefix": "KV of the same tokens behind another prefix",
    "old_position": "KV of the same tokens behind another prefix, with keys of their old positions",
    "stale_generation": "KV of an earlier request of the same id",
    "rejected_draft": "KV of rejected drafts",
    "past_end": "KV of positions past the end of the request",
    "never_computed": "KV that was never computed",
    "on_failed_load": "KV that was computed upon a load that failed",
    "not_yet_loaded": "memory that the load had not filled yet",
    "kv_swapped": "K in the place of V",
    "head_swapped": "KV of another head",
    "unknown": "bytes that nothing has computed",
}
_READ = {
    "external": "loaded",
    "local": "the local prefix cache holds",
    "own": "the request's own blocks hold",
}
_BY_TABLE = {
    "save": "a save read blocks that the request had no more, and stored",
    "load": "a load wrote by an outdated block table, which left",
}
_HITS = {
    CLAIMED: "a hit on KV of another salt, adapter, image, embedding or model",
    "reset.forgets": "a hit on KV from before a reset",
}
"""What is wrong with a hit, by requirement: the sentence begins with its numbers."""
_SAVED_BY_OLD_TABLE = "a save read by an outdated block table, and stored"
"""It never was the right block: not only was it someone else's by then."""


def kv_found(found: str) -> str:
    """Return in words what wrong bytes are; `found` is a field of kv.wrong."""
    return _FOUND.get(found, found.replace("_", " "))


def headline(
    event: Event,
    requirement: str,
    side: str | None,
    *,
    outdated: bool = False,
    again: bool = False,
) -> str | None:
    """Return in a few words what broke a requirement; None where the sentence is short enough.

    `side`: where wrong bytes went wrong, if it is known; `outdated`: by an outdated block table
    (kvconform.judge.backtrace). `again`: the event is a report that came more often than it may.
    """
    if again:
        return f"{_named(event)} again"
    if event["kind"] == "kv.wrong":
        what = kv_found(event["found"])
        if event["found"] == "head_swapped" and OF_ANOTHER_RANK in event["origin"]:
            what = "KV of another rank"
        if side == "save" and outdated:
            return f"{_SAVED_BY_OLD_TABLE} {what}"
        if side is not None:
            return f"{_BY_TABLE[side]} {what}"
        if requirement.startswith("save."):
            return f"stored {what}"
        return f"{_READ[event['via']]} {what}"
    if event["kind"] == "hook.returned" and event["error"] is not None:
        return f"{event['hook']} raised {event['error']}"
    if requirement == TRUTH and _unheard(event):
        return "a hit before anything of the request was computed"
    return _HITS.get(requirement)


def _unheard(e: Event) -> str:
    """Return UNHEARD for a hit of a request of which nothing was ever computed in its run."""
    return UNHEARD if _is_hit(e) and not max(e["ever_computed"], e["ever_plain"]) else ""


def adds_to_itself(e: Event) -> bool:
    """Return whether a wrong answer to a lookup would be right if nothing were added to it.

    It is no longer than what was stored for the request then, while vLLM adds its own hit to it.
    """
    most = min(e["ever_computed"], e["known"] - 1)
    return _is_hit(e) and e["local"] > 0 and e["tokens"] <= most


def _is_hit(e: Event) -> bool:
    """Return whether the answer to a lookup is a positive number."""
    tokens = e["tokens"]
    return isinstance(tokens, int) and not isinstance(tokens, bool) and tokens > 0


def _answer(e: Event) -> str:
    """Return the kind of answer to a lookup."""
    tokens = e["tokens"]
    local = e["local"]
    known = e["known"]
    if tokens is None or isinstance(tokens, bool) or not isinstance(tokens, int):
        return type(tokens).__name__
    if local + tokens > known:
        return "more"
    if local + tokens == known:
        return "all"
    return "negative" if tokens < 0 else "some"


def _blocks_missing(e: Event) -> str:
    return "blocks" if e["free_blocks"] != e["free_blocks_at_start"] else ""


_CAUSE: dict[str, tuple[str | Callable[[Event], str], ...]] = {
    "kv.wrong": ("found", "via", "damaged"),
    "kv.changed": ("after_hook", *_SLOTS),
    "load.due": ("missing", "wrong", "layers"),
    "hook.returned": ("hook", "error", "error_at"),
    "hook.called": ("hook", "half"),
    "engine.lifecycle": ("op", "error_type", "error_at"),
    "engine.crash": ("where", "hook", "error_type", "error_at"),
    "thread.died": ("error_type", "error_at"),
    "cache.reset": ("phase",),
    "profile.expectation": ("what", "resumed", "restarted", "across"),
    "soak.grown": ("holder", "place"),
    "soak.shrunk": ("holder", "place"),
    "restart.grown": ("what",),
    "case.expectation": ("what",),
    "engine.api": ("item",),
    "api": ("item",),
    "pair.engine": ("on", "role"),
    "pair.lookup": ("on", "role", "stale"),
    "pair.params": ("on", "none", "json"),
    "pair.request": ("on", "wrong", "failed", "gone", "early", "released"),
    "lookup": (_answer, "is_async", "computed_before_reset", _unheard),
    "device.note": ("hook", "what"),
    "transfer.reported": ("direction", "held", "second"),
    "transfer.failed": ("outside_grant",),
    "meta.built": ("none", "pickle_error", "output_mutated"),
    "worker.reports": ("what", "pickle_error"),
    "meta.bound": ("same_as_built",),
    "kv.event": ("op", "problem", "repeated"),
    "stats.taken": ("half", "kept", "lost", "merge"),
    "stats.sent": (*_STATS,),
    "stats.compared": ("what", "name", "place"),
    "handshake": ("none",),
    "hold": ("direction", "cause"),
    "plan": ("op", "timing"),
    "engine.id": ("half",),
    "relay.broken": ("way", "what"),
    "report.landed": ("changed",),
    "state.offered": ("in_table", "again"),
    "kv.registered": ("layout", "required"),
    "run.end": ("unfinished", _blocks_missing, "request_objects_alive", "threads"),
    "live.tokens": ("same",),
    "live.load": ("wrong", "missing"),
    "live.entered": (_lost,),
    "live.end": ("how", "processes", "ports", "files"),
}
"""What distinguishes faults, by kind of event: names of fields, or functions of the event.

Numbers, lists and the texts in `_WHETHER` hold particulars: it only matters whether they are empty.
"""
_WHETHER = frozenset({"json", "lost", "pickle_error", "problem", "stale", "merge", *_STATS})


def cause(event: Event, *, again: bool = False) -> tuple[str, ...]:
    """Return the kind of fault that an event stands for, without names, numbers and positions.

    `again`: the fault is that it happened more often than it may, whatever else it says.
    """
    found = [str(event["kind"])]
    for name in ("direction",) if again else _CAUSE.get(event["kind"], ()):
        if not isinstance(name, str):
            found += [part] if (part := name(event)) else []
            continue
        value = event.get(name)
        if name == "error_at":
            at = place(event)
            found += [at.file, at.function, at.code] if at is not None else []
        elif isinstance(value, str) and name not in _WHETHER:
            found.append(value)
        elif value:
            found.append(name)
    return tuple(found)


def hook_of(event: Event) -> str | None:
    """Return the hook that an event is about, or None."""
    return event.get("hook") or event.get("after_hook")


def place(event: Event) -> Place | None:
    """Return the line of the connector that raised the error of an event, or None."""
    at = event.get("error_at")
    return Place(*at) if at else None
