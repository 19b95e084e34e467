# SPDX-License-Identifier: Apache-2.0
"""Tests of the adapter `lmcache-cpu`: it copies as LMCache's own classes do.

The suite must notice an adapter that copies wrongly.

Needs LMCache:
`nox -s tests -- --install '--no-deps lmcache==0.5.6 aiofile aiofiles caio' tests/adapters`.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip(
    "lmcache", reason="LMCache is not installed; this file's first lines say how to run it"
)
os.environ.update(
    LMCACHE_TRACK_USAGE="false", LMCACHE_LOG_LEVEL="CRITICAL", LMCACHE_DISABLE_BANNER="1"
)

import torch

from kvconform.adapters import registry as adapters
from kvconform.config.settings import Settings, load
from kvconform.contract.case import Case
from kvconform.contract.loader import load_spec
from kvconform.judge.records import CaseReport, Row, Verdict
from kvconform.run import smoke
from kvconform.run.case import run_and_judge

LAYERS, BLOCKS, HEADS, SIZE, DIM = 2, 6, 2, 4, 16


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))


def judged(entry: str, variant: str | Case, tmp: Path, **extra: Any) -> CaseReport:
    """Return the report on a variant of a case, or on the first variant of a case of ours."""
    settings = load({"connector": f"catalogue:{entry}"}, start=Path("/"))
    settings.extra_config |= {f"lmcache.{name}": value for name, value in extra.items()}
    return judged_by(settings, variant, tmp)


def judged_by(settings: Settings, variant: str | Case, tmp: Path) -> CaseReport:
    """Return the same with these settings."""
    target = smoke.target_of(settings)
    adapters.install(target.adapters)
    spec = load_spec()
    case = variant if isinstance(variant, Case) else spec.cases[variant.partition("[")[0]]
    found = next(v for v in case.variants() if isinstance(variant, Case) or v.id == variant)
    return run_and_judge(found, target, spec, seed=0, tmp=tmp / "case")


def failed(report: CaseReport) -> set[str]:
    """Requirements that count and failed, or that were blocked."""
    return {
        r.requirement
        for r in report.rows
        if r.verdict in (Verdict.FAIL, Verdict.BLOCKED) and r.gating
    }


CASE = "chunked.boundaries[reference-sync-v1-d1-b4]"


@pytest.mark.parametrize("entry", ["lmcache-v1", "lmcache-v1-layerwise", "lmcache-v1-disk"])
def test_it_stores_and_loads(entry: str, tmp_path: Path) -> None:
    report = judged(entry, CASE, tmp_path)
    rows = {row.requirement: row for row in report.rows}
    assert (
        rows["load.complete-or-failed"].verdict == Verdict.PASS
        and rows["load.complete-or-failed"].exercised > 2
    )
    assert (
        rows["save.completeness"].verdict == Verdict.PASS
        and rows["save.completeness"].exercised > 2
    )
    assert failed(report) <= ({"load.only-grant"} if entry == "lmcache-v1-layerwise" else set())


def test_cachegen_is_judged_by_its_tolerance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("aiofiles", reason="LMCache's remote store in a file system needs aiofiles")
    from lmcache.v1.storage_backend.naive_serde import cachegen_decoder as decoder

    report = judged("lmcache-v1-cachegen", CASE, tmp_path / "sound")
    (content,) = [row for row in report.rows if row.requirement == "load.content"]
    assert content.verdict == Verdict.PASS and content.exercised > 2
    assert failed(report) == set()

    restore = decoder.do_dequantize
    monkeypatch.setattr(decoder, "do_dequantize", lambda *given: restore(*given) * 0.9)
    report = judged("lmcache-v1-cachegen", CASE, tmp_path / "scaled")
    assert "load.content" in failed(report)


WRONG = {
    "load.complete-or-failed",
    "save.owned",
    "save.confirmed",
    "load.identity",
    "load.position",
}


def _slots_moved(slots: torch.Tensor) -> torch.Tensor:
    return slots + 1 - 2 * (slots % 2)  # each with its neighbour


@pytest.mark.parametrize("entry", ["lmcache-v1", "lmcache-v1-layerwise"])
def test_a_store_from_the_wrong_slots_is_noticed(
    entry: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvconform.adapters._lmcache_transfer import Pages

    read = Pages.read
    monkeypatch.setattr(Pages, "read", lambda self, slots: read(self, _slots_moved(slots)))
    assert failed(judged(entry, CASE, tmp_path)) & WRONG


def test_a_load_that_does_not_happen_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvconform.adapters._lmcache_transfer import Pages

    monkeypatch.setattr(Pages, "write", lambda self, slots, rows: None)
    assert "load.complete-or-failed" in failed(judged("lmcache-v1", CASE, tmp_path))


@pytest.mark.parametrize(
    ("entry", "counts", "wrong"),
    [
        ("lmcache-v1", "on_retrieve_finished", "num_hit_tokens"),
        ("lmcache-v1", "on_store_request", "num_stored_tokens"),
        ("lmcache-v1-eviction", "update_local_cpu_evict_metrics", "local_cpu_evict_keys_count"),
    ],
)
def test_a_counter_that_counts_twice_is_noticed(
    entry: str, counts: str, wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lmcache.observability import LMCStatsMonitor

    count = getattr(LMCStatsMonitor, counts)

    def twice(*args: Any) -> Any:
        count(*args)
        return count(*args)

    [row] = rows_of("stats.true", judged(entry, CASE, tmp_path / "as-it-is"))
    assert row.verdict == Verdict.PASS and row.exercised >= 2
    monkeypatch.setattr(LMCStatsMonitor, counts, twice)
    [row] = rows_of("stats.true", judged(entry, CASE, tmp_path / "broken"))
    assert row.verdict == Verdict.FAIL and f"lmcache:{wrong}_total" in row.message


@pytest.mark.parametrize("factor", [1, 0.5, 2])
def test_written_bytes_are_compared_exactly(
    factor: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over files: RemoteBackend.close never returns over Redis, and the process would not end."""
    pytest.importorskip("aiofiles", reason="LMCache's remote store in a file system needs aiofiles")
    from lmcache.observability import LMCStatsMonitor

    name = "update_interval_remote_write_metrics"
    count = getattr(LMCStatsMonitor, name)
    monkeypatch.setattr(LMCStatsMonitor, name, lambda self, size: count(self, int(size * factor)))
    settings = load({"connector": "catalogue:lmcache-v1-cachegen"}, start=Path("/"))
    settings.extra_config["lmcache.remote_serde"] = "naive"
    written = "lmcache:num_remote_write_bytes_total"
    settings.capabilities["metrics"] = {"bytes_saved": [written]}
    [row] = rows_of("stats.true", judged_by(settings, CASE, tmp_path))
    if factor == 1:
        assert row.verdict == Verdict.PASS and row.exercised == 1
    else:
        assert row.verdict == Verdict.FAIL and written in row.message


