# SPDX-License-Identifier: Apache-2.0
"""Listens for a connector's statistics, and does with them what vLLM does until they are exported.

Both halves return statistics in every step. The scheduler merges those of the ranks, and what is
not empty of its own half; the result is encoded and sent to the front end, which rebuilds it, adds
it to the interval of the log, and shows it to the connector's metrics.
"""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from numbers import Number, Real
from typing import Any

import msgspec
from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from kvconform.contract.trace import Trace
from kvconform.errors import place_of
from kvconform.observe.call import Call
from kvconform.observe.probe import Probe
from kvconform.observe.seen import Seen

LOG_EVERY = 4
"""What is sent in so many steps makes an interval of the log."""
MULTI = "MultiKVConnectorStats"
"""The class of a MultiConnector's statistics, which older releases lack."""
ENGINES = 2
"""Number of data-parallel engines whose statistics one front end exports, in turn."""


class Metrics:
    """A connector's metrics, made of Prometheus' own classes in a registry of their own.

    They are observed as those of ENGINES engines.
    """

    def __init__(self, build: Callable[..., Any], config: Any) -> None:
        self._registry = CollectorRegistry()
        kinds = {kind: self._registered(kind) for kind in (Gauge, Counter, Histogram)}
        engines = {engine: ["tiny", str(engine)] for engine in range(ENGINES)}
        with self._taken_over():
            self._made = build(config, kinds, ["model_name", "engine"], engines)
        self._observed = 0
        self._last = self._values()
        self.moved = 0
        """How many observations have changed a value."""

    @property
    def exist(self) -> bool:
        """Whether the connector has metrics."""
        return self._made is not None

    def _registered(self, kind: type[Any]) -> type[Any]:
        registry = self._registry

        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            kind.__init__(self, *args, **{**kwargs, "registry": registry})

        return type(kind.__name__, (kind,), {"__init__": __init__})

    @contextlib.contextmanager
    def _taken_over(self) -> Iterator[None]:
        """Take over what a connector registers with Prometheus itself, without the given classes.

        vLLM clears that registry before it builds metrics (unregister_vllm_metrics), so the same
        names may come again.
        """
        before = set(REGISTRY._collector_to_names)
        try:
            yield
        finally:
            for collector in set(REGISTRY._collector_to_names) - before:
                REGISTRY.unregister(collector)
                self._registry.register(collector)

    def totals(self, names: Iterable[str]) -> dict[str, float]:
        """Return the values of those metrics that exist, over all of their labels, by name."""
        exported: dict[str, float] = {}
        for metric in self._registry.collect():
            for sample in metric.samples:
                exported[sample.name] = exported.get(sample.name, 0.0) + sample.value
        found = {}
        for name in names:
            values = [exported[each] for each in (name, f"{name}_total") if each in exported]
            if values:
                found[name] = sum(values)
        return found

    def observe(self, data: dict[str, Any]) -> None:
        """Show the metrics what the connector has sent. Raises what they raise."""
        if not self.exist:
            return
        self._made.observe(data, self._observed % ENGINES)
        self._observed += 1
        values = self._values()
        self.moved += values != self._last
        self._last = values

    def _values(self) -> list[tuple[str, dict[str, str], float]]:
        return [
            (sample.name, sample.labels, sample.value)
            for metric in self._registry.collect()
            for sample in metric.samples
            if sample.value and not sample.name.endswith("_created")
        ]


