# SPDX-License-Identifier: Apache-2.0
"""What the harness saw of one engine, in the terms of a connector's counters.

Each number is a pair: the least and the most that a true counter may show.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvconform.contract.events import loses_entries
from kvconform.contract.trace import Event, Trace
from kvconform.observe.cache import CacheObserver
from kvconform.observe.call import Call
from kvconform.observe.probe import Probe

Bounds = tuple[float, float]
SOME_TIME = 1e-9
"""Seconds that a load takes at least."""


class Seen:
    """Listens to lookups, grants and statistics of one engine. Changes nothing."""

    def __init__(self, trace: Trace, probe: Probe) -> None:
        self.trace = trace
        self.cache: CacheObserver | None = None
        """The observer of the cache behind the connector, if that is shown."""
        self.chunk_tokens = 0
        """The connector's granularity in tokens, if it declares one."""
        self.splits_tokens = False
        """Whether each rank has only some of the tokens."""
        self.known: Callable[[], Mapping[str, float]] | None = None
        """Returns what an adapter saw happen, by meaning; such a number is exact."""
        self._asked: dict[str, tuple[int, int, bool]] = {}
        self._misses: list[Miss] = []
        self._looked_up_tokens = 0
        # When a request was first looked up, until it is admitted.
        self._since: dict[str, float] = {}
        # The same of granted loads that are not due yet.
        self._loading: dict[str, list[float]] = defaultdict(list)
        self._due: set[Any] = set()
        self._seconds = 0.0
        self._read = 0
        self._layers = 0
        probe.on("register_kv_caches", before=self._registered)
        probe.on("on_new_request", before=self._looks_up)
        probe.on("get_num_new_matched_tokens", before=self._looks_up, after=self._looked_up)
        probe.on("update_state_after_alloc", before=self._admitted)
        probe.on("get_kv_connector_stats", before=self._counted)

    def _registered(self, call: Call) -> None:
        self._layers = max(self._layers, len(call.arg(0, "kv_caches")))

    def _looks_up(self, call: Call) -> None:
        """Note when a request is shown first: this may start to fetch, and a lookup answer None."""
        self._since.setdefault(call.arg(0, "request").request_id, time.monotonic())

    def _looked_up(self, call: Call) -> None:
        """Note how many tokens a request asks for, beyond those that the engine has itself."""
        request = call.arg(0, "request")
        self._looked_up_tokens += request.num_tokens
        answered = isinstance(call.result, tuple) and call.result[0] is not None
        if request.skip_reading_prefix_cache:
            # Nothing is missed; an aborted request with this id may have asked before.
            self._asked.pop(request.request_id, None)
        elif call.legal and answered:
            local = call.arg(1, "num_computed_tokens")
            is_resumed = request.num_preemptions > 0
            self._asked[request.request_id] = (request.num_tokens, local, is_resumed)

    def _admitted(self, call: Call) -> None:
        req = call.arg(0, "request").request_id
        external = call.arg(2, "num_external_tokens")
        since = self._since.pop(req, time.monotonic())
        if external > 0:
            self._loading[req].append(since)
        else:
            self._seconds += time.monotonic() - since
        if req in self._asked:
            tokens, local, is_resumed = self._asked.pop(req)
            self._misses.append(Miss(tokens, local + external, is_resumed))

    def _counted(self, call: Call) -> None:
        """Add the time of the loads that are over: since the first lookup, with all else meanwhile.

        The ranks load at the same time, and each may count its seconds.
        """
        events = self.trace.events
        for event in events[self._read :]:
            if event["kind"] != "load.due" or event["transfer"] in self._due:
                continue
            self._due.add(event["transfer"])
            if self._loading[event["req"]]:
                self._seconds += time.monotonic() - self._loading[event["req"]].pop(0)
        self._read = len(events)

    def of_run(self) -> Mapping[str, Bounds]:
        """Return the bounds by meaning; those that are not known are missing.

        Empty if the run is not over, or a granted load never became due.
        """
        events = self.trace.events
        allocs = [e for e in events if e["kind"] == "alloc"]
        grants = [e for e in allocs if e["external"] > 0]
        dues = [e for e in events if e["kind"] == "load.due"]
        ends = [e for e in events if e["kind"] == "run.end"]
        is_over = bool(ends) and ends[-1]["quiesced"] and not ends[-1]["crashed"]
        if not is_over or {e["transfer"] for e in grants} != {e["transfer"] for e in dues}:
            return {}
        if not allocs or any(e["bytes"] is None for e in dues):
            return {}
        incomplete = {e["transfer"] for e in dues if e["missing"]}
        found: dict[str, Bounds] = {
            # A load may fill the rest of its last block, too.
            "tokens_granted": (
                sum(e["external"] for e in grants),
                sum(in_whole_blocks(e) for e in grants),
            ),
            # A load that failed in part need not count.
            "bytes_loaded": (
                sum(e["bytes"] for e in dues if e["transfer"] not in incomplete),
                sum(e["most_bytes"] for e in dues),
            ),
            "tokens_missed": self._missed(allocs),
        }
        offered = len([1 for e in events if e["kind"] == "state.offered"])
        found["states_offered"] = (offered, offered)
        complete = [e for e in dues if not e["missing"]]
        # Of a group with a window, less is loaded than saved.
        has_one_group = all(len(e["tables"]) == 1 and not e["tables"][0][1] for e in allocs)
        ranks = 1 + max((e.get("rank") or 0 for e in dues), default=0)
        if has_one_group and not self.splits_tokens:
            found["tokens_loaded"] = self._loaded(dues, grants, incomplete)
            found["blocks_loaded"] = _blocks(grants, incomplete, ranks)
        if complete and has_one_group:
            found["bytes_saved"] = self._saved(complete, allocs)
            largest = max(e["granted"] for e in complete)
            found["tokens_saved"] = (largest, self._tokens(allocs) * ranks)
        if complete and not any(self._loading.values()):
            waiting = sum(time.monotonic() - since for since in self._since.values())
            found["load_seconds"] = (SOME_TIME, (self._seconds + waiting) * ranks)
        evicted = self._evicted(allocs, ranks)
        if evicted is not None:
            found["evictions"] = evicted
        exact = self.known() if self.known else {}
        return found | {what: (count, count) for what, count in exact.items()}

    def _loaded(self, dues: list[Event], grants: list[Event], incomplete: set[Any]) -> Bounds:
        """Return the tokens of loads that wrote all, and those of the chunks with a grant.

        They are those of all ranks. `incomplete`: loads that did not write all.
        """
        size = self._chunk(grants)
        whole = {e["transfer"]: in_whole_chunks(e, size) for e in grants}
        return (
            sum(e["granted"] for e in dues if e["transfer"] not in incomplete),
            sum(whole[e["transfer"]] for e in dues),
        )

    def _chunk(self, allocs: list[Event]) -> int:
        """Return the tokens of the connector's chunks, or of the engine's blocks."""
        return max(self.chunk_tokens, *map(block_size, allocs)) if allocs else 1

    def _missed(self, allocs: list[Event]) -> Bounds:
        """Return the misses in whole blocks or chunks that could be stored, and in all blocks.

        What is found within a chunk may count as missed with that chunk.
        """
        block = max(map(block_size, allocs))
        sizes = (block, self.chunk_tokens or block)
        # Whether the lookup of a resumed request counts is the connector's choice.
        sure = [miss for miss in self._misses if not miss.is_resumed]
        return (
            min(
                sum(max(0, _down(miss.tokens - 1, size) - miss.found) for miss in sure)
                for size in sizes
            ),
            sum(
                max(0, _up(miss.tokens, block) - _down(miss.found, max(sizes)))
                for miss in self._misses
            ),
        )

    def _saved(self, dues: list[Event], allocs: list[Event]) -> Bounds:
        """Return the bytes of a rank's largest load, and of all KV that could be saved in the run.

        What was loaded had been saved. KV that all ranks have alike may be saved by one of them.
        """
        written: dict[Any, int] = defaultdict(int)
        granted: dict[Any, int] = {}
        for e in dues:
            written[e["transfer"]] += e["most_bytes"]
            granted[e["transfer"]] = max(1, e["granted"])
        per_token = max(written[transfer] / granted[transfer] for transfer in written)
        return max(e["bytes"] for e in dues), per_token * self._tokens(allocs)

    def _tokens(self, allocs: list[Event]) -> int:
        """Return of how many tokens KV could be stored, again and again.

        In each step, that is from the chunk in which it begins to the end of its last block. All
        that a request has when it is admitted may be stored once more.
        """
        size = max(map(block_size, allocs))
        coarse = self._chunk(allocs)
        steps = [e for e in self.trace.events if e["kind"] == "req.scheduled"]
        computed = sum(
            _up(e["computed"] + e["scheduled"], size) - _down(e["computed"], coarse) for e in steps
        )
        return computed + sum(_up(e["local"] + e["external"], size) for e in allocs)

    def _evicted(self, allocs: list[Event], ranks: int) -> Bounds | None:
        """Return how often an entry had to leave a level, and at most may have left one.

        An entry can come and go between two looks: once per stored or looked up token, layer, level
        and rank at most.
        """
        if self.cache is None or self.cache.left is None:
            return None
        if any(e["kind"] == "control.done" or loses_entries(e) for e in self.trace.events):
            return None
        # What has expired need not have been evicted.
        may_expire = any(e["kind"] == "clock.advanced" for e in self.trace.events)
        tokens = self._tokens(allocs) + self._looked_up_tokens
        # Keys and values of a layer may be two entries.
        most = tokens * ranks * self.cache.levels * max(1, self._layers) * 2
        return 0 if may_expire else self.cache.left, most


