# SPDX-License-Identifier: Apache-2.0
"""Tests that what vLLM would not mind is no failure: connectors that were wrongly judged once."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from threading import Timer, get_ident
from typing import Any, ClassVar

import pytest
from vllm.distributed.kv_events import BlockStored
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from core_rig import BLOCK, REFERENCE, make_case, select
from kvconform.config.target import Target
from kvconform.contract.capabilities import CAPABILITIES
from kvconform.contract.case import Case, Variant
from kvconform.contract.loader import load_spec
from kvconform.judge.records import CaseReport, Row, Verdict
from kvconform.refimpl.connector import Lookup, ReferenceConnector
from kvconform.refimpl.defects.losses import StoresEveryStep
from kvconform.refimpl.plan import Load
from kvconform.refimpl.variants.loading import BlockFiller, RoundsFailures
from kvconform.refimpl.variants.registry import VARIANTS
from kvconform.refimpl.variants.saving import WholeChunks
from kvconform.run.calibration import takes_every_stage
from kvconform.run.case import run_and_judge

SPEC = load_spec()
Steps = list[dict[str, Any]]
RUN: dict[str, Any] = {"run": {}}


class Held(ReferenceConnector):
    """Holds the blocks of every request that has ended for some steps."""

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, Any]:
        super().request_finished(request, block_ids)
        return bool(block_ids), None

    def get_finished(self, finished_req_ids: set[str]) -> tuple[Any, Any]:
        held = {req: left - 1 for req, left in getattr(self, "_held", {}).items()}
        self._held = {req: left for req, left in held.items() if left} | dict.fromkeys(
            finished_req_ids, 3
        )
        _, received = super().get_finished(finished_req_ids)
        return {req for req, left in held.items() if not left}, received


class OneStage(ReferenceConnector):
    """Has handshake metadata, and leaves those of other stages to vLLM's base class."""

    set_xfer_handshake_metadata_pp_aware = KVConnectorBase_V1.set_xfer_handshake_metadata_pp_aware


class RefusesLayout(ReferenceConnector):
    """Says at its start which layout it does not support."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        for cache in kv_caches.values():
            if not cache.is_contiguous():
                raise NotImplementedError("only contiguous KV caches are supported")
        super().register_kv_caches(kv_caches)


class BreaksOnLayout(ReferenceConnector):
    """Has a bug that shows with the same layout."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        for cache in kv_caches.values():
            cache.view(-1)
        super().register_kv_caches(kv_caches)


class Counts(ReferenceConnector):
    """Has statistics in every step."""

    def get_kv_connector_stats(self) -> Any:
        self._count("calls")
        return super().get_kv_connector_stats()


def judged(
    cls: type, case: Case, tmp_path: Path, *, engine: str = "vllm", **options: Any
) -> CaseReport:
    return _judged(f"{__name__}:{cls.__name__}", options, case, engine, tmp_path)


def judged_variant(name: str, case: Case, tmp_path: Path, *, engine: str = "vllm") -> CaseReport:
    return _judged(*VARIANTS[name], case, engine, tmp_path)


def _judged(
    connector: str, options: dict[str, Any], case: Case, engine: str, tmp_path: Path
) -> CaseReport:
    target = Target(connector, {"store": "{tmp}", **options}, stall_seconds=0.1)
    variant = Variant(case, engine, "sync", "v1", 1, case.config.block_size)
    return run_and_judge(variant, target, SPEC, seed=0, tmp=tmp_path / "run")


def failed(report: CaseReport) -> list[str]:
    bad = (Verdict.FAIL, Verdict.BLOCKED, Verdict.ERROR)
    return [row.requirement for row in report.rows if row.verdict in bad]


