# SPDX-License-Identifier: Apache-2.0
"""Tests of the sorts of differences: particulars do not make another sort, kinds of change do."""

from __future__ import annotations

from typing import Any

import pytest

from kvconform.snapshots.difference import Difference, Entry

CHANGED: dict[str, Any] = {
    "kind": "changed",
    "place": (Entry("request_finished", "a"), "answer", 0, "name"),
    "was": 1,
    "now": "x",
    "steps": (3,),
}
MOVED: dict[str, Any] = {
    "kind": "moved",
    "place": ("build_connector_meta", "saves"),
    "was": {"class": "Save", "fields": {"req": "a", "start": 4}},
    "steps": (3, 5),
}


def sort(known: dict[str, Any], **fields: Any) -> object:
    return Difference(**{**known, **fields}).sort()


@pytest.mark.parametrize(
    ("known", "alike"),
    [
        (CHANGED, {"run": "a.case[vllm-sync-v1-d1-b4]"}),
        (CHANGED, {"steps": (4,)}),
        (CHANGED, {"was": 23}),
        (CHANGED, {"now": "y"}),
        (CHANGED, {"place": (Entry("request_finished", "b"), "answer", 7, "name")}),
        (MOVED, {"steps": (1, 9)}),
        (MOVED, {"was": {"class": "Save", "fields": {"req": "b", "start": 8}}}),
    ],
)
def test_particulars_do_not_make_a_sort(known: dict[str, Any], alike: dict[str, Any]) -> None:
    assert Difference(**known) != Difference(**{**known, **alike})
    assert sort(known) == sort(known, **alike)


@pytest.mark.parametrize(
    ("known", "other"),
    [
        (CHANGED, {"kind": "gone"}),
        (CHANGED, {"place": (Entry("get_finished", "a"), "answer", 0, "name")}),
        (CHANGED, {"place": (Entry("request_finished", ""), "answer", 0, "name")}),
        (CHANGED, {"place": (Entry("request_finished", "a", 2), "answer", 0, "name")}),
        (CHANGED, {"place": (Entry("request_finished", "a"), "answer", 0, "count")}),
        (CHANGED, {"was": "a long text"}),
        (CHANGED, {"was": [1]}),
        (CHANGED, {"now": None}),
        (CHANGED, {"steps": (3, 4)}),
        (MOVED, {"steps": (5, 3)}),
        (MOVED, {"was": {"class": "Load", "fields": {"req": "a", "start": 4}}}),
    ],
)
def test_another_change_is_of_another_sort(known: dict[str, Any], other: dict[str, Any]) -> None:
    assert sort(known) != sort(known, **other)
