# SPDX-License-Identifier: Apache-2.0
"""Tests that declared counters are compared with what was loaded, where that is known."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from kvconform.config.target import Target
from kvconform.contract.capabilities import complete
from kvconform.contract.case import Engine
from kvconform.contract.loader import load_spec
from kvconform.contract.trace import Event
from kvconform.errors import UsageError
from kvconform.refimpl.connector import Lookup, ReferenceConnector
from kvconform.refimpl.telemetry import COUNTERS, ReferenceMetrics
from kvconform.refimpl.variants.loading import BlockFiller
from kvconform.refimpl.variants.metered import Metered
from kvconform.run.calibration import target_profile
from kvconform.run.case import run_and_judge
from kvconform.run.runner import run_variant

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

SPEC = load_spec()


class Misnames(ReferenceConnector):
    """Declares a counter that it does not have."""

    @classmethod
    def kvconform_capabilities(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        found = super().kvconform_capabilities(extra_config)
        return {**found, "metrics": {"bytes_loaded": ["bytes"]}}


class Exclusive(Metered):
    """Moves what it reads to the first level, and keeps it at no other."""

    def __init__(
        self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        tiers = self._cache.tiers
        promote = tiers._promote

        def move_up(key: str, value: bytes) -> None:
            promote(key, value)
            if tiers.levels[0].exists(key):
                for level in tiers.levels[1:]:
                    level.delete(key)

        tiers._promote = move_up  # type: ignore[method-assign]


class SlowLookup(Metered):
    """Fetches at lookup, which takes longer than all the rest, and counts that time."""

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> Lookup:
        found = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if found[0]:
            time.sleep(0.05)
            self._count_seconds(0.05)
        return found


class MissesBlocks(Metered):
    """Counts misses in whole blocks."""

    def _count_missed(self, tokens: int) -> None:
        super()._count_missed(tokens - tokens % self.options.chunk_tokens)


class KeepsElsewhere(Metered):
    """Keeps its counters to itself, and shows what it saved."""

    FACTOR = 1

    def __init__(
        self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if role.name == "SCHEDULER":  # the last half of an engine
            elsewhere[self.options.store].clear()

    def _count(self, name: str, by: float = 1) -> None:
        elsewhere[self.options.store][name] += by

    def kvconform_counters(self) -> dict[str, float]:
        counts = elsewhere[self.options.store]
        return {f"own_{name}": value * self.FACTOR for name, value in counts.items()}

    def kvconform_known(self) -> dict[str, float]:
        return {"tokens_saved": elsewhere[self.options.store]["tokens_saved"]}

    @classmethod
    def kvconform_capabilities(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        found = super().kvconform_capabilities(extra_config)
        names = ("tokens_loaded", "tokens_saved")
        return {**found, "metrics": {name: [f"own_{name}"] for name in names}}


class CountsElsewhereTwice(KeepsElsewhere):
    """Shows twice what happened."""

    FACTOR = 2


class Nested(KVConnectorStats):
    """Statistics that are added to in place, in an inner map."""

    def reset(self) -> None:
        self.data = {"counts": {}}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        counts = self.data["counts"]
        for name, count in other.data["counts"].items():
            counts[name] = counts.get(name, 0) + count
        return self

    def reduce(self) -> dict[str, int | float]:
        return dict(self.data["counts"])

    def is_empty(self) -> bool:
        return not self.data["counts"]


class NestedMetrics(ReferenceMetrics):
    """Observes such statistics."""

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        super().observe(transfer_stats_data["counts"], engine_idx)


class AddsInPlace(ReferenceConnector):
    """Has statistics that are added to in place."""

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        stats = super().get_kv_connector_stats()
        return None if stats is None else Nested({"counts": stats.data})

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        return Nested({"counts": {}} if data is None else data)

    @classmethod
    def build_prom_metrics(cls, *args: Any) -> NestedMetrics:
        return NestedMetrics(*args)

    @classmethod
    def kvconform_capabilities(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        return {**super().kvconform_capabilities(extra_config), "metrics": COUNTERS}


class ReadsItsOptions(Metered):
    """Makes its metrics as its own options say."""

    @classmethod
    def build_prom_metrics(cls, vllm_config: Any, *args: Any) -> Any:
        assert "store" in vllm_config.kv_transfer_config.kv_connector_extra_config
        return super().build_prom_metrics(vllm_config, *args)


elsewhere: defaultdict[str, Counter[str]] = defaultdict(Counter)
"""What KeepsElsewhere has counted on all ranks, by store; each run has its own."""


def target_of(cls: type, **options: Any) -> Target:
    return Target(f"{cls.__module__}:{cls.__name__}", {"store": "{tmp}/store", **options})


def compared(case: str, engine: Engine, target: Target, tmp: Path) -> list[Event]:
    profile = target_profile(target, tmp / "profile")
    run = run_variant(
        SPEC.cases[case].variants([engine])[0],
        target,
        seed=0,
        tmp=tmp / "run",
        relation="connector",
        caps=profile.caps,
        promises=profile.promises,
    )
    return [event for event in run.trace if event["kind"] == "stats.compared"]


@pytest.mark.parametrize("engine", ["reference", "vllm"])
@pytest.mark.parametrize("case", ["lifecycle.fail-recompute", "ranks.tensor"])
@pytest.mark.parametrize("cls", [ReferenceConnector, AddsInPlace])
def test_the_log_and_the_metrics_show_what_was_loaded(
    cls: type, case: str, engine: Engine, tmp_path: Path
) -> None:
    events = compared(case, engine, target_of(cls), tmp_path)
    assert {(event["what"], event["place"]) for event in events} == {
        ("bytes_loaded", "log"),
        ("bytes_loaded", "metrics"),
        ("tokens_granted", "log"),
        ("tokens_granted", "metrics"),
    }
    assert all(event["seen"] <= event["value"] <= event["most"] for event in events)
    assert all(event["value"] > 0 for event in events)
    exact = {event["what"] for event in events if event["seen"] == event["most"]}
    failed_in_part = {"bytes_loaded"} if case == "lifecycle.fail-recompute" else set()
    assert exact == {"bytes_loaded", "tokens_granted"} - failed_in_part


def test_a_load_whose_request_was_aborted_counts(tmp_path: Path) -> None:
    target = target_of(ReferenceConnector, load="async", load_delay=3)
    events = compared("lifecycle.abort-loading", "reference", target, tmp_path)
    assert len(events) == 4 and all(event["value"] == event["seen"] > 0 for event in events)


@pytest.mark.parametrize("engine", ["reference", "vllm"])
def test_whole_blocks_may_be_counted(engine: Engine, tmp_path: Path) -> None:
    """All of the prompt is stored, and one token less than that is granted."""
    target = target_of(BlockFiller, whole_blocks=False)
    events = compared("lifecycle.last-token", engine, target, tmp_path)
    assert len(events) == 4
    assert all(event["seen"] < event["value"] <= event["most"] for event in events)
    report = run_and_judge(
        SPEC.cases["lifecycle.last-token"].variants([engine])[0],
        target,
        SPEC,
        seed=0,
        tmp=tmp_path / "judged",
    )
    [row] = [row for row in report.rows if row.requirement == "stats.true"]
    assert row.verdict == "PASS", row.message


@pytest.mark.parametrize("engine", ["reference", "vllm"])
def test_misses_saves_evictions_and_seconds_are_compared(engine: Engine, tmp_path: Path) -> None:
    events = compared("cache.demoted", engine, target_of(Metered, store_chunks=12), tmp_path)
    log = {event["what"]: event for event in events if event["place"] == "log"}
    assert set(log) == {
        "bytes_loaded",
        "tokens_loaded",
        "blocks_loaded",
        "tokens_granted",
        "tokens_missed",
        "bytes_saved",
        "tokens_saved",
        "evictions",
        "load_seconds",
    }
    assert all(0 < event["seen"] <= event["value"] <= event["most"] for event in events)
    assert log["evictions"]["seen"] > 4


def test_a_child_of_multi_connector_has_metrics_by_its_own_options(tmp_path: Path) -> None:
    variant = SPEC.cases["multi.alone"].variants(["reference"])[0]
    report = run_and_judge(variant, target_of(ReadsItsOptions), SPEC, seed=0, tmp=tmp_path)
    [row] = [row for row in report.rows if row.requirement == "stats.observable"]
    assert row.verdict == "PASS", row.message


@pytest.mark.parametrize("cls", [Exclusive, SlowLookup, MissesBlocks])
def test_other_correct_counters_pass(cls: type, tmp_path: Path) -> None:
    # Nine chunks are less than the prompts, so the exclusive cache moves entries up.
    target = target_of(cls, store_chunks=24, tiers=[{"url": "memory:", "chunks": 9}])
    events = compared("cache.demoted", "reference", target, tmp_path)
    assert {"evictions", "load_seconds", "tokens_missed"} <= {event["what"] for event in events}
    assert [e for e in events if not e["seen"] <= e["value"] <= e["most"]] == []


def test_a_counter_that_does_not_exist_is_zero(tmp_path: Path) -> None:
    report = run_and_judge(
        SPEC.cases["lifecycle.local-and-external"].variants(["reference"])[0],
        target_of(Misnames),
        SPEC,
        seed=0,
        tmp=tmp_path,
    )
    [row] = [row for row in report.rows if row.verdict == "FAIL"]
    assert row.requirement == "stats.true"
    assert row.message.startswith(
        "the connector counted 0 as bytes, and the bytes that loads wrote"
    )


@pytest.mark.parametrize("engine", ["reference", "vllm"])
@pytest.mark.parametrize("cls", [KeepsElsewhere, CountsElsewhereTwice])
def test_counters_of_its_own_are_compared(cls: type, engine: Engine, tmp_path: Path) -> None:
    variant = SPEC.cases["ranks.tensor"].variants([engine])[0]
    report = run_and_judge(variant, target_of(cls), SPEC, seed=0, tmp=tmp_path)
    [row] = [row for row in report.rows if row.requirement == "stats.true"]
    assert row.exercised == 2
    if cls is KeepsElsewhere:
        assert row.verdict == "PASS", row.message
    else:
        assert row.verdict == "FAIL"
        assert "own_tokens_" in row.message and "(own)" in row.message


@pytest.mark.parametrize("wrong", [["bytes"], {"hits": ["hits"]}, {"bytes_loaded": "bytes"}])
def test_a_wrong_declaration_is_refused(wrong: Any) -> None:
    with pytest.raises(UsageError, match="capability metrics must be a mapping of bytes_loaded"):
        complete({"metrics": wrong})
