# SPDX-License-Identifier: Apache-2.0
"""Tests of connectors as children of MultiConnector.

They check what is recorded, and that correct connectors fail nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

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
