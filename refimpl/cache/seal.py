# SPDX-License-Identifier: Apache-2.0
"""The stored form of a value: a header with key, length and checksum, and the layers of a chunk.

Stores lose, cut and mix up values. What does not fit its header is taken for missing. The layers
are in safetensors' format: reading them executes nothing, unlike unpickling.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping

import numpy as np
from safetensors import SafetensorError, deserialize
from safetensors.numpy import save

MAGIC = b"kvc1"
HEADER = struct.Struct("<4sIIQ")
"""Magic, CRC-32 of key and data, length of the key, length of the data."""

BYTES = "U8"
"""The type of all layers in safetensors' header."""


def seal(key: str, data: bytes) -> bytes:
    """Return the data with a header in front."""
    name = key.encode()
    checksum = zlib.crc32(data, zlib.crc32(name))
    return HEADER.pack(MAGIC, checksum, len(name), len(data)) + name + data


def unseal(key: str, stored: bytes) -> bytes | None:
    """Return the data that were sealed under this key; None if this is anything else."""
    if len(stored) < HEADER.size:
        return None
    magic, checksum, width, length = HEADER.unpack_from(stored)
    name = stored[HEADER.size : HEADER.size + width]
    data = stored[HEADER.size + width :]
    fits = magic == MAGIC and name == key.encode() and len(data) == length
    return data if fits and zlib.crc32(data, zlib.crc32(name)) == checksum else None


def packed(layers: Mapping[str, bytes]) -> bytes:
    """Return the layers of a chunk in one value, by name."""
    return save({name: np.frombuffer(data, np.uint8) for name, data in layers.items()})


def unpacked(data: bytes) -> dict[str, bytes]:
    """Undo `packed`. Empty for data of another form, or with tensors of another type."""
    try:
        layers = deserialize(data)
    except SafetensorError:
        return {}
    if any(layer["dtype"] != BYTES for _, layer in layers):
        return {}
    return {name: bytes(layer["data"]) for name, layer in layers}
