# SPDX-License-Identifier: Apache-2.0
"""Benchmark of the reference connector's codecs, compared with copying as many bytes (memcpy)."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from statistics import median

import torch

from kvconform.refimpl.cache.backend import MissingPackage
from kvconform.refimpl.cache.codecs import CODECS, Codec, codec_named

TOKENS = 256
COLUMNS = 2 * 8 * 128
"""K and V of eight heads of 128 values."""
OUTLIERS = 40
"""One column in so many is 20 times as wide."""
ROUNDS = 15


def measure() -> dict[str, float]:
    """Measure each codec on one layer of a chunk of 256 tokens in bfloat16.

    Returns, by codec, medians:
    - `memcpy_gbps`: 10^9 bytes of KV per second that are copied in memory;
    - `NAME_smaller`: how many times smaller the KV becomes;
    - `NAME_encode_gbps`, `NAME_decode_gbps`: 10^9 bytes of KV per second;
    - `NAME_encode`, `NAME_decode`: the same as multiples of memcpy.

    Codecs whose package is missing are left out.
    """
    rows = torch.randn(TOKENS, COLUMNS, generator=torch.Generator().manual_seed(0))
    rows[:, ::OUTLIERS] *= 20
    dtype = torch.bfloat16
    data = rows.to(dtype).view(torch.uint8).numpy().tobytes()
    found: dict[str, float] = {}
    for name, codec in lossy_codecs().items():
        stored = codec.encode(data, dtype, TOKENS)
        copy, encode, decode = _seconds(
            lambda: bytearray(data),
            lambda codec=codec: codec.encode(data, dtype, TOKENS),  # type: ignore[misc]
            lambda codec=codec, stored=stored: codec.decode(stored, dtype),  # type: ignore[misc]
        )
        found.setdefault("memcpy_gbps", len(data) / copy / 1e9)
        found[f"{name}_smaller"] = len(data) / len(stored)
        for what, seconds in (("encode", encode), ("decode", decode)):
            found[f"{name}_{what}_gbps"] = len(data) / seconds / 1e9
            found[f"{name}_{what}"] = copy / seconds
    return found


def lossy_codecs() -> dict[str, Codec]:
    """Return the codecs that lose something and whose packages are installed, by name."""
    found: dict[str, Codec] = {}
    for name in CODECS:
        with suppress(MissingPackage):
            found[name] = codec_named(name)
    return {name: codec for name, codec in found.items() if codec.tolerance}


def _seconds(*calls: Callable[[], object]) -> list[float]:
    """Return the medians of the processor times of calls, which are made in turns."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(ROUNDS):
        for call, taken in zip(calls, times, strict=True):
            began = time.process_time()
            call()
            taken.append(time.process_time() - began)
    return [median(taken) for taken in times]
