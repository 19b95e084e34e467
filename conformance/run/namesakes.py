# SPDX-License-Identifier: Apache-2.0
"""The request whose KV a lookup claims although it has other content for the same tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvconform.contract.steps import Add
from kvconform.contract.trace import Event
from kvconform.run.records import RunState, common_prefix

WHOLE = ("salt", "embeds", "mm")
"""Fields of a request that tell it apart from others with the same tokens, but for the adapter."""
NAMES = {"salt": "cache salt", "embeds": "prompt embedding", "mm": "multi-modal item"}
RESTARTED = "model or layout since a restart"
"""Words for two requests that are alike: the model, data type or split of the ranks differs."""


class Namesakes:
    """Emits lookup.namesake behind a lookup that claims KV of another request of these tokens.

    That is more than was ever computed for the request's own salt, adapter, items and model, and
    not more than was computed for any.
    """

    def __init__(self, state: RunState) -> None:
        self.state = state

    def looked_up(self, request: Any, event: Event) -> None:
        """Handle a lookup event."""
        tokens = event["tokens"]
        if not tokens:
            return
        if not event["ever_computed"] < event["local"] + tokens <= event["ever_plain"]:
            return
        state = self.state
        name = state.info(request.request_id).name
        found = max(self._others(request, name), default=None)
        if found is None or found[0] <= event["ever_computed"]:
            return
        other = state.adds[found[2]]
        state.trace.emit(
            "lookup.namesake",
            req=request.request_id,
            of=state.ids[other.req],
            tokens=found[0],
            differs=list(differences(other, state.adds[name])),
        )

    def _others(self, request: Any, name: str) -> Iterator[tuple[int, int, str]]:
        """Yield (common tokens, rank, name) of the other requests; the first has the best rank."""
        wanted = request.all_token_ids
        for number, (other, known) in enumerate(self.state.requests.items()):
            if other != name:
                yield common_prefix(wanted, known.all_token_ids), -number, other


def differences(one: Add, other: Add) -> Iterator[str]:
    """Yield in words how two requests with the same tokens differ: `cache salt ('s', none)`."""
    found = False
    if one.lora is not None and other.lora is not None:
        for field in type(one.lora).model_fields:
            values = getattr(one.lora, field), getattr(other.lora, field)
            if values[0] != values[1]:
                found = True
                yield f"{field} of its adapter ({_words(*values)})"
    elif one.lora != other.lora:
        found = True
        yield f"adapter ({_words(one.lora and one.lora.name, other.lora and other.lora.name)})"
    for field in WHOLE:
        if getattr(one, field) != getattr(other, field):
            found = True
            words = f" ({_words(one.salt, other.salt)})" if field == "salt" else ""
            yield f"{NAMES[field]}{words}"
    if not found:
        yield RESTARTED


def _words(one: object, other: object) -> str:
    return ", ".join("none" if value is None else repr(value) for value in (one, other))
