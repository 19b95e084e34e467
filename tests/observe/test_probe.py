# SPDX-License-Identifier: Apache-2.0
"""Tests of the probe: it sees every hook and changes nothing that a connector could notice.

test_answers.py tests what hooks return.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

from core_rig import REFERENCE, ROUND_TRIP, check_ok, run_case, select
from kvconform.compat import vllm_api
from kvconform.compat.vllm_api import KVConnectorBase_V1, KVConnectorMetadata, KVConnectorRole
from kvconform.contract.trace import Trace
from kvconform.observe.probe import Patch, Probe, hook_names, wrap_instance_hooks
from kvconform.refimpl.connector import ReferenceConnector
from plain_connector import Plain

Event = dict[str, Any]


class Child(Plain):
    """Inherits every hook."""


def attributes(cls: type) -> dict[str, Any]:
    return dict(vars(cls))


@pytest.mark.parametrize("cls", [Plain, Child, ReferenceConnector])
def test_the_class_is_restored_exactly(cls: type) -> None:
    before, order = attributes(cls), list(vars(cls))
    with Patch(cls):
        assert attributes(cls) != before
        for name in hook_names():
            assert name == "request_finished_all_groups" or hasattr(
                getattr(cls, name), "_kvconform_original"
            )
    assert attributes(cls) == before and sorted(vars(cls)) == sorted(order)


def test_the_class_is_restored_when_the_run_raises() -> None:
    before = attributes(Plain)
    with pytest.raises(ZeroDivisionError), Patch(Plain):
        raise ZeroDivisionError
    assert attributes(Plain) == before


def test_nested_patches_record_once(trace: Trace) -> None:
    before, before_child = attributes(Plain), attributes(Child)
    with Patch(Plain):
        with Patch(Plain), Patch(Child):
            Child().wait_for_layer_load("x")
            assert len(select(trace.events, "hook.called")) == 1
        with Patch(Child):
            pass
        Plain().wait_for_layer_load("x")
        assert len(select(trace.events, "hook.called")) == 2
    with Patch(Child), Patch(Plain):
        Child().wait_for_layer_load("x")
        assert len(select(trace.events, "hook.called")) == 3
    assert (attributes(Plain), attributes(Child)) == (before, before_child)


@pytest.fixture
def no_probe() -> Any:
    """Between runs."""
    before, Probe.active = Probe.active, None
    yield
    Probe.active = before


def test_a_class_that_is_patched_again_records_for_the_next_run(no_probe: None) -> None:
    for _ in range(2):
        run = Trace()
        with Patch(Plain):
            Probe.active = Probe(run)
            Plain().wait_for_layer_load("x")
            Probe.active = None
        assert len(select(run.events, "hook.called")) == 1


def test_a_class_that_wraps_its_own_hooks_does_so_anew_in_each_run(no_probe: None) -> None:
    before, calls = attributes(Plain), []

    def wrap() -> None:
        inner = Plain.wait_for_layer_load

        def wrapped(self: Plain, layer_name: str) -> None:
            calls.append(layer_name)
            inner(self, layer_name)

        Plain.wait_for_layer_load = wrapped  # type: ignore[method-assign]

    for number in range(3):
        with Patch(Plain):
            wrap()
            Plain().wait_for_layer_load(str(number))
    assert calls == ["0", "1", "2"] and attributes(Plain) == before


def test_without_a_probe_the_patch_only_passes_on() -> None:
    outer, Probe.active = Probe.active, None
    try:
        with Patch(Plain):
            assert Plain().get_num_new_matched_tokens(None, 0) == (0, True)
    finally:
        Probe.active = outer


def test_the_type_is_the_connectors_own(trace: Trace) -> None:
    with Patch(Plain):
        made = Plain()
        assert type(made) is Plain and made.get_num_new_matched_tokens(None, 0) == (0, True)
        assert list(inspect.signature(Plain.get_num_new_matched_tokens).parameters) == [
            "self",
            "request",
            "num_computed_tokens",
        ]
    assert select(trace.events, "hook.returned")[0]["value"] == "(0, True)"


def test_hooks_that_are_no_instance_methods_are_recorded_and_called_as_before(trace: Trace) -> None:
    with Patch(Plain):
        assert Plain().get_finished_count() == 7
        assert Child().take_events() == ["Child"]
        assert Plain().take_events() == ["Plain"]
    assert {e["hook"] for e in select(trace.events, "hook.called")} == {
        "get_finished_count",
        "take_events",
    }


def test_depth_counts_hooks_that_call_hooks(trace: Trace) -> None:
    heard = []
    Probe.active.on("wait_for_save", after=lambda call: heard.append(call.depth))  # type: ignore[union-attr]
    Probe.active.on(
        "start_load_kv",
        before=lambda call: heard.append(-1),
        after=lambda call: heard.append(call.depth),
    )  # type: ignore[union-attr]
    with Patch(Plain):
        Plain().start_load_kv(None)
        Plain().wait_for_layer_load("x")
    calls = [(e["kind"], e["hook"], e["depth"]) for e in trace.events]
    names = ["start_load_kv", "wait_for_save", "handle_preemptions"]
    nested = [("hook.called", name, depth) for depth, name in enumerate(names)]
    assert calls[:6] == nested + [
        ("hook.returned", name, 2 - depth) for depth, name in enumerate(reversed(names))
    ]
    assert calls[6:] == [
        ("hook.called", "wait_for_layer_load", 0),
        ("hook.returned", "wait_for_layer_load", 0),
    ]
    assert heard == [-1, 0]  # listeners hear outermost calls only


def test_an_exception_is_recorded_and_passed_on(trace: Trace) -> None:
    with Patch(Plain), pytest.raises(LookupError):
        Plain(KVConnectorRole.WORKER).save_kv_layer("l0", None, None)
    (event,) = select(trace.events, "hook.returned")
    assert (event["error"], event["layer"]) == ("LookupError", "l0")
    assert event["error_text"].startswith("LookupError: no l0 (plain_connector.py:") and event[
        "error_text"
    ].endswith(", in save_kv_layer)")
    probe = Probe.active
    assert (
        probe is not None
        and probe.last_error is not None
        and probe.last_error[0] == "save_kv_layer"
    )
    with Patch(Plain):
        Plain().wait_for_layer_load("x")
    assert trace.events[-1]["depth"] == 0


def test_bound_tells_whether_metadata_is_bound(trace: Trace) -> None:
    with Patch(Plain):
        worker = Plain(KVConnectorRole.WORKER)
        worker.bind_connector_metadata(KVConnectorMetadata())
        worker.wait_for_layer_load("x")
        worker.clear_connector_metadata()
        worker.wait_for_layer_load("x")
        Plain().wait_for_layer_load("x")
    assert [e["bound"] for e in select(trace.events, "hook.called")] == [
        False,
        True,
        True,
        False,
        None,
    ]


def test_before_the_base_constructor_ran_nothing_is_recorded(trace: Trace) -> None:
    with Patch(Plain):
        Plain(None).wait_for_layer_load("x")
    assert trace.events == []


def test_hooks_on_the_instance_are_recorded_once(trace: Trace) -> None:
    with Patch(Plain):
        made = Plain()
        made.wait_for_layer_load = lambda name: f"own {name}"  # type: ignore[assignment, method-assign, return-value]
        wrap_instance_hooks(made)
        wrap_instance_hooks(made)
        assert made.wait_for_layer_load("x") == "own x"  # type: ignore[func-returns-value]
    assert [(e["hook"], e["depth"]) for e in select(trace.events, "hook.called")] == [
        ("wait_for_layer_load", 0)
    ]


def test_a_hook_that_a_newer_base_class_has_is_recorded(
    trace: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Newer(KVConnectorBase_V1):
        def brand_new_hook(self, value: int) -> int:
            return value + 1

        def _private(self) -> None: ...

    monkeypatch.setattr(vllm_api, "hook_classes", lambda: (Newer, *KVConnectorBase_V1.__mro__[:1]))
    Plain.brand_new_hook = lambda self, value: value + 2  # type: ignore[attr-defined]
    try:
        assert "brand_new_hook" in hook_names() and "_private" not in hook_names()
        with Patch(Plain):
            assert Plain().brand_new_hook(1) == 3  # type: ignore[attr-defined]
    finally:
        del Plain.brand_new_hook  # type: ignore[attr-defined]
    assert [e["hook"] for e in select(trace.events, "hook.called")] == ["brand_new_hook"]


# -- whole runs


class OnTheInstance(ReferenceConnector):
    """Assigns a hook in its constructor, and changes an argument in another."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        own = super().get_finished
        self.get_finished = lambda ids: own(ids)  # type: ignore[method-assign]

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        made = super().build_connector_meta(scheduler_output)
        scheduler_output.num_scheduled_tokens["a"] = scheduler_output.num_scheduled_tokens.pop(
            "a", 0
        )
        return made


