# SPDX-License-Identifier: Apache-2.0
"""Tests of the blending connector: what it refuses, and equal chunks in one step."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from kvconform.config.target import Target
from kvconform.contract.loader import load_spec
from kvconform.refimpl.variants.blending import Blending
from kvconform.run.case import run_and_judge


def config_of(*, use_mla: bool, **options: Any) -> Any:
    return SimpleNamespace(
        kv_transfer_config=KVTransferConfig(
            kv_connector="X", kv_role="kv_both", kv_connector_extra_config=options
        ),
        cache_config=SimpleNamespace(block_size=4, cache_dtype="auto"),
        parallel_config=SimpleNamespace(
            rank=0, world_size=1, decode_context_parallel_size=1, pipeline_parallel_size=1
        ),
        model_config=SimpleNamespace(use_mla=use_mla, hf_text_config=SimpleNamespace()),
    )


GROUPS: Any = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=None)])


def test_latent_kv_is_refused() -> None:
    Blending(config_of(use_mla=False), KVConnectorRole.WORKER, GROUPS)
    with pytest.raises(ValueError, match="latent KV"):
        Blending(config_of(use_mla=True), KVConnectorRole.WORKER, GROUPS)


@pytest.mark.parametrize("layerwise", [False, True])
@pytest.mark.parametrize("engine", ["reference", "vllm"])
def test_equal_chunks_of_a_step_have_the_kv_of_their_position(
    engine: str, layerwise: bool, tmp_path: Path
) -> None:
    """Otherwise a load is wrong, or is reported as failed."""
    spec = load_spec()
    (variant,) = spec.cases["identity.blended-in-step"].variants([engine])
    options = {"store": "{tmp}/store", "layerwise": layerwise}
    target = Target("kvconform.refimpl.variants.blending:Blending", options)
    report = run_and_judge(variant, target, spec, seed=0, tmp=tmp_path / "run")
    assert not report.unmet and report.harness_error is None
    assert not [row.message for row in report.rows if row.verdict in ("FAIL", "ERROR")]
    due = [event for event in report.trace if event["kind"] == "load.due"]
    assert due and not any(event["reported_failed"] or event["missing"] for event in due)
