# SPDX-License-Identifier: Apache-2.0
"""Tests of how statistics are logged; those of several connectors in one are numbers by name."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

pytest.importorskip("vllm")
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from kvconform.observe.telemetry import _merge


@dataclass
class Stats(KVConnectorStats):
    """Statistics with the values that a test wants."""

    reduced: Any = field(default_factory=dict)

    def aggregate(self, other: Any) -> Stats:
        return self

    def reduce(self) -> Any:
        return self.reduced

    def is_empty(self) -> bool:
        return not self.data

    def reset(self) -> None:
        self.data = {}


@pytest.mark.parametrize(
    "reduced", [{}, {"loads": 3, "rate": 0.5}, {"Child": {"loads": 3}, "Other": {}}, {"unit": "MB"}]
)
def test_numbers_also_by_child(reduced: Any) -> None:
    _merge(Stats({"a": 1}, reduced))


@pytest.mark.parametrize("reduced", [{"loads": [1, 2]}, {"Child": {"loads": None}}])
def test_what_is_no_number(reduced: Any) -> None:
    with pytest.raises(TypeError, match="reduce does not return numbers"):
        _merge(Stats({"a": 1}, reduced))
