# SPDX-License-Identifier: Apache-2.0
"""Tests of the ways to a cache's bytes: arrays, tensors and kernels write and find the same.

There is no GPU here: the kernels run on their torch path, and one test in Triton's interpreter.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from access_rig import WAYS, WithKernels, foreign
from kvconform.kernels.codes import CodeBook
from kvconform.kv import device
from kvconform.kv.access import Arrays, Kernels, Tensors
from kvconform.kv.cache import PACKED, UNLIKE, PagedCache, groups_of
from kvconform.kv.content import Content

BOOK = CodeBook(3, 2, 32)


def content(*ids: int, nonce: int = 0) -> Content:
    return Content.of(BOOK, np.array(ids, dtype=np.uint64), nonce)


def cache(way: str, dtype: torch.dtype = torch.float32) -> PagedCache:
    with device.activate(WAYS[way]()):
        return PagedCache(BOOK, 6, 4, dtype=dtype)


def used(
    way: str, dtype: torch.dtype = torch.float32, narrow: Any = None, layout: str = PACKED
) -> tuple[list[object], list[torch.Tensor]]:
    """What a cache says after writes of the engine and of a connector, and its bytes."""
    groups = groups_of([], layers=3, block_size=4, heads=2, window=8, narrow=narrow)
    with device.activate(WAYS[way]()):
        made = PagedCache(BOOK, 6, 4, layout, groups, dtype=dtype)
    slots = np.array([5, 9, 22])
    with device.activate(WAYS[way]()):
        poisoned = made.poison(0, np.array([2, 4]), content(7, 8, 9), np.array([2, 0]))
        for layer in range(3):
            made.write(layer, slots, content(1, 2, 3, nonce=5))
            made.write(layer, np.array([6]), content(1, 2, 3), np.array([1]))
        said: list[object] = [poisoned.tolist(), foreign(made)]
        made.tensors[1][1, 1, 1, 3] = 9  # slot 5
        made.tensors[2][5, 0, 2, 14] = 9  # slot 22, in the lanes of the nonce
        said += [made.mismatches(layer, slots, content(1, 2, 3)).tolist() for layer in range(3)]
        said += [made.mismatches(0, slots, content(1, 2, 3), np.array([0, 2, 2])).tolist()]
        said += [foreign(made), foreign(made)]
    return said, made.tensors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_ways_write_and_find_the_same(dtype: torch.dtype) -> None:
    said, tensors = used("arrays", dtype)
    assert said == [
        [8, 9, 10, 11, 16, 17, 18, 19],
        [[], [], []],
        [],
        [0],
        [],
        [1],
        [[], [5], [22]],
        [[], [], []],
    ]
    for way in ("tensors", "kernels"):
        other, theirs = used(way, dtype)
        assert other == said
        assert all(torch.equal(one, two) for one, two in zip(tensors, theirs, strict=True))


@pytest.mark.parametrize("layout", UNLIKE)
@pytest.mark.parametrize("narrow", ["first", "last"])
def test_a_layer_may_have_half_of_the_heads(narrow: str, layout: str) -> None:
    plain, _ = used("arrays")
    said, tensors = used("arrays", narrow=narrow, layout=layout)
    assert said == plain
    assert [len(tensor[0]) for tensor in tensors] == ([1, 2, 2] if narrow == "first" else [2, 2, 1])
    sizes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    assert tensors[0].untyped_storage().nbytes() == sizes
    for way in ("tensors", "kernels"):
        other, theirs = used(way, narrow=narrow, layout=layout)
        assert other == said
        assert all(torch.equal(one, two) for one, two in zip(tensors, theirs, strict=True))


def test_which_way_depends_on_the_memory() -> None:
    assert type(cache("arrays")._access) is Arrays
    assert type(cache("arrays", torch.bfloat16)._access) is Tensors
    assert type(cache("tensors")._access) is Tensors
    assert type(cache("kernels")._access) is Kernels


def test_the_kernels_never_see_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host encodes nothing, and nothing but ids and slots goes to the device."""
    sent: list[int] = []

    class Counting(WithKernels):
        def upload(self, host: torch.Tensor) -> torch.Tensor:
            sent.append(host.nbytes)
            return host

    monkeypatch.setattr(CodeBook, "rows", None)
    with device.activate(Counting()):
        made = PagedCache(BOOK, 6, 4)
        sent.clear()
        slots, written, read = np.arange(8, 16), content(*range(8)), content(*range(8))
        for layer in range(3):
            made.write(layer, slots, written)
            assert not made.differing(layer, slots, read).any()
            assert foreign(made) == [[], [], []]
    assert sent == [64, 64, 64]  # slots, and both contents, once for all layers


