# SPDX-License-Identifier: Apache-2.0
"""The kinds of events that only a run of all of vLLM has (engine `live`): a part of the closed list, in its notation (kvconform.events)."""

from __future__ import annotations

from kvconform.kind import Kind

LIVE: dict[str, Kind] = {}


def _kind(name: str, fields: str, doc: str) -> None:
    LIVE[name] = Kind(name, "live", doc, dict(part.split(":", 1) for part in fields.split()))


_kind(
    "live.kv",
    "rank:i watched:b compared:b poisoned:b blocks:i size:i layers:i bytes:i",
    "A worker's KV cache: is memory outside of loads watched, are loaded blocks compared with recorded KV, are fresh blocks poisoned;"
    " blocks, tokens per block.",
)
_kind(
    "live.load",
    "req:s generation:i transfer:s? is_async:b granted:i blocks:i exact:l close:l wrong:l missing:l unknown:l error:f"
    " reported_failed:b rank:i",
    "The engine relies on a load. Of the `blocks` whole blocks that it was to fill: exact = bytes that the model computed for these"
    " tokens, close = within rounding, wrong, missing = nobody wrote them, unknown = the model has not computed these tokens; error ="
    " largest difference, as a part of the largest value.",
)
_kind(
    "live.phase",
    "phase:s answers:i reset:b? due:b asked:i loaded:i local:i preempted:i drafted:i accepted:i",
    "A phase of a scenario is over: answers, whether the local prefix cache could be emptied before it (None: nobody asked), whether loads"
    " were due in it; and over the phase, by vLLM's own metrics, tokens asked of the connector, loaded from it and found in the local"
    " prefix cache, preemptions, drafts and those that were accepted.",
)
_kind(
    "live.tokens",
    "phase:s req:s prompt:i count:i plain:i same:b ambiguous:b aborted:b at:i? token:i? instead:i? gap:f? drift:f drift_at:i?",
    "A request's greedy tokens against those that it got without a connector: `count` and `plain` of them; the first that differs, which it"
    " is, instead of which, and by how much (natural logarithm) that was more likely than the second choice; ambiguous = the two were"
    " nearly equally likely. drift = the largest difference of log probabilities before that.",
)
_kind(
    "live.fault",
    "phase:s number:i do:s still:f before:s? running:i loading:i",
    "A server of the connector fails now, in a scenario that wants it: kill, restart, pause or clear, after `still` seconds in which it"
    " answers nothing; right before the worker half loads or saves, or between two steps. Requests that run, and loads that the engine"
    " has granted and does not rely on yet.",
)
_kind("live.happened", "what:s count:i due:b", "How often something happened in the whole run, and whether it was due.")
_kind(
    "live.end",
    "how:s phase:s? error:s? processes:l ports:l files:l",
    "How vLLM's process ended (ended, crash, killed, timeout) and in which phase; what it left behind: processes, ports that these listened"
    " on, files in shared memory.",
)
