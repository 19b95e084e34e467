# SPDX-License-Identifier: Apache-2.0
"""The provenance code: the bytes of a slot as a function of the slot's content.

A *content id* is a 64-bit integer (see `kvconform.kv.provenance`). For each layer, head and side (K
or V) it becomes a 48-bit fingerprint, written as 12 nibbles into 12 lanes of the head's vector.
Four further lanes hold the write generation (nonce). Lanes beyond the 16th repeat the fingerprint.
All values are the integers 0..15, which fp32, fp16, bf16, fp8 e4m3 and uint8 represent exactly.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

FINGERPRINT_LANES = 12
NONCE_LANES = 4
MIN_HEAD_DIM = FINGERPRINT_LANES + NONCE_LANES
_FINGERPRINT_MASK = np.uint64((1 << (4 * FINGERPRINT_LANES)) - 1)


def mix64(value: int) -> int:
    """Avalanche a 64-bit integer (the finaliser of splitmix64). Pure."""
    mask = (1 << 64) - 1
    value &= mask
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
    return value ^ (value >> 31)


def mix_array_(values: np.ndarray, spare: np.ndarray) -> np.ndarray:
    """Apply `mix64` to every element of a uint64 array, in place; return `values`.

    Overwrites `spare`, which has the same shape.
    """
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, None)):
        np.right_shift(values, np.uint64(shift), out=spare)
        np.bitwise_xor(values, spare, out=values)
        if factor is not None:
            np.multiply(values, np.uint64(factor), out=values)
    return values


@dataclass(frozen=True)
class CodeBook:
    """Encoder and decoder for one cache geometry.

    A row has shape [layers, heads, 2 * head_dim]: K in the first half of the last axis, V in the
    second.
    """

    layers: int
    heads: int
    head_dim: int
    _keys: np.ndarray = field(init=False, repr=False, compare=False)
    _shifts: np.ndarray = field(init=False, repr=False, compare=False)
    """Bits [head_dim] before the digit of the fingerprint that each lane holds."""

    def __post_init__(self) -> None:
        if self.head_dim < MIN_HEAD_DIM:
            raise ValueError(
                f"head_dim must be at least {MIN_HEAD_DIM} to hold fingerprint and nonce,"
                f" got {self.head_dim}"
            )
        keys = np.array(
            [
                [
                    [mix64(1 + (layer * 2 + kv) * 4096 + head) for head in range(self.heads)]
                    for kv in range(2)
                ]
                for layer in range(self.layers)
            ],
            dtype=np.uint64,
        )
        object.__setattr__(self, "_keys", keys)
        digits = np.arange(self.head_dim, dtype=np.uint64) % np.uint64(FINGERPRINT_LANES)
        object.__setattr__(self, "_shifts", digits * np.uint64(4))

    @property
    def layer(self) -> int:
        """Number in the model of the first layer; a book of one rank may begin with another."""
        return 0

    @property
    def head(self) -> int:
        """Number in the model of the first head, see `layer`."""
        return 0

    @property
    def width(self) -> int:
        """Elements per slot, layer and head: K and V packed."""
        return 2 * self.head_dim

    def fingerprints(self, content: np.ndarray) -> np.ndarray:
        """Convert content ids [n] uint64 to fingerprints [n, layers, 2, heads] uint64. Pure."""
        mixed = content[:, None, None, None] ^ self._keys[None]
        return mix_array_(mixed, np.empty_like(mixed)) & _FINGERPRINT_MASK

    def rows(self, content: np.ndarray, nonce: int = 0) -> np.ndarray:
        """Convert content ids [n] uint64 to rows [n, layers, heads, 2 * head_dim] uint8.

        `nonce` (16 bits) fills the nonce lanes. Pure.
        """
        prints = self.fingerprints(content).transpose(0, 1, 3, 2)
        lanes = np.right_shift(prints[..., None], self._shifts, order="C")
        out = np.bitwise_and(lanes, np.uint64(15), out=lanes).astype(np.uint8)
        out[..., FINGERPRINT_LANES:MIN_HEAD_DIM] = [
            (nonce >> (4 * i)) & 15 for i in range(NONCE_LANES)
        ]
        return out.reshape(len(content), self.layers, self.heads, self.width)

    def content_mask(self) -> np.ndarray:
        """Return a boolean array [2 * head_dim]: lanes that carry content, not the nonce."""
        half: np.ndarray = np.ones(self.head_dim, dtype=bool)
        half[FINGERPRINT_LANES:MIN_HEAD_DIM] = False
        return np.concatenate([half, half])

    def read_print(self, lanes: np.ndarray) -> int | None:
        """Decode one K or V vector [head_dim] to its fingerprint; None if it is not a code.

        A code has integers 0..15, and its repetitions agree.
        """
        values = np.asarray(lanes, dtype=np.float64)
        head = values[:FINGERPRINT_LANES]
        if not np.all((head >= 0) & (head <= 15) & (head == np.floor(head))):
            return None
        repeats = np.arange(MIN_HEAD_DIM, len(values)) % FINGERPRINT_LANES
        if np.any(values[MIN_HEAD_DIM:] != head[repeats]):
            return None
        return int(sum(int(v) << (4 * i) for i, v in enumerate(head)))
