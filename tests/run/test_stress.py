# SPDX-License-Identifier: Apache-2.0
"""Test of a thousand concurrent requests: none lost, no byte wrong, no block leaked."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvconform.config.target import Target
from kvconform.contract.case import Case, Variant
from kvconform.kernels.codes import CodeBook
from kvconform.run.runner import run_variant

pytestmark = pytest.mark.e2e  # three quarters of a minute

REQUESTS, PROMPT, OUTPUT, BLOCK = 1000, 200, 64, 16


def case() -> Case:
    """All requests at once, with room for all of them."""
    per_request = (PROMPT + OUTPUT) // BLOCK + 2
    config = {
        "block_size": BLOCK,
        "num_blocks": REQUESTS * per_request + 1,
        "budget": 16384,
        "max_seqs": REQUESTS,
        "max_model_len": 2 * (PROMPT + OUTPUT),
    }
    steps = [
        {"add": {"req": "r", "count": REQUESTS, "prompt": PROMPT, "max_tokens": OUTPUT}},
        {"run": {}},
    ]
    raw = {
        "id": "stress",
        "area": "stress",
        "text": "Many requests at once.",
        "config": config,
        "steps": steps,
    }
    return Case.model_validate(raw, strict=False)


def test_a_thousand_concurrent_requests(tmp_path: Path) -> None:
    variant = Variant(case(), "reference", "async", "v1", 2, BLOCK)
    target = Target("kvconform.refimpl.connector:ReferenceConnector", {"store": "memory:{tmp}"})
    run = run_variant(variant, target, seed=0, tmp=tmp_path / "run", book=CodeBook(1, 1, 16))
    assert run.harness_error is None
    finished = {
        e["req"]
        for e in run.trace
        if e["kind"] == "req.finished" and e["status"] == "FINISHED_LENGTH_CAPPED"
    }
    sampled = [e for e in run.trace if e["kind"] == "sample"]
    end = next(e for e in run.trace if e["kind"] == "run.end")
    assert len(finished) == REQUESTS
    assert len(sampled) == REQUESTS * OUTPUT and all(e["clean"] for e in sampled)
    assert [e for e in run.trace if e["kind"] == "kv.wrong"] == []
    assert end["unfinished"] == [] and end["free_blocks"] == end["free_blocks_at_start"]
