# SPDX-License-Identifier: Apache-2.0
"""End-to-end tests of the engine `live`, which are marked `long`.

Such runs that belong to every change are made by `nox -s defects` and test_probe_engine.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvconform.config.target import Target
from kvconform.contract.loader import load_spec
from kvconform.contract.scenario import Request, Scenario
from kvconform.dev.defect import load_defects
from kvconform.dev.defects import examine
from kvconform.live.baseline import FOLDER
from kvconform.run.case import run_and_judge

pytest.importorskip("vllm")
SPEC = load_spec()
LIVE = [name for name, defect in load_defects(SPEC).items() if defect.live]
TWICE = [Request(own=n, tail=tail, out=12) for n, tail in enumerate((70, 96, 130))]
SMALL = Scenario(
    id="live.small",
    text="Three prompts, and again.",
    due=["loads"],
    families=1,
    requests=[
        *TWICE,
        *(
            request.model_copy(update={"own": n, "reset": n == 0})
            for n, request in enumerate(TWICE)
        ),
    ],
)


@pytest.fixture(scope="module", autouse=True)
def plain_runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The runs without connector are made once for all tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER, str(tmp_path_factory.mktemp("plains")))
        yield


def verdicts(scenario: Scenario, target: Target, tmp: Path) -> dict[str, str]:
    """The verdict of every requirement on one run."""
    (variant,) = scenario.variants()
    report = run_and_judge(variant, target, SPEC, seed=0, tmp=tmp)
    assert report.harness_error is None, report.harness_error
    return {row.requirement: row.verdict for row in report.rows}


def reference(connector: str, **options: Any) -> Target:
    declared = {
        "store": True,
        "saves": "all",
        "chunk_tokens": 32,
        "async_load": False,
        "best_effort": False,
    }
    return Target(
        f"kvconform.refimpl.{connector}", {"store": "{tmp}/store", **options}, capabilities=declared
    )


@pytest.mark.long
def test_the_tiny_model_reacts_to_a_block_that_is_a_tenth_too_small(tmp_path: Path) -> None:
    found = verdicts(SMALL, reference("defects.live:ScalesLoads"), tmp_path / "run")
    assert {name for name, verdict in found.items() if verdict == "FAIL"} == {
        "live.tokens",
        "live.loaded-kv",
        "load.content",
    }
    assert not (tmp_path / "run").exists()


@pytest.mark.long
def test_the_reference_connector_changes_nothing(tmp_path: Path) -> None:
    found = verdicts(SMALL, reference("connector:ReferenceConnector"), tmp_path / "run")
    assert (
        "FAIL" not in found.values()
        and found["live.tokens"] == "PASS"
        and found["live.loaded-kv"] == "PASS"
    )


@pytest.mark.long
def test_where_nothing_is_loaded_nothing_passes(tmp_path: Path) -> None:
    found = verdicts(
        SMALL, reference("connector:ReferenceConnector", save="none"), tmp_path / "run"
    )
    assert "PASS" not in found.values() and "FAIL" not in found.values()


@pytest.mark.long
@pytest.mark.parametrize("name", LIVE)
def test_a_defect_is_found_by_what_names_it(name: str, tmp_path: Path) -> None:
    assert examine(load_defects(SPEC)[name], SPEC, tmp_path).problem == ""
