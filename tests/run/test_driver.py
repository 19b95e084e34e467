# SPDX-License-Identifier: Apache-2.0
"""Tests of whole runs: blame for a crash, detection of a wrong byte, the steps of a case."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from core_rig import REFERENCE, RESTART, ROUND_TRIP, check_ok, make_case, run_case, select
from kvconform.config.target import Target
from kvconform.contract.loader import load_spec
from kvconform.engine.batch import Batch
from kvconform.engine.engine import Engine
from kvconform.refimpl.connector import Lookup, ReferenceConnector
from kvconform.run.case import run_and_judge
from kvconform.run.driver import REST_STEPS
from kvconform.run.records import Run
from kvconform.run.runner import run_variant

ENGINES = ["reference", "vllm"]
Steps = list[dict[str, Any]]


def crash(run: Run) -> tuple[str, str | None]:
    """(where, hook) of the one crash of a run."""
    (event,) = select(run.trace, "engine.crash")
    assert len(select(run.trace, "run.end")) == 1
    return event["where"], event["hook"]


def case_of(cls: type, tmp_path: Path, steps: Steps = ROUND_TRIP, **more: Any) -> Run:
    return run_case(f"{__name__}:{cls.__name__}", steps, tmp_path, **more)


# -- who is blamed for a crash


class RaisesInTorch(ReferenceConnector):
    """The innermost frames of its error are a library's."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None: ...

    def wait_for_save(self) -> None:
        torch.nn.functional.cross_entropy(torch.zeros(2, 3), torch.zeros(9, dtype=torch.long))


class AnswersZeroAsync(ReferenceConnector):
    """Says that nothing is to be loaded, asynchronously."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Lookup:
        return 0, True


class AnswersNonsense(ReferenceConnector):
    """Returns a bare number."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        return 4


class NoConstructor(ReferenceConnector):
    """Cannot be made."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        torch.zeros(2).view(3)


class Exits(ReferenceConnector):
    """Leaves."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        sys.exit(3)


class NativePanic(BaseException):
    """As PyO3's PanicException: no `Exception`."""


class Panics(ReferenceConnector):
    """Its native code panics in a hook."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        raise NativePanic("called unwrap on nothing")


class PanicsAtOnce(ReferenceConnector):
    """Its native code panics while it is made."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise NativePanic("no cache tier is configured")


class RaisesAtShutdown(ReferenceConnector):
    """Raises when it is asked to end."""

    def shutdown(self) -> None:
        raise OSError("still busy")


class NamesStrangers(ReferenceConnector):
    """Reports unknown requests."""

    def get_finished(self, finished_req_ids: set[str]) -> Any:
        return {"nobody"}, None


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("cls", "where", "hook"),
    [
        (RaisesInTorch, "hook", "wait_for_save"),
        (AnswersZeroAsync, "engine", None),
        (AnswersNonsense, "engine", None),
        (NoConstructor, "hook", "__init__"),
        (Exits, "hook", "start_load_kv"),
        (Panics, "hook", "start_load_kv"),
        (PanicsAtOnce, "hook", "__init__"),
        (RaisesAtShutdown, "hook", "shutdown"),
        (NamesStrangers, "engine", None),
    ],
)
def test_a_crash_is_blamed_on_who_caused_it(
    cls: type, where: str, hook: str | None, engine: str, tmp_path: Path
) -> None:
    run = case_of(cls, tmp_path, engine=engine)
    assert crash(run) == (where, hook)
    assert run.harness_error is None
    if hook not in (None, "__init__"):
        raised = [e["hook"] for e in select(run.trace, "hook.returned") if e["error"] is not None]
        assert raised[-1] == hook


@pytest.mark.parametrize("answer", [None, 3, [1], ({"a"},), (["a"], None), ({1, "b"}, {2})])
@pytest.mark.parametrize(
    "hook",
    ["get_finished", "get_block_ids_with_load_errors", "get_transfer_results", "request_finished"],
)
def test_an_illegal_report_is_never_our_own_fault(
    hook: str, answer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ReferenceConnector, hook, lambda self, *args: answer)
    run = run_case(REFERENCE, ROUND_TRIP[:2], tmp_path)
    assert run.harness_error is None
    # the base class makes sets of lists
    laundered = hook == "get_finished" and answer == (["a"], None)
    assert laundered or any(
        not e["value_ok"] or e["error"] for e in select(run.trace, "hook.returned")
    )