def promises(steps: Steps, tmp_path: Path, **more: Any) -> list[int]:
    report = run_and_judge(
        Variant(make_case(steps, **more), "vllm", "sync", "v1", 1, 4),
        Target(REFERENCE, {"store": "{tmp}"}, stall_seconds=0.1),
        SPEC,
        seed=0,
        tmp=tmp_path / "run",
    )
    return [e["promised"] for e in select(report.trace, "profile.expectation")]


ASK: dict[str, Any] = {"req": "b", "prompt": {"same": "a"}, "reloads": "a"}
STORED: Steps = [{"add": {"req": "a", "prompt": 13}}, RUN, {"drop-local": {}}]


def test_nothing_is_promised_to_a_request_whose_hits_are_dropped(tmp_path: Path) -> None:
    assert promises([*STORED, {"add": ASK}, RUN], tmp_path) == [12]
    skips = {**ASK, "skip_reading_prefix_cache": True}
    assert promises([*STORED, {"add": skips}, RUN], tmp_path) == []


@pytest.mark.parametrize("name", ["lifecycle.id-reuse", "lifecycle.id-after-abort"])
@pytest.mark.parametrize("engine", ["reference", "vllm"])
def test_an_id_is_used_again_only_after_its_release(name: str, engine: str, tmp_path: Path) -> None:
    report = judged(Held, SPEC.cases[name], tmp_path, engine=engine)
    assert select(report.trace, "hold")
    assert failed(report) == []
    assert not any(row.gating for row in report.rows)


def test_a_connector_for_one_stage_is_not_run_with_two(tmp_path: Path) -> None:
    assert takes_every_stage(ReferenceConnector)
    assert not takes_every_stage(OneStage)
    report = judged(OneStage, SPEC.cases["ranks.pipeline"], tmp_path)
    doc = CAPABILITIES["pipeline_parallel"].doc
    assert {(row.verdict, row.message) for row in report.rows} == {
        (Verdict.UNSUPPORTED, f"the case needs (pipeline_parallel): {doc}")
    }


class RefusesResets(ReferenceConnector):
    """Refuses to empty its store, whose blocks stay announced."""

    def reset_cache(self) -> bool | None:
        return False


def test_what_a_refused_reset_leaves_is_announced_still(tmp_path: Path) -> None:
    reset = {"reset": {"running": False, "connector": True}}
    report = judged(RefusesResets, make_case([*STORED, reset, {"add": ASK}, RUN]), tmp_path)
    assert failed(report) == []
    assert any(e["tokens"] for e in select(report.trace, "lookup", req=ASK["req"]))


class CommitsLate(ReferenceConnector):
    """Lets others find a chunk some time after it was saved, by a thread."""

    AFTER = 0.2

    def wait_for_save(self) -> None:
        store, commit = self._store, self._store.commit

        def now(epoch: int, key: str, layers: dict[str, bytes]) -> None:
            for layer, data in layers.items():
                store.put(epoch, key, layer, data)
            commit(epoch, key)

        def later(epoch: int, key: str) -> None:
            layers = store._staged.pop((get_ident(), epoch, key), {})
            timer = Timer(self.AFTER, now, (epoch, key, layers))
            timer.daemon = True
            timer.start()
            self.__dict__.setdefault("timers", []).append(timer)

        store.commit = later  # type: ignore[method-assign]
        try:
            super().wait_for_save()
        finally:
            store.commit = commit  # type: ignore[method-assign]

    def shutdown(self) -> None:
        for timer in self.__dict__.pop("timers", ()):
            timer.cancel()
            timer.join()
        super().shutdown()


class NeverCommits(CommitsLate):
    """Has such threads, and they never get there."""

    AFTER = 60.0


