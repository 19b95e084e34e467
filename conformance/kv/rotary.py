# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding: how the keys of a token depend on its position.

The codes in the KV of a run stand for keys with their positions, as in the paged cache of vLLM. So
keys that a connector moves by n positions are turned by n.
"""

from __future__ import annotations

import numpy as np

BASE = 10_000.0
"""`rope_theta` of the model in fixtures/tiny-model, whose rotary embedding is NeoX-style."""


def turned(keys: np.ndarray, by: int, base: float = BASE) -> np.ndarray:
    """Return keys [..., head_dim] moved by `by` positions, as float64."""
    half = keys.shape[-1] // 2
    angles = by * base ** (-np.arange(half) / half)
    first, second = keys[..., :half], keys[..., half:]
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
