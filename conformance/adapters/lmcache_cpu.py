# SPDX-License-Identifier: Apache-2.0
"""Adapter `lmcache-cpu`: LMCache's connector on a machine without an accelerator.

LMCache moves KV between the engine's pages and its own chunks through a class per accelerator. It
has none for CPU tensors: it logs "No supported cpu connector found" and goes on without a cache.
This adapter adds one; everything else is LMCache's own code.

LMCache also keeps its configuration, its engine and its threads in the process. In production they
end with the process; here one process does many runs. `around` lets each run begin as in a new
process. By then the suite has judged what the last connector's shutdown left behind.

The adapter also gives the connector what an operator can ask of LMCache's engine
(`_lmcache_controller`), and what LMCache exports as metrics (`_lmcache_metrics`).

CacheGen, LMCache's lossy codec, looks up the number of layers by the model's name on a hub. The
engines `reference` and `vllm` use names that no hub has; for these it gets their configuration.
"""

from __future__ import annotations

import gc
import importlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from kvconform.adapters.registry import Adapter
from kvconform.fixtures.tiny_llama import CONFIG

_started: list[Any] = []
"""The LMCacheManagers that were created and that the adapter has not ended."""


def install() -> None:
    """Change LMCache in this process.

    Replaces lmcache.v1.gpu_connector.CreateGPUConnector, makes LMCacheEngineBuilder keep one engine
    per rank, and records every LMCacheManager.
    """
    from lmcache.integration.vllm.utils import ENGINE_NAME
    from lmcache.utils import EngineType
    from lmcache.v1 import gpu_connector
    from lmcache.v1.cache_engine import LMCacheEngineBuilder
    from lmcache.v1.manager import LMCacheManager
    from lmcache.v1.storage_backend.connector.instrumented_connector import (
        InstrumentedRemoteConnector,
    )
    from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
    from vllm.distributed.kv_transfer.kv_connector.v1.lmcache_connector import LMCacheConnectorV1

    from kvconform.adapters import _lmcache_controller as controller
    from kvconform.adapters import _lmcache_metrics as metrics
    from kvconform.adapters import _lmcache_transfer as transfer

    theirs = gpu_connector.CreateGPUConnector
    construct = LMCacheManager.__init__

    def create(config: Any, metadata: Any, engine: Any, layout_hints: Any = None) -> Any:
        if engine != EngineType.VLLM:
            return theirs(config, metadata, engine, layout_hints)
        if config.use_layerwise:
            return transfer.LayerwiseTransfer(metadata)
        return transfer.Transfer(metadata)

    def noted(self: Any, *args: Any, **kwargs: Any) -> None:
        _started.append(self)
        construct(self, *args, **kwargs)

    def operations(self: Any) -> controller.Controller:
        return controller.Controller(LMCacheEngineBuilder.get(ENGINE_NAME))

    connector: Any = LMCacheConnectorV1
    connector.kvconform_controller = operations
    connector.kvconform_counters = lambda self: metrics.counters()
    connector.kvconform_known = lambda self: metrics.known()
    gpu_connector.CreateGPUConnector = create
    LMCacheManager.__init__ = noted
    for name in ("allocate", "batched_allocate"):
        setattr(LocalCPUBackend, name, metrics.watched(getattr(LocalCPUBackend, name)))
    remote: Any = InstrumentedRemoteConnector
    remote.__init__ = metrics.stored(remote.__init__)
    for name in ("put", "batched_put"):
        setattr(remote, name, metrics.awaited(getattr(remote, name)))
    _know_the_model()
    for name in ("get", "get_or_create", "destroy"):
        setattr(LMCacheEngineBuilder, name, _by_rank(getattr(LMCacheEngineBuilder, name)))


def _know_the_model() -> None:
    """Make CacheGen find the configuration of the suite's models.

    Replaces CacheGenConfig.from_model_name.
    """
    from lmcache.v1.storage_backend.naive_serde.cachegen_basics import CacheGenConfig

    theirs = CacheGenConfig.from_model_name

    def from_model_name(name: str) -> CacheGenConfig:
        return theirs(str(CONFIG.parent) if name.startswith("kvconform/") else name)

    CacheGenConfig.from_model_name = from_model_name


