# SPDX-License-Identifier: Apache-2.0
"""Tests of connectors as children of MultiConnector.

They check what is recorded, and that correct connectors fail nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from beside_fetcher import Scribbles
from kvconform.config.target import Target, inside
from kvconform.contract.capabilities import complete
from kvconform.contract.case import Case
from kvconform.contract.loader import load_spec
from kvconform.engine.engine import Engine
from kvconform.run.calibration import profile_of
from kvconform.run.case import run_and_judge
from kvconform.run.driver import Driver
from kvconform.run.runner import run_variant

REFERENCE = "kvconform.refimpl.connector:ReferenceConnector"
SPEC = load_spec()
CASES = [case for case in SPEC.cases.values() if case.area == "multi"]
TARGETS: dict[str, tuple[str, dict[str, Any]]] = {
    "sync": (REFERENCE, {"store": "{tmp}/store"}),
    "async": (REFERENCE, {"store": "{tmp}/store", "load": "async", "async_saves": True}),
    "plain": ("kvconform.refimpl.variants.plain:Plain", {}),
    "decoy": ("kvconform.refimpl.variants.decoy:Decoy", {}),
}

FETCHED = """
  - add: {req: a, prompt: 17, max_tokens: 2}
  - run: {}
  - add: {req: b, prompt: 6, max_tokens: 8}
  - step: 2
  - add: {req: c, prompt: {same: a}, max_tokens: 2}
  - run: {}
  - add: {req: e, prompt: 18, max_tokens: 6}
  - run: {}