@pytest.mark.parametrize(("cls", "verdict"), [(CommitsLate, "PASS"), (NeverCommits, "FAIL")])
def test_what_is_stored_by_a_thread_gets_the_time_that_it_needs(
    cls: type, verdict: str, tmp_path: Path
) -> None:
    case = make_case([*STORED, {"add": ASK}, RUN])
    target = Target(
        f"{__name__}:{cls.__name__}",
        {"store": "memory:{tmp}"},
        capabilities={"store": True, "saves": "all"},
        stall_seconds=2.0,
    )
    variant = Variant(case, "vllm", "sync", "v1", 1, case.config.block_size)
    report = run_and_judge(variant, target, SPEC, seed=0, tmp=tmp_path / "run")
    (row,) = (row for row in report.rows if row.requirement == "save.completeness")
    assert row.verdict.name == verdict
    (promise,) = select(report.trace, "profile.expectation")
    assert (promise["promised"], promise["reloadable"]) == (12, 12 if verdict == "PASS" else 0)


@pytest.mark.parametrize("engine", ["reference", "vllm"])
def test_who_stores_when_it_is_polled_gets_the_steps_that_it_needs(
    engine: str, tmp_path: Path
) -> None:
    """The correct variant `fenced` saves in a later step, and has neither threads nor processes."""
    name, options = VARIANTS["fenced"]
    target = Target(
        name, {"store": "memory:{tmp}", **options}, capabilities={"store": True, "saves": "all"}
    )
    variant = Variant(make_case([*STORED, {"add": ASK}, RUN]), engine, "sync", "v1", 1, 4)
    report = run_and_judge(variant, target, SPEC, seed=0, tmp=tmp_path / "run")
    (row,) = (row for row in report.rows if row.requirement == "save.completeness")
    assert row.verdict is Verdict.PASS
    assert [e["reloadable"] for e in select(report.trace, "profile.expectation")] == [12]


def test_the_promise_is_learned_without_hurry(tmp_path: Path) -> None:
    report = judged(
        CommitsLate,
        make_case([*STORED, {"add": ASK}, RUN]),
        tmp_path,
        engine="reference",
        store="memory:{tmp}",
    )
    assert failed(report) == []
    (promise,) = select(report.trace, "profile.expectation")
    assert (promise["promised"], promise["reloadable"]) == (12, 12)


class RaisesInHurry(CommitsLate):
    """Has a fault that only shows if content is asked for before it is stored.

    In the run that is judged, nothing is stored in time. In the runs before and after it, which
    find out what to expect, a thread stores at once.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        store = vllm_config.kv_transfer_config.kv_connector_extra_config["store"]
        self.AFTER = 60.0 if store.endswith("/run/connector") else 0.0

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Lookup:
        found = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if request.request_id == "b" and not found[0]:
            raise KeyError("it is not there yet")
        return found


def test_what_fails_in_a_hurry_is_no_matter_of_time(tmp_path: Path) -> None:
    target = Target(
        f"{__name__}:RaisesInHurry",
        {"store": "memory:{tmp}"},
        capabilities={"store": True, "saves": "all"},
    )
    case = make_case([*STORED, {"add": ASK}, RUN])
    variant = Variant(case, "vllm", "sync", "v1", 1, case.config.block_size)
    report = run_and_judge(variant, target, SPEC, seed=0, tmp=tmp_path / "run")
    assert "hook.no-raise" in failed(report)


LAYOUT = next(case for case in SPEC.cases.values() if case.id == "layout.heads-outside")


def test_a_refusal_in_a_sentence_is_no_failure(tmp_path: Path) -> None:
    report = judged(RefusesLayout, LAYOUT, tmp_path)
    ((verdict, message),) = {(row.verdict, row.message) for row in report.rows}
    assert verdict is Verdict.UNSUPPORTED
    assert message is not None
    assert message.startswith("the connector refuses layout ")
    assert message.endswith(": only contiguous KV caches are supported")


@pytest.mark.parametrize("kind", ["process", pytest.param("interpreter", marks=pytest.mark.long)])
def test_a_refusal_before_a_restart_is_no_failure(kind: str, tmp_path: Path) -> None:
    steps: Steps = [*STORED, {"restart": kind}, {"add": ASK}, RUN]
    restarts = make_case(steps, config={"groups": ["latent"]})
    refuses = "kvconform.refimpl.variants.habits:RefusesLatentLayers"
    target = Target(refuses, {"store": "{tmp}", "layerwise": True})
    variant = Variant(restarts, "vllm", "sync", "v1", 1, restarts.config.block_size)
    report = run_and_judge(variant, target, SPEC, seed=0, tmp=tmp_path / "run")
    assert report.harness_error is None
    refused = "the connector refuses groups ['latent']: layer-wise transfers are not supported"
    assert {(row.verdict, row.message) for row in report.rows} == {
        (Verdict.UNSUPPORTED, f"{refused} with MLA")
    }


def test_an_error_at_the_start_that_nobody_raised_on_purpose_is_a_failure(tmp_path: Path) -> None:
    assert "hook.no-raise" in failed(judged(BreaksOnLayout, LAYOUT, tmp_path))


class RefusesAll(ReferenceConnector):
    """Refuses the plainest configuration."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        raise NotImplementedError("this connector is not finished yet")