def rows_of(requirement: str, report: CaseReport) -> list[Row]:
    """Return the rows of one requirement."""
    return [row for row in report.rows if row.requirement == requirement]


def test_k_and_v_that_are_mixed_up_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvconform.adapters._lmcache_transfer import Pages

    write = Pages.write
    monkeypatch.setattr(Pages, "write", lambda self, slots, rows: write(self, slots, rows.flip(1)))
    assert "layout.halves" in failed(judged("lmcache-v1", CASE, tmp_path))


def test_a_load_over_what_is_cached_locally_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvconform.adapters._lmcache_transfer import Transfer

    to_gpu = Transfer.to_gpu

    def everything(self: Any, chunk: Any, start: int, end: int, **kwargs: Any) -> None:
        to_gpu(self, chunk, start, end, **{**kwargs, "vllm_cached_tokens": 0})

    steps = [
        {"add": {"req": "a", "prompt": 34, "max_tokens": 2}},
        {"run": {}},
        {"drop-local": {}},
        {"add": {"req": "b", "prompt": {"of": "a", "tokens": 9}, "max_tokens": 1}},
        {"run": {}},
        {"add": {"req": "c", "prompt": {"same": "a"}, "max_tokens": 2}},
        {"run": {}},
    ]
    case = Case.model_validate(
        {"id": "x.local", "area": "lifecycle", "text": "It.", "rules": ["R039"], "steps": steps},
        strict=False,
    )
    assert not failed(judged("lmcache-v1", case, tmp_path / "as-it-is", chunk_size=16))
    monkeypatch.setattr(Transfer, "to_gpu", everything)
    assert "load.only-grant" in failed(
        judged("lmcache-v1", case, tmp_path / "broken", chunk_size=16)
    )


