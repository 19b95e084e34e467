# SPDX-License-Identifier: Apache-2.0
"""Codes in torch: the codes of `codes.CodeBook`, as the bits that a cache of any dtype holds."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from kvconform.kernels.codes import FINGERPRINT_LANES, MIN_HEAD_DIM, NONCE_LANES
from kvconform.kernels.paged import BITS, HEADS

GROUP = 4
"""Lanes that one entry of a table covers: 16 bits of a fingerprint.

4 divides 12 and 16, so a row repeats three groups, except for the group of the nonce.
"""
UNITS = {1: torch.int32, 2: torch.int64, 4: torch.int64}
"""Integers as which groups are compared, by size of an element; of 4-byte elements two a group."""
TABLES = {1: torch.int32, 2: torch.int64, 4: torch.complex128}
"""The dtype as which a whole group is copied, by size of an element."""


def mix64(values: torch.Tensor) -> torch.Tensor:
    """Return `codes.mix64` of every element of an int64 tensor, as unsigned bits. Pure."""
    return mix64_(values.clone())


def mix64_(values: torch.Tensor, spare: torch.Tensor | None = None) -> torch.Tensor:
    """Apply `mix64` in place; return `values`. Overwrites `spare`, which has the same shape."""
    spare = torch.empty_like(values) if spare is None else spare
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 0)):
        torch.bitwise_right_shift(values, shift, out=spare)
        # The mask removes the copies of the sign that an arithmetic shift brings in.
        values.bitwise_xor_(spare.bitwise_and_((1 << (64 - shift)) - 1))
        if factor:
            values.mul_(factor - (1 << 64))
    return values


@lru_cache(maxsize=64)
def keys(firsts: tuple[int, ...], heads: int, sides: int, device: torch.device) -> torch.Tensor:
    """Return keys [layers, heads, sides] int64 of layers; `firsts`: their `paged.first_key`."""
    first = torch.tensor(firsts, dtype=torch.int64, device=device)[:, None, None]
    head = torch.arange(heads, device=device)[:, None]
    side = torch.arange(sides, device=device)
    return mix64(first + side * HEADS + head)


def fingerprints(content: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Convert content ids [n] int64 and `keys` [...] to fingerprints [n, ...] int64.

    Their upper 16 bits are not cleared. Pure.
    """
    return mix64_(content.view(-1, *[1] * key.dim()) ^ key)


@lru_cache(maxsize=16)
def values(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return the bits [16] of the integers 0..15 in `dtype`."""
    return torch.arange(16, dtype=torch.float32, device=device).to(dtype).view(BITS[dtype.itemsize])


@lru_cache(maxsize=16)
def table(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return the table [65536] from 16 bits of a fingerprint or nonce to a group of four lanes."""
    number = torch.arange(1 << 16, device=device)
    lanes = torch.stack(
        [values(dtype, device)[(number >> (4 * lane)) & 15] for lane in range(GROUP)], 1
    )
    return lanes.view(TABLES[dtype.itemsize]).flatten()


def groups(prints: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert fingerprints [...] to units [..., 3 * units of a group].

    These are the first 12 lanes of a row.
    """
    index = prints.view(torch.uint16).view(*prints.shape, 4)[..., :3].to(torch.int32)
    found = table(dtype, prints.device).index_select(0, index.flatten())
    return found.view(UNITS[dtype.itemsize]).view(*prints.shape, -1)


def quads(
    prints: torch.Tensor, dtype: torch.dtype, index: torch.Tensor, out: torch.Tensor
) -> torch.Tensor:
    """Convert contiguous fingerprints [...] to units [..., 4 * units of a group].

    These are the first 12 lanes of a row, and four lanes without meaning. They are written to `out`
    (of a dtype in `TABLES`); `index` (int32) is overwritten. Both have one axis of 4 elements per
    fingerprint.
    """
    index.copy_(prints.view(torch.uint16).view(-1))
    torch.index_select(table(dtype, prints.device), 0, index, out=out)
    return out.view(UNITS[dtype.itemsize]).view(*prints.shape, -1)


def rows(
    content: torch.Tensor,
    firsts: Sequence[int],
    heads: int,
    sides: int,
    dim: int,
    dtype: torch.dtype,
    nonce: int = 0,
) -> torch.Tensor:
    """Convert content ids [n] int64 to bits [n, layers, heads, sides, dim] in a cache of `dtype`.

    The values are those of `CodeBook.rows`, with another order of axes. `firsts`: as in
    `keys`. Pure.
    """
    prints = fingerprints(content, keys(tuple(firsts), heads, sides, content.device))
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
    """Convert fingerprints [...] to bits [..., dim], lane by lane: the definition. Pure."""
    lane = torch.arange(dim, device=prints.device)
    nibbles = (prints[..., None] >> (lane % FINGERPRINT_LANES * 4)) & 15
    shifts = torch.arange(NONCE_LANES, device=prints.device) * 4
    nibbles[..., FINGERPRINT_LANES:MIN_HEAD_DIM] = (nonce >> shifts) & 15
    return values(dtype, prints.device)[nibbles]


def content_lanes(dim: int, device: torch.device) -> torch.Tensor:
    """Return a boolean tensor [dim]: the lanes of a head's K or V with content, not the nonce."""
    lane = torch.arange(dim, device=device)
    return (lane < FINGERPRINT_LANES) | (lane >= MIN_HEAD_DIM)
