# SPDX-License-Identifier: Apache-2.0
"""What the installed vLLM refuses to start with, and what its interface has left behind. Asked once, of the classes and a configuration."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import PropertyMock, patch

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput

from kvconform import compat
from kvconform.api import keeps_hybrid
from kvconform.compat import KVConnectorBase_V1, KVConnectorFactory, KVConnectorRole, KVTransferConfig, SupportsHMA

Finding = tuple[str, bool, str]
NAME = "KvconformNobody"


def inspect_engine(config: Any, cache_config: Any, case: str) -> Iterator[Finding]:
    """(item, ok, detail) per check of the engine's own side. Leaves the registry, the environment and `config` as they were."""
    bare = copy.copy(config)
    bare.kv_transfer_config = None
    yield _refuses("transfer-config", ValueError, lambda: KVConnectorBase_V1.__init__(_Blank(), bare, KVConnectorRole.WORKER, cache_config))
    yield _refuses("unknown-name", ValueError, lambda: KVConnectorFactory.get_connector_class(_transfer(NAME)))
    yield from _registry()
    yield _refuses("role-required", ValueError, lambda: KVTransferConfig(kv_connector=NAME))
    yield _refuses("role-known", ValueError, lambda: KVTransferConfig(kv_connector=NAME, kv_role="nobody"))
    first, second = _transfer(NAME).engine_id, _transfer(NAME).engine_id
    yield "engine-id", bool(first) and bool(second) and first != second, "not given, or given twice"
    policy = compat.later(_transfer(NAME), "kv_load_failure_policy", "recompute")  # until 0.12 there was no other
    yield "failure-policy", policy == "fail", f"is {policy}"
    yield _refuses("encoder-decoder", AssertionError, lambda: _encoder_decoder(config, cache_config))
    yield _refuses("expandable-segments", ValueError, lambda: _expandable_segments(config))
    yield _refuses("groups-opted-in", ValueError, lambda: _hybrid(config, cache_config))
    yield "hybrid-kept", _keeps_hybrid(), "is turned off with a connector that supports several groups, and on without one"
    yield _multi_stats("_Talker" if case == "lifecycle.api" else NAME)
    for owner, names in REMOVED.items():
        left = [name for name in names if name in getattr(owner, "__dataclass_fields__", {}) or hasattr(owner, name)]
        empty = getattr(SchedulerOutput, "make_empty", object)()  # since 0.12
        left = [name for name in left if owner is not SchedulerOutput or getattr(empty, name, None) != []]  # always empty: it says nothing
        yield f"removed:{owner.__name__}", not left, f"{', '.join(left)} is there" if left else ""


REMOVED: dict[Any, tuple[str, ...]] = {
    CachedRequestData: ("resumed_from_preemption", "resumed_req_token_ids"),
    SchedulerOutput: ("num_common_prefix_blocks",),
    KVConnectorBase_V1: ("register_cross_layers_kv_cache", "prefer_cross_layer_blocks"),
    KVTransferConfig: ("kv_buffer_size", "kv_rank", "kv_parallel_size", "kv_ip"),
}
"""Names of older releases, by the class that had them."""


class _Blank(KVConnectorBase_V1):
    """Something that the base class's constructor can be called on; its abstract methods do not matter."""

    def __init__(self) -> None:
        pass


_Blank.__abstractmethods__ = frozenset()


class _Hybrid(_Blank, SupportsHMA):
    """Says that it works with several KV cache groups, and does nothing."""


def _keeps_hybrid() -> bool:
    """Whether the hybrid cache manager is as it would be without a connector: on, unless the platform has none."""
    with patch.object(KVConnectorFactory, "get_connector_class", lambda *args: _Hybrid):
        return keeps_hybrid(_transfer(NAME)) or not keeps_hybrid(None)


class _Talker(_Blank):
    """Has statistics, and its class can rebuild them from their data."""

    def get_kv_connector_stats(self) -> Any:
        return KVConnectorStats(data={"loads": 1})

    @classmethod
    def build_kv_connector_stats(cls, data: Any = None) -> Any:
        return KVConnectorStats(data=data or {})


def _multi_stats(name: str) -> Finding:
    """The way of a child's statistics to the front end, for a child whose class is registered as `name`."""
    registry = KVConnectorFactory._registry
    KVConnectorFactory.register_connector(name, __name__, "_Talker")
    try:
        stats = MultiConnector.get_kv_connector_stats(SimpleNamespace(_connectors=[_Talker()]))
        rebuilt = MultiConnector.build_kv_connector_stats({key: dict(child.data) for key, child in stats.data.items()})
        found = [dict(child.data) for child in rebuilt.data.values()]
        return "multi-stats", found == [{"loads": 1}], f"rebuilt as {found}"
    except Exception as error:  # in the front end, whatever is raised here ends the engine
        return "multi-stats", False, f"{type(error).__name__}: {error}".splitlines()[0][:200]
    finally:
        registry.pop(name, None)


def _transfer(name: str) -> Any:
    return KVTransferConfig(kv_connector=name, kv_role="kv_both")


def _refuses(item: str, error: type[Exception], call: Callable[[], object]) -> Finding:
    try:
        call()
    except error:
        return item, True, ""
    except Exception as other:  # any other refusal is not the one that was promised
        return item, False, f"{type(other).__name__}: {other}".splitlines()[0][:200]
    return item, False, "is accepted"


def _registry() -> Iterator[Finding]:
    registry = KVConnectorFactory._registry
    try:
        KVConnectorFactory.register_connector(NAME, "kvconform_no_such_module", NAME)
        yield "lazy-registration", True, ""
        yield _refuses("second-registration", ValueError, lambda: KVConnectorFactory.register_connector(NAME, "kvconform_other", NAME))
        yield _refuses("broken-registration", ModuleNotFoundError, lambda: KVConnectorFactory.get_connector_class(_transfer(NAME)))
    finally:
        registry.pop(NAME, None)


def _hybrid(config: Any, cache_config: Any) -> None:
    """Ask for several KV cache groups with a connector that is written for one."""
    asked, scheduler = copy.copy(config), copy.copy(config.scheduler_config)
    asked.scheduler_config, asked.kv_transfer_config = scheduler, _transfer(NAME)
    scheduler.disable_hybrid_kv_cache_manager = False
    with patch.object(KVConnectorFactory, "get_connector_class", lambda *args: _Blank):
        KVConnectorFactory.create_connector(config=asked, role=KVConnectorRole.WORKER, kv_cache_config=cache_config)


def _encoder_decoder(config: Any, cache_config: Any) -> None:
    with patch.object(type(config.model_config), "is_encoder_decoder", new_callable=PropertyMock, return_value=True):
        compat.build_scheduler(config, cache_config, block_size=config.cache_config.block_size, scheduling="sync", runner="v1")


def _expandable_segments(config: Any) -> None:
    with patch.dict(os.environ, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}):
        config._verify_kv_transfer_compat()
