# SPDX-License-Identifier: Apache-2.0
"""Faults of vLLM's startup (engine `vllm`): refusals that it omits, and a name that it keeps."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from kvconform.refimpl.faulty import Target, returns, skipped

CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1"
FACTORY = "vllm.distributed.kv_transfer.kv_connector.factory:KVConnectorFactory"
CHECK_TRANSFER_CONFIG = Target("vllm.config:KVTransferConfig.__post_init__")
CHECK_TRANSFER_COMPAT = Target("vllm.config:VllmConfig._verify_kv_transfer_compat")
PREFER_CROSS_LAYER_BLOCKS = Target(f"{CONNECTOR}.prefer_cross_layer_blocks", missing=True)

moves_registered_memory = CHECK_TRANSFER_COMPAT.replaced_by(skipped)
"""Start with expandable segments, which map registered memory elsewhere."""

asks_for_what_is_gone = PREFER_CROSS_LAYER_BLOCKS.replaced_by(returns(False))
"""Keep a name of the interface that the engine no longer reads."""


@Target(f"{CONNECTOR}.__init__").replaced_by
def accepts_no_transfer_config(
    init: Any, connector: Any, config: Any, *args: Any, **kwargs: Any
) -> None:
    """Construct a connector from a configuration without a transfer configuration."""
    if config.kv_transfer_config is not None:
        init(connector, config, *args, **kwargs)


@Target(f"{FACTORY}.register_connector").before
def registers_over(name: str, module: str, class_name: str) -> None:
    """Register a name for the second time: the last class is used."""
    KVConnectorFactory._registry.pop(name, None)


@CHECK_TRANSFER_CONFIG.replaced_by
def needs_no_role(check: Any, config: Any) -> None:
    """Start with a connector that was given no role."""
    if config.kv_role is not None:
        check(config)


@CHECK_TRANSFER_CONFIG.after
def recomputes_by_default(_: None, config: Any) -> None:
    """Recompute failed loads although no policy asks for it, as vLLM did until 0.13."""
    config.kv_load_failure_policy = "recompute"


@Target("vllm.v1.core.sched.scheduler:Scheduler.__init__").replaced_by
def serves_cross_attention(init: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """Start with an encoder-decoder model and a connector."""
    try:
        init(scheduler, *args, **kwargs)
    except AssertionError:
        if not kwargs["vllm_config"].model_config.is_encoder_decoder:
            raise
