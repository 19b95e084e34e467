# SPDX-License-Identifier: Apache-2.0
"""Tests of stores that outlive a run: a mistake of the set-up, which is no connector's failure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

import pytest

from core_rig import REFERENCE, ROUND_TRIP, make_case
from kvconform.config.target import Target
from kvconform.contract.case import Variant
from kvconform.contract.loader import load_spec
from kvconform.explore import judging
from kvconform.explore.workload import Workload
from kvconform.judge.foreign import CAUSE, OWN_STORE, REASON, ForeignKV, own, sentence
from kvconform.judge.records import CaseReport
from kvconform.refimpl.connector import ReferenceConnector
from kvconform.report.causes import headline, usual_causes
from kvconform.report.roots import roots
from kvconform.run.case import run_and_judge

SPEC = load_spec()
EVENT = {"kind": "load.foreign", "req": "a"}


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
    (tmp_path / "store").mkdir()
    options = {"store": str(tmp_path / "store")}
    assert failing(judged(tmp_path / "1", options)) == []
    with pytest.raises(ForeignKV) as found:
        judged(tmp_path / "2", options)
    assert found.value.message.startswith(REASON)
    assert """--extra-config '{"store": "{tmp}"}'""" in found.value.message


def test_kv_that_an_earlier_run_left_in_the_process_does_not_disturb(tmp_path: Path) -> None:
    """vLLM does not ask a connector to forget KV at shutdown: the process ends (decision 0029)."""
    for number in range(2):
        report = judged(tmp_path / str(number), {"store": "memory:left-behind"})
        assert report.harness_error is None and failing(report) == []
        assert any(event["kind"] == "load.due" for event in report.trace)


def test_a_store_below_tmp_has_nothing_of_an_earlier_run(tmp_path: Path) -> None:
    for number in range(2):
        assert failing(judged(tmp_path / str(number), {"store": "{tmp}/store"})) == []


def test_a_connector_that_invents_hits_fails(tmp_path: Path) -> None:
    report = judged(tmp_path, {"store": "{tmp}"}, f"{__name__}:Inventing")
    assert "lookup.truth" in failing(report)
    root, *others = [each for each in roots(report.rows) if each.counts]
    assert root.row.requirement == "lookup.truth"
    assert others == [], "what follows from an invented hit is no root cause of its own"
    assert "{tmp}" not in headline(root.row), "its options have it"
    wrong = SPEC.requirements["lookup.truth"].wrong or ""
    assert usual_causes(root.row, wrong) == CAUSE
    assert "though nothing of this request had been computed" in str(root.row.message)


def test_exploration_ends_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def found(*_: object, **__: object) -> NoReturn:
        raise ForeignKV(REASON)

    monkeypatch.setattr(judging, "outcome", found)
    with pytest.raises(ForeignKV):  # other errors are outcomes of their workload
        judging.judged((Workload({"id": "a"}), None), Target("m:C"), SPEC, tmp_path, 60.0)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"redis_url": "redis://host/0", "profile": "fast", "name": "run-1", "number": 4},
        {"config_file": __file__},
        {"path": "/there/is/no/such/directory"},
        {"store_dir": "relative"},
    ],
)
def test_no_option_is_proposed_that_is_no_place_of_files(options: dict[str, Any]) -> None:
    assert own(options) == options
    assert "--extra-config" not in sentence(EVENT, options)
    assert OWN_STORE in sentence(EVENT, options)


def test_directories_are_proposed_wherever_they_are(tmp_path: Path) -> None:
    options = {
        "disk": f"file://{tmp_path}",
        "redis_url": "redis://host/0",
        "connectors": [{"kv_connector_extra_config": {"where": str(tmp_path), "ttl": 3}}],
    }
    better = {
        "disk": "file://{tmp}",
        "redis_url": "redis://host/0",
        "connectors": [{"kv_connector_extra_config": {"where": "{tmp}", "ttl": 3}}],
    }
    assert own(options) == better
    assert f"--extra-config '{json.dumps(better)}'" in sentence(EVENT, options)


def test_tmp_is_not_proposed_to_a_connector_that_has_it() -> None:
    assert "though its options have {tmp}" in sentence(EVENT, {"store": "{tmp}/store"})
