# SPDX-License-Identifier: Apache-2.0
"""Codes in torch: what `codes.CodeBook` computes with numpy, as the bits that a cache of any dtype holds."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from kvconform.kernels.codes import FINGERPRINT_LANES, MIN_HEAD_DIM, NONCE_LANES
from kvconform.kernels.paged import BITS

GROUP = 4
"""Lanes that one entry of a table covers: 16 bits of a fingerprint. 4 divides 12 and 16, so a row is three groups over and over, but for
the nonce's."""
UNITS = {1: torch.int32, 2: torch.int64, 4: torch.int64}
"""By size of an element: the integers that groups are compared as; of 4-byte elements a group is two of them."""
TABLES = {1: torch.int32, 2: torch.int64, 4: torch.complex128}
"""By size of an element: what a whole group is copied as."""


def mix64(values: torch.Tensor) -> torch.Tensor:
    """`codes.mix64` of every element of an int64 tensor: the bits of the unsigned result. Pure."""
    return mix64_(values.clone())


def mix64_(values: torch.Tensor, spare: torch.Tensor | None = None) -> torch.Tensor:
    """`mix64` in place; returns `values`. Overwrites `spare`, of the same shape."""
    spare = torch.empty_like(values) if spare is None else spare
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 0)):
        torch.bitwise_right_shift(values, shift, out=spare)
        values.bitwise_xor_(
            spare.bitwise_and_((1 << (64 - shift)) - 1)
        )  # the sign must not come in from the left
        if factor:
            values.mul_(factor - (1 << 64))
    return values


@lru_cache(maxsize=64)
def keys(numbers: tuple[int, ...], heads: int, sides: int, device: torch.device) -> torch.Tensor:
    """Keys [layers, heads, sides] int64 of the layers with these numbers."""
    layer = torch.tensor(numbers, dtype=torch.int64, device=device)[:, None, None]
    head, side = torch.arange(heads, device=device)[:, None], torch.arange(sides, device=device)
    return mix64(1 + (layer * 2 + side) * 4096 + head)


def fingerprints(content: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Content ids [n] int64 and `keys` [...] to fingerprints [n, ...] int64; their upper 16 bits are not cleared. Pure."""
    return mix64_(content.view(-1, *[1] * key.dim()) ^ key)


@lru_cache(maxsize=16)
def values(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Bits [16] of the integers 0..15 in `dtype`."""
    return torch.arange(16, dtype=torch.float32, device=device).to(dtype).view(BITS[dtype.itemsize])


@lru_cache(maxsize=16)
def table(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[65536], a group each: 16 bits of a fingerprint or the nonce to the bits of its four lanes."""
    number = torch.arange(1 << 16, device=device)
    lanes = torch.stack(
        [values(dtype, device)[(number >> (4 * lane)) & 15] for lane in range(GROUP)], 1
    )
    return lanes.view(TABLES[dtype.itemsize]).flatten()


def groups(prints: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Fingerprints [...] to units [..., 3 * units of a group]: the first 12 lanes of each row."""
    index = prints.view(torch.uint16).view(*prints.shape, 4)[..., :3].to(torch.int32)
    return (
        table(dtype, prints.device)
        .index_select(0, index.flatten())
        .view(UNITS[dtype.itemsize])
        .view(*prints.shape, -1)
    )


def quads(
    prints: torch.Tensor, dtype: torch.dtype, index: torch.Tensor, out: torch.Tensor
) -> torch.Tensor:
    """Fingerprints [...], contiguous, to units [..., 4 * units of a group]: the first 12 lanes of each row, and four of no meaning.

    They are written to `out` (of dtype `TABLES`), by way of `index` (int32), both one axis of 4 elements for each fingerprint.
    """
    index.copy_(prints.view(torch.uint16).view(-1))
    torch.index_select(table(dtype, prints.device), 0, index, out=out)
    return out.view(UNITS[dtype.itemsize]).view(*prints.shape, -1)


def rows(
    content: torch.Tensor,
    numbers: Sequence[int],
    heads: int,
    sides: int,
    dim: int,
    dtype: torch.dtype,
    nonce: int = 0,
) -> torch.Tensor:
    """Content ids [n] int64 to the bits [n, layers, heads, sides, dim] that they have in a cache of `dtype`. Pure.

    The same as `CodeBook.rows`, other order of axes, for the layers with these numbers.
    """
    prints = fingerprints(content, keys(tuple(numbers), heads, sides, content.device))
    if dim % GROUP:
        return plain(prints, dim, dtype, nonce)
    twelve = groups(prints, dtype)
    each = twelve.shape[-1] // 3
    order = torch.arange(dim // GROUP * each, device=content.device)
    out = twelve.index_select(-1, order % (3 * each))
    out[..., 3 * each : 4 * each] = table(dtype, content.device)[[nonce & 0xFFFF]].view(
        UNITS[dtype.itemsize]
    )
    return out.view(BITS[dtype.itemsize])


def plain(prints: torch.Tensor, dim: int, dtype: torch.dtype, nonce: int = 0) -> torch.Tensor:
    """Fingerprints [...] to bits [..., dim], lane by lane: the definition. Pure."""
    lane = torch.arange(dim, device=prints.device)
    nibbles = (prints[..., None] >> (lane % FINGERPRINT_LANES * 4)) & 15
    nibbles[..., FINGERPRINT_LANES:MIN_HEAD_DIM] = (
        nonce >> (torch.arange(NONCE_LANES, device=prints.device) * 4)
    ) & 15
    return values(dtype, prints.device)[nibbles]


def content_lanes(dim: int, device: torch.device) -> torch.Tensor:
    """Boolean [dim]: the lanes of a head's K or V that carry content, not the nonce."""
    lane = torch.arange(dim, device=device)
    return (lane < FINGERPRINT_LANES) | (lane >= MIN_HEAD_DIM)