@pytest.mark.parametrize("engine", ["reference", "vllm"])
def test_a_run_records_every_hook_and_leaves_the_class_alone(engine: str, tmp_path: Path) -> None:
    before = attributes(ReferenceConnector)
    run = run_case(REFERENCE, ROUND_TRIP, tmp_path, engine=engine)
    check_ok(run)
    assert attributes(ReferenceConnector) == before
    called = select(run.trace, "hook.called", depth=0)
    returned = {e["called_seq"] for e in select(run.trace, "hook.returned")}
    assert {e["seq"] for e in select(run.trace, "hook.called")} == returned
    worker = {e["hook"] for e in called if e["half"] == "worker"}
    assert worker >= {
        "register_kv_caches",
        "handle_preemptions",
        "bind_connector_metadata",
        "start_load_kv",
        "wait_for_layer_load",
    }
    assert worker >= {
        "save_kv_layer",
        "wait_for_save",
        "get_transfer_results",
        "get_block_ids_with_load_errors",
        "shutdown",
    }
    scheduler = {e["hook"] for e in called if e["half"] == "scheduler"}
    assert scheduler >= {
        "get_num_new_matched_tokens",
        "update_state_after_alloc",
        "build_connector_meta",
        "request_finished",
    }
    assert scheduler >= {"on_new_request", "update_connector_output", "shutdown"}


def test_instance_hooks_of_a_connector_are_seen_in_a_run(tmp_path: Path) -> None:
    run = run_case(f"{__name__}:OnTheInstance", ROUND_TRIP[:2], tmp_path)
    assert run.harness_error is None  # what it did to the engine's step is its own fault
    assert (
        {e["step"] for e in select(run.trace, "meta.built", output_mutated=True)}
        == {e["step"] for e in select(run.trace, "hook.returned", mutated_args=True)}
        != set()
    )
    assert select(run.trace, "hook.called", hook="get_finished", depth=1)
