# SPDX-License-Identifier: Apache-2.0
"""Tests of what is done with statistics: merged, sent, rebuilt, logged and exported."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import prometheus_client
import pytest
from prometheus_client import Gauge
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from kvconform.contract.trace import Trace
from kvconform.observe.call import Call
from kvconform.observe.probe import Probe
from kvconform.observe.statistics import LOG_EVERY, Metrics, Statistics, encode, merge, rebuild
from kvconform.refimpl.connector import ReferenceConnector
from kvconform.refimpl.telemetry import ReferenceStats


class _Forgets(ReferenceStats):
    def aggregate(self, other: Any) -> Any:
        return ReferenceStats()


def test_statistics_go_through_what_the_engine_does_to_them() -> None:
    merge(ReferenceStats({"n": 1}))
    with pytest.raises(ValueError, match="empty"):
        merge(_Forgets({"n": 1}))
    with pytest.raises(TypeError, match="numbers"):
        merge(ReferenceStats({"n": (1, 2)}))  # adds up to a tuple
    connector: Any = object.__new__(ReferenceConnector)
    assert rebuild(connector, ReferenceStats({"n": 1}), encode(ReferenceStats({"n": 1})))
    with pytest.raises(ValueError, match="not what was sent"):
        rebuild(connector, ReferenceStats({"n": 1}), encode(ReferenceStats()))


class _Observes:
    """Metrics with a counter and a gauge, fed by name."""

    def __init__(self, config: Any, kinds: Any, labels: list[str], values: Any) -> None:
        made = {kind.__name__: made(kind.__name__, "text", labels) for kind, made in kinds.items()}
        self.metrics = {name: metric.labels(*values[0]) for name, metric in made.items()}

    def observe(self, data: dict[str, Any], engine: int = 0) -> None:
        for call, amount in data.items():
            name, method = call.split(".")
            getattr(self.metrics[name], method)(*amount)


def test_metrics_are_those_of_prometheus() -> None:
    metrics = Metrics(_Observes, None)
    metrics.observe({})
    metrics.observe({"Counter.inc": [0]})
    assert metrics.moved == 0
    metrics.observe({"Counter.inc": [2], "Gauge.dec": [1]})
    metrics.observe({"Gauge.inc": [-1]})
    metrics.observe({"Histogram.observe": [0]})
    assert metrics.moved == 3
    with pytest.raises(ValueError, match="non-negative"):
        metrics.observe({"Counter.inc": [-1]})
    with pytest.raises(ValueError, match="Duplicated"):
        Metrics(lambda config, kinds, *args: [kinds[Gauge]("a", "b") for _ in "xy"], None)
    assert Metrics(_Observes, None).moved == 0, "each has a registry of its own"


def test_a_connector_without_metrics() -> None:
    metrics = Metrics(lambda *args: None, None)
    metrics.observe({"n": 1})
    assert not metrics.exist and metrics.moved == 0


def test_empty_statistics_are_not_reduced() -> None:
    class Mean(ReferenceStats):
        def aggregate(self, other: Any) -> Mean:
            return Mean(dict(super().aggregate(other).data))

        def reduce(self) -> dict[str, int | float]:
            return {"mean": sum(self.data.values()) / len(self.data)}

    assert merge(Mean({})).cleared is None
    assert merge(Mean({"n": 1})).lost is None


@dataclass
class Stats(KVConnectorStats):
    """Statistics with the values that a test wants."""

    reduced: Any = field(default_factory=dict)

    def aggregate(self, other: Any) -> Stats:
        return self

    def reduce(self) -> Any:
        return self.reduced

    def is_empty(self) -> bool:
        return not self.data

    def reset(self) -> None:
        self.data = {}


@pytest.mark.parametrize(
    "reduced", [{}, {"loads": 3, "rate": 0.5}, {"Child": {"loads": 3}, "Other": {}}, {"unit": "MB"}]
)
def test_numbers_also_by_child(reduced: Any) -> None:
    merge(Stats({"a": 1}, reduced))


@pytest.mark.parametrize("reduced", [{"loads": [1, 2]}, {"Child": {"loads": None}}])
def test_what_is_no_number(reduced: Any) -> None:
    with pytest.raises(TypeError, match="reduce does not return numbers"):
        merge(Stats({"a": 1}, reduced))


@pytest.mark.parametrize(
    ("before", "after", "lost"),
    [
        ({"loads": 3}, {"loads": 6}, None),
        ({"rate": 0.5, "idle": 0}, {"rate": 0.5, "idle": 0}, None),
        ({"loads": 3}, {"loads": 0}, "loads was 3, and is 0"),
        ({"loads": 3, "rate": 2.0}, {"loads": 6}, "rate is gone"),
        ({"Child": {"loads": 4}}, {"Child": {"loads": 1}}, "loads was 4, and is 1"),
        ({"Child": {"loads": 4}}, {}, "loads is gone"),
        ({"drift": -2}, {"drift": -4}, None),
    ],
)
def test_what_is_lost_in_themerge(before: Any, after: Any, lost: str | None) -> None:
    class Merging(Stats):
        def aggregate(self, other: Any) -> Stats:
            return Stats({"a": 1}, after)

    assert merge(Merging({"a": 1}, before)).lost == lost


def test_whether_a_reset_clears() -> None:
    class Keeping(Stats):
        def reset(self) -> None:
            pass

    assert merge(Stats({"a": 1})).cleared
    assert not merge(Keeping({"a": 1})).cleared


@dataclass
class Counts(KVConnectorStats):
    """Adds the other's counts to its own, as far as `knows_all` it has the keys."""

    knows_all: bool = True

    def aggregate(self, other: Any) -> Counts:
        for name, count in other.data.items():
            self.data[name] = (
                self.data.get(name, 0) if self.knows_all else self.data[name]
            ) + count
        return self

    def reduce(self) -> Any:
        return dict(self.data)

    def is_empty(self) -> bool:
        return not self.data

    def reset(self) -> None:
        self.data = {}


