# SPDX-License-Identifier: Apache-2.0
"""Tests of many requests that save, are preempted, and load what others have saved.

None is lost, no byte is wrong, no block leaks. Connectors with planted defects must fail.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kvconform.config.target import Target
from kvconform.contract.case import Case, Variant
from kvconform.contract.loader import load_spec
from kvconform.judge.records import Verdict
from kvconform.judge.verdict import judge
from kvconform.kernels.codes import CodeBook
from kvconform.run.records import Run
from kvconform.run.runner import run_variant

pytestmark = pytest.mark.e2e  # many seconds each

BLOCK = 16
DOCUMENTS = 8
"""Requests whose prompts the others are made of."""
LENGTH = 6 * BLOCK
"""Tokens of a document."""
OUTPUT = 40
LIVE = 100
"""Requests that run at once; the pool has room for the shared prompts, and not for all output."""


def case(requests: int) -> Case:
    """Half of the requests save, the other half repeat their prompts when the local cache is empty.

    A prompt has the start of one document, the end of another one, and a few tokens of its own: so
    the same chunk comes behind different starts.
    """
    half = requests // 2
    config = {
        "block_size": BLOCK,
        "num_blocks": LIVE * 4 + 1,
        "budget": 4096,
        "max_seqs": LIVE,
        "max_model_len": 2 * (LENGTH + OUTPUT),
    }
    adds: list[dict[str, Any]] = [
        {"req": f"d{number}", "prompt": LENGTH, "max_tokens": 1} for number in range(DOCUMENTS)
    ]
    for number in range(half - DOCUMENTS):
        start, end = number % DOCUMENTS, (number // DOCUMENTS) % DOCUMENTS
        parts = [
            {"of": f"d{start}", "tokens": 2 * BLOCK},
            {"of": f"d{end}", "from": 2 * BLOCK, "tokens": 4 * BLOCK},
        ]
        adds.append(
            {
                "req": f"r{number}",
                "prompt": {"parts": parts, "then": 1 + number % BLOCK},
                "max_tokens": OUTPUT,
            }
        )
    again = [
        {
            "req": f"again_{add['req']}",
            "prompt": {"of": add["req"], "outputs": True, "then": 1},
            "max_tokens": 2,
        }
        for add in adds
    ]
    steps: list[dict[str, Any]] = [{"add": add} for add in adds]
    steps += [{"run": {}}, {"drop-local": {}}]
    steps += [{"add": add} for add in again]
    steps += [{"run": {}}]
    raw = {
        "id": "stress",
        "area": "stress",
        "text": "Many requests at once.",
        "config": config,
        "steps": steps,
    }
    return Case.model_validate(raw, strict=False)


def stressed(engine: str, connector: str, requests: int, tmp: Path, **options: Any) -> Run:
    """Run the workload with asynchronous scheduling."""
    variant = Variant(case(requests), engine, "async", "v1", 2, BLOCK)
    declared = {"store": True, "saves": "all", "chunk_tokens": BLOCK, "async_load": bool(options)}
    options = {"store": "memory:{tmp}", **options}
    target = Target(f"kvconform.refimpl.{connector}", options, capabilities=declared)
    return run_variant(variant, target, seed=0, tmp=tmp / "run", book=CodeBook(1, 1, 16))


def failed(run: Run) -> set[str]:
    """Return the requirements that the run fails."""
    rows = judge(load_spec().requirements.values(), {"connector": run}, run.caps)
    return {row.requirement for row in rows if row.verdict is Verdict.FAIL}


def wrong(run: Run) -> Counter[str]:
    """Return what went wrong, and how often."""
    assert run.harness_error is None
    found: Counter[str] = Counter()
    for e in run.trace:
        if e["kind"] in ("kv.wrong", "engine.crash", "engine.stall"):
            found[e["kind"]] += 1
        elif e["kind"] == "sample":
            found["tokens sampled from wrong KV"] += not e["clean"]
        elif e["kind"] == "run.end":
            found["unfinished"] += len(e["unfinished"])
            found["blocks leaked"] += e["free_blocks_at_start"] - e["free_blocks"]
    return +found


ASYNC = {"load": "async", "async_saves": True}


@pytest.mark.parametrize("engine", ["reference", "vllm"])
@pytest.mark.parametrize("requests", [240, pytest.param(1000, marks=pytest.mark.long)])
def test_requests_load_what_they_saved(engine: str, requests: int, tmp_path: Path) -> None:
    run = stressed(engine, "connector:ReferenceConnector", requests, tmp_path, **ASYNC)
    assert wrong(run) == Counter()
    assert failed(run) == set()
    ended = [e["status"] for e in run.trace if e["kind"] == "req.finished"]
    assert ended == ["FINISHED_LENGTH_CAPPED"] * requests
    loads = [e for e in run.trace if e["kind"] == "alloc" and e["external"] > 0]
    assert len({e["req"] for e in loads if e["req"].startswith("again")}) > 0.45 * requests
    assert all(e["is_async"] for e in loads)
    victims = {e["req"] for e in run.trace if e["kind"] == "req.state" and e["to"] == "PREEMPTED"}
    assert len(victims) > requests / 10


WRONG = {
    "defects.bytes:SwapsHalves": "layout.halves",
    "defects.boundaries:UnknownToken": "save.plan-bound",
    "defects.identity:Unchained": "identity.prefix",
    "defects.identity:UnchainedWithIdentity": "identity.prefix",
}


@pytest.mark.parametrize("connector", WRONG)
@pytest.mark.parametrize(
    "options", [pytest.param({}, marks=pytest.mark.long), ASYNC], ids=["sync", "async"]
)
def test_a_defect_does_not_pass_it(connector: str, options: Any, tmp_path: Path) -> None:
    run = stressed("reference", connector, 60, tmp_path, **options)
    assert WRONG[connector] in failed(run)
