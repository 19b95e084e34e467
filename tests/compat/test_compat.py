# SPDX-License-Identifier: Apache-2.0
"""Tests of kvconform.compat.vllm_api with releases that are not installed.

Each shim is tested against a stand-in with the interface of its release.
"""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvconform.compat import installed, step, vllm_api
from kvconform.config.selection import select
from kvconform.config.settings import Settings
from kvconform.contract.expectations import OutputsE
from kvconform.contract.loader import load_spec
from kvconform.errors import EnvironmentProblem
from kvconform.report.collector import Collector
from kvconform.report.terminal import header, make_console


class Reset11:
    """reset_prefix_cache of 0.11."""

    def reset_prefix_cache(self) -> bool:
        return True


class Reset12:
    """Of 0.12."""

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        return not reset_running_requests


class Reset13:
    """Since 0.13."""

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        return reset_running_requests and reset_connector


def test_a_reset_asks_for_what_the_release_knows() -> None:
    assert vllm_api.reset_caches(Reset11(), running=False, connector=False)
    assert vllm_api.reset_caches(Reset12(), running=False, connector=False)
    assert not vllm_api.reset_caches(Reset12(), running=True, connector=False)
    assert vllm_api.reset_caches(Reset13(), running=True, connector=True)
    assert not vllm_api.reset_caches(Reset13(), running=True, connector=False)


@pytest.mark.parametrize(
    ("scheduler", "asked"),
    [(Reset11(), "running"), (Reset11(), "connector"), (Reset12(), "connector")],
)
def test_a_reset_that_the_release_cannot_do_is_refused(scheduler: Any, asked: str) -> None:
    with pytest.raises(NotImplementedError, match=f"knows no reset_{asked}"):
        vllm_api.reset_caches(scheduler, running=asked == "running", connector=asked == "connector")


def test_until_0_12_a_transfer_configuration_has_no_failure_policy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arguments = ("Nobody", "kv_both", {}, None, "recompute", "engine-1")
    assert vllm_api.transfer_config(*arguments).kv_load_failure_policy == "recompute"

    class Older(SimpleNamespace):
        __dataclass_fields__ = {"kv_connector": None}

    monkeypatch.setattr(vllm_api, "KVTransferConfig", Older)
    assert not hasattr(vllm_api.transfer_config(*arguments), "kv_load_failure_policy")


def test_until_0_14_drafts_come_from_n_grams(monkeypatch: pytest.MonkeyPatch) -> None:
    for release, method in (
        ((0, 11, 2), "ngram"),
        ((0, 14, 1), "ngram"),
        ((0, 15), "draft_model"),
        ((0, 33), "draft_model"),
    ):
        monkeypatch.setattr(vllm_api, "_RELEASE", release)
        assert vllm_api._drafter(3)["method"] == method
        assert vllm_api._drafter(3)["num_speculative_tokens"] == 3


class Scheduler16:
    """As much of a scheduler of 0.16 as a preemption between two steps touches."""

    num_spec_tokens = 0

    def __init__(self, request: Any) -> None:
        self.running, self.preempted = [request], list[Any]()

    def _preempt_request(self, request: Any, timestamp: float) -> None:
        self.preempted.append(request)


class Scheduler27(Scheduler16):
    """Of 0.27: it marks output in flight itself."""

    requires_kv_delivery = True

    def _preempt_request(
        self, request: Any, timestamp: float, drop_stale_output: bool = False
    ) -> None:
        self.preempted.append(drop_stale_output)


def test_until_0_26_output_in_flight_is_dropped_as_a_reset_drops_it() -> None:
    request: Any = SimpleNamespace(
        request_id="a", num_output_placeholders=1, discard_latest_async_tokens=False
    )
    scheduler = Scheduler16(request)
    assert vllm_api.force_preemption(scheduler, request)
    assert scheduler.preempted == [request]
    assert not scheduler.running
    assert (request.discard_latest_async_tokens, request.num_output_placeholders) == (True, 0)


def test_a_victim_whose_output_cannot_be_dropped_is_left_alone() -> None:
    request: Any = SimpleNamespace(
        request_id="a", num_output_placeholders=2, discard_latest_async_tokens=False
    )
    scheduler = Scheduler16(request)
    assert not vllm_api.force_preemption(scheduler, request)
    assert scheduler.running == [request]
    assert not scheduler.preempted