def test_our_own_fault_gives_error_rows_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when the innermost frames are a library's, as for `rows`, broken inside the worker."""
    scope: dict[str, Any] = {"__name__": "kvconform.engine.batch", "torch": torch}
    exec(
        (
            "def rows(self, output):\n    torch.nn.functional.cross_entropy(torch.zeros(2, 3), "
            "torch.zeros(9, dtype=torch.long))"
        ),
        scope,
    )
    monkeypatch.setattr(Batch, "rows", scope["rows"])
    run = run_case(REFERENCE, ROUND_TRIP, tmp_path / "run")
    assert crash(run) == ("harness", None)
    assert run.harness_error is not None and "cross_entropy" in run.harness_error
    spec = load_spec()
    variant = spec.cases["placeholders.decode-timeline"].variants(["reference"], ["sync"])[0]
    target = Target(
        REFERENCE,
        {"store": "{tmp}"},
        capabilities={"store": True, "saves": "all", "chunk_tokens": 4, "async_load": False},
    )
    report = run_and_judge(variant, target, spec, seed=0, tmp=tmp_path / "judge")
    assert report.harness_error is not None
    assert {row.verdict for row in report.rows} == {"ERROR"} and len(report.rows) == len(
        spec.requirements
    )


class BeforeRestart(ReferenceConnector):
    """Raises in the first process."""

    def wait_for_save(self) -> None:
        raise OSError("disk full")


def test_a_crash_before_a_process_restart_is_the_connectors(tmp_path: Path) -> None:
    run = case_of(BeforeRestart, tmp_path, RESTART)
    assert crash(run) == ("hook", "wait_for_save")
    assert run.harness_error is None
    assert select(run.trace, "req.scheduled", req="a") and not select(
        run.trace, "engine.lifecycle", op="restart"
    )


