# SPDX-License-Identifier: Apache-2.0
"""Tests of guarantees that known bugs of vLLM break, and of those that nothing explains."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from kvconform.config.target import Target
from kvconform.contract import yaml12
from kvconform.contract.loader import explained, load_spec
from kvconform.explore.outcome import outcome
from kvconform.explore.workload import Workload

SPEC = load_spec()
KNOWN = explained(SPEC)
CASES = {
    name: entry
    for entries in KNOWN.values()
    for entry in entries
    for name in entry.cases
    if entry.mark and "vllm" in SPEC.cases[name].engines
}


def workload(name: str, scheduling: str) -> Workload:
    path = resources.files("kvconform.spec") / "cases" / "findings" / f"{name}.yaml"
    data: dict[str, Any] = yaml12.parse(path.read_text(encoding="utf-8"), name)
    one = {"scheduling": [scheduling], "runner": ["v1"], "depth": [2]}
    return Workload({**data, "engines": ["vllm"], "matrix": one})


@pytest.mark.parametrize("name", CASES)
def test_a_known_bug_explains_what_its_case_breaks(name: str, tmp_path: Path) -> None:
    entry = CASES[name]
    found = outcome(
        workload(name, entry.scheduling[0]),
        Target(entry.connector, entry.extra_config),
        SPEC,
        tmp_path,
    )
    assert found.error is None and set(entry.fails) <= set(found.broken_guarantees)
    assert found.unknown == []


def test_two_bugs_that_break_the_same_guarantee_are_told_apart_by_their_marks() -> None:
    """The second bug's mark once hid the first one, whose own was any read of the null block."""
    marks = {entry.id: entry.mark for entry in KNOWN["engine.window-kept"]}
    assert set(marks) == {"whole-prompt-window", "failed-load-window"}
    read = {"kind": "kv.wrong", "seq": 2, "block": 0, "req": "a"}
    claim = {"is_async": True, "tokens": 8, "local": 4, "known": 13}
    part = {"kind": "lookup", "seq": 1, "req": "a", **claim}
    failed = {"kind": "transfer.failed", "seq": 1}

    def explaining(event: dict[str, Any]) -> list[str]:
        return [name for name, mark in marks.items() if mark and mark.precedes([event, read], 2)]

    assert explaining(part) == []
    assert explaining(part | {"known": 12}) == ["whole-prompt-window"]
    assert explaining(part | {"known": 12, "req": "b"}) == []
    assert explaining(failed) == ["failed-load-window"]