"""
"""Steps of a case: a fetcher loads the prompt of c, while b decodes."""


def behind(sibling: str, steps: str = FETCHED) -> Case:
    """Return a case with a sibling that loads behind the connector under test."""
    config = {"multi": ["self", sibling], "num_blocks": 20, "prefix_caching": False}
    return Case.model_validate(
        {
            "id": "multi.behind",
            "area": "multi",
            "text": "A sibling behind the connector loads.",
            "config": config,
            "relations": [],
            "steps": yaml.safe_load(steps),
        }
    )


@pytest.mark.parametrize("sibling", ["fetcher", "winner"])
@pytest.mark.parametrize(
    "connector", ["loading:NeverHits", "saving:StoresNothing", "decoy:Decoy", "plain:Plain"]
)
def test_what_a_sibling_behind_the_connector_loads_is_its_own(
    connector: str, sibling: str, tmp_path: Path
) -> None:
    target = Target(f"kvconform.refimpl.variants.{connector}", {})
    for number, variant in enumerate(behind(sibling).variants(["reference", "vllm"])):
        report = run_and_judge(variant, target, SPEC, seed=number, tmp=tmp_path / str(number))
        assert report.harness_error is None
        assert [row for row in report.rows if row.verdict == "FAIL"] == []


def test_a_sibling_behind_the_connector_loads_the_right_kv(tmp_path: Path) -> None:
    target = Target("kvconform.refimpl.variants.loading:NeverHits", {})
    variant = behind("fetcher").variants(["reference"])[0]
    trace = run_variant(variant, target, seed=0, tmp=tmp_path).trace
    states = [event for event in trace if event["kind"] == "req.state" and event["req"] == "c"]
    assert states[0]["to"] == "WAITING_FOR_REMOTE_KVS"
    assert not [event for event in trace if event["kind"] in ("kv.changed", "kv.wrong")]


@pytest.mark.parametrize("order", [["self", "fetcher"], ["fetcher", "self"]])
@pytest.mark.parametrize(
    "hook",
    [
        "start_load_kv",
        "wait_for_layer_load",
        "wait_for_save",
        "get_transfer_results",
        "get_block_ids_with_load_errors",
    ],
)
def test_a_stray_write_beside_a_sibling_that_loads_is_found(
    hook: str, order: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Scribbles, "hook", hook, raising=False)
    case = behind("fetcher")
    case = case.model_copy(update={"config": case.config.model_copy(update={"multi": order})})
    target = Target("beside_fetcher:Scribbles", {})
    report = run_and_judge(case.variants(["vllm"])[0], target, SPEC, seed=0, tmp=tmp_path)
    assert "load.only-grant" in {row.requirement for row in report.rows if row.verdict == "FAIL"}


def test_a_load_that_only_the_sibling_was_granted_is_found(tmp_path: Path) -> None:
    variant = behind("fetcher").variants(["vllm"])[0]
    target = Target("beside_fetcher:LoadsToo", {})
    report = run_and_judge(variant, target, SPEC, seed=0, tmp=tmp_path)
    assert "load.only-grant" in {row.requirement for row in report.rows if row.verdict == "FAIL"}


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_a_correct_child_fails_nothing(case: Case, name: str, tmp_path: Path) -> None:
    for number, variant in enumerate(case.variants(["reference", "vllm"])):
        report = run_and_judge(
            variant, Target(*TARGETS[name]), SPEC, seed=number, tmp=tmp_path / str(number)
        )
        assert report.harness_error is None
        assert [row for row in report.rows if row.verdict == "FAIL"] == []


def test_the_child_is_recorded_and_nobody_else(tmp_path: Path) -> None:
    variant = SPEC.cases["multi.after-winner"].variants(["reference"])[0]
    seen = set[str]()

    class Classes:
        """Notes the class of every connector whose hooks are recorded."""

        def started(self, engine: Engine) -> None:
            engine.probe.after_any.append(lambda call: seen.add(type(call.connector).__name__))

        def finished(self, driver: Driver) -> None:
            """Nothing to do."""

    target = Target(*TARGETS["sync"])
    trace = run_variant(variant, target, seed=0, tmp=tmp_path, watcher=Classes()).trace
    assert seen == {"ReferenceConnector"}
    answers = [event for event in trace if event["kind"] == "lookup" and event["tokens"]]
    grants = [event for event in trace if event["kind"] == "alloc"]
    assert answers, "the child is asked although its sibling has it all"
    assert all(grant["external"] == 0 for grant in grants) and any(
        grant["blocks"] for grant in grants
    )


def test_a_child_gets_its_own_options(tmp_path: Path) -> None:
    target = inside(Target(*TARGETS["sync"], role="kv_producer"), ["idle", "self"])
    children = target.options(tmp_path, 4)["connectors"]
    assert target.name == "MultiConnector" and target.resolve().__name__ == "ReferenceConnector"
    assert [child["kv_connector"] for child in children] == ["Idle", "ReferenceConnector"]
    assert (
        children[1]["kv_connector_extra_config"] == {"store": f"{tmp_path}/store"}
        and children[1]["kv_role"] == "kv_producer"
    )


def test_any_case_can_be_run_inside(tmp_path: Path) -> None:
    variant = SPEC.cases["lifecycle.last-token"].variants(["vllm"])[0]
    runs = [
        run_variant(variant, Target(*TARGETS["sync"]), seed=0, tmp=tmp_path / name, relation=name)
        for name in ("connector", "inside-multi")
    ]
    alone, within = (
        [(e["req"], e["tokens"]) for e in run.trace if e["kind"] == "lookup"] for run in runs
    )
    assert alone == within and alone


def test_multi_connector_is_not_put_into_itself() -> None:
    """The probe would take the outer one for the connector under test.

    It could not build statistics for the outer one's siblings.
    """
    cases = [case for case in load_spec().cases.values() if case.config.multi]
    assert cases and all(
        "composite" in str(case.unmet(complete({"composite": True, "store": True})))
        for case in cases
    )


def test_multi_connector_works_with_several_groups_if_all_its_children_do(tmp_path: Path) -> None:
    either, both = ["DecodeBenchConnector"], ["DecodeBenchConnector", "ExampleConnector"]
    for children, several in ((either, True), (both, False), (["ExampleConnector"], False)):
        config = {"connectors": [{"kv_connector": name, "kv_role": "kv_both"} for name in children]}
        target = Target(
            "MultiConnector",
            extra_config=config,
            capabilities={"store": False, "saves": "none", "async_load": False},
        )
        caps = profile_of(target, tmp_path).caps
        assert (caps["hma"], caps["composite"]) == (several, True)
