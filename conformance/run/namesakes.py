# SPDX-License-Identifier: Apache-2.0
"""The request whose KV a lookup claims although it has other content for the same tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from kvconform.contract.trace import Event
from kvconform.judge.identity import MODEL, ORDER, PLACE, differences, restarted
from kvconform.run.records import RunState, common_prefix

Found = tuple[int, int, int, str, list[dict[str, str]]]


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
        found = max(self._others(request, name), key=lambda one: one[:3], default=None)
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

    def _others(self, request: Any, name: str) -> Iterator[Found]:
        """Yield (common tokens, closeness, rank, name, differences) of the other requests.

        The first of equally close ones has the best rank. A request that is alike is left out: it
        has loaded this KV, too. After a restart it may have been computed by another model.
        """
        wanted = request.all_token_ids
        own = self.state.adds[name].identity
        another_model = restarted(self.state.trace.events)
        for number, (other, known) in enumerate(self.state.requests.items()):
            differs = differences(own, self.state.adds[other].identity)
            if other != name and (another_model or differs[0]["what"] != MODEL):
                common = common_prefix(wanted, known.all_token_ids)
                yield common, -_distance(differs), -number, other, differs


def _distance(differs: Iterable[dict[str, str]]) -> int:
    """Return how much two requests differ; the place of the same items counts half."""
    return sum(1 if each["what"] in (PLACE, ORDER) else 2 for each in differs)
