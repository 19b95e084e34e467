# SPDX-License-Identifier: Apache-2.0
"""Tests of the static checks of a connector's class.

Each check has a class that fails it, and a good class passes all.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from kvconform.compat.vllm_api import KVConnectorBase_V1
from kvconform.config.target import Target
from kvconform.contract.loader import load_spec
from kvconform.observe.probe import Patch
from kvconform.observe.static_checks import inspect_class
from kvconform.refimpl.connector import ReferenceConnector
from kvconform.run.runner import run_variant

Findings = dict[str, tuple[bool, str]]


def findings(cls: type) -> Findings:
    return {item: (ok, detail) for item, ok, detail in inspect_class(cls, {}, None)}


def failed(cls: type) -> Findings:
    return {item: found for item, found in findings(cls).items() if not found[0]}


class TwoArguments(ReferenceConnector):
    def __init__(self, vllm_config: Any, role: Any) -> None: ...


class Anything(ReferenceConnector):
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...


class NeedsMore(ReferenceConnector):
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any, server: str) -> None: ...


class Abstract(KVConnectorBase_V1):
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...


class NoKwargs(ReferenceConnector):
    def start_load_kv(self, forward_context: Any) -> None: ...  # type: ignore[override]


class OldSignature(ReferenceConnector):
    def update_state_after_alloc(self, request: Any, num_external_tokens: int) -> None: ...  # type: ignore[override]


class MoreRequired(ReferenceConnector):
    def get_finished(self, finished_req_ids: set[str], extra: int) -> Any: ...  # type: ignore[override]


class MoreOptional(ReferenceConnector):
    def get_finished(self, finished_req_ids: set[str], extra: int = 0) -> Any: ...


class Wrapped(ReferenceConnector):
    @functools.wraps(ReferenceConnector.get_finished)
    def get_finished(self, *args: Any, **kwargs: Any) -> Any: ...


class InstanceQuestion(ReferenceConnector):
    def get_required_kvcache_layout(self, vllm_config: Any) -> Any: ...  # type: ignore[override]


class RaisingQuestion(ReferenceConnector):
    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        raise KeyError("server\nmissing")


class SleepQuestion(ReferenceConnector):
    def supports_sleep_mode(self, kv_transfer_config: Any) -> bool:
        return True


class PropertyHook(ReferenceConnector):
    get_finished = property(lambda self: None)  # type: ignore[assignment]


def test_a_good_class_has_no_findings() -> None:
    for cls in (ReferenceConnector, Anything, MoreOptional, Wrapped):
        assert failed(cls) == {}, cls
    assert {
        "constructor",
        "abstract-methods",
        "class-methods",
        "start-load-kwargs",
        "signature:get_finished",
    } <= set(findings(Wrapped))


@pytest.mark.parametrize(
    ("cls", "item", "text"),
    [
        (TwoArguments, "constructor", "no parameter named kv_cache_config"),
        (NeedsMore, "constructor", "cannot be called with (vllm_config, role, kv_cache_config)"),
        (NoKwargs, "start-load-kwargs", "takes no **kwargs"),
        (
            OldSignature,
            "signature:update_state_after_alloc",
            "3 arguments (request, blocks, num_external_tokens)",
        ),
        (MoreRequired, "signature:get_finished", "1 argument (finished_req_ids)"),
        (InstanceQuestion, "class-methods", "get_required_kvcache_layout is not a class method"),
        (RaisingQuestion, "class-methods", "KeyError: 'server"),
        (SleepQuestion, "class-methods", "supports_sleep_mode is not a class method"),
        (PropertyHook, "signature:get_finished", "is not a function"),
    ],
)
def test_each_fault_is_one_finding(cls: type, item: str, text: str) -> None:
    found = failed(cls)
    assert list(found) == [item]
    assert text in found[item][1] and "\n" not in found[item][1] and " at 0x" not in found[item][1]


def test_methods_that_are_missing_are_named() -> None:
    ok, detail = findings(Abstract)["abstract-methods"]
    assert not ok and "wait_for_save" in detail and "start_load_kv" not in detail


@pytest.mark.parametrize("cls", [ReferenceConnector, OldSignature, NoKwargs])
def test_the_probe_does_not_hide_the_shape(cls: type) -> None:
    before = findings(cls)
    with Patch(cls):
        assert findings(cls) == before


def test_the_api_case_emits_the_findings(tmp_path: Path) -> None:
    variant = load_spec().cases["lifecycle.api"].variants(["reference"])[0]
    run = run_variant(
        variant,
        Target("kvconform.refimpl.connector:ReferenceConnector", {"store": "{tmp}"}),
        seed=0,
        tmp=tmp_path,
    )
    found = {e["item"]: e["ok"] for e in run.trace if e["kind"] == "api"}
    # it is for one group, and vLLM knows that
    assert [item for item, ok in found.items() if not ok] == ["hybrid-kept"]
    assert found.keys() == findings(ReferenceConnector).keys() | {
        "bind-hooks",
        "multi-layout",
        "hybrid-kept",
    }


def test_the_children_that_do_not_keep_several_groups_are_named(tmp_path: Path) -> None:
    """MultiConnector itself subclasses SupportsHMA."""
    names = ("DecodeBenchConnector", "ExampleConnector")
    children = [{"kv_connector": name, "kv_role": "kv_both"} for name in names]
    variant = load_spec().cases["lifecycle.api"].variants(["reference"])[0]
    run = run_variant(
        variant, Target("MultiConnector", {"connectors": children}), seed=0, tmp=tmp_path
    )
    said = next(e["detail"] for e in run.trace if e["kind"] == "api" and e["item"] == "hybrid-kept")
    assert (
        "not every child of MultiConnector is a subclass of SupportsHMA (ExampleConnector)" in said
    )
    assert "declare hma = false" in said
