# SPDX-License-Identifier: Apache-2.0
"""Tests of what kvconform.compat.backports adds to the classes and schedulers of older releases.

Stand-ins have the interface of the release.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvconform.compat import backports, step, vllm_api


@dataclass
class Report30:
    """KVConnectorOutput until 0.30."""

    finished_recving: set[str] = field(default_factory=set)


@dataclass
class Step11:
    """SchedulerOutput until 0.11."""

    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)


@dataclass
class Step12(Step11):
    """Since 0.12."""

    preempted_req_ids: set[str] | None = None


@dataclass
class Report31(Report30):
    """Since 0.31."""

    failed_recving: set[str] = field(default_factory=set)


def test_fields_that_outputs_lack_say_nothing() -> None:
    assert backports.complete_outputs(Report30, Step11) == {"failed_recving", "preempted_req_ids"}
    assert not Report30().failed_recving  # type: ignore[attr-defined]
    assert Step11().preempted_req_ids is None  # type: ignore[attr-defined]
    assert backports.complete_outputs(Report31, Step12) == set()
    assert Report31({"a"}, {"b"}).failed_recving == {"b"}


class Scheduler15:
    """A scheduler until 0.15, which does not say whose prefill goes on."""

    def __init__(self, **requests: Any) -> None:
        self.requests, self.seen = requests, dict[str, bool]()

    def _update_after_schedule(self, output: Any) -> None:
        for req_id, count in output.num_scheduled_tokens.items():
            self.seen[req_id] = self.requests[req_id].is_prefill_chunk
            self.requests[req_id].num_computed_tokens += count


def request(computed: int, tokens: int, placeholders: int = 0, **more: Any) -> Any:
    """A request with these counters."""
    return SimpleNamespace(
        num_computed_tokens=computed,
        num_tokens=tokens,
        num_output_placeholders=placeholders,
        is_prefill_chunk=None,
        **more,
    )


def test_until_0_15_a_prefill_that_goes_on_is_marked_before_the_counters_move() -> None:
    scheduler = Scheduler15(
        short=request(0, 9),
        whole=request(4, 9),
        last=request(8, 9),
        decode=request(9, 9, 1),
        ahead=request(9, 9),
    )
    backports.mark_chunks(scheduler)
    counts = {"short": 8, "whole": 5, "last": 1, "decode": 1, "ahead": 1}
    scheduler._update_after_schedule(SimpleNamespace(num_scheduled_tokens=counts))
    assert scheduler.seen == {
        "short": True,
        "whole": False,
        "last": False,
        "decode": False,
        "ahead": False,
    }
    assert scheduler.requests["short"].num_computed_tokens == 8
    assert vllm_api.is_chunk(scheduler.requests["short"])


def test_0_11_wants_arrays_of_tokens_and_gets_them() -> None:
    @dataclass
    class Lists:
        sampled_token_ids: list[list[int]]

    @dataclass
    class Arrays:
        sampled_token_ids: list[np.ndarray]

    assert not backports.wants_arrays(Lists)
    assert backports.wants_arrays(Arrays)
    seen: list[Any] = []
    scheduler = SimpleNamespace(update_from_output=lambda output, result: seen.append(result))
    backports.give_arrays(scheduler)
    given = SimpleNamespace(sampled_token_ids=[[7, 8], []])
    scheduler.update_from_output("output", given)
    assert [tokens.tolist() for tokens in seen[0].sampled_token_ids] == [[7, 8], []]
    assert given.sampled_token_ids == [[7, 8], []], "the harness's own stays as it is"


@pytest.mark.parametrize(
    ("has", "placeholders", "dropped"),
    [
        ({}, 0, True),
        ({}, 1, False),  # 0.11
        ({"discard_latest_async_tokens": False}, 3, True),  # 0.12 to 0.21: of one step
        ({"discard_latest_async_tokens": False}, 4, False),
        ({"async_tokens_to_discard": 0}, 4, True),  # 0.22 to 0.26
    ],
)
def test_output_in_flight_is_dropped_where_the_release_can(
    has: dict[str, Any], placeholders: int, dropped: bool
) -> None:
    victim = request(9, 9, placeholders, **has)
    assert backports.drop_output(victim, 3) == dropped
    assert victim.num_output_placeholders == (0 if dropped else placeholders)
    if dropped and placeholders:
        assert getattr(victim, next(iter(has))) == (
            True if "discard_latest_async_tokens" in has else placeholders
        )


def test_0_11_is_preempted_by_hand() -> None:
    freed: list[str] = []
    waiting: list[Any] = []
    scheduler = SimpleNamespace(
        kv_cache_manager=SimpleNamespace(free=lambda each: freed.append("blocks")),
        encoder_cache_manager=SimpleNamespace(free=lambda each: freed.append("images")),
        waiting=SimpleNamespace(prepend_request=waiting.append),
    )
    victim = request(9, 9, status=vllm_api.RequestStatus.RUNNING, num_preemptions=0)
    backports.preempt(scheduler, victim)
    assert (victim.status, victim.num_computed_tokens, victim.num_preemptions) == (
        vllm_api.RequestStatus.PREEMPTED,
        0,
        1,
    )
    assert (freed, waiting) == (["blocks", "images"], [victim])


def test_0_17_looks_at_models_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.models import registry

    monkeypatch.setattr(registry, "_run_in_subprocess", None, raising=False)
    backports.inspect_models_here()
    assert registry._run_in_subprocess(lambda: 7) == 7
    assert vllm_api.torch._C._cpu._is_avx512_supported() in (True, False)  # type: ignore[attr-defined]


def test_hooks_that_a_base_class_lacks_do_nothing_and_are_not_recorded() -> None:
    class Base:
        def get_finished(self, finished: set[str]) -> tuple[set[str] | None, set[str] | None]:
            return {"sent"}, None

        def set_xfer_handshake_metadata(self, metadata: Any) -> None:
            self.told = metadata

        def bind_gpu_block_pool(self, pool: Any) -> None:
            self.pool = pool

    added = backports.complete(Base)
    assert "on_new_request" in added
    assert "get_transfer_results" not in added
    assert "set_xfer_handshake_metadata" not in added
    half: Any = Base()
    results = half.get_transfer_results({"a"})
    assert (results.finished_sending, results.finished_recving, results.failed_recving) == (
        {"sent"},
        set(),
        set(),
    )
    half.set_xfer_handshake_metadata_pp_aware({(0, 1): "m"})
    assert half.told == {1: "m"}
    half.bind_kv_cache_manager(SimpleNamespace(block_pool="pool"))
    assert half.pool == "pool"
    assert half.requires_kv_delivery is False
    assert not half.has_pending_push_work()


def test_until_0_22_finished_requests_that_wait_for_the_connector_keep_an_engine_going() -> None:
    scheduler = SimpleNamespace(requests={"a": 1, "b": 2}, waiting=["a"], running=[])
    assert backports.holds_finished(scheduler)
    assert not backports.holds_finished(
        SimpleNamespace(requests={"a": 1}, waiting=[], running=["a"])
    )
    assert not backports.holds_finished(
        SimpleNamespace(requests={"a": 1}, waiting=[], skipped_waiting=["a"], running=[])
    )


def test_an_output_keeps_what_its_class_does_not_know() -> None:
    made = step.make_scheduler_output(
        scheduled_new_reqs=[],
        scheduled_cached_reqs=None,
        num_scheduled_tokens={},
        total_num_scheduled_tokens=0,
        scheduled_spec_decode_tokens={},
        scheduled_encoder_inputs={},
        finished_req_ids=set(),
        free_encoder_mm_hashes=[],
        of_tomorrow=7,
    )
    assert made.of_tomorrow == 7


def test_a_request_has_what_the_reference_scheduler_keeps_on_it() -> None:
    made = step.build_request(
        "a",
        [5, 6, 7],
        max_tokens=2,
        block_size=4,
        stop=False,
        salt=None,
        lora=None,
        items=[],
        priority=0,
        params=None,
        skip_reading_prefix_cache=False,
        arrival=0.0,
    )
    assert all(hasattr(made, name) for name in step.LATER_REQUEST_FIELDS)


def test_handle_preemptions_is_called_as_the_release_calls_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[Any] = []
    half = SimpleNamespace(handle_preemptions=seen.append)
    output: Any = SimpleNamespace(kv_connector_metadata="meta", preempted_req_ids={"a"})
    quiet: Any = SimpleNamespace(kv_connector_metadata="meta", preempted_req_ids=None)
    for by_metadata, unrecorded, expected in (
        (True, set(), ["meta", "meta"]),
        (False, set(), [{"a"}]),
        (False, {"handle_preemptions"}, []),
    ):
        seen.clear()
        monkeypatch.setattr(step, "PREEMPTIONS_BY_METADATA", by_metadata)
        monkeypatch.setattr(step, "UNRECORDED", unrecorded)
        step.handle_preemptions(half, output)
        step.handle_preemptions(half, quiet)
        assert seen == expected
