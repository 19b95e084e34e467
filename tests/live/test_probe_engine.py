# SPDX-License-Identifier: Apache-2.0
"""Tests of the probe in the complete vLLM.

A correct connector fails nothing. A defect fails the same requirement as in the other engines.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvconform.contract.capabilities import complete
from kvconform.contract.events import check_event
from kvconform.contract.loader import load_spec
from kvconform.judge.records import Verdict
from kvconform.judge.verdict import judge
from kvconform.live.trace import channels, collect
from live_rig import BLOCKS, BUDGET, LENGTHS, OUTPUTS, SEQUENCES, SIZE
from places import RIGS

RIG = RIGS / "live_rig.py"
CONNECTORS = {
    "ReferenceConnector": "kvconform.refimpl.connector",
    "LayerOrder": "kvconform.refimpl.defects.loads",
    "ReceivedEarly": "kvconform.refimpl.defects.reports",
}
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "PYTHONHASHSEED": "0",
}
CAPABILITIES = {"store": True, "saves": "all", "chunk_tokens": 32}


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """A live trace of every connector, by class."""
    pytest.importorskip("vllm")
    folder = tmp_path_factory.mktemp("live")
    arguments = [
        part for cls, module in CONNECTORS.items() for part in (cls, module, str(folder / cls))
    ]
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("KVCONFORM_")
    } | ENVIRONMENT
    subprocess.run(
        [sys.executable, str(RIG), *arguments],
        env=environment,
        check=True,
        timeout=180,
        capture_output=True,
    )
    for cls in CONNECTORS:
        error = folder / cls / "error"
        assert not error.exists(), error.read_text()[-2000:]
    return {cls: collect(folder / cls) for cls in CONNECTORS}


def failed(trace: list[dict[str, Any]], **capabilities: Any) -> tuple[set[str], set[str]]:
    """(requirements and guarantees that the trace fails, those that it passes)."""
    start = trace[0]
    axes = {name: start[name] for name in ("engine", "scheduling", "runner", "depth", "block_size")}
    variant = SimpleNamespace(case=SimpleNamespace(id="live"), axes=axes, beyond=())
    run = SimpleNamespace(
        variant=variant, trace=trace, channels=channels(trace), harness_error=None
    )
    wanted = [one for one in load_spec().requirements.values() if one.in_force(start["vllm"])]
    rows = judge(wanted, {"connector": run}, complete(CAPABILITIES | capabilities))  # type: ignore[dict-item]
    assert not [row for row in rows if row.verdict is Verdict.ERROR]
    by = {
        verdict: {row.requirement for row in rows if row.verdict is verdict}
        for verdict in (Verdict.FAIL, Verdict.PASS)
    }
    return by[Verdict.FAIL], by[Verdict.PASS]


@pytest.mark.e2e
def test_a_correct_connector_passes_on_all_of_vllm(traces: dict[str, list[dict[str, Any]]]) -> None:
    trace = traces["ReferenceConnector"]
    assert not [problem for event in trace for problem in check_event(event)]
    assert channels(trace) == {"hooks", "sched", "kv", "live", "plan"}
    loads = [event for event in trace if event["kind"] == "live.load"]
    assert sum(len(event["exact"]) for event in loads) >= 6
    assert not any(
        event["close"] or event["wrong"] or event["missing"] or event["unknown"] for event in loads
    )
    assert trace[-1]["kind"] != "run.end" and any(
        e["kind"] == "run.end" and e["quiesced"] for e in trace
    )
    bad, good = failed(trace)
    assert not bad
    seen = (
        "load.complete-or-failed",
        "load.position",
        "lookup.truth",
        "load.only-grant",
        "end.baseline",
        "engine.final-after-step",
    )
    assert set(seen) <= good


@pytest.mark.e2e
@pytest.mark.parametrize(
    "cls, requirement", [("LayerOrder", "layout.layer"), ("ReceivedEarly", "recv.not-before-bytes")]
)
def test_a_defect_is_found_as_on_the_other_engines(
    traces: dict[str, list[dict[str, Any]]], cls: str, requirement: str
) -> None:
    bad, _ = failed(traces[cls], async_load=cls == "ReceivedEarly")
    assert bad - {"live.loaded-kv"} == {requirement}  # which says the same of whole loads


def schedule(trace: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Return every request's share of every step that scheduled something.

    A share has the number of the step and of the request, tokens scheduled, counts before it,
    tokens known, block table, and kind.
    """
    steps: dict[int, int] = {}
    names: dict[str, int] = {}
    return [
        (
            steps.setdefault(e["step"], len(steps)),
            names.setdefault(e["req"], len(names)),
            e["output_computed"],
            e["scheduled"],
            e["computed"],
            e["placeholders"],
            e["known"],
            tuple(e["table"]),
            e["listed_as"],
            e["prefill"],
        )
        for e in trace
        if e["kind"] == "req.scheduled"
    ]


@pytest.mark.e2e
@pytest.mark.parametrize("engine", ["reference", "vllm"])
def test_the_other_engines_schedule_what_all_of_vllm_does(
    engine: str, traces: dict[str, list[dict[str, Any]]], tmp_path: Path
) -> None:
    """Token for token and block for block, a preemption and loads included."""
    from core_rig import REFERENCE, check_ok, run_case, select  # takes vLLM

    live = traces["ReferenceConnector"]
    first = [
        {"add": {"req": f"a{i}", "prompt": length, "max_tokens": OUTPUTS}}
        for i, length in enumerate(LENGTHS)
    ]
    again = [
        {"add": {"req": f"b{i}", "prompt": {"same": f"a{i}"}, "max_tokens": OUTPUTS}}
        for i in range(len(LENGTHS))
    ]
    config = {
        "block_size": SIZE,
        "num_blocks": BLOCKS,
        "budget": BUDGET,
        "max_seqs": SEQUENCES,
        "max_model_len": 320,
    }
    run = run_case(
        REFERENCE,
        [*first, {"run": {}}, {"drop-local": {}}, *again, {"run": {}}],
        tmp_path,
        engine=engine,
        config=config,
    )
    check_ok(run)
    assert live[0]["scheduling"] == "sync"
    assert schedule(run.trace) == schedule(live)
    preempted = [len(select(trace, "req.state", to="PREEMPTED")) for trace in (run.trace, live)]
    assert preempted[0] == preempted[1] > 0
    assert len(select(live, "load.due")) == len(select(run.trace, "load.due")) > 0
