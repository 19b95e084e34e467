# SPDX-License-Identifier: Apache-2.0
"""The request whose KV a lookup claims although it has other content for the same tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from kvconform.contract.steps import Add
from kvconform.contract.trace import Event
from kvconform.run.records import RunState, common_prefix

WHOLE = ("salt", "embeds", "mm")
"""Fields of a request that tell it apart from others with the same tokens, but for the adapter."""
NAMES = {"salt": "cache salt", "embeds": "prompt embedding", "mm": "multi-modal item"}
ELSEWHERE = "place of its multi-modal items"
REORDERED = "order of its multi-modal items"
RESTARTED = "model or layout since a restart"
"""Words for two requests that are alike: the model, data type or split of the ranks differs."""


class Namesakes:
    """Emits lookup.namesake behind a lookup that claims KV of another request of these tokens.

    That is more than was ever computed for the request's own salt, adapter, items and model, and
    not more than was computed for any. Of those with the longest common prefix, it names the one
    that differs least.
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
        if found is None:
            return
        common, *_, other, differs = found
        if common <= event["ever_computed"]:
            return
        state.trace.emit(
            "lookup.namesake",
            req=request.request_id,
            of=state.ids[other],
            tokens=common,
            differs=differs,
        )

    def _others(self, request: Any, name: str) -> Iterator[tuple[int, int, int, str, list[str]]]:
        """Yield (common tokens, closeness, rank, name, differences) of the other requests.

        The first of equally close ones has the best rank. A request that is alike is left out: it
        has loaded this KV, too. After a restart it may have been computed by another model.
        """
        wanted = request.all_token_ids
        own = self.state.adds[name]
        events = self.state.trace.events
        restarted = any(e["kind"] == "engine.lifecycle" and e["op"] == "restart" for e in events)
        for number, (other, known) in enumerate(self.state.requests.items()):
            differs = list(differences(self.state.adds[other], own))
            if other != name and (restarted or differs != [RESTARTED]):
                common = common_prefix(wanted, known.all_token_ids)
                yield common, -_distance(differs), -number, other, differs


def _distance(differs: Iterable[str]) -> int:
    """Return how much two requests differ; the place of the same items counts half."""
    return sum(1 if each in (ELSEWHERE, REORDERED) else 2 for each in differs)


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
            yield _items(one, other) if field == "mm" else f"{NAMES[field]}{words}"
    if not found:
        yield RESTARTED


def _items(one: Add, other: Add) -> str:
    """Return how the multi-modal items of two requests differ, which are not all the same."""
    ids, others = ([item.id for item in each.mm] for each in (one, other))
    if ids == others:
        return ELSEWHERE
    return REORDERED if sorted(ids) == sorted(others) else NAMES["mm"]


def _words(one: object, other: object) -> str:
    return ", ".join("none" if value is None else repr(value) for value in (one, other))