def test_one_run_knows_nothing_of_another(tmp_path: Path) -> None:
    """The seed and the prompts are the same.

    If the store were shared, the second run's first lookup would find what the first run stored.
    """
    for number in range(2):
        report = judged("lmcache-v1", CASE, tmp_path / str(number))
        assert not failed(report)


# -- as LMCache's own classes do
def _cache() -> list[torch.Tensor]:
    """Return layers [blocks, slots, 2, heads, dim], LMCache's flash-infer layout.

    All values differ.
    """
    count = LAYERS * BLOCKS * 2 * SIZE * HEADS * DIM
    return list(torch.arange(count, dtype=torch.float32).view(LAYERS, BLOCKS, 2, SIZE, HEADS, DIM))


def _metadata() -> Any:
    return SimpleNamespace(kv_shape=(LAYERS, 2, SIZE, HEADS, DIM))


def test_a_layer_is_copied_as_lmcache_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """LMCache's torch version of its CUDA class's copy, on [blocks, K or V, slots, heads, dim]."""
    from lmcache import lmcache_native as native
    from lmcache.v1.platform.torch_ops.mem_kernels import single_layer_kv_transfer

    from kvconform.adapters._lmcache_transfer import Pages

    layer = _cache()[1]
    slots = torch.tensor([5, 4, 11, 20, 0, 23])
    theirs = torch.zeros(len(slots), 2, HEADS * DIM)
    form = native.EngineKVFormat.NL_X_NB_TWO_BS_NH_HS
    single_layer_kv_transfer(
        theirs, layer, slots, native.TransferDirection.D2H, form, token_major=True
    )
    ours = Pages(layer, latent=False).read(slots)
    assert torch.equal(ours, theirs)
    there, here = torch.zeros_like(layer), torch.zeros_like(layer)
    single_layer_kv_transfer(
        theirs, there, slots, native.TransferDirection.H2D, form, token_major=True
    )
    Pages(here, latent=False).write(slots, ours)
    assert torch.equal(here, there) and here.any()


@pytest.mark.parametrize("shape", ["packed", "kv-second", "kv-first", "latent"])
def test_every_layout_comes_back(shape: str) -> None:
    from kvconform.adapters._lmcache_transfer import Pages

    sizes = {
        "packed": (BLOCKS, HEADS, SIZE, 2 * DIM),
        "kv-second": (BLOCKS, 2, SIZE, HEADS, DIM),
        "kv-first": (2, BLOCKS, SIZE, HEADS, DIM),
        "latent": (BLOCKS, 1, SIZE, 2 * DIM),
    }
    layer = torch.rand(sizes[shape])
    copy = torch.zeros_like(layer)
    slots = torch.randperm(BLOCKS * SIZE)
    rows = Pages(layer, shape == "latent").read(slots)
    assert rows.shape == (
        BLOCKS * SIZE,
        1 if shape == "latent" else 2,
        2 * DIM if shape == "latent" else HEADS * DIM,
    )
    Pages(copy, shape == "latent").write(slots, rows)
    assert torch.equal(layer, copy)


def test_what_is_cached_locally_is_left_alone() -> None:
    from kvconform.adapters._lmcache_transfer import Transfer

    pages = [torch.zeros(BLOCKS, HEADS, SIZE, 2 * DIM) for _ in range(LAYERS)]
    chunk = SimpleNamespace(tensor=torch.ones(2, LAYERS, 8, HEADS * DIM))
    Transfer(_metadata()).batched_to_gpu(
        [chunk], [8], [16], kvcaches=pages, slot_mapping=torch.arange(16), vllm_cached_tokens=12
    )
    written = {
        (block, slot)
        for block in range(BLOCKS)
        for slot in range(SIZE)
        if pages[0][block, :, slot].any()
    }
    assert written == {(3, slot) for slot in range(SIZE)}