class Reads:
    """Metrics that read the same key of everything that they observe, and note the engines."""

    engines: list[int]

    def __init__(self, key: str) -> None:
        self.key = key
        self.engines = []

    def observe(self, data: dict[str, Any], engine_idx: int = 0) -> None:
        self.engines.append(engine_idx)
        assert data[self.key] >= 0


class Connector:
    """A connector whose metrics read one key."""

    metrics = Reads("bytes")
    knows_all = True

    @classmethod
    def build_prom_metrics(cls, *args: Any) -> Any:
        return cls.metrics

    @classmethod
    def build_kv_connector_stats(cls, data: Any = None) -> Any:
        return Counts(dict(data or {}), knows_all=cls.knows_all)


def sent(steps: list[tuple[Any, Any]], connector: type[Connector] = Connector) -> list[Any]:
    """Return the events stats.sent of steps with (workers' statistics, the scheduler half's)."""
    trace = Trace()
    probe = Probe(trace)
    statistics = Statistics(trace, probe, None, alone=lambda: True)
    for of_workers, of_scheduler in steps:
        statistics.landing(SimpleNamespace(kv_connector_stats=of_workers))
        taken = Call(connector(), "get_kv_connector_stats", "scheduler", 0, (), {})
        taken.result = of_scheduler
        for listener in probe.after[taken.hook]:
            listener(taken)
    return [event for event in trace.events if event["kind"] == "stats.sent"]


def test_the_metrics_get_both_halves_at_once_as_from_the_scheduler() -> None:
    """Keys that only one half has are together; vLLM drops what its half returns empty."""
    (both,) = sent([(Counts({"bytes": 1}), Counts({"hits": 2}))])
    assert both["observe"] is None and both["rebuilt"] and not both["empty"]
    assert sent([(None, Counts({}))]) == [] == sent([(None, None)])
    (empty,) = sent([(Counts({}), Counts({}))])
    assert "KeyError: 'bytes'" in empty["observe"], "vLLM sends the workers', if empty"
    (alone,) = sent([(None, Counts({"hits": 2}))])
    assert "KeyError: 'bytes'" in alone["observe"]


def test_what_is_sent_is_a_copy() -> None:
    of_workers, ours = Counts({"bytes": 1}), Counts({"bytes": 2})
    sent([(of_workers, ours)])
    assert (of_workers.data, ours.data) == ({"bytes": 1}, {"bytes": 2})


class AddsKnown(Connector):
    """Adds up only keys that were there before."""

    knows_all = False


def test_steps_are_added_up_as_in_the_log() -> None:
    unlike = [(Counts({"bytes": 1}), None), (Counts({"bytes": 1, "hits": 1}), None)]
    assert [event["rebuild"] for event in sent(unlike)] == [None, None]
    first, second = sent(unlike, AddsKnown)
    assert first["rebuild"] is None
    assert re.fullmatch(
        r"KeyError: 'hits' \(test_statistics\.py:\d+ in aggregate\)", second["rebuild"]
    ), "what is wrong, and where"
    an_interval = [(Counts({"bytes": 1}), None)] * LOG_EVERY
    apart = sent([*an_interval, unlike[1]], AddsKnown)
    assert [event["rebuild"] for event in apart] == [None] * (LOG_EVERY + 1), "the next interval"


def test_the_metrics_of_several_engines_are_observed() -> None:
    Connector.metrics.engines.clear()
    sent([(Counts({"bytes": 1}), None)] * 3)
    assert Connector.metrics.engines == [0, 1, 0]


def test_metrics_that_are_registered_with_prometheus_itself() -> None:
    """As vLLM clears the registry before it builds metrics, one name may be used again."""

    def build(*args: Any) -> Any:
        counter = prometheus_client.Counter("vllm:hits", "text")
        return SimpleNamespace(observe=lambda data, engine: counter.inc(data["hits"]))

    for _ in range(2):
        metrics = Metrics(build, None)
        metrics.observe({"hits": 3})
        assert metrics.moved == 1 and metrics.totals(["vllm:hits"]) == {"vllm:hits": 3}
    left = prometheus_client.REGISTRY.collect()
    assert "vllm:hits" not in [metric.name for metric in left]
