# SPDX-License-Identifier: Apache-2.0
"""Tests that correct connectors fail nothing, however unusual they are.

A requirement that one of them breaks is wrong. A few cases each run here, in turn on the engines
and schedulings; `python -m kvconform.dev.sweep` runs everything, over many seeds.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from kvconform.config.target import Target
from kvconform.contract.case import Variant
from kvconform.contract.loader import load_spec
from kvconform.refimpl.variants.registry import NOT_RECOMMENDED, VARIANTS
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
    "blending": (
        "identity.blended",
        "identity.blended-in-step",
        "identity.blended-image",
        "identity.same-middle",
    ),
    "blending-layerwise": ("identity.blended-in-step",),
    "buffered": ("cache.prefetched",),
    "buffered-async": ("cache.prefetched",),
    "chunk-256": ("chunked.large-chunks",),
    "consuming": ("layout.kernel-blocks",),
    "controlled": (
        "cache.looked-up",
        "cache.cleared",
        "cache.moved",
        "cache.compressed",
        "cache.pinned",
    ),
    "converting": ("transfer.other-block-size",),
    "divergent": ("groups.divergent",),
    "foresees-failures": ("chunked.boundaries",),
    "hybrid-peer": ("transfer.groups",),
    "honours-skip": ("lifecycle.ignore-hits", "lifecycle.local-recomputed"),
    "in-parts": ("chunked.boundaries",),
    "int8": ("cache.size", "cache.stored-again"),
    "instance-hooks": ("multi.after-winner",),
    "metered": ("cache.demoted", "lifecycle.statistics"),
    "one-group-only": ("groups.chunked",),
    "own-metadata": ("lifecycle.local-and-external",),
    "plain": ("layout.kernel-blocks",),
    "refuses-latent-layers": ("layout.latent",),
    "peer": ("transfer.late", "transfer.split-tokens"),
    "peer-timed": ("transfer.lease-midway", "transfer.slow-producer"),
    "resharding": ("transfer.ranks-busy", "transfer.fewer-ranks"),
    "pusher": ("transfer.chunked",),
    "peer-to-peer": ("transfer.three-engines",),
    "save-budget": ("lifecycle.thirty-requests",),
    "three-levels": ("cache.pressure", "cache.promoted"),
    "tiered-lfu": ("cache.pressure",),
    "tiered-lru": ("cache.demoted",),
    "hybrid-threads": ("groups.late-threads", "groups.late-threads-state"),
    "retrying": ("lifecycle.async-load",),
    "bounded-loads": ("cache.events",),
    "own-hashes": ("cache.events",),
    "rounds-failures": ("lifecycle.fail-recompute",),
    "stops-at-failure": ("lifecycle.fail-recompute",),
    "threads": ("lifecycle.pickled-metadata",),
    "selective": ("lifecycle.skip-last", "lifecycle.skip-low-priority", "lifecycle.skip-save"),
    "whole-chunks": ("chunked.large-chunks",),
    "zeros": ("layout.kernel-blocks",),
    "write-behind": ("cache.demoted", "cache.pressure"),
    "unfull-chunk": ("chunked.unfull-chunk",),
    "uneven": ("lifecycle.abort-preempted",),
    "unreliable": ("preemption.twice",),
}


def runs_of(name: str, whole: bool) -> list[Variant]:
    """Return some cases on all their engines and schedulings, or three on one of them in turn.

    The cases that matter for this variant run on both engines. Of the other axes, only the last
    values are used.
    """
    found: list[Variant] = []
    first = list(VARIANTS).index(name)
    for number, case in enumerate((*CASES, *MATTERS.get(name, ())), first):
        if not whole and case in CASES and number % len(CASES) >= 3:
            continue
        runs: dict[tuple[str, str], Variant] = {}
        for variant in SPEC.cases[case].variants(["reference", "vllm"]):
            runs[variant.engine, variant.scheduling] = variant
        each = list(runs.values())
        if whole:
            found += each
        elif case in CASES:
            found.append(each[number % len(each)])
        else:
            found += {variant.engine: variant for variant in each}.values()
    return found


def test_there_are_as_many_as_promised() -> None:
    assert (
        len({options.get("load", "") + connector for connector, options in VARIANTS.values()}) >= 15
    )
    assert {case for cases in MATTERS.values() for case in cases} <= set(SPEC.cases)
    assert set(MATTERS) <= set(VARIANTS)


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", VARIANTS)
def test_a_correct_connector_fails_nothing(name: str, whole: bool, tmp_path: Path) -> None:
    connector, options = VARIANTS[name]
    if "zstd" in options.get("codec", ""):
        pytest.importorskip("zstandard", reason="the extra `test` has it")
    target = Target(connector, {"store": "{tmp}/store", **options})
    failed, judged = [], 0
    for number, variant in enumerate(runs_of(name, whole)):
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
    assert judged >= (10 if whole else 2)
