# SPDX-License-Identifier: Apache-2.0
"""Tests that correct connectors fail nothing, however unusual they are.

A requirement that one of them breaks is wrong. A few cases each run here, on both engines and
schedulings; `python -m kvconform.dev.sweep` runs everything, over many seeds.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvconform.config.target import Target
from kvconform.contract.case import Variant
from kvconform.contract.loader import load_spec
from kvconform.refimpl.store import MemoryStore
from kvconform.refimpl.variants.registry import NOT_RECOMMENDED, VARIANTS
from kvconform.refimpl.variants.tiers import HOST_CHUNKS, Tiers
from kvconform.run.case import run_and_judge

SPEC = load_spec()
CASES = (
    "chunked.interleaved",
    "lifecycle.id-reuse",
    "placeholders.conversation",
    "preemption.after-load",
    "speculation.mixed",
)
MATTERS = {  # what is only different elsewhere
    "chunk-256": ("chunked.large-chunks",),
    "divergent": ("groups.divergent",),
    "foresees-failures": ("chunked.boundaries",),
    "in-parts": ("chunked.boundaries",),
    "instance-hooks": ("multi.after-winner",),
    "one-group-only": ("groups.chunked",),
    "save-budget": ("lifecycle.thirty-requests",),
    "threads": ("lifecycle.pickled-metadata",),
    "uneven": ("lifecycle.abort-preempted",),
    "unreliable": ("preemption.twice",),
}


def runs_of(name: str) -> list[Variant]:
    """Return some cases on all their engines and schedulings.

    Of the other axes, only the last values are used.
    """
    found: dict[tuple[str, str, str], Variant] = {}
    for case in (*CASES, *MATTERS.get(name, ())):
        for variant in SPEC.cases[case].variants(["reference", "vllm"]):
            found[case, variant.engine, variant.scheduling] = variant
    return list(found.values())


def test_there_are_as_many_as_promised() -> None:
    assert (
        len({options.get("load", "") + connector for connector, options in VARIANTS.values()}) >= 15
    )
    assert {case for cases in MATTERS.values() for case in cases} <= set(SPEC.cases)
    assert set(MATTERS) <= set(VARIANTS)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_correct_connector_fails_nothing(name: str, tmp_path: Path) -> None:
    connector, options = VARIANTS[name]
    target = Target(connector, {"store": "{tmp}/store", **options})
    failed, judged = [], 0
    for number, variant in enumerate(runs_of(name)):
        report = run_and_judge(variant, target, SPEC, seed=0, tmp=tmp_path / str(number))
        assert report.harness_error is None
        bad = [
            row
            for row in report.rows
            if row.verdict in ("FAIL", "ERROR") and row.kind == "requirement"
        ]
        failed += [(report.variant, row.requirement, row.message) for row in bad]
        judged += any(row.verdict == "PASS" for row in report.rows)
    assert {requirement for _, requirement, _ in failed} == (
        {NOT_RECOMMENDED[name]} if name in NOT_RECOMMENDED else set()
    ), failed
    assert judged >= 10


# -- two tiers


def filled(tmp_path: Path, count: int, *, lfu: bool = False, pinned: tuple[str, ...] = ()) -> Tiers:
    MemoryStore._named.clear()
    tiers = Tiers(str(tmp_path / "store"), lfu, 0, 1)
    tiers.books.pins["a request"] = set(pinned)
    for number in range(count):
        store_one(tiers, f"k{number}")
    return tiers


def store_one(tiers: Tiers, key: str) -> None:
    tiers.put(0, key, "layer", key.encode())
    tiers.commit(0, key)


def test_what_leaves_the_host_goes_to_the_disk_and_comes_back(tmp_path: Path) -> None:
    tiers = filled(tmp_path, HOST_CHUNKS + 1)
    assert list(tiers.books.disk) == ["k0"]
    assert all(tiers.has(f"k{number}") for number in range(HOST_CHUNKS + 1))
    assert tiers.get("k0", "layer") == b"k0"
    # k0 was promoted, and k1 went to disk
    assert list(tiers.books.host)[-1] == "k0" and "k1" in tiers.books.disk


def test_lru_and_lfu_choose_different_victims(tmp_path: Path) -> None:
    victims: dict[bool, Any] = {}
    for lfu in (False, True):
        tiers = filled(tmp_path / str(lfu), HOST_CHUNKS, lfu=lfu)
        for _ in range(3):
            tiers.get("k0", "layer")  # used often, but longest ago in the end
        for number in range(1, HOST_CHUNKS):
            tiers.get(f"k{number}", "layer")
        store_one(tiers, "new")
        victims[lfu] = list(tiers.books.disk)
    assert victims[False] == ["k0"]
    assert victims[True] != ["k0"] and len(victims[True]) == 1


def test_a_pinned_chunk_stays_on_its_tier(tmp_path: Path) -> None:
    tiers = filled(tmp_path, HOST_CHUNKS + 2, pinned=("k0",))
    assert "k0" in tiers.books.host and list(tiers.books.disk) == ["k1", "k2"]
