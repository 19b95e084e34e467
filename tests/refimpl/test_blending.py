# SPDX-License-Identifier: Apache-2.0
"""Tests of what the blending connector refuses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from kvconform.refimpl.variants.blending import Blending


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


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (config_of(use_mla=False, layerwise=True), "layerwise must be false"),
        (config_of(use_mla=True), "latent KV"),
    ],
)
def test_what_would_be_stored_or_loaded_wrongly_is_refused(config: Any, message: str) -> None:
    Blending(config_of(use_mla=False), KVConnectorRole.WORKER, GROUPS)
    with pytest.raises(ValueError, match=message):
        Blending(config, KVConnectorRole.WORKER, GROUPS)
