# SPDX-License-Identifier: Apache-2.0
"""Faults of vLLM's own start: what it no longer refuses, and what it no longer leaves out (engine `vllm`)."""

from __future__ import annotations

from typing import Any

from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.core.sched.scheduler import Scheduler

from kvconform.refimpl.faulty import fault


@fault(KVConnectorBase_V1, "__init__")
def accepts_no_transfer_config(
    init: Any, connector: Any, config: Any, *args: Any, **kwargs: Any
) -> None:
    """Constructs a connector of a configuration that has no transfer configuration."""
    if config.kv_transfer_config is not None:
        init(connector, config, *args, **kwargs)


@fault(KVConnectorFactory, "register_connector")
def registers_over(register: Any, name: str, module: str, class_name: str) -> None:
    """Registers a name a second time: the class that comes last is used."""
    KVConnectorFactory._registry.pop(name, None)
    register(name, module, class_name)


@fault(KVTransferConfig, "__post_init__")
def needs_no_role(check: Any, config: Any) -> None:
    """Starts with a connector that was given no role."""
    if config.kv_role is not None:
        check(config)


@fault(KVTransferConfig, "__post_init__")
def recomputes_by_default(check: Any, config: Any) -> None:
    """Computes failed loads again although nobody asked for it: until 0.13 that was what happened."""
    check(config)
    config.kv_load_failure_policy = "recompute"


@fault(Scheduler, "__init__")
def serves_cross_attention(init: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """Starts with an encoder-decoder model and a connector."""
    try:
        init(scheduler, *args, **kwargs)
    except AssertionError:
        if not kwargs["vllm_config"].model_config.is_encoder_decoder:
            raise


@fault(VllmConfig, "_verify_kv_transfer_compat")
def moves_registered_memory(check: Any, config: Any) -> None:
    """Starts with expandable segments: registered memory is mapped elsewhere."""


@fault(KVConnectorBase_V1, "prefer_cross_layer_blocks", create=True)
def asks_for_what_is_gone(missing: Any, connector: Any) -> bool:
    """Keeps a name of the interface that the engine does not look at any more."""
    return False
