# SPDX-License-Identifier: Apache-2.0
"""Tests of the trace of a live run.

It is written as it grows, joined from several processes, and completed for those that died.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from kvconform.contract.events import check_event, lifecycle
from kvconform.live.trace import StreamTrace, channels, collect, later, read

START = dict(
    seed=0,
    engine="live",
    case="live",
    scheduling="sync",
    runner="v1",
    depth=1,
    vllm="0.32.0",
    block_size=32,
    hash_size=32,
    num_blocks=8,
    policies=[],
    connector="C",
    spec_tokens=0,
    role="kv_both",
    failure_policy="fail",
    groups=1,
    ranks=1,
    stages=1,
    context_ranks=1,
    drafter=False,
    pooling=False,
    device="cpu",
    slow=None,
)
CALLED = dict(half="worker", rank=0, depth=0, bound=True, thread="main")
SCHEDULED = dict(
    total=4,
    new=["a"],
    cached=[],
    resumed=[],
    preempted=[],
    finished=[],
    has_sync_loads=False,
    empty=False,
    new_ids=0,
)
END = dict(
    quiesced=True,
    unfinished=[],
    free_blocks=7,
    free_blocks_at_start=7,
    engine_requests=[],
    request_objects_alive=[],
    threads=0,
    crashed=False,
)


def returned(called: dict[str, Any]) -> dict[str, Any]:
    """The fields of the return of a hook."""
    fields = {name: called[name] for name in ("hook", "depth")}
    return {
        **fields,
        "error": None,
        "error_text": None,
        "error_at": None,
        "value": "None",
        "value_ok": True,
        "mutated_args": False,
        "params_msgpack_ok": True,
        "params_aliased": False,
        "called_seq": called["seq"],
        "layer": None,
        "timed_out": False,
    }


def scheduler(path: Path, *, steps: int = 2, end: bool = True) -> StreamTrace:
    """The process of the scheduler: `steps` steps, each with a hook after it was scheduled."""
    trace = StreamTrace(path / "10.jsonl")
    trace.emit("engine.lifecycle", **lifecycle("start"))
    trace.emit("run.start", **START)
    for _ in range(steps):
        trace.step += 1
        trace.emit("step.scheduled", **SCHEDULED)
        called = trace.emit(
            "hook.called", hook="update_connector_output", **{**CALLED, "half": "scheduler"}
        )
        trace.emit("hook.returned", **returned(called))
    if end:
        trace.emit("run.end", **END)
    return trace


def worker(path: Path, *, steps: int = 2) -> StreamTrace:
    """The process of a worker."""
    trace = StreamTrace(path / "11.jsonl")
    trace.emit(
        "live.kv",
        rank=0,
        watched=True,
        compared=True,
        poisoned=True,
        blocks=8,
        size=32,
        layers=2,
        bytes=1024,
    )
    for step in range(1, steps + 1):
        trace.step = step
        called = trace.emit("hook.called", hook="start_load_kv", **CALLED)
        trace.emit("hook.returned", **returned(called))
    return trace


def test_an_event_is_in_the_file_at_once_and_as_it_became(tmp_path: Path) -> None:
    trace = StreamTrace(tmp_path / "1.jsonl")
    event = trace.emit("cache.reset", phase="asked", returned=None, running=False, connector=True)
    assert [e["phase"] for e in read(trace.path)] == ["asked"]
    trace.amend(event, returned=True)
    trace.emit("cache.reset", phase="done", returned=True, running=False, connector=True)
    assert [(e["phase"], e["returned"]) for e in read(trace.path)] == [
        ("asked", True),
        ("done", True),
    ]


def test_an_engine_that_was_started_again_continues_the_trace(tmp_path: Path) -> None:
    scheduler(tmp_path)
    again = later(tmp_path, 2)
    assert later(again, 3) == later(tmp_path, 3)
    again.mkdir()
    scheduler(again, end=False)
    third = later(tmp_path, 3)
    third.mkdir()
    scheduler(third)
    found = collect(tmp_path)
    assert [e["seq"] for e in found] == list(range(len(found)))
    assert [e["step"] for e in found if e["kind"] == "step.scheduled"] == [1, 2, 3, 4, 5, 6]
    assert [e["step"] for e in found if e["kind"] == "engine.lifecycle" and e["op"] == "restart"]
    assert [e["kind"] for e in found].count("run.start") == 1
    assert [n for n, e in enumerate(found) if e["kind"] == "run.end"] == [len(found) - 1]
    by_seq = {e["seq"]: e for e in found}
    for event in found:
        assert check_event(event) == []
        if event["kind"] == "hook.returned":
            assert by_seq[event["called_seq"]]["kind"] == "hook.called"
            assert by_seq[event["called_seq"]]["step"] == event["step"]


def test_half_a_line_is_what_a_process_died_over(tmp_path: Path) -> None:
    trace = scheduler(tmp_path)
    with trace.path.open("a") as file:
        file.write('{"k": "hook.cal')
    assert len(read(trace.path)) == len(trace.events)


def test_processes_are_joined_step_by_step(tmp_path: Path) -> None:
    scheduler(tmp_path)
    worker(tmp_path)
    trace = collect(tmp_path, case="mine", seed=7)
    assert [e["seq"] for e in trace] == list(range(len(trace)))
    assert trace[0]["kind"] == "run.start" and (trace[0]["case"], trace[0]["seed"]) == ("mine", 7)
    assert trace[-1]["kind"] == "run.end"
    order = [
        (e["step"], e.get("hook", e["kind"]))
        for e in trace
        if e["step"] and e["kind"] != "hook.returned" and e["kind"] != "run.end"
    ]
    assert order == [
        (step, name)
        for step in (1, 2)
        for name in ("step.scheduled", "start_load_kv", "update_connector_output")
    ]
    for event in trace:
        if event["kind"] == "hook.returned":
            assert trace[event["called_seq"]]["hook"] == event["hook"]
        assert not check_event(event), event
    assert channels(trace) == {"hooks", "sched", "kv", "live"}


def test_kv_is_a_channel_only_where_all_of_it_was_looked_at(tmp_path: Path) -> None:
    scheduler(tmp_path)
    trace = worker(tmp_path)
    trace.amend(trace.events[0], watched=False)
    assert channels(collect(tmp_path)) == {"hooks", "sched", "live"}
    assert channels([]) == {"sched", "live"}


def test_a_process_that_died_in_a_hook(tmp_path: Path) -> None:
    scheduler(tmp_path, end=False)
    trace = worker(tmp_path)
    trace.emit("hook.called", hook="get_transfer_results", **CALLED)
    found = collect(tmp_path)
    crash, end = found[-2:]
    assert (crash["kind"], crash["where"], crash["hook"]) == (
        "engine.crash",
        "process",
        "get_transfer_results",
    )
    assert end["kind"] == "run.end" and end["crashed"]
    assert not [problem for event in found for problem in check_event(event)]


def test_a_hook_that_never_returned_until_the_process_was_ended(tmp_path: Path) -> None:
    scheduler(tmp_path, end=False)
    trace = worker(tmp_path)
    trace.emit("hook.called", hook="wait_for_save", **CALLED)
    found = collect(tmp_path, killed=True)
    late = found[-3]
    assert (late["kind"], late["hook"], late["timed_out"]) == (
        "hook.returned",
        "wait_for_save",
        True,
    )
    assert found[late["called_seq"]]["kind"] == "hook.called"
    assert found[-2]["kind"] == "engine.crash" and found[-2]["where"] == "hook"
    assert not [problem for event in found for problem in check_event(event)]


def test_a_process_that_was_ended_between_hooks_did_not_crash(tmp_path: Path) -> None:
    scheduler(tmp_path, end=False)
    found = collect(tmp_path, killed=True)
    assert found[-1]["crashed"] and not any(e["kind"] == "engine.crash" for e in found)
    assert collect(tmp_path)[-2]["where"] == "process"
    assert not any(e["kind"] == "engine.crash" for e in collect(tmp_path, ended=True)), (
        "vLLM puts an end to its own processes"
    )


def test_nobody_wrote_anything(tmp_path: Path) -> None:
    assert collect(tmp_path) == []
    StreamTrace(tmp_path / "1.jsonl")
    assert collect(tmp_path) == []


def test_the_entry_point_is_there_and_does_nothing_unless_it_is_asked() -> None:
    points = {
        point.name: point.value
        for point in importlib.metadata.entry_points(group="vllm.general_plugins")
    }
    assert points.get("kvconform") == "kvconform.live.plugin:register"
    code = (
        "import sys, kvconform.live.plugin as p; p.register(); "
        "print(json.dumps(sorted(m.partition('.')[0] for m in sys.modules)))"
    )
    environment = {
        name: value for name, value in os.environ.items() if name != "KVCONFORM_LIVE_TRACE"
    }
    out = subprocess.run(
        [sys.executable, "-c", "import json; " + code],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert not {"vllm", "torch", "numpy", "pydantic"} & set(json.loads(out.stdout))
