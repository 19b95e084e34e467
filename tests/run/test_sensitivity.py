# SPDX-License-Identifier: Apache-2.0
"""Tests that small damage done to the reference connector is detected.

One byte, one layer, one write in the wrong place, or one report too early is enough.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from core_rig import REFERENCE, ROUND_TRIP, check_ok, run_case, select
from kvconform.refimpl.connector import ReferenceConnector
from kvconform.run.records import Run

ENGINES = ["reference", "vllm"]
Steps = list[dict[str, Any]]


def case_of(cls: type, tmp_path: Path, steps: Steps = ROUND_TRIP, **more: Any) -> Run:
    return run_case(f"{__name__}:{cls.__name__}", steps, tmp_path, **more)


class FlipsOneByte(ReferenceConnector):
    """One lane of one slot of one layer is off by one after a load."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        super().start_load_kv(forward_context, **kwargs)
        for load in self._metadata().loads:
            layer = self._layers["model.layers.1.self_attn.attn"]
            slot = load.pieces[1].slots[2]
            layer[slot // 4, 1, slot % 4, 20] = (layer[slot // 4, 1, slot % 4, 20] + 1) % 16


class SkipsALayer(ReferenceConnector):
    """Does not load the second layer."""

    def _load_layer(self, piece: Any, layer: str) -> bool:
        return "layers.1" in layer or super()._load_layer(piece, layer)


class RewritesShared(ReferenceConnector):
    """Loads a granted block twice: also over the local hit before it, whose content is the same."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        super().start_load_kv(forward_context, **kwargs)
        for save in self._metadata().saves:
            for layer in self._layers.values():
                block = layer[save.table[0]]
                # the nonce that other KV of the same content would have
                block[:, 0, 12] = (block[:, 0, 12] + 1) % 16


@pytest.mark.parametrize("engine", ENGINES)
def test_one_flipped_byte_is_named_and_changes_the_output(engine: str, tmp_path: Path) -> None:
    clean = run_case(REFERENCE, ROUND_TRIP, tmp_path / "clean", engine=engine)
    check_ok(clean)
    run = case_of(FlipsOneByte, tmp_path / "flipped", engine=engine)
    (wrong,) = select(run.trace, "kv.wrong")
    assert (wrong["req"], wrong["layer"], wrong["pos"], wrong["count"]) == ("b", 1, 6, 1)
    assert (wrong["kv"], wrong["found"], wrong["via"]) == ("v", "unknown", "external")
    (due,) = select(run.trace, "load.due")
    assert (due["missing"], due["wrong"]) == ([], [6])
    tokens = [
        [(e["token"], e["clean"]) for e in select(r.trace, "sample", req="b")] for r in (clean, run)
    ]
    assert [token for token, _ in tokens[0]] != [token for token, _ in tokens[1]]
    assert all(ok for _, ok in tokens[0]) and not any(ok for _, ok in tokens[1])
    assert [e["token"] for e in select(clean.trace, "sample", req="a")] == [
        e["token"] for e in select(run.trace, "sample", req="a")
    ]


def test_equal_requests_get_equal_tokens_with_and_without_a_load(tmp_path: Path) -> None:
    clean = run_case(REFERENCE, ROUND_TRIP, tmp_path / "clean")
    without = run_case(REFERENCE, ROUND_TRIP, tmp_path / "without", relation="no-connector")
    check_ok(without)
    assert not select(without.trace, "hook.called") and "hooks" not in without.channels
    assert [(e["req"], e["token"]) for e in select(clean.trace, "sample")] == [
        (e["req"], e["token"]) for e in select(without.trace, "sample")
    ]


def test_a_layer_that_is_not_loaded_is_missing(tmp_path: Path) -> None:
    run = case_of(SkipsALayer, tmp_path)
    (due,) = select(run.trace, "load.due")
    assert (due["missing"], due["reported_failed"]) == (list(range(12)), False)
    assert not select(run.trace, "kv.wrong")
    assert not any(e["clean"] for e in select(run.trace, "sample", req="b"))


@pytest.mark.parametrize("engine", ENGINES)
def test_identical_bytes_over_somebody_elses_block_show_by_their_nonce(
    engine: str, tmp_path: Path
) -> None:
    run = case_of(RewritesShared, tmp_path, ROUND_TRIP[:2], engine=engine)
    assert any(e["other_request"] or e["over_computed"] for e in select(run.trace, "kv.changed"))
    assert not select(run.trace, "kv.wrong") and all(
        e["clean"] for e in select(run.trace, "sample")
    )


class ReportsTooEarly(ReferenceConnector):
    """Reports an asynchronous load as finished before its bytes are there."""

    def get_finished(self, finished_req_ids: set[str]) -> Any:
        sent, _ = super().get_finished(finished_req_ids)
        return sent, {load.req for load in self._metadata().loads} or None


@pytest.mark.parametrize("engine", ENGINES)
def test_a_load_reported_too_early_was_late_not_incomplete(engine: str, tmp_path: Path) -> None:
    run = case_of(
        ReportsTooEarly,
        tmp_path,
        engine=engine,
        extra={"store": "{tmp}", "load": "async", "load_delay": 3},
    )
    assert run.harness_error is None
    assert [e["missing"] for e in select(run.trace, "load.due")] == [[]]
    assert {(e["found"], e["transfer_sync"]) for e in select(run.trace, "kv.wrong")} == {
        ("not_yet_loaded", False)
    }
