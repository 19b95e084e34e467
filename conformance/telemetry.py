# SPDX-License-Identifier: Apache-2.0
"""Watches what a connector says about itself: KV events, statistics and metrics, handshake metadata. Does what their readers would do."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import msgspec
from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from kvconform.digest import pickle_round_trip
from kvconform.hashes import HashBook, Stored
from kvconform.probe import Call, Probe
from kvconform.trace import Trace


class _Metric:
    """Stands in for a Prometheus metric: takes what a metric takes, as one with these labels does. `names`: those of one front end."""

    names: ClassVar[set[str]] = set()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        name = str(kwargs.get("name", args[0] if args else None))
        if name in self.names:
            raise ValueError(f"there is a metric {name} already")
        self.names.add(name)
        self._labels = tuple(kwargs.get("labelnames") or (args[2] if len(args) > 2 else ()))

    def labels(self, *values: Any, **named: Any) -> _Metric:
        if len(values) + len(named) != len(self._labels):
            raise ValueError(f"{len(values) + len(named)} label values for {len(self._labels)} labels")
        return self

    def inc(self, amount: float = 1, *args: Any, **kwargs: Any) -> None:
        if amount < 0:
            raise ValueError("a counter cannot fall")

    def observe(self, amount: float, *args: Any, **kwargs: Any) -> None:
        float(amount)

    set = observe


_engines: WeakKeyDictionary[Trace, int] = WeakKeyDictionary()


class Telemetry:
    """Listens to one engine's connector halves. `connector()` is the scheduler half; changes nothing but the trace."""

    def __init__(self, trace: Trace, probe: Probe, book: HashBook, config: Any) -> None:
        self.trace, self.book, self.config = trace, book, config
        self.stored: dict[Any, int] = {}  # block hash that this engine announced -> tokens of the announced block
        self.withdrawn_from = [self.stored]  # and where a withdrawal counts: a store may be shared between engines, or be each one's own
        self.taken: list[Any] = []  # the events of the last call, kept so that their identity means something
        self.last: dict[str, Any] = {}
        self.metrics: Any = None
        self.first = not any(event["k"] == "request.new" for event in trace.events)
        _engines[trace] = _engines.get(trace, 0) + 1
        probe.on("take_events", after=self._events)
        probe.on("get_num_new_matched_tokens", after=self._lookup)
        probe.on("reset_cache", after=lambda call: self._clear())
        probe.on("get_kv_connector_stats", after=self._stats)
        probe.on("get_handshake_metadata", after=self._handshake)

    # -- KV events -------------------------------------------------------------------------------------------------------------
    def _events(self, call: Call) -> None:
        if call.error is not None or call.result is None or not hasattr(call.result, "__iter__"):
            return
        call.result = events = list(call.result)  # a generator can be read only once
        for event in events:
            op = {"BlockStored": "stored", "BlockRemoved": "removed", "AllBlocksCleared": "cleared"}.get(type(event).__name__, "other")
            hashes = list(getattr(event, "block_hashes", None) or [])
            tokens, size = list(getattr(event, "token_ids", None) or []), getattr(event, "block_size", 0)
            truth = self._truth(event, hashes, tokens, size) if op == "stored" else ""
            self.trace.emit(
                "kv.event", op=op, keys=self.book.numbers(hashes), medium=getattr(event, "medium", None), tokens=len(tokens),
                problem=truth or _shape(op, event, hashes, tokens, size), repeated=any(event is other for other in self.taken),
            )  # fmt: skip
            if op == "stored":
                self.stored.update(dict.fromkeys(hashes, size))
            elif op == "removed":
                for stored, known in itertools.product(self.withdrawn_from, hashes):
                    stored.pop(known, None)
            elif op == "cleared":
                self._clear()
        self.taken = events

    def _clear(self) -> None:
        for stored in self.withdrawn_from:
            stored.clear()

    def _truth(self, event: Any, hashes: list[Any], tokens: list[int], size: Any) -> str:
        """What is wrong with the blocks whose hashes the engine knows; "" if nothing, or if they are hashes of the connector's own."""
        if not isinstance(size, int) or size <= 0 or len(tokens) != len(hashes) * size:
            return ""
        for number, key in enumerate(hashes):
            block = self.book.blocks.get(key)
            if block is None:
                continue
            problem = self._differs(block, event, tokens[number * size : (number + 1) * size], number, hashes, size)
            if problem:
                return problem
        return ""

    def _differs(self, block: Stored, event: Any, tokens: list[int], number: int, hashes: list[Any], size: int) -> str:
        start = block.end - size
        if start < 0 or tokens != block.tokens[start : block.end]:
            return "token_ids are not those of the block"
        parent = hashes[number - 1] if number else event.parent_block_hash
        if start and start in block.parents and parent != block.parents[start]:
            return "parent_block_hash is not the hash of the block before"
        if start == 0 and parent is not None:
            return "the first block has a parent"
        if (block.lora is None) != (getattr(event, "lora_name", block.lora) is None):
            return "lora_name is not that of the request"
        return ""

    def _lookup(self, call: Call) -> None:
        """What the announcements so far promise to this request, and what it is answered."""
        if call.error is not None or not (isinstance(call.result, tuple) and len(call.result) == 2):
            return
        request, local, tokens = call.arg(0, "request"), call.arg(1, "num_computed_tokens"), call.result[0]
        if type(tokens) is not int or request.skip_reading_prefix_cache:
            return
        end = self.book.reach(request, self.stored)
        size = self.book.block_size
        due = min(end, (request.num_tokens - 1) // size * size)
        missing = self.book.between(request, local + tokens, due)
        untold = self.book.between(request, max(end, local)) if self._alone() and max(end, local) < (local + tokens) // size * size else ()
        self.trace.emit(
            "events.lookup", req=request.request_id, announced=due, got=local + tokens, local=local, tokens=tokens,
            missing=self.book.numbers(missing), untold=self.book.numbers(untold),
            chain=self.book.numbers(self.book.between(request, 0, due)),
        )  # fmt: skip

    def _alone(self) -> bool:
        """Whether no other engine, before or beside this one, can have stored anything."""
        return self.first and _engines[self.trace] == 1

    # -- statistics ------------------------------------------------------------------------------------------------------------
    def _stats(self, call: Call) -> None:
        stats = call.result
        if call.error is not None or not isinstance(stats, KVConnectorStats):
            return
        empty = bool(_try(stats.is_empty)[0])
        same = self.last.get(call.half) is stats and not empty
        self.last[call.half] = stats
        _, merge_problem = _try(lambda: _merge(copy.deepcopy(stats)))
        data, problem = _try(lambda: msgspec.msgpack.decode(msgspec.msgpack.encode(stats.to_dict())))
        rebuilt, build_problem = (None, None) if problem else _try(lambda: _build(call.connector, stats, data))
        _, watch_problem = (None, None) if problem else _try(lambda: self._observe(call.connector, data))
        self.trace.emit(
            "stats.taken", half=call.half, empty=empty, kept=same, merge=merge_problem, encode=problem,
            rebuilt=bool(rebuilt), rebuild=build_problem, observe=watch_problem,
        )  # fmt: skip

    def _observe(self, connector: Any, data: dict[str, Any]) -> None:
        if self.metrics is None:
            own = type("Metric", (_Metric,), {"names": set()})
            kinds = dict.fromkeys((Gauge, Counter, Histogram), own)
            made = type(connector).build_prom_metrics(self.config, kinds, ["model_name", "engine"], {0: ["tiny", "0"]})
            self.metrics = made or False
        if self.metrics:
            self.metrics.observe(data, 0)

    # -- handshake -------------------------------------------------------------------------------------------------------------
    def _handshake(self, call: Call) -> None:
        if call.error is None:
            reason = None if call.result is None else pickle_round_trip(call.result)[1]
            self.trace.emit("handshake", none=call.result is None, pickles=reason is None, detail=reason)


def _shape(op: str, event: Any, hashes: list[Any], tokens: list[int], size: Any) -> str:
    """What is wrong with the fields of an event, whatever they refer to."""
    if op == "other":
        return f"{type(event).__name__} is no KV cache event"
    if op == "cleared":
        return ""
    if not hashes or not all(isinstance(key, (bytes, int)) for key in hashes):
        return "block_hashes are missing or not hashes"
    if op == "stored" and (type(size) is not int or size <= 0 or len(tokens) != len(hashes) * size):
        return f"{len(tokens)} token_ids for {len(hashes)} blocks of {size}"
    return "" if isinstance(event.medium, str) else "medium is missing"


def _try(call: Callable[[], Any]) -> tuple[Any, str | None]:
    """(result, None), or (None, one line about what was raised)."""
    try:
        return call(), None
    except Exception as error:  # whatever a connector's classes raise here would be raised in the engine or the front end
        return None, f"{type(error).__name__}: {error}".splitlines()[0][:200]


def _logged(value: Any) -> bool:
    """Whether the logger's line can hold it: a number, or what several connectors' statistics come to, by name."""
    return all(map(_logged, value.values())) if isinstance(value, Mapping) else isinstance(value, (int, float, str))


def _merge(stats: Any) -> None:
    """What happens to statistics between two log lines. TypeError where a method does not give what the next step needs."""
    merged = stats.aggregate(copy.deepcopy(stats))
    if not isinstance(merged, KVConnectorStats):
        raise TypeError(f"aggregate returns {type(merged).__name__}")
    if not all(_logged(value) for value in dict(merged.reduce()).values()):
        raise TypeError("reduce does not return numbers")
    if merged.is_empty() and not stats.is_empty():
        raise ValueError("what was merged is empty")
    merged.reset()


def _build(connector: Any, stats: Any, data: dict[str, Any]) -> bool:
    """Whether the class rebuilds the statistics from their data. ValueError if they are not the same afterwards."""
    rebuilt = type(connector).build_kv_connector_stats(data)
    if rebuilt is None:
        return False
    if rebuilt.is_empty() != stats.is_empty():
        raise ValueError("what was rebuilt is not what was sent")
    rebuilt.aggregate(type(connector).build_kv_connector_stats(data)).reduce()
    return True