class Statistics:
    """Listens to one engine. Emits events, and changes nothing else.

    `alone()` returns whether no other engine of the run can have stored anything.
    """

    def __init__(
        self, trace: Trace, probe: Probe, config: Any, *, alone: Callable[[], bool]
    ) -> None:
        self.trace = trace
        self.config = config
        self._alone = alone
        self.last: dict[str, Any] = {}
        """The statistics that each half returned last."""
        self.metrics: Metrics | None = None
        """The connector's metrics; None before the first statistics."""
        self.declared: Mapping[str, list[str]] = {}
        """Names of the counters that the connector declares, by their meaning."""
        self.logged: dict[str, float] = {}
        """Totals of the numbers that the logger would print, by name."""
        self.own_counters: Callable[[], Mapping[str, float]] | None = None
        """Returns totals that the connector keeps elsewhere than in its statistics, by name."""
        self.seen = Seen(trace, probe)
        self.returned = self.filled = 0
        """How many statistics were returned, and how many of them were not empty."""
        self._compared = False
        self._of_workers: Any = None  # the joined statistics of the step that is taken up now
        self._interval: Any = None  # what the front end has rebuilt and added up since the last log
        self._sent = 0
        probe.on("get_kv_connector_stats", after=self._returned)
        probe.on("shutdown", before=self._total)

    def landing(self, output: Any) -> None:
        """Note the workers' statistics in a KVConnectorOutput that the scheduler is about to get.

        `output`: None for a step without one.
        """
        self._of_workers = getattr(output, "kv_connector_stats", None)

    def _returned(self, call: Call) -> None:
        stats = call.result
        if call.error is None and isinstance(stats, KVConnectorStats):
            empty = self._take(call.half, stats)
        else:
            stats, empty = None, True
        if call.half == "scheduler":
            # The scheduler drops what its half returns empty, but not what the workers do.
            self._send(call.connector, None if empty else stats)

    def _take(self, half: str, stats: KVConnectorStats) -> bool:
        """Emit stats.taken, and return whether the statistics are empty."""
        empty = bool(_try(stats.is_empty)[0])
        kept = self.last.get(half) is stats and not empty
        self.last[half] = stats
        self.returned += 1
        self.filled += not empty
        if self.declared:
            self._log(_try(lambda: _copier(stats)().reduce())[0])
        merged, problem = _try(lambda: merge(stats))
        self.trace.emit(
            "stats.taken",
            half=half,
            empty=empty,
            kept=kept,
            merge=problem,
            lost=merged.lost if merged else None,
            cleared=merged.cleared if merged else None,
        )
        return empty

    def _send(self, connector: Any, ours: KVConnectorStats | None) -> None:
        """Do what the engine and its front end do with a step's statistics; emit stats.sent.

        Statistics of the two halves that cannot be merged end the engine, which is seen there.
        """
        workers, self._of_workers = _own(connector, self._of_workers), None
        stats = ours if workers is None else workers
        if workers is not None and ours is not None:
            stats = _try(lambda: _copier(workers)().aggregate(_copier(ours)()))[0]
        if not isinstance(stats, KVConnectorStats):
            return
        empty = bool(_try(stats.is_empty)[0])
        data, problem = _try(lambda: encode(stats))
        rebuilt = build_problem = observe_problem = None
        if data is not None:
            if not empty or msgspec.msgpack.decode(data):  # the log passes over an empty dictionary
                rebuilt, build_problem = _try(lambda: rebuild(connector, stats, data))
            if rebuilt is not None:
                _, build_problem = _try(lambda: self._add_up(rebuilt))
            _, observe_problem = _try(lambda: self._observe(connector, data))
        self.trace.emit(
            "stats.sent",
            empty=empty,
            encode=problem,
            rebuilt=rebuilt is not None or is_unknown(stats),
            rebuild=build_problem,
            observe=observe_problem,
        )

    def _add_up(self, rebuilt: KVConnectorStats) -> None:
        """Add what was rebuilt to the interval, as vLLM's KVConnectorLogging does.

        Raises what aggregate and reduce raise.
        """
        before, self._interval = self._interval, None
        interval = rebuilt if before is None else before.aggregate(rebuilt)
        self._sent += 1
        if self._sent % LOG_EVERY:
            self._interval = interval
        elif not interval.is_empty():
            interval.reduce()

    def _observe(self, connector: Any, data: bytes) -> None:
        if self.metrics is None:
            # MultiConnector builds a child and its metrics with a configuration of the child's own.
            config = getattr(connector, "_vllm_config", self.config)
            self.metrics = Metrics(type(connector).build_prom_metrics, config)
        self.metrics.observe(msgspec.msgpack.decode(data))

    def _total(self, call: Call) -> None:
        """Record once, before the worker half is shut down, what came of statistics and lookups."""
        if call.half != "worker":
            return
        if not self._compared:
            self._compared = True
            self._compare()
        if not self.returned:
            return
        self.trace.emit(
            "stats.total",
            returned=self.returned,
            filled=self.filled,
            metrics=self.metrics is not None and self.metrics.exist,
            moved=self.metrics.moved if self.metrics else 0,
            loaded=self._loads() if self._alone() else 0,
        )
        self.returned = 0

    def _log(self, reduced: Any) -> None:
        """Add up what the logger prints of the statistics of one step."""
        for name, value in reduced.items() if isinstance(reduced, Mapping) else ():
            if isinstance(value, Real):
                self.logged[name] = self.logged.get(name, 0) + float(value)

    def _compare(self) -> None:
        """Compare the declared counters with what was seen of this engine's loads.

        Only at the end of a run of one engine in which each granted load became due: only then is
        all known that was loaded.
        """
        seen = self.seen.of_run() if self.declared and self._alone() else {}
        own = self.own_counters() if seen and self.own_counters else {}
        named = [name for what, names in self.declared.items() if what in seen for name in names]
        exported = self.metrics.totals(named) if self.metrics and named else {}
        for what, names in self.declared.items():
            for name in names if what in seen else ():
                places = {
                    "log": self.logged.get(name),
                    "metrics": exported.get(name),
                    "own": own.get(name),
                }
                totals = {place: value for place, value in places.items() if value is not None}
                for place, value in (totals or {"": 0.0}).items():
                    self.trace.emit(
                        "stats.compared",
                        what=what,
                        name=name,
                        place=place,
                        value=value,
                        seen=seen[what][0],
                        most=seen[what][1],
                    )

    def _loads(self) -> int:
        """Return how many loads have written all that was granted."""
        events = self.trace.events
        return len([1 for e in events if e["kind"] == "load.due" and not e["missing"]])


