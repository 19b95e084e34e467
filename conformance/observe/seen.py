# SPDX-License-Identifier: Apache-2.0
"""What the harness saw of one engine, in the terms of a connector's counters.

Each number is a pair: the least and the most that a true counter may show.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from kvconform.contract.trace import Event, Trace
from kvconform.observe.cache import CacheObserver
from kvconform.observe.call import Call
from kvconform.observe.probe import Probe

Bounds = tuple[float, float]
SOME_TIME = 1e-9
"""Seconds that a load takes at least."""
LOSSES = ("transfer.failed", "control.done", "store.damaged")
"""Events after which an entry that is gone need not have been evicted."""


def _is_loss(event: Event) -> bool:
    """Return whether an entry may be gone after the event without having been evicted."""
    return event["kind"] in LOSSES or (event["kind"] == "cache.reset" and event["connector"])


class Seen:
    """Listens to lookups, grants and statistics of one engine. Changes nothing."""

    def __init__(self, trace: Trace, probe: Probe) -> None:
        self.trace = trace
        self.cache: CacheObserver | None = None
        """The observer of the cache behind the connector, if that is shown."""
        self._asked: dict[str, tuple[int, bool]] = {}
        self._missed: Bounds = (0, 0)
        self._granted_at: dict[str, float] = {}
        self._seconds = 0.0
        self._read = 0
        probe.on("get_num_new_matched_tokens", after=self._looked_up)
        probe.on("update_state_after_alloc", before=self._admitted)
        probe.on("get_kv_connector_stats", before=self._counted)

    def _looked_up(self, call: Call) -> None:
        """Note how many tokens a request asks for, beyond those that the engine has itself."""
        request = call.arg(0, "request")
        if call.legal and call.result[0] is not None and not request.skip_reading_prefix_cache:
            wanted = request.num_tokens - call.arg(1, "num_computed_tokens")
            self._asked[request.request_id] = (wanted, request.num_preemptions > 0)

    def _admitted(self, call: Call) -> None:
        req = call.arg(0, "request").request_id
        external = call.arg(2, "num_external_tokens")
        if external > 0:
            self._granted_at[req] = time.monotonic()
        wanted, is_resumed = self._asked.pop(req, (external, False))
        # Whether the lookup of a resumed request counts is the connector's choice.
        low, high = self._missed
        self._missed = (low if is_resumed else low + wanted - external, high + wanted - external)

    def _counted(self, call: Call) -> None:
        """Add the time of the loads that are over: since their grant, with all else meanwhile."""
        events = self.trace.events
        for event in events[self._read :]:
            if event["kind"] == "load.due" and event["req"] in self._granted_at:
                self._seconds += time.monotonic() - self._granted_at.pop(event["req"])
        self._read = len(events)

    def of_run(self) -> Mapping[str, Bounds]:
        """Return the bounds by meaning; those that are not known are missing.

        Empty if the run is not over, or a granted load never became due.
        """
        events = self.trace.events
        grants = [e for e in events if e["kind"] == "alloc" and e["external"] > 0]
        dues = [e for e in events if e["kind"] == "load.due"]
        ends = [e for e in events if e["kind"] == "run.end"]
        is_over = bool(ends) and ends[-1]["quiesced"] and not ends[-1]["crashed"]
        if not is_over or {e["transfer"] for e in grants} != {e["transfer"] for e in dues}:
            return {}
        if any(e["bytes"] is None for e in dues):
            return {}
        found: dict[str, Bounds] = {
            # A load may fill the rest of its last block, too.
            "tokens_granted": (
                sum(e["external"] for e in grants),
                sum(in_whole_blocks(e) for e in grants),
            ),
            "bytes_loaded": (sum(e["bytes"] for e in dues), sum(e["most_bytes"] for e in dues)),
            "tokens_missed": self._missed,
        }
        if dues:
            found["bytes_saved"] = self._saved(dues)
        if dues and not self._granted_at:
            found["load_seconds"] = (SOME_TIME, self._seconds)
        evicted = self._evicted(dues)
        return found if evicted is None else {**found, "evictions": evicted}

    def _saved(self, dues: list[Event]) -> Bounds:
        """Return the bytes of the largest load, and of all KV that there was in the run.

        What was loaded had been saved. What is saved had been computed or loaded.
        """
        written: dict[Any, int] = defaultdict(int)
        granted: dict[Any, int] = {}
        for e in dues:
            written[e["transfer"]] += e["most_bytes"]
            granted[e["transfer"]] = max(1, e["granted"])
        per_token = max(written[transfer] / granted[transfer] for transfer in written)
        least: dict[Any, int] = defaultdict(int)
        for e in dues:
            least[e["transfer"]] += e["bytes"]
        return max(least.values()), per_token * self._tokens()

    def _tokens(self) -> int:
        """Return how many tokens were computed or loaded, again and again."""
        events = self.trace.events
        computed = sum(e["scheduled"] for e in events if e["kind"] == "req.scheduled")
        return int(computed + sum(e["external"] for e in events if e["kind"] == "alloc"))

    def _evicted(self, dues: list[Event]) -> Bounds | None:
        """Return how often an entry was seen to leave a level, and at most may have left one.

        An entry can come and go between two looks, once per token and level and rank at most.
        """
        if self.cache is None or self.cache.left is None:
            return None
        if any(map(_is_loss, self.trace.events)):
            return None
        ranks = 1 + max((e.get("rank") or 0 for e in dues), default=0)
        return self.cache.left, self._tokens() * ranks * self.cache.levels


def in_whole_blocks(alloc: Mapping[str, Any]) -> int:
    """Return the tokens of the blocks that a grant covers, completely or in part."""
    size = max(tokens for tokens, *_ in alloc["tables"])
    first = alloc["local"] // size
    last = -(-(alloc["local"] + alloc["external"]) // size)
    return int(last - first) * size
