# SPDX-License-Identifier: Apache-2.0
"""Tests of engines with several ranks.

Correct connectors fail nothing, however far their ranks drift apart. The reports of the ranks are
joined by count.
"""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata

from kvconform.compat.vllm_api import KVConnectorOutput
from kvconform.config.target import Target
from kvconform.contract.case import Case
from kvconform.contract.loader import load_spec
from kvconform.contract.trace import Trace
from kvconform.engine.ranks import Place, stage_of
from kvconform.observe.ledger import RankReports
from kvconform.refimpl.connector import ReferenceConnector
from kvconform.run.case import run_and_judge
from kvconform.run.runner import run_variant

SPEC = load_spec()
CASES = [case for case in SPEC.cases.values() if case.area == "ranks"]
ASYNC = {"load": "async", "async_saves": True}
TARGETS: dict[str, tuple[str, dict[str, Any]]] = {
    "sync": ("kvconform.refimpl.connector:ReferenceConnector", {}),
    "async": ("kvconform.refimpl.connector:ReferenceConnector", ASYNC),
    "drifting": ("kvconform.refimpl.variants.ranks:Drifting", ASYNC),
    "losing": ("kvconform.refimpl.variants.ranks:LosesShards", {}),
    "losing-async": ("kvconform.refimpl.variants.ranks:LosesShards", ASYNC),
    "failing-by-id": ("kvconform.refimpl.variants.ranks:FailsById", ASYNC),
    "plain": ("kvconform.refimpl.variants.plain:Plain", {}),
    "decoy": ("kvconform.refimpl.variants.decoy:Decoy", {}),
}

SOON = {("ranks.soak", "async"), ("ranks.soak-turnover", "losing")}
"""Of the cases of many rounds, those that are tried with each change."""


def target(name: str) -> Target:
    connector, options = TARGETS[name]
    return Target(connector, {"store": "{tmp}/store", **options})


def pairs() -> list[Any]:
    """Return each case with each connector; most of the long ones for every night."""
    found = []
    for case, name in itertools.product(CASES, TARGETS):
        later = "soak" in case.id and (case.id, name) not in SOON
        marks = [pytest.mark.long] if later else []
        found.append(pytest.param(case, name, id=f"{case.id}-{name}", marks=marks))
    return found


@pytest.mark.parametrize(("case", "name"), pairs())
def test_a_correct_connector_fails_nothing(case: Case, name: str, tmp_path: Path) -> None:
    for number, variant in enumerate(
        [*case.variants(["reference"])[-1:], *case.variants(["vllm"])[:1]]
    ):
        report = run_and_judge(variant, target(name), SPEC, seed=number, tmp=tmp_path / str(number))
        assert report.harness_error is None
        assert [row for row in report.rows if row.verdict == "FAIL"] == []


@pytest.mark.parametrize("load", ["sync", "async"])
@pytest.mark.parametrize(
    "groups", [["sliding"], ["full", "sliding"], ["full", "local"], ["full", "sliding", "state"]]
)
def test_ranks_split_the_heads_of_every_group(groups: list[str], load: str, tmp_path: Path) -> None:
    case = SPEC.cases["groups.ranks"]
    config = case.config.model_copy(update={"groups": groups})
    variant = case.model_copy(update={"config": config}).variants(["vllm"])[0]
    hybrid = Target(
        "kvconform.refimpl.variants.hybrid:HybridConnector",
        {"store": "{tmp}/store", "load": load},
    )
    report = run_and_judge(variant, hybrid, SPEC, seed=0, tmp=tmp_path)
    assert report.harness_error is None
    assert [row for row in report.rows if row.verdict == "FAIL"] == []
    start = next(event for event in report.trace if event["kind"] == "run.start")
    assert start["groups"] == len(groups)
    registered = [event for event in report.trace if event["kind"] == "kv.registered"]
    assert len(registered) == 2 and all(event["shape"][1] == 1 for event in registered)
    loads = [event for event in report.trace if event["kind"] == "alloc" and event["external"]]
    assert all(len(event["tables"]) == len(groups) for event in loads) and loads


def test_every_rank_copies_the_block_that_a_hit_ends_in(tmp_path: Path) -> None:
    case = SPEC.cases["groups.inside-block"]
    config = case.config.model_copy(update={"tensor_parallel": 2})
    variant = case.model_copy(update={"config": config, "relations": []}).variants(["vllm"])[0]
    hybrid = Target("kvconform.refimpl.variants.hybrid:HybridConnector", {"store": "{tmp}/store"})
    report = run_and_judge(variant, hybrid, SPEC, seed=0, tmp=tmp_path)
    assert [row for row in report.rows if row.verdict == "FAIL"] == []
    copies = [e for e in report.trace if e["kind"] == "block" and e["op"] == "copy"]
    assert len(copies) == 2 * len({(e["step"], e["id"]) for e in copies}) > 0


