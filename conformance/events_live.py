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
