# SPDX-License-Identifier: Apache-2.0
"""Tests of packing vLLM's compiled parts, with small fat binaries written as NVIDIA's tools do."""

from __future__ import annotations

import struct

import pytest

from kvconform.errors import UsageError
from kvconform.pack.compiled import Capability, is_kept, thinned

HOPPER = Capability(9, 0)
PTX, BINARY = 1, 2


def entry(kind: int, number: int, code: bytes) -> bytes:
    """An entry with a header of 64 bytes, which says more than what is read of it."""
    head = struct.pack("<HHIQIIHHI", kind, 0x101, 64, len(code), len(code), 0, 0, 0, number)
    return head.ljust(64, b"h") + code


def container(*entries: bytes) -> bytes:
    inside = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(inside)) + inside


def test_code_for_other_gpus_is_blanked_in_place() -> None:
    own, other = entry(BINARY, 90, b"own!" * 8), entry(BINARY, 80, b"other" * 8)
    ptx = entry(PTX, 90, b"text" * 8)
    library = b"host code" + container(other, own, ptx) + b"data" + container(own) + b"end"
    thin = thinned(library, HOPPER)
    assert thin is not None and len(thin) == len(library)
    blank_other, blank_ptx = other[:64] + bytes(40), ptx[:64] + bytes(32)
    assert thin == (
        b"host code" + container(blank_other, own, blank_ptx) + b"data" + container(own) + b"end"
    )


def test_a_gpu_runs_the_code_of_its_generation_that_is_not_newer() -> None:
    ada = Capability.of("8.9")
    assert [number for number in (75, 80, 86, 89, 90) if ada.runs(BINARY, number)] == [80, 86, 89]
    assert Capability.of("12.0").runs(BINARY, 120) and not ada.runs(PTX, 80)


def test_a_library_for_other_gpus_only_is_left_out_and_one_for_none_is_kept() -> None:
    assert thinned(b"x" + container(entry(BINARY, 80, b"code")), HOPPER) is None
    assert thinned(b"only for the host", HOPPER) == b"only for the host"


def test_bytes_that_only_look_like_a_fat_binary_are_kept() -> None:
    lookalike = struct.pack("<IHHQ", 0xBA55ED50, 1, 16, 1 << 40) + b"an address"
    assert thinned(lookalike, HOPPER) == lookalike


def test_an_entry_that_cannot_be_read_is_an_error() -> None:
    broken = entry(BINARY, 90, b"code")[:-1]
    with pytest.raises(ValueError, match="an entry at 16 has 64 and 4 bytes"):
        thinned(container(broken), HOPPER)


@pytest.mark.parametrize(
    "name, kept",
    [
        ("vllm/_C_stable_libtorch.abi3.so", True),
        ("vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so", True),
        ("vllm/_flashmla_C.abi3.so", False),
        ("vllm/third_party/deep_gemm/_C_extension.abi3.so", False),
        ("other/_C_stable_libtorch.abi3.so", False),
    ],
)
def test_what_a_plain_model_needs_is_kept(name: str, kept: bool) -> None:
    assert is_kept(name) is kept


@pytest.mark.parametrize("text", ["9", "sm_90", "9.0a", ""])
def test_another_text_is_no_capability(text: str) -> None:
    with pytest.raises(UsageError, match="is no compute capability such as 9.0"):
        Capability.of(text)
