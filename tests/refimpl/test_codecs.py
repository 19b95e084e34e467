# SPDX-License-Identifier: Apache-2.0
"""Tests of the codecs behind the reference connector, on values like those of real KV."""

from __future__ import annotations

import pytest
import torch

from kvconform.refimpl.cache.backend import MissingPackage
from kvconform.refimpl.cache.codecs import (
    CODECS,
    DTYPES,
    EIGHT_BITS,
    HEADER,
    CodecError,
    Compressible,
    Quantising,
    codec_named,
    compressed,
)

TOKENS, HEADS, DIM = 256, 4, 64
QUANTISING = [name for name, codec in CODECS.items() if codec.tolerance]
SIXTEEN_BITS = {
    "int8": (1.9, 2.0),
    "int8-zstd": (1.98, 2.4),
    "int4": (3.6, 4.0),
    "int4-zstd": (4, 5),
}
"""How many times smaller the KV of a 16-bit model becomes: at least, at most."""


@pytest.fixture(params=QUANTISING)
def name(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if "zstd" in name:
        pytest.importorskip("zstandard", reason="the extra `test` has it")
    return name


def keys(dtype: torch.dtype, tokens: int = TOKENS, seed: int = 0) -> torch.Tensor:
    """Return rows [tokens, HEADS * DIM] like those of keys.

    Normally distributed, with outlier channels: some are wide, some far from zero.
    """
    source = torch.Generator().manual_seed(seed)
    rows = torch.randn(tokens, HEADS, DIM, generator=source)
    rows[:, :, [3, 40]] *= 30
    rows[:, :, 11] += 60
    return rows.view(tokens, -1).to(dtype)


def bytes_of(rows: torch.Tensor) -> bytes:
    return rows.contiguous().view(torch.uint8).numpy().tobytes()


def rows_of(data: bytes, rows: torch.Tensor) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=rows.dtype).view(rows.shape)


