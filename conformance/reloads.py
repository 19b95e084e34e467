# SPDX-License-Identifier: Apache-2.0
"""Requests that repeat earlier content: how much of it was promised, and how much a lookup says that there is."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from kvconform.crowd import crowd_of
from kvconform.plain import ROOM
from kvconform.trace import Event

if TYPE_CHECKING:
    from kvconform.driver import Driver


class Reloads:
    """Emits profile.expectation at the first lookup of each request of `driver.reloads`, and takes it out of there."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver

    def looked_up(self, request: Any, event: Event) -> None:
        """A lookup was answered; `event` is its event."""
        driver = self.driver
        source = driver.reloads.get(request.request_id)
        if source is None or event["tokens"] is None or driver.promises is None:
            return
        del driver.reloads[request.request_id]
        if self._broke(source):
            return  # whoever tried to load it has seen that it is not there any more
        if self._outlived(source):
            return
        if not driver.promises.declared and (driver.adds[source].priority or driver.adds[source].params):
            return  # a connector may store by priority, or as the client asks; the plain runs have neither
        of = (driver.requests[source], driver.prompts[source], request, driver.variant.block_size, self._final(source))
        config = driver.variant.case.config
        several = tuple(config.groups) if len(config.groups) > 1 else ()
        promise = functools.partial(driver.promises.promised, *of, groups=several, window=config.window, caching=config.prefix_caching)
        promised, found = promise(), event["local"] + event["tokens"]
        if found < promised and not driver.promises.declared:  # perhaps it does its best, and there was a lot to do
            key = (driver.ids[source], driver.expectations.generation(source))
            promised = min(promised, promise(crowd=crowd_of(driver.trace.events, key, event)))
        if found < promised and not driver.promises.declared:
            promised = min(promised, promise(room=ROOM))
        driver.trace.emit(
            "profile.expectation", what=driver.caps["saves"], req=request.request_id, of=source, promised=promised, reloadable=found
        )

    def _broke(self, source: str) -> bool:
        """Whether a load of content that begins like that of `source` has failed in this run, or was made to and is under way."""
        ids, prompts = self.driver.ids, self.driver.prompts
        events, failing = self.driver.trace.events, self.driver.failing
        failed = {e["req"] for e in events if e["k"] == "transfer.failed"}
        failed |= {e["req"] for e in events if e["k"] == "alloc" and e["external"] > 0 and e["req"] in failing}
        return any(ids[name] in failed and tokens[:1] == prompts[source][:1] for name, tokens in prompts.items())

    def _outlived(self, source: str) -> bool:
        """Whether some of the KV of `source` is from before the connector was reset: its own, or what the engine's cache still had then.

        The connector was told of it before, and is not told again; the engine's cache is not emptied while blocks are held."""
        key = (self.driver.ids[source], self.driver.expectations.generation(source))
        began, kept, found = False, False, False
        for e in self.driver.trace.events:
            if e["k"] == "cache.reset":
                if e["phase"] == "returned" and e["returned"] is not False:
                    kept = True
                    found = found or began
                elif e["phase"] == "done":
                    kept = kept and not e["returned"]
            elif e["k"] == "alloc" and (e["req"], e["generation"]) == key:
                began = True
                found = found or (kept and e["local"] > 0)
        return found

    def _final(self, name: str) -> int | None:
        """Final KV of a finished request that one can save step by step (None: it is not one whose KV a connector must keep).

        Tokens that only became known after the last step was planned belong to those who also save at the end; nobody has to.
        """
        key = (self.driver.ids[name], self.driver.expectations.generation(name))
        kinds = ("req.finished", "req.scheduled")
        mine = [e for e in self.driver.trace.events if e["k"] in kinds and (e["req"], e["generation"]) == key]
        if not mine or mine[-1].get("status") not in ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED"):
            return None
        planned = max((min(e["C"] + e["S"], e["N"]) for e in mine[:-1]), default=0)
        return min(int(mine[-1]["v_final"]), planned)
