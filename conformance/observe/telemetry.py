# SPDX-License-Identifier: Apache-2.0
"""The engine's block hashes, set against what the harness knows about content: equal content, equal hash, and nothing else.

Watches what a connector says about itself: KV events, statistics and metrics, handshake metadata. Does what their readers would do.

Watches what the engine tells a connector about its requests, and that the connector leaves the arguments of its hooks alone.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import msgspec
from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from kvconform.contract.trace import Trace
from kvconform.kv.provenance import ROOT, extend
from kvconform.observe.call import Call
from kvconform.observe.digest import canonical, pickle_round_trip
from kvconform.observe.probe import Probe


@dataclass(frozen=True)
class Stored:
    """A hashed block: the tokens of its request up to its end, where it ends, the hashes at the block ends before it, the adapter."""

    tokens: list[int]
    end: int
    parents: dict[int, Any]
    lora: str | None


class HashBook:
    """Every block hash that a request showed in this run. `block_size`: tokens per hash. `identity(req)`: salt, adapter, images."""

    def __init__(self, block_size: int, identity: Callable[[str], Any]) -> None:
        self.block_size, self.identity = block_size, identity
        self.blocks: dict[Any, Stored] = {}
        self._hash_of: dict[int, Any] = {}
        self._content_of: dict[Any, int] = {}
        self._numbers: dict[Any, int] = {}

    def numbers(self, keys: Iterable[Any]) -> list[int]:
        """Names for hashes that are the same in every process, whatever the hash seed: the order in which they were first named."""
        return [self._numbers.setdefault(key, len(self._numbers)) for key in keys]

    def keys(self, request: Any) -> list[Any]:
        """The hashes of a request's full blocks, as KV events spell them."""
        return [maybe_convert_block_hash(key) for key in request.block_hashes]

    def enter(self, request: Any) -> dict[str, Any]:
        """Take note of a request's hashes. How many there are and should be; whether they agree with content seen before."""
        keys, tokens = self.keys(request), list(request.all_token_ids)
        identity, chain, same, distinct = self.identity(request.request_id), ROOT, True, True
        parents: dict[int, Any] = {}
        lora = None if request.lora_request is None else request.lora_request.lora_name
        for position, token in enumerate(tokens):
            chain = extend(chain, token, identity.extra(position))
            end = position + 1
            if end % self.block_size or end // self.block_size > len(keys):
                continue
            key = keys[end // self.block_size - 1]
            same = same and self._hash_of.setdefault(chain, key) == key
            distinct = distinct and self._content_of.setdefault(key, chain) == chain
            if key not in self.blocks:
                self.blocks[key] = Stored(tokens, end, dict(parents), lora)
            parents[end] = key
        return {
            "count": len(keys),
            "full": len(tokens) // self.block_size,
            "same": same,
            "distinct": distinct,
        }

    def reach(self, request: Any, announced: dict[Any, int]) -> int:
        """Tokens of a request that announced blocks cover without a gap, from the start."""
        covered = 0
        for number, key in enumerate(self.keys(request), 1):
            end = number * self.block_size
            if key in announced and end - announced[key] <= covered:
                covered = end
        return covered

    def between(self, request: Any, start: int, end: int | None = None) -> Iterator[Any]:
        """The hashes of the blocks that end within (start, end]; up to the last one without `end`."""
        for number, key in enumerate(self.keys(request), 1):
            if start < number * self.block_size and (
                end is None or number * self.block_size <= end
            ):
                yield key


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
            raise ValueError(
                f"{len(values) + len(named)} label values for {len(self._labels)} labels"
            )
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
        self.stored: dict[
            Any, int
        ] = {}  # block hash that this engine announced -> tokens of the announced block
        self.withdrawn_from = [
            self.stored
        ]  # and where a withdrawal counts: a store may be shared between engines, or be each one's own
        self.taken: list[
            Any
        ] = []  # the events of the last call, kept so that their identity means something
        self.last: dict[str, Any] = {}
        self.metrics: Any = None
        self.first = not any(event["kind"] == "request.new" for event in trace.events)
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
            op = {
                "BlockStored": "stored",
                "BlockRemoved": "removed",
                "AllBlocksCleared": "cleared",
            }.get(type(event).__name__, "other")
            hashes = list(getattr(event, "block_hashes", None) or [])
            tokens, size = (
                list(getattr(event, "token_ids", None) or []),
                getattr(event, "block_size", 0),
            )
            truth = self._truth(event, hashes, tokens, size) if op == "stored" else ""
            self.trace.emit(
                "kv.event",
                op=op,
                keys=self.book.numbers(hashes),
                tokens=len(tokens),
                problem=truth or _shape(op, event, hashes, tokens, size),
                repeated=any(event is other for other in self.taken),
            )
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
            problem = self._differs(
                block, event, tokens[number * size : (number + 1) * size], number, hashes, size
            )
            if problem:
                return problem
        return ""

    def _differs(
        self,
        block: Stored,
        event: Any,
        tokens: list[int],
        number: int,
        hashes: list[Any],
        size: int,
    ) -> str:
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
        request, local, tokens = (
            call.arg(0, "request"),
            call.arg(1, "num_computed_tokens"),
            call.result[0],
        )
        if type(tokens) is not int or request.skip_reading_prefix_cache:
            return
        end = self.book.reach(request, self.stored)
        size = self.book.block_size
        due = min(end, (request.num_tokens - 1) // size * size)
        missing = self.book.between(request, local + tokens, due)
        untold = (
            self.book.between(request, max(end, local))
            if self._alone() and max(end, local) < (local + tokens) // size * size
            else ()
        )
        self.trace.emit(
            "events.lookup",
            req=request.request_id,
            announced=due,
            got=local + tokens,
            local=local,
            tokens=tokens,
            missing=self.book.numbers(missing),
            untold=self.book.numbers(untold),
            chain=self.book.numbers(self.book.between(request, 0, due)),
        )

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
        data, problem = _try(
            lambda: msgspec.msgpack.decode(msgspec.msgpack.encode(stats.to_dict()))
        )
        rebuilt, build_problem = (
            (None, None) if problem else _try(lambda: _build(call.connector, stats, data))
        )
        _, watch_problem = (
            (None, None) if problem else _try(lambda: self._observe(call.connector, data))
        )
        self.trace.emit(
            "stats.taken",
            half=call.half,
            empty=empty,
            kept=same,
            merge=merge_problem,
            encode=problem,
            rebuilt=bool(rebuilt),
            rebuild=build_problem,
            observe=watch_problem,
        )

    def _observe(self, connector: Any, data: dict[str, Any]) -> None:
        if self.metrics is None:
            own = type("Metric", (_Metric,), {"names": set()})
            kinds = dict.fromkeys((Gauge, Counter, Histogram), own)
            made = type(connector).build_prom_metrics(
                self.config, kinds, ["model_name", "engine"], {0: ["tiny", "0"]}
            )
            self.metrics = made or False
        if self.metrics:
            self.metrics.observe(data, 0)

    # -- handshake -------------------------------------------------------------------------------------------------------------
    def _handshake(self, call: Call) -> None:
        if call.error is None:
            reason = None if call.result is None else pickle_round_trip(call.result)[1]
            self.trace.emit(
                "handshake", none=call.result is None, pickles=reason is None, detail=reason
            )


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
    return (
        all(map(_logged, value.values()))
        if isinstance(value, Mapping)
        else isinstance(value, (int, float, str))
    )


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


SHARED = {
    "get_transfer_results": (0, "finished_req_ids"),
    "update_connector_output": (0, "connector_output"),
    "request_finished": (1, "block_ids"),
    "request_finished_all_groups": (1, "block_ids"),
}
"""Hook -> the argument that others read after it."""
REPORTS = ("finished_sending", "finished_recving", "failed_recving", "invalid_block_ids")


class Watch:
    """Listens to one engine. `generation(req)` is the incarnation of a request id. Changes nothing but the trace."""

    def __init__(
        self, trace: Trace, probe: Probe, book: HashBook, generation: Callable[[str], int]
    ) -> None:
        self.trace, self.book, self.generation = trace, book, generation
        probe.on("on_new_request", after=self._new)
        probe.on("get_num_new_matched_tokens", after=self._hashes)
        for hook in SHARED:
            probe.on(hook, before=self._before, after=self._after)
        probe.on("update_connector_output", before=self._landed)

    def _new(self, call: Call) -> None:
        request = call.arg(0, "request")
        self.trace.emit(
            "request.new", req=request.request_id, generation=self.generation(request.request_id)
        )

    def _hashes(self, call: Call) -> None:
        request = call.arg(0, "request")
        found = self.book.enter(request)
        self.trace.emit(
            "hashes",
            req=request.request_id,
            generation=self.generation(request.request_id),
            **found,
        )

    def _landed(self, call: Call) -> None:
        """A step's reports reach the scheduler half, perhaps after the worker half has returned those of later steps."""
        output = call.arg(0, "connector_output")
        reports = {name: getattr(output, name, None) for name in REPORTS}
        changed = [
            name
            for name, ids in reports.items()
            if ids is not None and getattr(ids, "reported", ids) != ids
        ]
        self.trace.emit("report.landed", changed=changed)

    def _before(self, call: Call) -> None:
        call.scratch["argument"] = _picture(call)

    def _after(self, call: Call) -> None:
        if call.result_event is not None and call.error is None:
            mutated = _picture(call) != call.scratch["argument"]
            self.trace.amend(call.result_event, mutated_args=mutated)


def _picture(call: Call) -> str:
    value: Any = call.arg(*SHARED[call.hook])
    if call.hook == "update_connector_output":
        value = [sorted(getattr(value, name, None) or ()) for name in REPORTS]
    return repr(canonical(value))