class NeverReceives(ReferenceConnector):
    """Loads for ever."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Lookup:
        return None, False


def test_a_stall_before_a_process_restart_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvconform.run.stall.STALL_STEPS", 5)
    run = case_of(NeverReceives, tmp_path, RESTART)
    assert run.harness_error is None and not select(run.trace, "engine.crash")
    (stall,) = select(run.trace, "engine.stall")
    assert stall["waiting_on"] == ["a: WAITING"]
    (end,) = select(run.trace, "run.end")
    assert (end["quiesced"], end["unfinished"], end["crashed"]) == (False, ["a"], False)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_process_restart_goes_on_with_what_was_known(engine: str, tmp_path: Path) -> None:
    run = run_case(REFERENCE, RESTART, tmp_path, engine=engine)
    check_ok(run)
    assert [e["pid"] for e in select(run.trace, "engine.lifecycle", op="restart")] == [1]
    (lookup,) = select(run.trace, "lookup", req="b")
    assert (lookup["tokens"], lookup["ever_computed"]) == (12, 13)
    assert [e["seq"] for e in run.trace] == list(range(len(run.trace)))


# -- steps


def test_tokens_belong_to_the_variant_so_that_stores_cannot_mix_runs_up(tmp_path: Path) -> None:
    """An in-memory store without a name is never shared.

    Neither another run of the case nor another variant finds anything in it.
    """
    first = run_case(REFERENCE, ROUND_TRIP, tmp_path / "a", extra={})
    assert [e["tokens"] for e in select(first.trace, "lookup")] == [0, 12]
    again = run_case(REFERENCE, ROUND_TRIP, tmp_path / "b", extra={})
    assert [e["tokens"] for e in select(again.trace, "lookup")] == [0, 12]
    shared = {"store": "memory:test-driver"}
    for scheduling in ("sync", "async"):
        run = run_case(
            REFERENCE, ROUND_TRIP, tmp_path / scheduling, extra=shared, scheduling=scheduling
        )
        assert [e["tokens"] for e in select(run.trace, "lookup")] == [0, 12]


def test_a_reused_id_is_another_incarnation_also_for_promises(tmp_path: Path) -> None:
    steps: Steps = [
        {"add": {"req": "a", "prompt": 13, "max_tokens": 2}},
        {"run": {}},
        {"add": {"req": "b", "prompt": 6, "max_tokens": 2, "id": "a"}},
        {"run": {}},
        {"expect": {"outputs": {"req": "a", "count": 2, "finish": "length"}}},
        {"expect": {"chunks": {"req": "b", "equal": 1}}},
        {"expect": {"chunks": {"req": "a", "equal": 1}}},
    ]
    run = run_case(REFERENCE, steps, tmp_path)
    check_ok(run)
    assert all(e["holds"] for e in select(run.trace, "case.expectation"))
    assert [(e["generation"], e["final"]) for e in select(run.trace, "req.finished")] == [
        (0, 14),
        (1, 7),
    ]


def test_a_case_must_be_sound() -> None:
    with pytest.raises(ValueError, match="names request 'x'"):
        make_case([{"add": {"req": "a", "prompt": 3}}, {"abort": "x"}])


@pytest.mark.parametrize("engine", ENGINES)
def test_a_synchronous_engine_ends_a_step_before_the_next(engine: str, tmp_path: Path) -> None:
    """`run` continues with the step that a case has scheduled and not landed.

    Two steps in flight occur only in asynchronous scheduling.
    """
    steps: Steps = [
        {"add": {"req": "a", "prompt": 16, "max_tokens": 2}},
        {"schedule": 1},
        {"run": {}},
    ]
    run = run_case(REFERENCE, steps, tmp_path, engine=engine, config={"budget": 6})
    check_ok(run)
    running = [event for event in select(run.trace, "req.updated") if event["status"] == "RUNNING"]
    assert [event["computed"] for event in running][:3] == [6, 12, 16] and all(
        event["computed"] - event["placeholders"] < event["known"] for event in running
    )


def test_the_limit_of_a_run_step_does_not_count_steps_that_wait_for_a_load(tmp_path: Path) -> None:
    steps: Steps = [*ROUND_TRIP[:4], {"run": {"max": 2}}, {"preempt": "b"}, {"run": {}}]
    options = {"store": "memory:{tmp}", "load": "async", "load_delay": 30}
    run = run_case(REFERENCE, steps, tmp_path, extra=options, stall=5)
    [preempted] = select(run.trace, "req.state", req="b", to="PREEMPTED")
    assert preempted["reason"] == "preempt"


@pytest.mark.parametrize(
    ("before", "more"),
    [
        ([{"run": {}}], REST_STEPS),  # before b; c would go on with b
        ([{"step": 1}], 0),
    ],
)
def test_who_asks_again_has_steps_without_work_before_unless_requests_would_go_on(
    before: list[dict[str, Any]], more: int, tmp_path: Path
) -> None:
    again = [
        {"add": {"req": req, "prompt": {"same": "a"}, "max_tokens": 1, "reloads": "a"}}
        for req in ("b", "c")
    ]
    steps = [{"add": {"req": "a", "prompt": 9, "max_tokens": 6}}, *before, *again, {"run": {}}]
    variant, *_ = make_case(steps).variants(["reference"], ["sync"])
    empty = []
    target = Target(REFERENCE, {"store": "{tmp}"})
    for rests in (False, True):
        run = run_variant(variant, target, seed=0, tmp=tmp_path / str(rests), rests=rests)
        assert run.harness_error is None
        empty.append(sum(e["kind"] == "step.scheduled" and e["empty"] for e in run.trace))
    assert empty[1] - empty[0] == more


# -- steps in flight


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("then", [{"run": {}}, {"schedule": 2}, {"idle": 1}])
def test_never_more_steps_are_in_flight_than_the_engine_core_has(
    engine: str, depth: int, then: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = 0
    schedule = Engine.schedule

    def counted(self: Engine) -> None:
        nonlocal most
        schedule(self)
        most = max(most, len(self.queue))

    monkeypatch.setattr(Engine, "schedule", counted)
    steps: Steps = [{"add": {"req": "a", "prompt": 5, "max_tokens": 9}}, {"schedule": 4}, then]
    scheduling = "sync" if depth == 1 else "async"
    check_ok(
        run_case(REFERENCE, steps, tmp_path, engine=engine, scheduling=scheduling, depth=depth)
    )
    assert most == depth
