# SPDX-License-Identifier: Apache-2.0
"""Tests of the order of a KV tensor's axes in memory, and of MLA's single vector."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from access_rig import WAYS, foreign
from kvconform.compat.groups import RESOLVES_LAYOUTS
from kvconform.config.target import Target
from kvconform.contract.case import Layout
from kvconform.contract.loader import load_spec
from kvconform.kernels.codes import CodeBook
from kvconform.kv import device
from kvconform.kv.cache import PagedCache, groups_of
from kvconform.kv.content import Content
from kvconform.run.case import run_and_judge

SPEC = load_spec()
BOOK = CodeBook(2, 2, 16)
BLOCKS, TOKENS = 6, 4
LAYOUTS = get_args(Layout)
needs_layouts = pytest.mark.skipif(not RESOLVES_LAYOUTS, reason="this vLLM does not settle layouts")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["full", "latent"])
def test_a_slot_is_found_in_every_layout(layout: str, kind: str, way: str) -> None:
    with device.activate(WAYS[way]()):
        found_in_its_place(layout, kind)


def found_in_its_place(layout: str, kind: str) -> None:
    groups = groups_of([kind], layers=2, block_size=TOKENS, heads=2, window=8)  # type: ignore[list-item]
    cache = PagedCache(BOOK, BLOCKS, TOKENS, layout=layout, groups=groups)
    slots, content = np.array([5, 22]), Content.of(BOOK, np.array([3, 4], dtype=np.uint64))
    rows = content.rows
    cache.write(1, slots, content)
    assert cache.mismatches(1, slots, content).tolist() == []
    assert cache.tensors[1][1, 0, 1].tolist() == rows[0, 1, 0].tolist()  # block 1, head 0, token 1
    assert not cache.tensors[0].any() and cache.tensors[1].count_nonzero() == np.count_nonzero(
        rows[:, 1, : groups[0].heads]
    )
    cache.tensors[1][2, :, 3] = 9
    assert foreign(cache) == [[], [11]]


@needs_layouts
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["full", "latent"])
def test_shape_and_strides_are_those_of_vllm(layout: str, kind: str) -> None:
    import torch
    from vllm.v1.kv_cache_interface import create_kv_cache_views
    from vllm.v1.kv_cache_layout import KVCacheLayout

    from kvconform.compat.groups import build_cache_config

    cache = PagedCache(
        BOOK,
        BLOCKS,
        TOKENS,
        layout=layout,
        groups=groups_of([kind], layers=2, block_size=TOKENS, heads=2, window=8),
    )  # type: ignore[list-item]
    config = build_cache_config(cache)
    spec, tensor = config.kv_cache_groups[0].kv_cache_spec, config.kv_cache_tensors[0]
    views = create_kv_cache_views(
        torch.zeros(tensor.size, dtype=torch.int8), spec, BLOCKS, KVCacheLayout[layout], tensor
    )
    for ours, theirs in zip(cache.tensors, views, strict=True):
        assert (ours.shape, ours.stride(), ours.storage_offset()) == (
            theirs.shape,
            theirs.stride(),
            theirs.storage_offset(),
        )


@needs_layouts
@pytest.mark.parametrize("case", [case.id for case in SPEC.cases.values() if case.area == "layout"])
def test_the_reference_connector_works_with_every_layout(case: str, tmp_path: Path) -> None:
    for chunk in (4, 6):
        options = {"store": "{tmp}/store", "chunk_tokens": chunk, "whole_blocks": chunk == 4}
        target = Target("kvconform.refimpl.connector:ReferenceConnector", options)
        for variant in SPEC.cases[case].variants():
            report = run_and_judge(
                variant, target, SPEC, seed=0, tmp=tmp_path / f"{variant.id}{chunk}"
            )
            assert report.harness_error is None
            assert [
                row.requirement
                for row in report.rows
                if row.verdict in ("FAIL", "ERROR", "BLOCKED")
            ] == []


@needs_layouts
@pytest.mark.parametrize(
    ("case", "layout"), [("layout.free-choice", "LBNHC"), ("layout.layers-inside", "BLHNC")]
)
def test_a_connector_gets_the_layout_that_it_requires_where_it_can_be_had(
    case: str, layout: str, tmp_path: Path
) -> None:
    target = Target("kvconform.refimpl.defects.layout:WantsTokensFirst", {"store": "{tmp}/store"})
    report = run_and_judge(SPEC.cases[case].variants()[-1], target, SPEC, seed=0, tmp=tmp_path)
    registered = next(event for event in report.trace if event["kind"] == "kv.registered")
    assert (registered["required"], registered["layout"], registered["told"]) == (
        "LBNHC",
        layout,
        layout,
    )