def test_since_0_27_the_scheduler_itself_marks_output_in_flight() -> None:
    request: Any = SimpleNamespace(request_id="a", num_output_placeholders=2)
    scheduler = Scheduler27(request)
    assert vllm_api.force_preemption(scheduler, request)
    assert scheduler.preempted == [True]
    assert request.num_output_placeholders == 2


def test_an_output_of_a_model_runner_says_everything() -> None:
    made = step.runner_output(["b", "a"], [[7], [8, 9]])
    assert (made.req_ids, made.req_id_to_index) == (["b", "a"], {"b": 0, "a": 1})
    assert made.sampled_token_ids == [[7], [8, 9]]
    assert step.runner_output().req_ids == []


def test_until_0_11_a_new_request_had_no_tokens_to_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    class Older:
        @classmethod
        def from_request(cls, request: Any, block_ids: Any) -> Any:
            return request, block_ids

    class Newer:
        @classmethod
        def from_request(cls, request: Any, block_ids: Any, prefill_token_ids: Any = None) -> Any:
            return request, block_ids, prefill_token_ids

    monkeypatch.setattr(step, "NewRequestData", Older)
    assert step.new_request_data("r", ([1],), None) == ("r", ([1],))
    monkeypatch.setattr(step, "NewRequestData", Newer)
    assert step.new_request_data("r", ([1],), [5]) == ("r", ([1],), [5])


class Active22:
    """post_forward until 0.22."""

    def post_forward(self, scheduler_output: Any) -> Any:
        return "whole", scheduler_output


class Active23:
    """From then on."""

    def post_forward(self, finished_req_ids: Any) -> Any:
        return "ids", finished_req_ids


class Active33:
    """Since 0.33."""

    finished = 0

    def post_forward(self, finished_req_ids: Any, defer_finalize: bool = False) -> Any:
        return defer_finalize, finished_req_ids

    def finalize_step(self) -> None:
        self.finished += 1


def test_model_runner_v2_is_told_as_its_release_wants_to_be() -> None:
    output: Any = SimpleNamespace(finished_req_ids={"a"})
    assert step.post_forward(Active22(), output, defer=True) == ("whole", output)
    assert step.post_forward(Active23(), output, defer=True) == ("ids", {"a"})
    assert step.post_forward(Active33(), output, defer=True) == (True, {"a"})
    assert step.post_forward(Active33(), output) == (False, {"a"})


def test_since_0_33_model_runner_v2_finishes_saves_after_the_drafter() -> None:
    active = Active33()
    step.finish_step(active)
    assert active.finished == 1
    step.finish_step(Active23())  # has nothing left to do


def test_an_expectation_begins_with_a_release_on_vllms_own_engine_only() -> None:
    expectation = OutputsE.model_validate({"outputs": {"req": "a", "count": 3}, "since": "0.16"})
    assert not expectation.applies({}, {"engine": "vllm", "vllm": "0.15.1+cpu"})
    assert expectation.applies({}, {"engine": "vllm", "vllm": "0.16.0"})
    assert expectation.applies({}, {"engine": "reference", "vllm": "0.15.1"})
    assert expectation.what == "outputs"


def test_a_newer_release_runs_with_a_warning_and_an_older_one_not_at_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def checked(version: str) -> tuple[str, list[str]]:
        monkeypatch.setattr(installed, "vllm_version", lambda: version)
        return installed.check_vllm()

    assert checked(f"{installed.OLDEST}.0") == (f"{installed.OLDEST}.0", [])
    assert checked(f"{installed.NEWEST}.7+cpu")[1] == []
    (warning,) = checked("0.99.0")[1]
    assert "newer than any" in warning
    with pytest.raises(EnvironmentProblem, match="too old"):
        checked("0.10.2")


def test_what_a_release_cannot_be_brought_to_is_named_before_the_run() -> None:
    spec, settings = load_spec(), Settings()
    old, new = (select(spec, settings, version) for version in ("0.11.2", installed.NEWEST))
    assert "lifecycle.reset-connector" in old.beyond[0]
    assert "engine.saves-before-results" in old.beyond[1]
    assert old.without > 0
    assert not any(variant.case.id in old.beyond[0] for variant in old.variants)
    assert (list(new.beyond[0]), new.without) == ([], 0)

    console = make_console(io.StringIO())
    header(console, Collector(spec, settings, old, "0.11.2"), ())
    said = " ".join(cast(io.StringIO, console.file).getvalue().split())
    assert "cases that this vLLM cannot run:" in said
    assert "lifecycle.reset-connector" in said
    assert f"{len(old.beyond[1])} requirements of other vLLM releases" in said
