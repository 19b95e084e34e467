# SPDX-License-Identifier: Apache-2.0
"""Tests of stores that outlive a run: a mistake of the set-up, which is no connector's failure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from core_rig import REFERENCE, ROUND_TRIP, make_case
from kvconform.config.target import Target
from kvconform.contract.case import Variant
from kvconform.contract.loader import load_spec
from kvconform.judge.foreign import CAUSE, REASON, own
from kvconform.judge.records import CaseReport, Verdict
from kvconform.refimpl.connector import ReferenceConnector
from kvconform.report.causes import headline, usual_causes
from kvconform.report.roots import roots
from kvconform.run.case import run_and_judge

SPEC = load_spec()


class Inventing(ReferenceConnector):
    """Reports a hit for all but the last token of every request, and has nothing of it."""

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return request.num_tokens - 1 - num_computed_tokens, False


def judged(tmp: Path, options: dict[str, Any], connector: str = REFERENCE) -> CaseReport:
    """Judge a round trip; every call has the same prompts, and may have its own `tmp`."""
    variant = Variant(make_case(ROUND_TRIP), "reference", "sync", "v1", 1, 4)
    caps = {"store": True, "saves": "all", "async_load": False, "best_effort": False}
    caps |= {"persistent": True, "chunk_tokens": 1}
    target = Target(connector, options, stall_seconds=0.1, capabilities=caps)
    return run_and_judge(variant, target, SPEC, seed=0, tmp=tmp)


def failing(report: CaseReport) -> list[str]:
    return [row.requirement for row in report.rows if row.accuses]


def test_kv_of_an_earlier_run_is_a_mistake_of_the_set_up(tmp_path: Path) -> None:
    options = {"store": str(tmp_path / "store")}
    first = judged(tmp_path / "1", options)
    assert first.foreign is None and failing(first) == []
    second = judged(tmp_path / "2", options)
    assert {row.verdict for row in second.rows} == {Verdict.ERROR}
    assert all(REASON in str(row.message) for row in second.rows)
    assert second.foreign is not None
    assert second.foreign.startswith(REASON)
    assert """--extra-config '{"store": "{tmp}"}'""" in second.foreign


def test_a_store_below_tmp_has_nothing_of_an_earlier_run(tmp_path: Path) -> None:
    for number in range(2):
        report = judged(tmp_path / str(number), {"store": "{tmp}/store"})
        assert report.foreign is None and failing(report) == []


def test_a_connector_that_invents_hits_fails(tmp_path: Path) -> None:
    report = judged(tmp_path, {"store": "{tmp}"}, f"{__name__}:Inventing")
    assert report.foreign is None
    assert "lookup.truth" in failing(report)
    root, *others = [each for each in roots(report.rows) if each.counts]
    assert root.row.requirement == "lookup.truth"
    assert others == [], "what follows from an invented hit is no root cause of its own"
    assert REASON in headline(root.row)
    wrong = SPEC.requirements["lookup.truth"].wrong or ""
    assert usual_causes(root.row, wrong) == CAUSE
    assert "though nothing of this request had been computed" in str(root.row.message)


@pytest.mark.parametrize(
    ("options", "better"),
    [
        ({}, {"path": "{tmp}"}),
        ({"path": "/kv", "chunk": 4}, {"path": "{tmp}", "chunk": 4}),
        ({"mode": "fast"}, {"mode": "fast", "path": "{tmp}"}),
        ({"cache_dir": "/kv", "store": "{tmp}"}, {"cache_dir": "{tmp}", "store": "{tmp}"}),
        ({"name": "run-{tmp}"}, {}),
    ],
)
def test_the_option_that_is_proposed(options: dict[str, Any], better: dict[str, Any]) -> None:
    assert own(options) == better