def error(rows: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return the absolute errors [tokens, columns]."""
    return (rows.to(torch.float32) - other.to(torch.float32)).abs()


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_lost_is_within_the_tolerance(name: str, dtype: torch.dtype) -> None:
    """Also of each column alone, whose largest value is then that of the layer."""
    codec, rows = CODECS[name], keys(dtype)
    decoded = rows_of(codec.decode(codec.encode(bytes_of(rows), dtype, TOKENS), dtype), rows)
    largest = rows.to(torch.float32).abs().amax(0)
    lost = error(rows, decoded).amax(0)
    assert (lost <= codec.tolerance * largest).all()
    assert (lost.max() == 0) == ("int4" in name and dtype in EIGHT_BITS)


@pytest.mark.parametrize("largest", [1e-31, 3e38])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tiny_and_huge_values_are_within_the_tolerance(
    name: str, dtype: torch.dtype, largest: float
) -> None:
    codec, rows = CODECS[name], keys(torch.float32)
    rows = (rows / rows.abs().max() * largest).to(dtype)
    decoded = rows_of(codec.decode(codec.encode(bytes_of(rows), dtype, TOKENS), dtype), rows)
    lost = (rows.to(torch.float64) - decoded.to(torch.float64)).abs().amax(0)
    assert (lost <= codec.tolerance * rows.to(torch.float64).abs().amax(0)).all()


@pytest.mark.parametrize("dtype", EIGHT_BITS)
def test_four_bits_would_lose_too_much_of_eight_bit_numbers(dtype: torch.dtype) -> None:
    """So they are stored as they are, also when they are compressed twice."""
    data = bytes_of(keys(dtype))
    codec = CODECS["int4"]
    stored = Compressible().encode(data, dtype, TOKENS)
    for _ in range(2):
        stored = compressed(stored, codec)
        assert Compressible().decode(stored, dtype) == data


def test_outlier_channels_cost_the_others_no_precision(name: str) -> None:
    codec, rows = CODECS[name], keys(torch.float32)
    dtype = rows.dtype
    decoded = rows_of(codec.decode(codec.encode(bytes_of(rows), dtype, TOKENS), dtype), rows)
    width = rows.amax(0) - rows.amin(0)
    bits = 8 if "int8" in name else 4
    assert (error(rows, decoded).amax(0) <= 1.01 * width / (2 * (2**bits - 1))).all()


def test_storing_again_loses_nothing_more(name: str) -> None:
    codec, rows = CODECS[name], keys(torch.float32)
    once = codec.decode(codec.encode(bytes_of(rows), rows.dtype, TOKENS), rows.dtype)
    twice = codec.decode(codec.encode(once, rows.dtype, TOKENS), rows.dtype)
    assert error(rows_of(once, rows), rows_of(twice, rows)).max() < 1e-4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_it_is_two_to_four_times_smaller(name: str, dtype: torch.dtype) -> None:
    data = bytes_of(keys(dtype))
    least, most = SIXTEEN_BITS[name]
    assert least <= len(data) / len(CODECS[name].encode(data, dtype, TOKENS)) <= most


@pytest.mark.parametrize("tokens", [1, 3])
def test_small_and_odd_chunks(name: str, tokens: int) -> None:
    codec = CODECS[name]
    rows = keys(torch.float32, tokens)[:, :3]
    data = bytes_of(rows)
    decoded = rows_of(codec.decode(codec.encode(data, rows.dtype, tokens), rows.dtype), rows)
    assert error(rows, decoded).max() <= codec.tolerance * rows.abs().max()
    assert codec.decode(codec.encode(b"", rows.dtype, tokens), rows.dtype) == b""


def test_constant_columns_are_exact(name: str) -> None:
    rows = torch.tensor([[0.0, 7.0, -3.5]]).repeat(TOKENS, 1)
    data = bytes_of(rows)
    assert CODECS[name].decode(CODECS[name].encode(data, rows.dtype, TOKENS), rows.dtype) == data


def test_what_cannot_be_quantised_is_stored_as_it_is(name: str) -> None:
    codec = CODECS[name]
    states = torch.arange(64, dtype=torch.int8).view(4, 16)
    infinite = torch.full((4, 16), 1.0)
    infinite[1, 1], infinite[2, 2] = torch.inf, torch.nan
    for rows in (states, infinite):
        data = bytes_of(rows)
        assert codec.decode(codec.encode(data, rows.dtype, 4), rows.dtype) == data


def test_damage_is_refused(name: str) -> None:
    codec, rows = CODECS[name], keys(torch.float16, 16)
    stored = codec.encode(bytes_of(rows), rows.dtype, 16)
    for length in (0, 3, HEADER.size, HEADER.size + 5, len(stored) // 2, len(stored) - 1):
        with pytest.raises(CodecError):
            codec.decode(stored[:length], rows.dtype)
    for other in (stored + b"\0\0", b"raw KV of this size" + stored, bytes(len(stored))):
        with pytest.raises(CodecError):
            codec.decode(other, rows.dtype)
    with pytest.raises(CodecError, match="bfloat16"):
        codec.decode(stored, torch.bfloat16)


def test_a_compressed_layer_may_not_grow() -> None:
    zstandard = pytest.importorskip("zstandard", reason="the extra `test` has it")
    codec, rows = CODECS["int4-zstd"], keys(torch.float32)
    stored = codec.encode(bytes_of(rows), rows.dtype, TOKENS)
    start = HEADER.size + 8 * rows.shape[1]
    bomb = stored[:start] + zstandard.compress(bytes(1 << 24))
    with pytest.raises(CodecError, match="another length"):
        codec.decode(bomb, rows.dtype)


def test_raw_is_the_default_and_changes_nothing() -> None:
    data = bytes_of(keys(torch.float32))
    raw = codec_named("raw")
    assert raw.encode(data, torch.float32, TOKENS) is data
    assert raw.decode(data, torch.float32) is data and raw.tolerance == 0


def test_eight_bits_per_number_and_type() -> None:
    for dtype in DTYPES:
        rows = keys(torch.float32, 16)[:, 12:20].to(dtype)
        codec = Quantising(8, 0.01)
        decoded = rows_of(codec.decode(codec.encode(bytes_of(rows), dtype, 16), dtype), rows)
        spacing = torch.finfo(dtype).eps
        largest = rows.to(torch.float32).abs().max()
        assert error(rows, decoded).max() <= (1 / 255 + spacing) * largest


def test_unknown_codecs_and_a_missing_package_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="codec must be one of raw, int8, .*, not 'int3'"):
        codec_named("int3")
    monkeypatch.setattr("kvconform.refimpl.cache.codecs.find_spec", lambda name: None)
    with pytest.raises(MissingPackage, match=r"codec int4-zstd needs .* zstandard.*\[codecs\]"):
        codec_named("int4-zstd")
    assert codec_named("int4") is CODECS["int4"]
