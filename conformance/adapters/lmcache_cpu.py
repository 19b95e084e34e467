# SPDX-License-Identifier: Apache-2.0
"""Adapter `lmcache-cpu`: LMCache's connector on a machine without an accelerator.

LMCache moves KV between the engine's pages and its own chunks through a class per accelerator, and has none for CPU tensors: it says "No
supported cpu connector found" and goes on without a cache. This gives it one; everything else is LMCache's own code.

LMCache also keeps its configuration, its engine and its threads in the process, whose end is their end in production; here one process
does many runs. `around` lets each begin as in a new process. What is left over when a run's connector was shut down was judged by then.
"""

from __future__ import annotations

import gc
import importlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from kvconform.adapters.registry import Adapter

_started: list[Any] = []
"""The managers of LMCache that were made and not ended by the adapter."""


def install() -> None:
    """Changes lmcache.v1.gpu_connector.CreateGPUConnector, has one LMCacheEngine per rank, and notes every LMCacheManager that is made."""
    from lmcache.utils import EngineType
    from lmcache.v1 import gpu_connector
    from lmcache.v1.cache_engine import LMCacheEngineBuilder
    from lmcache.v1.manager import LMCacheManager

    from kvconform.adapters import _lmcache_transfer as transfer

    theirs, construct = gpu_connector.CreateGPUConnector, LMCacheManager.__init__

    def create(config: Any, metadata: Any, engine: Any, layout_hints: Any = None) -> Any:
        if engine != EngineType.VLLM:
            return theirs(config, metadata, engine, layout_hints)
        return (transfer.LayerwiseTransfer if config.use_layerwise else transfer.Transfer)(metadata)

    def noted(self: Any, *args: Any, **kwargs: Any) -> None:
        _started.append(self)
        construct(self, *args, **kwargs)

    gpu_connector.CreateGPUConnector = create
    LMCacheManager.__init__ = noted
    for name in ("get", "get_or_create", "destroy"):
        setattr(LMCacheEngineBuilder, name, _by_rank(getattr(LMCacheEngineBuilder, name)))


def _by_rank(method: Callable[..., Any]) -> Callable[..., Any]:
    """The engines' names are looked up per process, and here all ranks are in one."""

    def call(instance_id: str, *args: Any, **kwargs: Any) -> Any:
        from vllm.distributed.parallel_state import get_pp_group, get_tp_group

        rank = get_pp_group().rank_in_group, get_tp_group().rank_in_group
        return method(instance_id if rank == (0, 0) else f"{instance_id}-{rank}", *args, **kwargs)

    return call


@contextmanager
def fresh() -> Iterator[None]:
    """LMCache as in a new process. May be entered inside itself (a run inside a run)."""
    from lmcache.integration.vllm import utils, vllm_v1_adapter
    from lmcache.v1.cache_engine import LMCacheEngineBuilder

    builder = LMCacheEngineBuilder
    loggers: dict[str, Any] = builder._stat_loggers
    tables: list[dict[str, Any]] = [
        builder._instances,
        builder._cfgs,
        builder._metadatas,
        loggers,
        vllm_v1_adapter.tmp_disagg_tracker,
    ]
    kept, config, count, collecting = (
        [dict(table) for table in tables],
        utils._config_instance,
        len(_started),
        gc.isenabled(),
    )
    for table in tables:
        table.clear()
    utils._config_instance = None
    try:
        yield
    finally:
        left, _started[count:] = _started[count:], []
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
    """Stop the threads and close the sockets that a connector left behind; what its own shutdown has ended is left alone.

    In a thread, for LMCache's threads look every second whether they shall end. Its own `stop_services` would not do: it closes the engine
    that has the name now, which is the next run's, closes sockets in which another thread waits (libzmq may abort the process), and ends
    the zmq context of the whole process.
    """
    zmq: Any = importlib.import_module("zmq")

    for manager in managers:
        client, server, offload = (
            manager.lookup_client,
            manager.lookup_server,
            manager.offload_server,
        )
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
            if part is not None and not (getattr(part, "thread", None) and part.thread.is_alive()):
                for socket in _sockets(part):
                    socket.close(linger=0)
    for logger in loggers.values():
        with suppress(Exception):
            logger.shutdown()


def _end_thread(part: Any, socket: Any, kind: int) -> None:
    """Let a thread that waits in a socket hear something that it cannot read, and then end."""
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
    """The zmq sockets of a client or server of LMCache."""
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
    text="LMCache copies between CPU pages and its chunks (its own classes want an accelerator); each run finds it as in a new process.",
    package="lmcache",
    install=install,
    around=fresh,
)
