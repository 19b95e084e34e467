# SPDX-License-Identifier: Apache-2.0
"""Every known-bad connector is caught by exactly the requirements that name it."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from kvconform.defects import Defect, difference, examine, load_defects
from kvconform.load import load_spec
from kvconform.refimpl.connector import ReferenceConnector

SPEC = load_spec()
DEFECTS = load_defects(SPEC)


@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_is_caught_by_the_requirements_that_name_it(name: str, tmp_path: Path) -> None:
    assert examine(DEFECTS[name], SPEC, tmp_path).problem == ""


def test_every_defective_class_is_in_the_registry() -> None:
    listed = {defect.connector for defect in DEFECTS.values()}
    for family in ("boundaries", "chunked", "identity", "lifecycle", "loads", "lookup", "preemption", "reports"):
        module = importlib.import_module(f"kvconform.refimpl.defects.{family}")
        for name, found in vars(module).items():
            if isinstance(found, type) and issubclass(found, ReferenceConnector) and found.__module__ == module.__name__ and name[0] != "_":
                assert f"{module.__name__}:{name}" in listed


def test_a_difference_says_what_was_missed_and_what_was_not_expected() -> None:
    defect = Defect(id="x", text="x", connector="m:C", cases=["c"], fails=["a", "b"], may=["d"])
    assert difference(defect, {"a", "b", "d"}) == ""
    assert difference(defect, {"a", "c"}) == "not caught by b; also fails c"