def _by_rank(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return the method with one engine name per rank.

    LMCache looks up engines by name in the process, and here all ranks are in one process.
    """

    def call(instance_id: str, *args: Any, **kwargs: Any) -> Any:
        from vllm.distributed.parallel_state import get_pp_group, get_tp_group

        rank = get_pp_group().rank_in_group, get_tp_group().rank_in_group
        return method(instance_id if rank == (0, 0) else f"{instance_id}-{rank}", *args, **kwargs)

    return call


@contextmanager
def fresh() -> Iterator[None]:
    """Give the run an LMCache as in a new process. May be nested (a run inside a run)."""
    from lmcache.integration.vllm import utils, vllm_v1_adapter
    from lmcache.v1.cache_engine import LMCacheEngineBuilder

    from kvconform.adapters import _lmcache_metrics as metrics

    builder = LMCacheEngineBuilder
    loggers: dict[str, Any] = builder._stat_loggers
    tables: list[dict[str, Any]] = [
        builder._instances,
        builder._cfgs,
        builder._metadatas,
        loggers,
        vllm_v1_adapter.tmp_disagg_tracker,
    ]
    kept = [dict(table) for table in tables]
    config = utils._config_instance
    count = len(_started)
    collecting = gc.isenabled()
    for table in tables:
        table.clear()
    utils._config_instance = None
    try:
        with metrics.of_run():
            yield
    finally:
        left = _started[count:]
        del _started[count:]
        if left:
            threading.Thread(
                target=_end,
                args=(left, dict(loggers)),
                name="lmcache-cpu ends what a run left",
                daemon=True,
            ).start()
        for table, before in zip(tables, kept, strict=True):
            table.clear()
            table.update(before)
        utils._config_instance = config
        if collecting:
            gc.enable()  # LMCache may switch it off


def _end(managers: list[Any], loggers: dict[str, Any]) -> None:
    """Stop the threads and close the sockets that a connector left behind.

    What its own shutdown has ended is left alone. Runs in a thread, because LMCache's threads check
    only once a second whether they should end. LMCache's own `stop_services` cannot be used: it
    closes the engine that has the name now, which is the next run's; it closes sockets in which
    another thread waits (libzmq may abort the process); and it ends the zmq context of the whole
    process.
    """
    zmq: Any = importlib.import_module("zmq")

    for manager in managers:
        client = manager.lookup_client
        server = manager.lookup_server
        offload = manager.offload_server
        client = getattr(client, "actual_lookup_client", client)
        for part, name, kind in (
            (server, "pull_socket", zmq.PUSH),
            (client, "pull_socket", zmq.PUSH),
            (offload, "socket", zmq.REQ),
        ):
            with suppress(Exception):
                _end_thread(part, getattr(part, name), kind)
        with suppress(Exception):
            server.running = False
            server.thread.join(30)
        for part in (manager.health_monitor, manager.lmcache_engine):
            with suppress(Exception):
                (getattr(part, "close", None) or part.stop)()
        for part in (client, server, offload):
            still_runs = getattr(part, "thread", None) and part.thread.is_alive()
            if part is not None and not still_runs:
                for socket in _sockets(part):
                    socket.close(linger=0)
    for logger in loggers.values():
        with suppress(Exception):
            logger.shutdown()


def _end_thread(part: Any, socket: Any, kind: int) -> None:
    """End a thread that waits in a socket: send it a message that it cannot parse."""
    zmq: Any = importlib.import_module("zmq")

    if not part.thread.is_alive():
        return
    part.running = False
    with zmq.Context() as context, context.socket(kind) as caller:
        caller.setsockopt(zmq.LINGER, 1000)
        caller.connect(socket.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode())
        caller.send(b"end")
        part.thread.join(30)


def _sockets(part: Any) -> list[Any]:
    """Return the zmq sockets of a client or server of LMCache."""
    holders = [part, getattr(part, "transport", None)]
    single = [
        getattr(holder, name, None)
        for holder in holders
        for name in ("socket", "push_socket", "pull_socket")
    ]
    many = [
        socket
        for holder in holders
        for name in ("sockets", "push_sockets")
        for socket in getattr(holder, name, None) or ()
    ]
    return [socket for socket in (*single, *many) if socket is not None]


ADAPTER = Adapter(
    title="CPU transfer class for LMCache",
    text="Copies between CPU pages and LMCache's chunks; starts each run as in a new process.",
    package="lmcache",
    install=install,
    around=fresh,
)
