# SPDX-License-Identifier: Apache-2.0
"""Tests that lossy connectors are judged within their stated tolerance, and strictly beyond it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvconform.config.target import Target
from kvconform.contract.capabilities import MOST_LOSSY, tolerance
from kvconform.contract.loader import load_spec
from kvconform.refimpl.variants import lossy
from kvconform.refimpl.variants.lossy import Quantising
from kvconform.run.case import run_and_judge

SPEC = load_spec()


class Undeclared(Quantising):
    """Loses as much, and does not say so."""

    @classmethod
    def kvconform_capabilities(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        return {**super().kvconform_capabilities(extra_config), "lossy": False}


def failed(cls: type, tmp_path: Path) -> set[str]:
    case = SPEC.cases["placeholders.conversation"]
    report = run_and_judge(
        case.variants(["reference"])[0],
        Target(f"{cls.__module__}:{cls.__name__}", {"store": "{tmp}/store"}),
        SPEC,
        seed=0,
        tmp=tmp_path,
    )
    assert report.harness_error is None
    assert any(row.requirement == "load.content" and row.exercised for row in report.rows)
    return {row.requirement for row in report.rows if row.verdict == "FAIL"}


def test_a_byte_per_number_is_off_by_half_a_level() -> None:
    numbers = np.arange(16, dtype=np.float32)
    back = np.frombuffer(lossy.unsqueeze(lossy.squeeze(numbers.tobytes())), np.float32)
    assert 0 < np.abs(back - numbers).max() <= 15 / 254 + 1e-6
    assert not np.frombuffer(lossy.unsqueeze(lossy.squeeze(bytes(16))), np.float32).any()


def test_what_is_within_the_stated_tolerance_is_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert failed(Quantising, tmp_path / "declared") == set()
    assert "load.content" in failed(Undeclared, tmp_path / "undeclared")
    monkeypatch.setattr(lossy, "LEVELS", 9)
    assert "load.content" in failed(Quantising, tmp_path / "too lossy")


def test_the_tolerance_has_a_limit() -> None:
    assert [tolerance(value) for value in (False, 0.01, 0.5, True)] == [
        0.0,
        0.01,
        MOST_LOSSY,
        MOST_LOSSY,
    ]