def _try(call: Callable[[], Any]) -> tuple[Any, str | None]:
    """Return (result, None), or (None, one line about the exception and the connector's line)."""
    try:
        return call(), None
    except Exception as error:  # it would be raised in the engine or in the front end
        text = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        at = place_of(error)
        return None, text + (f" ({at.file}:{at.line} in {at.function})" if at else "")


def _logged(value: Any) -> bool:
    """Return whether the logger can print a reduced value.

    It may be a number or text, or a mapping with the values of several connectors.
    """
    if isinstance(value, Mapping):
        return all(map(_logged, value.values()))
    return isinstance(value, (Number, str))


@dataclass(frozen=True)
class _Merged:
    """What became of statistics that were merged with a copy of themselves, and then reset.

    - `lost`: what reduce returns less than half of, compared with what it returned before; None if
      nothing is lost.
    - `cleared`: whether they are empty after reset; None for empty ones, which vLLM drops.
    """

    lost: str | None = None
    cleared: bool | None = None


def _copier(stats: Any) -> Callable[[], Any]:
    """Return a function that returns copies of statistics, which share nothing."""
    try:
        data = pickle.dumps(stats)
        pickle.loads(data)
    except Exception:  # whatever the class may raise
        return lambda: copy.deepcopy(stats)
    return lambda: pickle.loads(data)  # several times as fast


def merge(stats: Any) -> _Merged:
    """Do with copies of statistics what vLLM does between two log lines.

    TypeError if a method returns another type than the next step needs; ValueError if the merged
    statistics are empty.
    """
    copied = _copier(stats)
    stats = copied()
    filled = not stats.is_empty()
    before = copied().reduce() if filled else {}
    merged = stats.aggregate(copied())
    if not isinstance(merged, KVConnectorStats):
        raise TypeError(f"aggregate returns {type(merged).__name__}")
    if not filled:
        return _Merged()
    if merged.is_empty():
        raise ValueError("what was merged is empty")
    after = dict(merged.reduce())
    if not all(_logged(value) for value in after.values()):
        raise TypeError("reduce does not return numbers")
    lost = next(_lost(before, after), None)
    _, problem = _try(merged.reset)
    return _Merged(lost, problem is None and merged.is_empty())


def _lost(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    """Yield the positive numbers that fell below half, as text.

    Counts double when statistics are merged with their copy, and averages stay as they are.
    Half leaves room for estimates such as a standard deviation.
    """
    for name, value in before.items():
        now = after.get(name)
        if isinstance(value, Mapping):
            yield from _lost(value, now if isinstance(now, Mapping) else {})
        elif isinstance(value, Real) and float(value) > 0:
            if not isinstance(now, Real):
                yield f"{name} is gone"
            elif float(now) < float(value) / 2:
                yield f"{name} was {value}, and is {now}"


def encode(stats: Any) -> bytes:
    """Return statistics as the engine sends them; raises if they cannot be sent and read."""
    data = msgspec.msgpack.encode(stats.to_dict())
    msgspec.msgpack.decode(data)
    return data


def _own(connector: Any, stats: Any) -> KVConnectorStats | None:
    """Return the connector's part of what the workers returned, with a MultiConnector or without.

    A MultiConnector files the statistics of its children under the names of their classes, and
    treats each child's as if it were alone.
    """
    name = type(connector).__name__
    if type(stats).__name__ == MULTI and name != "MultiConnector":
        stats = stats.data.get(name)
    return stats if isinstance(stats, KVConnectorStats) else None


def is_unknown(stats: KVConnectorStats) -> bool:
    """Return whether a MultiConnector's statistics are of children that vLLM does not find.

    It looks them up by the name of their class, and so finds none that is given by
    kv_connector_module_path: its own defect, not the child's.
    """
    return (
        type(stats).__name__ == MULTI
        and not stats.data.keys() <= KVConnectorFactory._registry.keys()
    )


def rebuild(connector: Any, stats: KVConnectorStats, data: bytes) -> KVConnectorStats | None:
    """Return statistics that the class rebuilds from their data, as they come over a wire.

    None if it does not, or if vLLM does not find it. ValueError if they are empty afterwards and
    were not before, or the other way round; raises what the class raises.
    """
    if is_unknown(stats):
        return None
    build, decode = type(connector).build_kv_connector_stats, msgspec.msgpack.decode
    rebuilt: KVConnectorStats | None = build(decode(data))
    if rebuilt is None:
        return None
    if rebuilt.is_empty() != stats.is_empty():
        raise ValueError("what was rebuilt is not what was sent")
    # From data of its own: aggregate may add to what it is given.
    merged = build(decode(data)).aggregate(build(decode(data)))
    if not merged.is_empty():
        merged.reduce()
    return rebuilt
