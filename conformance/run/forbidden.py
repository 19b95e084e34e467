# SPDX-License-Identifier: Apache-2.0
"""What a connector has declared not to store, compared with what its lookups find."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvconform.contract.steps import Add
from kvconform.contract.trace import Event
from kvconform.run.records import RunState, common_prefix


class Forbidden:
    """Emits lookup.permitted at lookups with a hit, if the connector has declared restrictions.

    Tokens are compared without regard to salts, adapters and images, which permits more. With two
    engines nothing is emitted: what a producer hands over is not stored.
    """

    def __init__(self, state: RunState) -> None:
        self.state = state
        caps = state.caps
        is_declared = state.promises is not None and state.promises.declared
        self._prompts_only = caps["saves"] == "prompt" and is_declared
        restricts = (
            self._prompts_only
            or caps["skip_save"]
            or caps["least_priority"] is not None
            or caps["skip_last"]
        )
        self._is_due = bool(restricts and caps["store"]) and not state.variant.case.config.engines

    def looked_up(self, request: Any, event: Event) -> None:
        """Handle a lookup event."""
        if not self._is_due or not event["tokens"] or event["tokens"] < 0:
            return
        wanted = request.all_token_ids
        prompts = allowed = vetoed = 0
        forbidden = None
        for name in self._sources(request):
            source = self.state.requests[name]
            common = common_prefix(wanted, source.all_token_ids)
            end = self._end(name)
            prompts = max(prompts, min(common, self._prompt_end(name)))
            allowed = max(allowed, min(common, end))
            if common > max(end, vetoed):
                vetoed, forbidden = common, self.state.ids[name]
        self.state.trace.emit(
            "lookup.permitted",
            req=request.request_id,
            end=event["local"] + event["tokens"],
            local=event["local"],
            prompts=prompts if self._prompts_only else None,
            allowed=allowed,
            of=forbidden,
        )

    def _sources(self, request: Any) -> Iterator[str]:
        """Yield the case's names of the requests whose KV may have been stored before."""
        own = request.request_id
        for name in self.state.requests:
            is_own = self.state.ids[name] == own and self.state.requests[name].live is request
            has_computed = request.num_preemptions or self.state.adds[name].session
            if not is_own or has_computed:
                yield name

    def _prompt_end(self, name: str) -> int:
        """Return the end of a request's prompt; in a session, earlier output is a part of it."""
        tokens = len(self.state.requests[name].all_token_ids)
        return tokens if self.state.adds[name].session else len(self.state.prompts[name])

    def _end(self, name: str) -> int:
        """Return the end of the KV of a request that its options permit to store."""
        caps = self.state.caps
        if not may_be_stored(self.state.adds[name], caps):
            return 0
        return max(0, len(self.state.requests[name].all_token_ids) - caps["skip_last"])


def may_be_stored(add: Add, caps: dict[str, Any]) -> bool:
    """Return whether a connector with these capabilities may store anything of a request."""
    named = caps["skip_save"]
    is_vetoed = bool(named) and (add.skip_save or bool(add.params.get(named)))
    is_low = caps["least_priority"] is not None and add.priority > caps["least_priority"]
    return not is_vetoed and not is_low
