# SPDX-License-Identifier: Apache-2.0
"""Tests that the return values of hooks are judged and described."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")
from core_rig import select
from kvconform.compat.vllm_api import KVConnectorRole
from kvconform.contract.trace import Trace
from kvconform.observe.call import short
from kvconform.observe.probe import Patch, Probe, wrap_instance_hooks
from plain_connector import Plain

ONE = KVConnectorRole.WORKER
RESULTS = SimpleNamespace(
    finished_sending=set(), finished_recving={"a"}, failed_recving=frozenset()
)
VALUES: list[tuple[str, Any, bool]] = [
    ("get_finished", (None, {"a"}), True),
    ("get_finished", ({"a"}, ["b"]), False),
    ("get_finished", ({1}, None), False),
    ("get_finished", None, False),
    ("get_finished", ({"a"},), False),
    ("get_transfer_results", RESULTS, True),
    ("get_transfer_results", None, False),
    ("get_transfer_results", SimpleNamespace(**{**vars(RESULTS), "failed_recving": None}), False),
    ("get_transfer_results", SimpleNamespace(**{**vars(RESULTS), "finished_sending": {3}}), False),
    ("get_block_ids_with_load_errors", {1, 2}, True),
    ("get_block_ids_with_load_errors", [1, 2], False),
    ("get_block_ids_with_load_errors", {"1"}, False),
    ("get_block_ids_with_load_errors", None, False),
    ("reset_cache", None, True),
    ("reset_cache", False, True),
    ("reset_cache", 0, False),
    ("has_pending_push_work", False, True),
    ("has_pending_push_work", None, False),
    ("get_finished_count", 3, True),
    ("get_finished_count", "3", False),
    ("take_events", [], True),
    ("take_events", 3, False),
    ("build_connector_worker_meta", None, True),
    ("build_connector_worker_meta", 3, False),
    ("request_finished", (False, None), True),
    ("request_finished", (True, {"a": 1}), True),
    ("request_finished", (1, None), False),
    ("request_finished", True, False),
    ("request_finished", (True, None, None), False),
    ("request_finished", (True, [1]), False),
    ("wait_for_save", None, True),
]


@pytest.mark.parametrize(("hook", "value", "legal"), VALUES)
def test_what_a_hook_returns_is_judged(hook: str, value: Any, legal: bool, trace: Trace) -> None:
    heard = []
    Probe.active.on(hook, after=lambda call: heard.append(call.legal))  # type: ignore[union-attr]
    made = Plain(ONE)
    setattr(made, hook, lambda *args: value)
    with Patch(Plain):
        wrap_instance_hooks(made)
        assert getattr(made, hook)(SimpleNamespace(kv_transfer_params=None), []) is value
    assert select(trace.events, "hook.returned")[0]["value_ok"] is legal and heard == [legal]


@pytest.mark.parametrize(
    ("params", "msgpack_ok", "aliased"),
    [
        ({"x": [1, "y", None]}, True, False),
        ({"x": object()}, False, False),
        ("own", True, False),
        ("own, for a remote prefill", True, True),  # the engine adds a key
        ({"do_remote_prefill": True}, True, False),
    ],
)
def test_transfer_parameters_must_serialise_and_be_fresh(
    params: Any, msgpack_ok: bool, aliased: bool, trace: Trace
) -> None:
    request = SimpleNamespace(kv_transfer_params={"given": 1})
    if params == "own, for a remote prefill":
        request.kv_transfer_params["do_remote_prefill"] = True
    made = Plain()
    made.request_finished = lambda *args: (
        False,
        request.kv_transfer_params if isinstance(params, str) else params,
    )  # type: ignore[method-assign]
    with Patch(Plain):
        wrap_instance_hooks(made)
        made.request_finished(request, [])
    (event,) = select(trace.events, "hook.returned")
    assert (event["params_msgpack_ok"], event["params_aliased"]) == (msgpack_ok, aliased)


def test_values_are_described_without_addresses_and_in_one_order() -> None:
    assert short({"b", "a"}) == "{'a', 'b'}"
    assert short((1, None, [True, "x"])) == "(1, None, [True, 'x'])"
    assert short({"k": object()}) == "{'k': object}"
    assert short(list(range(20))) == "list"
    assert len(short("x" * 500)) < 70
