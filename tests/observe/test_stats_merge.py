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


@pytest.mark.parametrize(
    ("before", "after", "lost"),
    [
        ({"loads": 3}, {"loads": 6}, None),
        ({"rate": 0.5, "idle": 0}, {"rate": 0.5, "idle": 0}, None),
        ({"loads": 3}, {"loads": 0}, "loads was 3, and is 0"),
        ({"loads": 3, "rate": 2.0}, {"loads": 6}, "rate is gone"),
        ({"Child": {"loads": 4}}, {"Child": {"loads": 1}}, "loads was 4, and is 1"),
        ({"Child": {"loads": 4}}, {}, "loads is gone"),
        ({"drift": -2}, {"drift": -4}, None),
    ],
)
def test_what_is_lost_in_the_merge(before: Any, after: Any, lost: str | None) -> None:
    class Merging(Stats):
        def aggregate(self, other: Any) -> Stats:
            return Stats({"a": 1}, after)

    assert _merge(Merging({"a": 1}, before)).lost == lost


def test_whether_a_reset_clears() -> None:
    class Keeping(Stats):
        def reset(self) -> None:
            pass

    assert _merge(Stats({"a": 1})).cleared
    assert not _merge(Keeping({"a": 1})).cleared
