# SPDX-License-Identifier: Apache-2.0
"""The oldest bug of prefix caches, keys that ignore what is before a chunk, is found at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvconform.config.target import Target
from kvconform.contract.loader import load_spec
from kvconform.contract.profile import runs_in, select
from kvconform.explore.draw import drawn
from kvconform.explore.outcome import outcome
from kvconform.run.case import run_and_judge

SPEC = load_spec()
FORMS = ("Unchained", "UnchainedWithIdentity")


def connector(form: str) -> Target:
    return Target(f"kvconform.refimpl.defects.identity:{form}", {"store": "{tmp}"})


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("engine", ["reference", "vllm"])
def test_by_the_smallest_profile(engine: str, form: str, tmp_path: Path) -> None:
    _, cases = select(SPEC.profiles, "smoke", (), SPEC.cases.values())
    failed = []
    for case in SPEC.cases.values():
        for variant in case.variants([engine]) if case.id in cases else ():
            if runs_in(SPEC.profiles, "smoke", variant):
                target = connector(form)
                report = run_and_judge(variant, target, SPEC, seed=0, tmp=tmp_path / "run")
                failed += [row.requirement for row in report.rows if row.accuses]
    assert {"lookup.truth", "lookup.identity"} & {*failed}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("engine", ["reference", "vllm"])
@pytest.mark.parametrize("simple", [True, False])
def test_by_few_random_workloads(engine: str, form: str, simple: bool, tmp_path: Path) -> None:
    """Fifty, of which a process passes at least ten in a second."""
    workloads = drawn([engine], ["sync", "async"], None, first_seed=4, count=50, simple=simple)
    for workload in workloads:
        found = outcome(workload, connector(form), SPEC, tmp_path / "run")
        assert found.error is None
        if any(each.requirement == "lookup.truth" for each in found.failures if not each.risk):
            return
    pytest.fail("no workload shows it")
