# SPDX-License-Identifier: Apache-2.0
"""Tests that lossy connectors are judged within their stated tolerance, and strictly beyond it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvconform.config.target import Target
from kvconform.contract.capabilities import MOST_LOSSY, tolerance
from kvconform.contract.case import Engine
from kvconform.contract.loader import load_spec
from kvconform.refimpl.connector import ReferenceConnector
from kvconform.run.case import run_and_judge

SPEC = load_spec()


class Undeclared(ReferenceConnector):
    """Loses as much, and does not say so."""

    @classmethod
    def kvconform_capabilities(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        return {**super().kvconform_capabilities(extra_config), "lossy": False}


def failed(cls: type, codec: str, engine: Engine, tmp_path: Path) -> set[str]:
    case = SPEC.cases["placeholders.conversation"]
    report = run_and_judge(
        case.variants([engine])[0],
        Target(f"{cls.__module__}:{cls.__name__}", {"store": "{tmp}/store", "codec": codec}),
        SPEC,
        seed=0,
        tmp=tmp_path,
    )
    assert report.harness_error is None
    assert any(row.requirement == "load.content" and row.exercised for row in report.rows)
    return {row.requirement for row in report.rows if row.verdict == "FAIL"}


@pytest.mark.parametrize("engine", ["reference", "vllm"])
@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_what_is_within_the_declared_tolerance_is_right(
    codec: str, engine: Engine, tmp_path: Path
) -> None:
    assert failed(ReferenceConnector, codec, engine, tmp_path / "declared") == set()
    assert "load.content" in failed(Undeclared, codec, engine, tmp_path / "undeclared")


def test_the_tolerance_has_a_limit() -> None:
    assert [tolerance(value) for value in (False, 0.01, 0.5, True)] == [
        0.0,
        0.01,
        MOST_LOSSY,
        MOST_LOSSY,
    ]