def _blocks(grants: list[Event], incomplete: set[Any], ranks: int) -> Bounds:
    """Return the blocks of loads that wrote all that was granted, and those of all, on each rank.

    A connector may count the blocks of a request, or those of each rank. `incomplete`: loads that
    did not write all.
    """
    blocks = {e["transfer"]: in_whole_blocks(e) // block_size(e) for e in grants}
    least = sum(count for transfer, count in blocks.items() if transfer not in incomplete)
    return least, sum(blocks.values()) * ranks


@dataclass(frozen=True)
class Miss:
    """An admitted request of `tokens` tokens, of which the first `found` need not be computed."""

    tokens: int
    found: int
    is_resumed: bool


def _down(tokens: int, size: int) -> int:
    return tokens - tokens % size


def _up(tokens: int, size: int) -> int:
    return -(-tokens // size) * size


def block_size(alloc: Mapping[str, Any]) -> int:
    """Return the tokens of the largest blocks of a grant."""
    return max(tokens for tokens, *_ in alloc["tables"])


def in_whole_blocks(alloc: Mapping[str, Any]) -> int:
    """Return the tokens of the blocks that a grant covers, completely or in part."""
    return in_whole_chunks(alloc, block_size(alloc))


def in_whole_chunks(alloc: Mapping[str, Any], size: int) -> int:
    """Return the tokens of the chunks of `size` that a grant covers, completely or in part."""
    return int(_up(alloc["local"] + alloc["external"], size) - _down(alloc["local"], size))
