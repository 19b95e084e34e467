# SPDX-License-Identifier: Apache-2.0
"""Tests of which load wrote outside its blocks."""

from __future__ import annotations

from typing import Any

import pytest

from kvconform.contract.trace import Event
from kvconform.judge.strays import loader


def trace(*events: dict[str, Any]) -> list[Event]:
    return [{"step": 3, **event, "seq": seq} for seq, event in enumerate(events)]


def alloc(req: str, external: int = 8, **more: Any) -> dict[str, Any]:
    return {"kind": "alloc", "req": req, "external": external, **more}


def due(req: str) -> dict[str, Any]:
    return {"kind": "load.due", "req": req}


def changed(hook: str = "start_load_kv", **more: Any) -> dict[str, Any]:
    return {"kind": "kv.changed", "after_hook": hook, **more}


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([alloc("c"), changed()], "c"),
        ([alloc("c"), changed("wait_for_layer_load")], "c"),
        ([alloc("c"), changed("wait_for_save")], None),
        ([alloc("a"), alloc("c"), changed()], None),
        ([alloc("a"), due("a"), alloc("c"), changed()], "c"),
        ([alloc("a", external=0), alloc("c"), changed()], "c"),
        ([alloc("c"), due("c"), changed()], None),
        ([alloc("a", on="p"), alloc("c", on="d"), changed(on="d")], "c"),
        ([alloc("c"), {"kind": "kv.wrong"}], None),
    ],
)
def test_the_only_load(events: list[dict[str, Any]], expected: str | None) -> None:
    found = trace(*events)
    assert loader(found, found[-1]) == expected


def test_what_comes_later_does_not_count() -> None:
    found = trace(alloc("c"), changed(), due("c"), alloc("d"))
    assert loader(found, found[1]) == "c"
