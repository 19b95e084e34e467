# SPDX-License-Identifier: Apache-2.0
"""Codecs: how the KV of one layer of a chunk is stored. `raw` keeps it, the others lose precision.

A quantising codec stores each number as its step between the smallest and the largest value of its
*column*: the values of one head and channel over the tokens of the chunk. So the outlier channels
that keys have cost the others no precision. Storing loaded KV again loses nothing more, because
both ends of a column are steps. `-zstd` appends zstandard, whose Huffman coder stores frequent
steps in fewer bits.

An encoded layer describes itself: what does not fit its header, or the expected data type, is
refused. Layers that are no floating-point numbers, or not finite, are stored as they are. So are
8-bit floating-point numbers by a codec of 4 bits: rounded to their data type once more, what it
decodes would be beyond the tolerance.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from importlib.util import find_spec

import torch

from kvconform.refimpl.cache.backend import MissingPackage

HEADER = struct.Struct("<4sBBII")
"""Magic, form, data type, tokens, columns."""
MAGIC = b"kvq1"
PLAIN, BYTES, NIBBLES, COMPRESSED = range(4)
"""Forms: the layer as it was; a byte per step; two steps in a byte; steps, compressed."""
EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2)
DTYPES = (torch.float32, torch.float16, torch.bfloat16, *EIGHT_BITS)
"""Data types that can be quantised, by their number in a header."""
ZSTD_LEVEL = 1
"""Higher levels look longer for repetitions, and steps have none."""


class CodecError(ValueError):
    """An encoded layer is damaged, or of another form."""


class Codec:
    """Stores the bytes of a layer as they are."""

    tolerance: float = 0.0
    """How far a decoded value may be off, as a part of the layer's largest absolute value."""

    def encode(self, data: bytes, dtype: torch.dtype, tokens: int) -> bytes:
        """Return the stored form of `tokens` rows of equal length."""
        return data

    def decode(self, stored: bytes, dtype: torch.dtype) -> bytes:
        """Undo `encode`, up to the tolerance. CodecError if it is not a layer of this data type."""
        return stored


