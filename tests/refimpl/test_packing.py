# SPDX-License-Identifier: Apache-2.0
"""Tests of how the blending connector turns keys, in every layout that it finds them in."""

from __future__ import annotations

import pytest
import torch

from kvconform.refimpl.packing import Keys
from kvconform.refimpl.variants.blending import Rotary

HEADS, TOKENS, SIZE = 2, 32, 64


def keys_of(seed: int) -> torch.Tensor:
    """Keys [tokens, heads, head size] of one block."""
    return torch.randn(TOKENS, HEADS, SIZE, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    "shape",
    [(3, HEADS, TOKENS, 2 * SIZE), (2, 3, TOKENS, HEADS, SIZE), (3, 2, TOKENS, HEADS, SIZE)],
)
def test_keys_are_replaced_and_values_are_not(shape: tuple[int, ...]) -> None:
    layer = torch.zeros(shape)
    keys = Keys(layer, None)
    keys.write(1, keys_of(1))
    assert torch.equal(keys.read(1), keys_of(1))
    assert not keys.read(0).any() and not keys.read(2).any()
    assert int(layer.count_nonzero()) == TOKENS * HEADS * SIZE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("instructions", ["vec", "vec16"])
def test_keys_are_where_vllm_packs_them(instructions: str, dtype: torch.dtype) -> None:
    """The keys that vLLM's attention on a CPU writes are read, and written back as it does."""
    from vllm import _custom_ops
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        pytest.skip("needs a vLLM for CPUs")
    current_platform.import_kernels()

    def written(keys: torch.Tensor) -> torch.Tensor:
        layer = torch.zeros(3, HEADS, TOKENS, 2 * SIZE, dtype=dtype)
        cache = layer.view(3, HEADS, 2 * TOKENS, SIZE).chunk(2, dim=2)
        values = keys_of(9).to(dtype)
        slots = torch.arange(TOKENS) + TOKENS
        _custom_ops.cpu_attn_reshape_and_cache(keys, values, *cache, slots, instructions)
        return layer

    before = keys_of(1).to(dtype)
    after = keys_of(2).to(dtype)
    layer = written(before)
    keys = Keys(layer, instructions)
    assert torch.equal(keys.read(1), before)
    keys.write(1, after)
    assert torch.equal(layer, written(after))


@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("part", [1.0, 0.5])
def test_a_turn_is_what_vllm_does_to_later_positions(neox: bool, part: float) -> None:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    keys = keys_of(3)[:, 0]
    with set_current_vllm_config(VllmConfig()):
        model = RotaryEmbedding(SIZE, int(SIZE * part), 256, 10_000.0, neox, torch.float32)
    positions = torch.arange(TOKENS)
    at = [
        model.forward_native(positions + by, keys.clone(), keys.clone())[1] for by in (50, 114, 18)
    ]
    rotary = Rotary(10_000.0, part, neox)
    torch.testing.assert_close(rotary.turned(at[0], 64), at[1], atol=1e-4, rtol=0)
    torch.testing.assert_close(rotary.turned(at[0], -32), at[2], atol=1e-4, rtol=0)
