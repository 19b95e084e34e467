# SPDX-License-Identifier: Apache-2.0
"""Tests of corners of the template connector that no case of the suite reaches.

These are damaged files, several ranks, and models that it refuses.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace as Of
from typing import Any

import pytest

from places import ROOT

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

BLOCK = 4


class Request:
    """A request of so many tokens, as far as the connector looks at one."""

    def __init__(self, name: str, tokens: int) -> None:
        self.request_id, self.num_tokens, self.num_prompt_tokens = name, tokens, tokens
        self.block_hashes = [bytes([number]) for number in range(tokens // BLOCK)]


class Engine:
    """Both halves of a connector over one folder, and vLLM's part of a step.

    Each rank has a layer of 16 blocks.
    """

    def __init__(self, folder: Path, ranks: int = 1) -> None:
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

        sys.path.insert(0, str(ROOT / "fixtures" / "template"))
        try:
            made = importlib.import_module("folder_connector").FolderConnector
        finally:
            sys.path.remove(str(ROOT / "fixtures" / "template"))
        self.scheduler = made(config(folder, 0, ranks), KVConnectorRole.SCHEDULER, caches())
        self.workers = [
            made(config(folder, rank, ranks), KVConnectorRole.WORKER, caches())
            for rank in range(ranks)
        ]
        self.layers = [torch.zeros(16, BLOCK, 2) for _ in range(ranks)]
        for worker, layer in zip(self.workers, self.layers, strict=True):
            worker.register_kv_caches({"layer": layer})

    def step(
        self, request: Request, blocks: list[int], compute: Callable[[], None] = lambda: None
    ) -> set[int]:
        """Admit a request with what the connector offers, and compute the rest.

        Returns the blocks that were reported.
        """
        offered, _ = self.scheduler.get_num_new_matched_tokens(request, 0)
        self.scheduler.update_state_after_alloc(request, None, offered)
        new = Of(req_id=request.request_id, num_computed_tokens=offered, block_ids=(blocks,))
        return self._make(
            Of(scheduled_new_reqs=[new], scheduled_cached_reqs=NOBODY),
            {request.request_id: request.num_tokens - offered},
            compute,
        )

    def again(
        self, request: Request, computed: int, compute: Callable[[], None] = lambda: None
    ) -> set[int]:
        """Compute a running request from `computed` to its end, as after a failed load."""
        cached = Of(
            req_ids=[request.request_id],
            num_computed_tokens=[computed],
            new_block_ids=[None],
            resumed_req_ids=set(),
        )
        return self._make(
            Of(scheduled_new_reqs=[], scheduled_cached_reqs=cached),
            {request.request_id: request.num_tokens - computed},
            compute,
        )

    def _make(
        self, output: Any, scheduled: dict[str, int], compute: Callable[[], None]
    ) -> set[int]:
        output.num_scheduled_tokens = scheduled
        metadata = self.scheduler.build_connector_meta(output)
        for worker in self.workers:
            worker.bind_connector_metadata(metadata)
            worker.start_load_kv(None)
        compute()
        invalid: set[int] = set()
        for worker in self.workers:
            worker.wait_for_save()
            invalid |= worker.get_block_ids_with_load_errors()
            worker.clear_connector_metadata()
        self.scheduler.update_connector_output(Of(invalid_block_ids=invalid))
        return invalid


NOBODY = Of(req_ids=[], num_computed_tokens=[], new_block_ids=[], resumed_req_ids=set())


def config(folder: Path, rank: int, ranks: int) -> Any:
    transfer = Of(
        get_from_extra_config=lambda name, default: str(folder),
        is_kv_producer=True,
        is_kv_consumer=True,
        kv_role="kv_both",
    )
    parallel = Of(
        decode_context_parallel_size=1, rank=rank, world_size=ranks, tensor_parallel_size=ranks
    )
    model = Of(model="m", revision=None, dtype="f", quantization=None, hf_overrides={})
    cache = Of(block_size=BLOCK, cache_dtype="auto", prefix_caching_hash_algo="sha256")
    return Of(
        kv_transfer_config=transfer,
        parallel_config=parallel,
        cache_config=cache,
        model_config=model,
    )


def caches(kind: str = "FullAttentionSpec") -> Any:
    from vllm.v1 import kv_cache_interface

    more = {"sliding_window": 8} if kind == "SlidingWindowSpec" else {}
    spec = getattr(kv_cache_interface, kind)(
        block_size=BLOCK, num_kv_heads=1, head_size=2, dtype=torch.float32, **more
    )
    return Of(kv_cache_groups=[Of(kv_cache_spec=spec)], num_blocks=16)


def files(folder: Path) -> Iterator[Path]:
    return iter(sorted(folder.rglob("*.safetensors")))


def test_a_damaged_file_is_reported_once_and_replaced(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    engine.layers[0][1:3] = 7
    assert engine.step(Request("a", 9), [1, 2, 3]) == set()
    next(files(tmp_path)).write_bytes(b"damaged")
    b = Request("b", 9)
    assert engine.step(b, [4, 5, 6]) == {4}
    engine.again(b, 0, lambda: engine.layers[0][4:6].fill_(8))
    assert engine.step(Request("c", 9), [7, 8, 9]) == set()
    assert engine.layers[0][7].eq(8).all(), "the block was stored again"


def test_what_is_computed_upon_the_failed_load_of_another_rank_is_never_served(
    tmp_path: Path,
) -> None:
    engine = Engine(tmp_path, ranks=2)
    engine.step(Request("a", 5), [1, 2])
    next(path for path in files(tmp_path) if path.name == "0.safetensors").write_bytes(b"damaged")
    b = Request("b", 9)
    assert engine.step(b, [4, 5, 6]) == {4}
    assert engine.scheduler.get_num_new_matched_tokens(Request("c", 9), 0) == (0, False), (
        "rank 1 has saved block 5, which rank 0 has not"
    )
    engine.again(b, 0)
    assert engine.scheduler.get_num_new_matched_tokens(Request("c", 9), 0) == (8, False)


def test_blocks_of_a_local_hit_are_stored_unless_they_are_older_than_a_reset(
    tmp_path: Path,
) -> None:
    for reset, found in ((False, 8), (True, 0)):
        engine = Engine(tmp_path / str(reset))
        if reset:
            engine.scheduler.reset_cache()
        request = Request("b", 9)
        engine.scheduler.update_state_after_alloc(request, None, 0)
        new = Of(req_id="b", num_computed_tokens=8, block_ids=([1, 2, 3],))
        engine._make(
            Of(scheduled_new_reqs=[new], scheduled_cached_reqs=NOBODY), {"b": 1}, lambda: None
        )
        assert engine.scheduler.get_num_new_matched_tokens(Request("c", 9), 0) == (found, False)


def test_models_that_it_does_not_know_are_refused(tmp_path: Path) -> None:
    Engine(tmp_path)
    refuse = sys.modules["folder_connector.connector"].refuse_what_is_not_supported
    refuse(config(tmp_path, 0, 1), caches())
    with pytest.raises(ValueError, match="full attention"):
        refuse(config(tmp_path, 0, 1), caches("SlidingWindowSpec"))
    sliced = config(tmp_path, 0, 1)
    sliced.parallel_config.prefill_context_parallel_size = 2
    with pytest.raises(ValueError, match="context parallelism"):
        refuse(sliced, caches())