@pytest.mark.parametrize(
    ("numbers", "stages"),
    [
        ([0, 1], [[0], [1]]),
        ([0, 1, 2], [[0, 1], [2]]),
        ([0, 9, 10], [[0], [9, 10]]),
        ([1, 4], [[1], [4]]),
    ],
)
def test_a_stage_has_the_layers_that_vllm_gives_it(
    numbers: list[int], stages: list[list[int]]
) -> None:
    for pp, mine in enumerate(stages):
        place = Place(pp, 0, len(stages), 1)
        assert [numbers[i] for i in stage_of(place, numbers, numbers[-1] + 1)] == mine


def test_a_load_is_over_when_the_last_rank_is_done(tmp_path: Path) -> None:
    variant = SPEC.cases["ranks.async-load"].variants(["vllm"])[0]
    trace = run_variant(variant, target("drifting"), seed=0, tmp=tmp_path).trace
    reports = {
        e["rank"]: e
        for e in trace
        if e["kind"] == "transfer.reported" and e["req"] == "c" and e["direction"] == "recv"
    }
    joined = next(e for e in trace if e["kind"] == "ranks.joined" and "c" in e["received"])
    released = next(
        e for e in trace if e["kind"] == "release" and e["req"] == "c" and e["direction"] == "recv"
    )
    assert set(reports) == {0, 1} and reports[0]["step"] < reports[1]["step"] == joined["step"]
    assert released["seq"] > joined["seq"]


def report(**fields: Any) -> SimpleNamespace:
    return SimpleNamespace(kv_connector_output=KVConnectorOutput(**fields))


def joined(count: int | None) -> tuple[Trace, RankReports]:
    trace = Trace()
    return trace, RankReports(trace, SimpleNamespace(get_finished_count=lambda: count), 2, count)


def test_errors_of_any_rank_count_and_failures_wait_for_all() -> None:
    trace, engine = joined(None)
    engine.join(
        [report(), report(invalid_block_ids={3}, failed_recving={"a"}, finished_recving={"a"})]
    )
    engine.join([report(finished_recving={"a"}), report()])
    first, second = trace.events
    assert (first["invalid"], first["received"], first["failed"]) == ([3], [], [])
    assert (second["received"], second["failed"], second["failures"]) == (["a"], ["a"], ["a"])
    assert not any(event["early"] or event["late"] for event in trace.events)


def test_the_connectors_count_is_the_one_that_matters() -> None:
    trace, engine = joined(1)
    engine.join([report(finished_sending={"a"}), report()])
    assert trace.events[-1]["sent"] == ["a"] and trace.events[-1]["early"] == []


def test_a_report_that_the_engine_drops_is_late_and_one_that_it_invents_early() -> None:
    trace, engine = joined(None)
    engine._aggregator = SimpleNamespace(
        aggregate=lambda results, rank: report(finished_sending={"b"})
    )  # type: ignore[assignment]
    engine.join([report(finished_recving={"a"}), report(finished_recving={"a"})])
    assert (trace.events[-1]["early"], trace.events[-1]["late"]) == (["send b"], ["recv a"])


@dataclasses.dataclass
class Said(KVConnectorWorkerMetadata):
    """What a rank reports: a number of its own."""

    numbers: list[int]

    def aggregate(self, other: Any) -> Said:
        return Said(self.numbers + other.numbers)


class Shows(ReferenceConnector):
    """Shows which objects leave its worker halves, and which come to its scheduler half."""

    left: ClassVar[list[Any]] = []
    came: ClassVar[list[Any]] = []

    def get_handshake_metadata(self) -> Any:
        self.left.append(super().get_handshake_metadata())
        return self.left[-1]

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Any) -> None:
        self.came.extend(metadata.values())
        super().set_xfer_handshake_metadata_pp_aware(metadata)

    def build_connector_worker_meta(self) -> Any:
        self.left.append(Said([len(self.left)]))
        return self.left[-1]

    def update_connector_output(self, connector_output: Any) -> None:
        if connector_output.kv_connector_worker_meta is not None:
            self.came.append(connector_output.kv_connector_worker_meta)
        super().update_connector_output(connector_output)


@pytest.mark.parametrize(
    ("case", "relation", "same"),
    [
        ("lifecycle.hook-order", "connector", True),
        ("lifecycle.pickled-metadata", "pickled-metadata", False),
        ("ranks.tensor", "connector", False),
    ],
)
def test_what_leaves_a_worker_is_pickled_where_there_are_several(
    case: str, relation: str, same: bool, tmp_path: Path
) -> None:
    Shows.left.clear()
    Shows.came.clear()
    variant = SPEC.cases[case].variants(["reference", "vllm"])[0]
    target = Target(f"{__name__}:Shows", {"store": "{tmp}/store"})
    run = run_variant(variant, target, seed=0, tmp=tmp_path, relation=relation)
    left = set(map(id, Shows.left))
    kinds = {type(came).__name__ for came in Shows.came}
    assert kinds == {"Said", "ReferenceHandshake"}
    assert {id(came) in left for came in Shows.came} == {same}
    reports = [event for event in run.trace if event["kind"] == "worker.reports"]
    assert reports and all(event["pickles"] for event in reports)
    assert not any(event["kind"] == "relay.broken" for event in run.trace)