def test_the_tolerance_of_a_lossy_connector_holds_for_kernels() -> None:
    made = cache("kernels")
    with device.activate(WithKernels()):
        made.write(0, np.array([5]), content(1))
        made.tensors[0][1, 0, 1, 0] += 0.1
        assert made.mismatches(0, np.array([5]), content(1)).tolist() == [0]
        made.tolerance = 0.02
        assert made.mismatches(0, np.array([5]), content(1)).tolist() == []


def test_bytes_of_another_groups_block_are_no_change() -> None:
    groups = groups_of(["full", "wide", "private"], layers=3, block_size=4, heads=2, window=6)
    with device.activate(WithKernels()):
        made = PagedCache(BOOK, 6, 4, groups=groups)
        made.group_of[3] = 1
        made.tensors[0][3, 0, 2] = 1.0
        assert foreign(made) == [[], [3 * 8 + 2], []]
        made.poison(1, np.array([3]), content(4), np.array([0]))
        assert foreign(made) == [[], [], []]


CASES = (
    ("chunked.load-then-tail", 0),
    ("preemption.in-decode", 0),
    ("lifecycle.fail-recompute", 0),
    ("ranks.tensor", 0),
    ("ranks.split-tokens", 0),
)


@pytest.mark.parametrize("case, number", CASES)
def test_a_run_with_kernels_leaves_the_same_trace(
    case: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("vllm")
    from kvconform.config.target import Target
    from kvconform.contract.loader import load_spec
    from kvconform.kv import gpu
    from kvconform.run.runner import run_variant

    variant = load_spec().cases[case].variants(["reference"])[number]
    traces = []
    for way in (device.Cpu, WithKernels):
        monkeypatch.setattr(gpu, "Cpu", way)
        target = Target("kvconform.refimpl.connector:ReferenceConnector", {"store": "memory:"})
        run = run_variant(variant, target, seed=0, tmp=tmp_path / way.__name__)
        assert run.harness_error is None
        traces.append([repr(event) for event in run.trace])
    plain, with_kernels = traces
    assert len(plain) > 50 and with_kernels == plain


INTERPRETED = """
import numpy as np, torch
from kvconform.kernels.codes import CodeBook
from kvconform.kernels.device import INTERPRETED
from kvconform.kv import device
from kvconform.kv.access import Kernels
from kvconform.kv.cache import PagedCache
from kvconform.kv.content import Content
assert INTERPRETED
class WithKernels(device.Cpu):
    kernels = True
book = CodeBook(2, 2, 16)
content = Content.of(book, np.array([1, 2], dtype=np.uint64), 5)
slots = np.array([5, 2])
caches = []
for kind in (device.Cpu, WithKernels):
    with device.activate(kind()):
        cache = PagedCache(book, 3, 4)
        if kind is WithKernels:
            cache._access.backend = "triton"
        cache.poison(0, np.array([1]), content, np.array([1]))
        cache.write(1, slots, content)
        cache.tensors[1][1, 0, 1, 0] += 1  # slot 5
        wrong = cache.mismatches(1, slots, content).tolist()
        changed = [[each.tolist() for each in cache.foreign()] for _ in range(2)]
        caches.append((cache, wrong, *changed))
(one, *said), (two, *other) = caches
assert said == other == [[0], [[], [5]], [[], []]], (said, other)
assert all(map(torch.equal, one.tensors, two.tensors))
"""


def test_triton_kernels_do_the_same() -> None:
    pytest.importorskip("triton")
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", INTERPRETED], env=env, check=True)
