# SPDX-License-Identifier: Apache-2.0
"""Correct connectors fail nothing, however unusual they are: a requirement that one of them breaks is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvconform.load import load_spec
from kvconform.refimpl.variants import VARIANTS
from kvconform.run import run_and_judge
from kvconform.target import Target

SPEC = load_spec()


@pytest.mark.parametrize("name", VARIANTS)
def test_a_correct_connector_fails_nothing(name: str, tmp_path: Path) -> None:
    connector, options = VARIANTS[name]
    target = Target(connector, {"store": "{tmp}/store", **options})
    failed = []
    for number, case in enumerate(SPEC.cases.values()):
        variant = case.variants(["reference"])[-1:]  # one run of each case: asynchronous scheduling where the case has it
        for report in (run_and_judge(each, target, SPEC, seed=0, tmp=tmp_path / str(number)) for each in variant):
            assert report.harness_error is None
            failed += [(report.variant, row["requirement"]) for row in report.rows if row["verdict"] in ("FAIL", "ERROR")]
    assert failed == []
