# SPDX-License-Identifier: Apache-2.0
"""Tests of the attention metadata and of the layers' tensors that connectors get."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")
from vllm.model_executor.layers.attention.attention import Attention
from vllm.model_executor.layers.attention.mla_attention import MLAAttention, MLACommonMetadata

from core_rig import BLOCK, Machine, output
from kvconform.compat.groups import bound_tensors
from kvconform.contract.case import GroupKind
from kvconform.kv.cache import groups_of

DECODE = ("a", list(range(6)), [1, 2], 5, 1)
PREFILL = ("b", list(range(8)), [3, 4], 2, 6)


def metadata_of(kind: GroupKind, *new: Any) -> Any:
    groups = groups_of([kind], layers=2, block_size=BLOCK, heads=2, window=4)
    worker = Machine(groups=groups).worker
    worker.begin(output(new=new), [])
    by_name, mapping = worker.attention_metadata()
    assert all(mapping[name] is metadata.slot_mapping for name, metadata in by_name.items())
    return by_name[worker.cache.names[0]]


@pytest.mark.parametrize("new", [(DECODE, PREFILL), (DECODE,), (PREFILL,), (PREFILL, DECODE)])
def test_latent_layers_have_what_the_others_have_in_vllms_own_class(new: Any) -> None:
    plain = metadata_of("full", *new)
    latent = metadata_of("latent", *new)
    assert isinstance(latent, MLACommonMetadata) and not isinstance(plain, MLACommonMetadata)
    assert latent.slot_mapping.equal(plain.slot_mapping)
    assert latent.query_start_loc.equal(plain.query_start_loc)
    assert latent.num_actual_tokens == plain.num_actual_tokens
    assert latent.num_reqs == len(plain.seq_lens)
    assert latent.max_seq_len == plain.seq_lens.max()
    parts = [part for part in (latent.decode, latent.prefill) if part is not None]
    assert [
        row for part in parts for row in part.block_table.tolist()
    ] == plain.block_table.tolist()


def test_leading_requests_of_one_token_are_decodes() -> None:
    mixed = metadata_of("latent", DECODE, PREFILL)
    assert (mixed.num_decodes, mixed.num_decode_tokens, mixed.num_prefills) == (1, 1, 1)
    assert mixed.decode.seq_lens.tolist() == [6]
    assert mixed.prefill.query_start_loc.tolist() == [0, 6]
    assert (mixed.max_query_len, mixed.prefill.max_query_len) == (6, 6)
    assert metadata_of("latent", PREFILL, DECODE).num_decodes == 0
    assert metadata_of("latent", DECODE).prefill is None


def test_the_metadata_crosses_to_a_worker_process() -> None:
    sent = metadata_of("latent", DECODE, PREFILL)
    assert pickle.loads(pickle.dumps(sent)).slot_mapping.equal(sent.slot_mapping)


@pytest.mark.parametrize("kind", ["full", "latent"])
def test_layers_bind_what_vllms_layers_bind(kind: GroupKind) -> None:
    groups = groups_of([kind], layers=2, block_size=BLOCK, heads=2, window=4)
    cache = Machine(groups=groups).worker.cache
    vllm_config = SimpleNamespace(kernel_config=SimpleNamespace(enable_jit_warmup=False))
    layer: Any = SimpleNamespace(_vllm_config=vllm_config)
    binds: Any = MLAAttention if kind == "latent" else Attention
    for name, tensor in zip(cache.names, cache.tensors, strict=True):
        binds.bind_kv_cache(layer, tensor)
        bound = bound_tensors(cache)[name]
        assert bound.shape == layer.kv_cache.shape and bound.stride() == layer.kv_cache.stride()
        assert bound.data_ptr() == tensor.data_ptr()