def test_a_refusal_of_the_plain_configuration_is_a_failure(tmp_path: Path) -> None:
    assert "hook.no-raise" in failed(judged(RefusesAll, make_case(STORED), tmp_path))


def test_statistics_of_a_child_that_vllm_does_not_find_are_not_its_fault(tmp_path: Path) -> None:
    report = judged(Counts, SPEC.cases["multi.beside-idle"], tmp_path)
    rows: dict[str, Row] = {row.requirement: row for row in report.rows}
    assert select(report.trace, "stats.taken")
    assert rows["stats.rebuilt"].verdict is Verdict.PASS


def test_a_second_shutdown_is_a_recommendation(tmp_path: Path) -> None:
    report = judged(Once, SPEC.cases["lifecycle.shutdown-twice"], tmp_path)
    assert failed(report) == ["lifecycle.shutdown-again"]
    assert not any(row.gating for row in report.rows if row.verdict is Verdict.FAIL)


class Once(ReferenceConnector):
    """Can be shut down once."""

    _down = False

    def shutdown(self) -> None:
        if self._down:
            raise RuntimeError("already shut down")
        self._down = True
        super().shutdown()


RESET: dict[str, Any] = {"reset": {"running": False, "connector": True}}
PREEMPT_ALL: dict[str, Any] = {"reset": {"running": True, "connector": True}}
REUSED: Steps = [
    {"add": {"req": "a", "prompt": 13, "max_tokens": 2}},
    RUN,
    *(
        step
        for name in "bcde"
        for step in (
            RESET,
            {"add": {"req": name, "prompt": {"same": "a"}, "max_tokens": 2, "id": "a"}},
            RUN,
        )
    ),
]
"""Five requests under one id, each upon a store that was emptied."""
RESTARTED: Steps = [
    {"add": {"req": "a", "prompt": 12, "max_tokens": 8}},
    *(step for _ in range(5) for step in ({"step": 1}, PREEMPT_ALL)),
    RUN,
]
"""A request that computes its prompt six times, as the store is emptied after each."""


@pytest.mark.parametrize("steps", [REUSED, RESTARTED], ids=["reused-id", "reset"])
@pytest.mark.parametrize("engine", ["reference", "vllm"])
def test_what_is_stored_again_in_an_emptied_store_is_not_stored_in_every_step(
    engine: str, steps: Steps, tmp_path: Path
) -> None:
    report = judged(ReferenceConnector, make_case(steps), tmp_path, engine=engine)
    saves = [e for e in select(report.trace, "plan") if e["op"] == "save"]
    assert max(Counter((e["req"], e["key"]) for e in saves).values()) > 3
    assert next(row for row in report.rows if row.requirement == "save.once").verdict == "PASS"
    assert failed(report) == []


