# SPDX-License-Identifier: Apache-2.0
"""vLLM's compiled parts for one GPU: libraries with the device code of other GPUs blanked out.

A library has its kernels for every GPU (a fat binary: entries with a header and compressed code).
Blanked entries keep their place, so nothing else changes, and they compress to nothing.
"""

from __future__ import annotations

import re
import struct
from fnmatch import fnmatch
from typing import NamedTuple

from kvconform.errors import UsageError

STABLE = "_C_stable_libtorch*.so"
"""vLLM's kernels, if they are built for torch's stable interface: they run with other torches."""
LIBRARIES = (
    STABLE,
    "_moe_C_stable_libtorch*.so",
    "cumem_allocator*.so",
    "fs_io_C*.so",
    "spinloop*.so",
    "vllm_flash_attn/_vllm_fa*_C*.so",
)
"""What a model without quantisation, and FlashAttention, need of vLLM's folder."""
MAGIC = struct.pack("<I", 0xBA55ED50)
CONTAINER = struct.Struct("<4sHHQ")
"""Header of a fat binary: magic, version, size of this header, size of its entries."""
ENTRY = struct.Struct("<HHIQIIHHI")
"""Beginning of an entry's header: kind, version, size of the header, size of the code, four others,
and the compute capability (90 is 9.0)."""
BINARY = 2
"""Kind of an entry with machine code; others have PTX, which the driver would compile."""


class Capability(NamedTuple):
    """Compute capability of a GPU."""

    major: int
    minor: int

    @classmethod
    def of(cls, text: str) -> Capability:
        """Return that of a text such as 9.0. UsageError for another text."""
        found = re.fullmatch(r"(\d{1,2})\.(\d)", text)
        if found is None:
            raise UsageError(f"--capability {text} is no compute capability such as 9.0")
        return cls(int(found[1]), int(found[2]))

    def runs(self, kind: int, number: int) -> bool:
        """Return whether a GPU of this capability runs an entry for the capability `number`."""
        major, minor = divmod(number, 10)
        return kind == BINARY and major == self.major and minor <= self.minor


def is_kept(name: str) -> bool:
    """Return whether a file of vLLM's wheel is one of the libraries that are packed."""
    inside = name.removeprefix("vllm/")
    return inside != name and any(fnmatch(inside, pattern) for pattern in LIBRARIES)


def thinned(library: bytes, capability: Capability) -> bytes | None:
    """Return the library with the code for other GPUs blanked; None if it has none for this one.

    A library without any code for GPUs is returned as it is. ValueError for an entry that cannot be
    read.
    """
    data = bytearray(library)
    kept = blanked = 0
    begin = data.find(MAGIC)
    while begin >= 0:
        _, version, header, size = CONTAINER.unpack_from(data, begin)
        end = begin + header + size
        if version != 1 or header != CONTAINER.size or end > len(data):
            begin = data.find(MAGIC, begin + len(MAGIC))  # the bytes stand for something else
            continue
        place = begin + header
        while place < end:
            kind, _, mine, length, *_, number = ENTRY.unpack_from(data, place)
            if mine < ENTRY.size or place + mine + length > end:
                raise ValueError(f"an entry at {place} has {mine} and {length} bytes")
            if capability.runs(kind, number):
                kept += 1
            else:
                blanked += 1
                data[place + mine : place + mine + length] = bytes(length)
            place += mine + length
        begin = data.find(MAGIC, end)
    return None if blanked and not kept else bytes(data)