@dataclass(frozen=True)
class Quantising(Codec):
    """Stores numbers in `bits` bits (4 or 8), `compressed` or not."""

    bits: int
    tolerance: float
    compressed: bool = False

    def encode(self, data: bytes, dtype: torch.dtype, tokens: int) -> bytes:
        if self._quantises(dtype) and data:
            rows = torch.frombuffer(bytearray(data), dtype=dtype).view(tokens, -1)
            low, step = self._grid(rows.to(torch.float32))
            if step.isfinite().all():
                return self._quantised(rows, low, step)
        return _plain(data, dtype, tokens)

    def _quantises(self, dtype: torch.dtype) -> bool:
        return dtype in DTYPES and (self.bits == 8 or dtype not in EIGHT_BITS)

    def _grid(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the smallest value and the step of each column."""
        low, most = rows.amin(0), 2**self.bits - 1
        step = rows.amax(0) / most - low / most  # the difference may be beyond a float32
        return low, torch.where(step > 0, step, 1.0)

    def _quantised(self, rows: torch.Tensor, low: torch.Tensor, step: torch.Tensor) -> bytes:
        tokens, columns = rows.shape
        fits = bool((step * (2**self.bits - 1)).isfinite().all())
        numbers = rows.to(torch.float32 if fits else torch.float64).sub_(low).div_(step)
        steps = numbers.round_().clamp_(0, 2**self.bits - 1).to(torch.uint8)
        form, body = self._body(steps.flatten())
        head = HEADER.pack(MAGIC, form, DTYPES.index(rows.dtype), tokens, columns)
        return head + _bytes(low) + _bytes(step) + body

    def _body(self, steps: torch.Tensor) -> tuple[int, bytes]:
        """Return the form and the bytes of the steps; the smallest form."""
        form, body = (BYTES, _bytes(steps)) if self.bits == 8 else (NIBBLES, _nibbles(steps))
        if self.compressed:
            shorter = _compress(_bytes(steps))
            if len(shorter) < len(body):
                return COMPRESSED, shorter
        return form, body

    def decode(self, stored: bytes, dtype: torch.dtype) -> bytes:
        form, number, tokens, columns = _header(stored)
        body = stored[HEADER.size :]
        if form == PLAIN:
            return body
        if number >= len(DTYPES) or DTYPES[number] != dtype:
            raise CodecError(f"the layer is not of {dtype}")
        if len(body) < 8 * columns or not tokens * columns:
            raise CodecError("the columns are cut off")
        low, step = torch.frombuffer(bytearray(body[: 8 * columns]), dtype=torch.float32).view(
            2, columns
        )
        steps = _steps(form, body[8 * columns :], tokens * columns).view(tokens, columns)
        values = torch.addcmul(low, steps, step)
        limits = torch.finfo(dtype)
        return _bytes(values.clamp_(limits.min, limits.max).to(dtype))


def _plain(data: bytes, dtype: torch.dtype, tokens: int) -> bytes:
    """Return a layer as it is, with a header."""
    number = DTYPES.index(dtype) if dtype in DTYPES else len(DTYPES)
    return HEADER.pack(MAGIC, PLAIN, number, tokens, 0) + data


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def _nibbles(steps: torch.Tensor) -> bytes:
    """Return steps [n] below 16, two in a byte."""
    if len(steps) % 2:
        steps = torch.cat([steps, steps.new_zeros(1)])
    return _bytes(steps[::2] | steps[1::2] << 4)


def _header(stored: bytes) -> tuple[int, int, int, int]:
    """Return form, number of the data type, tokens and columns."""
    if len(stored) < HEADER.size:
        raise CodecError("the header is cut off")
    magic, form, number, tokens, columns = HEADER.unpack_from(stored)
    if magic != MAGIC:
        raise CodecError("the layer has no header")
    return form, number, tokens, columns


def _steps(form: int, body: bytes, count: int) -> torch.Tensor:
    """Return `count` steps [count], as float32."""
    if form == COMPRESSED:
        body = _decompress(body, count)
    due = (count + 1) // 2 if form == NIBBLES else count
    if form > COMPRESSED or len(body) != due:
        raise CodecError(f"{len(body)} bytes of {due}")
    steps = torch.frombuffer(bytearray(body), dtype=torch.uint8)
    if form == NIBBLES:
        steps = torch.stack([steps & 15, steps >> 4], dim=1).flatten()
    return steps[:count].to(torch.float32)


def _compress(data: bytes) -> bytes:
    import zstandard

    return zstandard.ZstdCompressor(level=ZSTD_LEVEL, write_checksum=False).compress(data)


def _decompress(body: bytes, count: int) -> bytes:
    """Return the data, which have `count` bytes. CodecError otherwise."""
    import zstandard

    try:
        if zstandard.frame_content_size(body) != count:
            raise CodecError("the compressed data have another length")
        return zstandard.ZstdDecompressor().decompress(body, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CodecError(f"the compressed data are damaged: {error}") from None


class Compressible(Codec):
    """Stores the bytes of a layer with a header, so that they can be compressed later."""

    def encode(self, data: bytes, dtype: torch.dtype, tokens: int) -> bytes:
        return _plain(data, dtype, tokens)

    def decode(self, stored: bytes, dtype: torch.dtype) -> bytes:
        return Quantising(8, 0.0).decode(stored, dtype)


def compressed(stored: bytes, codec: Codec) -> bytes:
    """Return a layer that `Compressible` has stored in the form of a quantising codec.

    What is no number, or compressed already, stays as it is.
    """
    form, number, tokens, _ = _header(stored)
    if form != PLAIN or number >= len(DTYPES):
        return stored
    return codec.encode(stored[HEADER.size :], DTYPES[number], tokens)


CODECS: dict[str, Codec] = {
    "raw": Codec(),
    "int8": Quantising(8, 0.01),
    "int8-zstd": Quantising(8, 0.01, compressed=True),
    "int4": Quantising(4, 0.07),
    "int4-zstd": Quantising(4, 0.07, compressed=True),
}
"""Codecs by name.

Half a step is 1/510 of a column's width with 8 bits and 1/30 with 4, and the width is at most twice
the largest value. The tolerances leave room for the rounding of the data type: of a number that was
of this type before, it is at most the error that it had, and at most half of the type's spacing.
"""


def codec_named(name: str) -> Codec:
    """Return a codec.

    ValueError for an unknown name. MissingPackage if it needs a package that is missing.
    """
    if name not in CODECS:
        raise ValueError(f"codec must be one of {', '.join(CODECS)}, not {name!r}")
    codec = CODECS[name]
    if isinstance(codec, Quantising) and codec.compressed and find_spec("zstandard") is None:
        raise MissingPackage(f"codec {name}", "zstandard", "codecs")
    return codec
