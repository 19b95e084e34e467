# SPDX-License-Identifier: Apache-2.0
"""Tests of the reference connector without an engine: both halves driven by hand, its bounds."""

from __future__ import annotations

import pickle
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from kvconform.refimpl.connector import ReferenceConnector
from kvconform.refimpl.plan import Piece, ReferenceMetadata, Save

BLOCK = 4


def request_of(tokens: list[int], req_id: str = "a") -> Request:
    return Request(req_id, tokens, SamplingParams(max_tokens=8), None)


class Rig:
    """The two halves of one engine's connector over tensors of the test's own.

    ``forward`` writes KV that depends on all tokens up to a position.
    """

    def __init__(self, store: str, **options: Any) -> None:
        transfer = KVTransferConfig(
            kv_connector="X",
            kv_role="kv_both",
            kv_connector_extra_config={"store": store, **options},
        )
        config: Any = SimpleNamespace(
            kv_transfer_config=transfer,
            cache_config=SimpleNamespace(block_size=BLOCK, cache_dtype="auto"),
            parallel_config=SimpleNamespace(
                rank=0, world_size=1, decode_context_parallel_size=1, pipeline_parallel_size=1
            ),
            model_config=None,
        )
        groups: Any = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=None)])
        self.scheduler = ReferenceConnector(config, KVConnectorRole.SCHEDULER, groups)
        self.worker = ReferenceConnector(config, KVConnectorRole.WORKER, groups)
        self.layers = {f"layer{index}": torch.zeros(32, 1, BLOCK, 4) for index in range(2)}
        self.worker.register_kv_caches(self.layers)

    def admit(self, request: Request, table: list[int], external: int, local: int = 0) -> None:
        self.scheduler.update_state_after_alloc(
            request, SimpleNamespace(get_block_ids=lambda: (table,)), external
        )  # type: ignore[arg-type]
        request.num_computed_tokens = local + external

    def step(
        self,
        request: Request | None = None,
        count: int = 0,
        table: list[int] | None = None,
        new: bool = False,
    ) -> tuple[Any, ...]:
        """Schedule ``count`` tokens of ``request`` in one step.

        Returns (metadata, sent, received, invalid blocks).
        """
        cached = CachedRequestData.make_empty()
        output = SchedulerOutput.make_empty()
        if request is not None and new:
            entry = NewRequestData.from_request(request, (table or [],))
            output.scheduled_new_reqs.append(entry)
        elif request is not None:
            cached = CachedRequestData(
                [request.request_id], set(), [], {}, [None], [request.num_computed_tokens], [0]
            )
        output.scheduled_cached_reqs = cached
        if request is not None:
            output.num_scheduled_tokens[request.request_id] = count
        metadata = pickle.loads(pickle.dumps(self.scheduler.build_connector_meta(output)))
        worker = self.worker
        worker.handle_preemptions(metadata)
        worker.bind_connector_metadata(metadata)
        worker.start_load_kv(SimpleNamespace(attn_metadata={}))
        if request is not None:
            self.forward(request, self.scheduler._tracked[request.request_id].table, count)
        worker.wait_for_save()
        sent, received = worker.get_finished(set())
        invalid = worker.get_block_ids_with_load_errors()
        worker.clear_connector_metadata()
        self.scheduler.update_connector_output(
            KVConnectorOutput(sent, received, invalid_block_ids=invalid)
        )
        return metadata, sent, received, invalid

    def forward(self, request: Request, table: list[int], count: int) -> None:
        start = request.num_computed_tokens
        for name, layer in self.layers.items():
            self.worker.wait_for_layer_load(name)
            for position in range(start, min(start + count, request.num_tokens)):
                layer[table[position // BLOCK], :, position % BLOCK] = kv(request, position, name)
            self.worker.save_kv_layer(name, layer, None)
        request.num_computed_tokens += count

    def wrong(self, request: Request, table: list[int], end: int) -> list[int]:
        """Positions below ``end`` whose KV is not what the forward pass would have written."""
        slots = [(position, table[position // BLOCK], position % BLOCK) for position in range(end)]
        return [
            p
            for p, block, offset in slots
            for name, layer in self.layers.items()
            if layer[block, 0, offset, 0] != kv(request, p, name)
        ]


def kv(request: Request, position: int, layer: str) -> float:
    return float(zlib.crc32(f"{request.all_token_ids[: position + 1]} {layer}".encode()) % 65536)


@pytest.mark.parametrize("where", ["memory", "directory"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"layerwise": True},
        {"chunk_tokens": 3},
        {"chunk_tokens": 8},
        {"load": "async", "async_saves": True},
    ],
)
def test_what_was_stored_comes_back(where: str, options: dict[str, Any], tmp_path: Path) -> None:
    rig = Rig(f"memory:{tmp_path}" if where == "memory" else str(tmp_path), **options)
    first, second = request_of(list(range(13)), "a"), request_of(list(range(13)), "b")
    rig.admit(first, [3, 1, 2, 4], 0)
    rig.step(first, 13, [3, 1, 2, 4], new=True)
    for _ in range(2):
        rig.step()
    tokens, is_async = rig.scheduler.get_num_new_matched_tokens(second, 0)
    assert (tokens, is_async) == (
        8 if options.get("chunk_tokens") == 8 else 12,
        options.get("load") == "async",
    )
    table = [9, 8, 7, 6]
    rig.admit(second, table, tokens or 0)
    if is_async:
        assert [rig.step()[2], rig.step()[2]] == [None, {"b"}]
        rig.admit(second, table, 0)
        second.num_computed_tokens = tokens or 0
    rig.step(second, 13 - (tokens or 0), table, new=True)
    assert rig.wrong(second, table, 13) == []


def test_equal_saves_of_a_step_store_a_layer_without_a_hook_next_to_the_others(
    tmp_path: Path,
) -> None:
    worker = (rig := Rig(str(tmp_path), layerwise=True)).worker
    worker.register_kv_caches({**rig.layers, "of a drafter": torch.zeros(32, 1, BLOCK, 4)})
    saves = tuple(
        Save(req, 0, 4, (Piece("k", 0, slots),), (), False, (0, 4, 5, 0))
        for req, slots in (("a", (4, 5, 6, 7)), ("b", (8, 9, 10, 11)))
    )
    worker.bind_connector_metadata(ReferenceMetadata(0, saves=saves))
    worker.start_load_kv(SimpleNamespace(attn_metadata={}))
    for name, layer in rig.layers.items():
        worker.save_kv_layer(name, layer, None)
    worker.wait_for_save()
    assert worker._store.read("k").keys() == {*rig.layers, "of a drafter"}


def test_a_lost_chunk_is_reported_and_nothing_computed_upon_it_is_stored(tmp_path: Path) -> None:
    rig = Rig(str(tmp_path))
    first, second = request_of(list(range(9)), "a"), request_of([*range(9), 20, 21, 22], "b")
    rig.admit(first, [1, 2, 3], 0)
    rig.step(first, 9, [1, 2, 3], new=True)
    rig.scheduler.kvconform_fail_load("b", [5])
    assert rig.scheduler.get_num_new_matched_tokens(second, 0) == (8, False)
    rig.admit(second, [4, 5, 6], 8)
    assert rig.step(second, 4, [4, 5, 6], new=True)[3] == {5}
    assert rig.scheduler.get_num_new_matched_tokens(second, 0) == (4, False)
    second.num_computed_tokens = 4  # the engine falls back to the first bad block
    rig.step(second, 8)
    assert rig.wrong(second, [4, 5, 6], 12) == []
    assert rig.scheduler.get_num_new_matched_tokens(
        request_of([*range(9), 20, 21, 22, 23], "c"), 0
    ) == (12, False)


def test_blocks_are_kept_for_the_last_chunk(tmp_path: Path) -> None:
    rig = Rig(str(tmp_path), async_saves=True)
    request = request_of(list(range(8)))
    rig.admit(request, [1, 2, 3], 0)
    rig.step(request, 8, [1, 2, 3], new=True)
    request.status = RequestStatus.FINISHED_LENGTH_CAPPED
    request.append_output_token_ids(5)
    assert rig.scheduler.request_finished(request, [1, 2]) == (True, None)
    assert [rig.step()[1], rig.step()[1], rig.step()[1]] == [None, {"a"}, None]


# ---- Bounds: one row per mode of the truth tables; k = 3 drafts ----


@pytest.mark.parametrize(
    ("mode", "computed", "scheduled", "known", "bound"),
    [
        ("sync decode", 10, 1, 11, 11),
        ("async decode", 11, 1, 11, 11),
        ("sync, drafts unverified", 10, 4, 11, 11),
        ("async, drafts in flight", 14, 4, 11, 11),
        ("prefill chunk", 6, 6, 21, 12),
        ("resumed with output", 8, 9, 17, 17),
    ],
)
def test_a_save_ends_where_known_computed_tokens_end(
    tmp_path: Path, mode: str, computed: int, scheduled: int, known: int, bound: int
) -> None:
    connector = Rig(str(tmp_path)).scheduler
    assert connector._save_bound(request_of(list(range(known))), computed, scheduled) == bound


@pytest.mark.parametrize(
    ("computed", "known", "bound"), [(17, 18, 17), (18, 18, 17), (21, 18, 17), (6, 21, 6)]
)
def test_a_finished_request_lacks_its_last_token(
    tmp_path: Path, computed: int, known: int, bound: int
) -> None:
    request = request_of(list(range(known)))
    request.num_computed_tokens = computed
    assert Rig(str(tmp_path)).scheduler._finish_bound(request) == bound


def test_metadata_is_plain_and_empty_when_nothing_happens(tmp_path: Path) -> None:
    assert Rig(str(tmp_path)).step()[0] == ReferenceMetadata(0)