def test_a_step_that_stores_everything_again_is_noticed_beside_resets(tmp_path: Path) -> None:
    steps = [*REUSED[:-2], {"add": {"req": "f", "prompt": 13, "max_tokens": 9, "id": "a"}}, RUN]
    assert failed(judged(StoresEveryStep, make_case(steps), tmp_path)) == ["save.once"]


class AnnouncesBlocks(WholeChunks):
    """Announces each block of a chunk that is loaded as a whole."""

    def _expect(self, tracked: Any, pieces: Any) -> bool:
        found = super()._expect(tracked, pieces)
        for chunk in self._planned.values():
            if len(chunk.hashes) == 1:
                keys = [maybe_convert_block_hash(key) for key in tracked.request.block_hashes]
                end = keys.index(chunk.hashes[0]) + 1
                chunk.hashes = keys[end - CHUNK // BLOCK : end]
        return found

    def take_events(self) -> Any:
        events = super().take_events()
        for event in events:
            if isinstance(event, BlockStored):
                event.block_size = BLOCK
        return events


class UndeclaredChunks(WholeChunks):
    """Does not declare the size of its chunks, each of which is announced as one block."""

    @classmethod
    def kvconform_capabilities(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        found = super().kvconform_capabilities(extra_config)
        return {name: value for name, value in found.items() if name != "chunk_tokens"}


CHUNK = 16
TWO_CHUNKS: Steps = [
    {"add": {"req": "a", "prompt": 2 * CHUNK, "max_tokens": 2}},
    RUN,
    {"drop-local": {}},
]


@pytest.mark.parametrize("cls", [WholeChunks, UndeclaredChunks, AnnouncesBlocks])
@pytest.mark.parametrize("engine", ["reference", "vllm"])
def test_the_chunk_of_the_last_token_need_not_be_served(
    engine: str, cls: type, tmp_path: Path
) -> None:
    steps = [*TWO_CHUNKS, {"add": {"req": "b", "prompt": {"same": "a"}, "max_tokens": 2}}, RUN]
    report = judged(cls, make_case(steps), tmp_path, engine=engine, chunk_tokens=CHUNK)
    (asked,) = select(report.trace, "events.lookup", req="b")
    assert (asked["known"], asked["got"]) == (2 * CHUNK, CHUNK)
    assert next(row for row in report.rows if row.requirement == "events.reachable").verdict == (
        Verdict.PASS
    )
    assert failed(report) == []


def test_a_block_that_comes_only_with_its_chunk_is_not_to_be_announced(tmp_path: Path) -> None:
    half = {"req": "b", "prompt": {"of": "a", "tokens": CHUNK + 2 * BLOCK, "then": 5}}
    steps = [*TWO_CHUNKS, {"add": half}, RUN]
    report = judged(AnnouncesBlocks, make_case(steps), tmp_path, chunk_tokens=CHUNK)
    assert failed(report) == ["events.reachable"]
    assert failed(judged(WholeChunks, make_case(steps), tmp_path, chunk_tokens=CHUNK)) == []


def test_the_rest_of_a_granted_block_may_be_written_though_another_request_hits_it_locally(
    tmp_path: Path,
) -> None:
    """As NIXL does: c's grant ends in its fourth block, which b has as a local hit in that step."""
    steps: Steps = [
        {"add": {"req": "a", "prompt": 30, "max_tokens": 2}},
        RUN,
        {"drop-local": {}},
        {"add": {"req": "b", "prompt": {"same": "a"}, "max_tokens": 8, "priority": 5}},
        {"step": 3},
        {"preempt": "b"},
        {"drop-local": {}},
        {"add": {"req": "c", "prompt": {"of": "a", "tokens": 16}, "max_tokens": 4}},
        RUN,
    ]
    report = judged(BlockFiller, make_case(steps), tmp_path, whole_blocks=False)
    assert failed(report) == []
    (row,) = (row for row in report.rows if row.requirement == "load.only-grant")
    assert row.verdict is Verdict.PASS and row.exercised


class AnnouncesLate(ReferenceConnector):
    """Announces what was there at the end of the step before, if it is there still."""

    def take_events(self) -> Any:
        before = self.__dict__.setdefault("_seen", set())
        self._seen = {key for key in self._planned if self._store.has(key)}
        later = {key: self._planned.pop(key) for key in self._seen - before}
        events = super().take_events()
        self._planned |= later
        return events


@pytest.mark.parametrize("lost", [True, False])
def test_what_is_lost_before_it_is_announced_was_not_served(lost: bool, tmp_path: Path) -> None:
    add: Steps = [
        {"drop-local": {}},
        {"add": {"req": "b", "prompt": {"same": "a"}, "max_tokens": 2}},
    ]
    loses: Steps = [{"fail-load": {"req": "b", "positions": [0, 4, 8]}}] if lost else []
    steps = [{"add": {"req": "a", "prompt": 13, "max_tokens": 1}}, {"step": 1}, *add, *loses]
    case = make_case([*steps, RUN], config={"load_failure_policy": "fail", "kv_events": True})
    report = judged(AnnouncesLate, case, tmp_path)
    assert failed(report) == []
    (found,) = [e for e in select(report.trace, "events.lookup") if e["req"] == "b"]
    assert found["tokens"] > 0
    assert bool(found["untold"]) is not lost


class Rounds(RoundsFailures):
    """Shows what it has reported."""

    told: ClassVar[set[int]] = set()

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed = super().get_block_ids_with_load_errors()
        self.told.update(failed)
        return failed


def test_the_end_of_a_failed_chunk_behind_the_grant_may_be_reported(tmp_path: Path) -> None:
    """vLLM throws away what is behind the first failed block of a request, whatever is reported."""
    stored = [{"add": {"req": "a", "prompt": 16}}, RUN, {"drop-local": {}}]
    again = {"add": {"req": "b", "prompt": {"same": "a"}}}
    case = make_case([*stored, again, {"fail-load": {"req": "b", "positions": [9]}}, RUN])
    report = judged(Rounds, case, tmp_path, chunk_tokens=8, whole_blocks=True)
    granted = {b for e in select(report.trace, "transfer.failed") for b in e["blocks"]}
    assert Rounds.told > granted, "it has reported more than what was granted"
    assert failed(report) == []


class NoMedium(ReferenceConnector):
    """Leaves `medium` None, as the types of BlockStored and BlockRemoved permit."""

    def take_events(self) -> Any:
        events = list(super().take_events())
        for event in events:
            if hasattr(event, "medium"):
                event.medium = None
        return events


def test_an_event_may_leave_its_medium_open(tmp_path: Path) -> None:
    report = judged(NoMedium, SPEC.cases["cache.events"], tmp_path)
    assert select(report.trace, "kv.event")
    assert failed(report) == []


class LoadsFirst(ReferenceConnector):
    """Asks for start_load_kv before the forward pass of every step, as HiSparseConnector does."""

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        scheduler_output.has_sync_kv_loads = True
        return super().build_connector_meta(scheduler_output)


def test_a_connector_may_ask_for_its_turn_before_the_forward_pass(tmp_path: Path) -> None:
    report = judged(LoadsFirst, SPEC.cases["lifecycle.hook-order"], tmp_path)
    assert failed(report) == []


class PinsWhatWaits(ReferenceConnector):
    """Saves a chunk at a time, some steps late, from blocks that it holds until then."""

    _queue: ClassVar[list[Any]] = []

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._pool = gpu_block_pool
        self._queue.clear()

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        metadata = super().build_connector_meta(scheduler_output)
        for save in metadata.saves:
            blocks = {block for piece in save.pieces for block in piece.blocks(self._block_size)}
            held = [self._pool.blocks[block] for block in sorted(blocks)]
            self._pool.touch(held)
            self._queue.append([4, save, held])
        for each in self._queue:
            each[0] -= 1
        due = [save for left, save, _ in self._queue if left == 1]
        for _, _, held in [each for each in self._queue if each[0] == 0]:
            self._pool.free_blocks(held)
        self._queue[:] = [each for each in self._queue if each[0] > 0]
        return replace(metadata, saves=tuple(due))

    def has_pending_push_work(self) -> bool:
        return bool(self._queue)


def test_blocks_that_the_connector_holds_may_be_saved_after_a_preemption(tmp_path: Path) -> None:
    preempted = [{"add": {"req": "a", "prompt": 9}}, {"step": 2}, {"preempt": "a"}, RUN]
    report = judged(PinsWhatWaits, make_case(preempted), tmp_path)
    late = [e for e in select(report.trace, "plan") if e["kept"]]
    assert late and failed(report) == []


class OrdersNothing(ReferenceConnector):
    """Sends an order without blocks for a request that has loaded nothing, as NIXL does."""

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        metadata = super().build_connector_meta(scheduler_output)
        empty = (Load(new.req_id, 0, 0, (), True) for new in scheduler_output.scheduled_new_reqs)
        return replace(metadata, loads=(*metadata.loads, *empty))

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        super().start_load_kv(forward_context, **kwargs)
        self._load_queue.drop(lambda load: not load.pieces)


def test_an_order_without_positions_loads_nothing(tmp_path: Path) -> None:
    report = judged(OrdersNothing, make_case([{"add": {"req": "a", "prompt": 9}}, RUN]), tmp_path)
    assert [(e["start"], e["end"]) for e in select(report.trace, "plan", op="load")] == [(0, 0)]
    assert failed(report) == []


class DropsAborted(ReferenceConnector):
    """Drops the load of a request that was aborted, and reports its end."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[Any, Any]:
        dropped = self._load_queue.take(lambda load: load.req in finished_req_ids)
        sent, received = super().get_finished(finished_req_ids)
        return sent, {*(received or ()), *(load.req for load in dropped)} or None


def test_what_an_aborted_request_was_to_load_need_not_arrive(tmp_path: Path) -> None:
    """vLLM only frees its blocks."""
    aborted = [*STORED, {"add": ASK}, {"schedule": 1}, {"abort": "b"}, RUN]
    report = judged(DropsAborted, make_case(aborted), tmp_path, load="async", load_delay=9)
    assert select(report.trace, "transfer.reported", direction="recv")
    assert failed(report) == []


def test_a_new_engine_may_ask_for_what_earlier_ones_failed_to_load(tmp_path: Path) -> None:
    """Each has a cold connection, say: none of them has seen the content fail three times."""
    ask: Steps = [{"restart": "another-engine"}]
    steps: Steps = [{"add": {"req": "a", "prompt": 9}}, RUN]
    for name in "bcde":
        steps += [*ask, {"add": {"req": name, "prompt": {"same": "a"}}}, {"step": 3}]
        steps += [{"abort": name}, RUN]
    report = judged_variant("stumbles", make_case(steps), tmp_path, engine="reference")
    assert len(select(report.trace, "transfer.failed")) > 3
    assert failed(report) == []


@pytest.mark.parametrize("name", ["reports-by-scheduler", "keeps-reports-back"])
@pytest.mark.parametrize("case", ["lifecycle.delayed-free", "ranks.async-load"])
def test_the_scheduler_half_may_decide_what_has_ended(name: str, case: str, tmp_path: Path) -> None:
    """vLLM reads the ends of transfers only after update_connector_output."""
    report = judged_variant(name, SPEC.cases[case], tmp_path)
    assert failed(report) == []
    reports = select(report.trace, "transfer.reported")
    assert reports and all(e["rank"] == -1 for e in reports if e["direction"] == "send")
    assert bool(select(report.trace, "transfer.withheld")) == (name == "keeps-reports-back")
