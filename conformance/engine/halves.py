# SPDX-License-Identifier: Apache-2.0
"""Starts and ends the two halves of a connector, and notes how that went."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm.config import set_current_vllm_config

from kvconform.compat import vllm_api
from kvconform.compat.vllm_api import KVConnectorFactory, KVConnectorRole
from kvconform.config.target import Target
from kvconform.contract.trace import Trace
from kvconform.engine.ranks import Rank, in_place
from kvconform.engine.stand_ins import NoWorkerHalf, RemoteHalf
from kvconform.errors import one_line, ordinary
from kvconform.kv import device
from kvconform.kv.cache import PagedCache
from kvconform.observe.probe import wrap_instance_hooks
from kvconform.observe.static_checks import inspect_class
from kvconform.process import watchdog


@contextmanager
def noted(trace: Trace, op: str) -> Iterator[None]:
    """Emit engine.lifecycle with the error, if any, that the connector raised; constructors have the time limit of a hook."""
    event = trace.emit("engine.lifecycle", op=op, pid=0, error=None)
    try:
        with watchdog.hook("__init__" if op == "start" else op):
            yield
    except watchdog.HookTimeout as error:
        if op == "start":  # a shutdown that hangs is seen as the hook that it is
            trace.amend(event, error=one_line(error))
        raise
    except BaseException as error:
        shown = ordinary(error)
        trace.amend(event, error=one_line(shown))
        if shown is not error:
            raise shown.with_traceback(
                error.__traceback__
            ) from error  # whose fault it is goes by the traceback
        raise


def refused(trace: Trace, cls: type, error: Exception, config: Any = None) -> None:
    """VLLM looks at the class before it constructs it: note that it does not start, and whether its constructor, or what the class says
    once there is a `config`, is why.
    """
    found = inspect_class(cls, {}, config)
    for item, ok, detail in [next(found)] if config is None else found:
        trace.emit("api", item=item, ok=ok, detail=detail)
    trace.emit("engine.lifecycle", op="start", pid=0, error=one_line(error))


def stand_ins(target: Target, relation: str) -> tuple[type, ...]:
    """Classes of ours whose hooks are recorded in place of the connector's own: what `start_worker_half` may return."""
    return (
        (NoWorkerHalf,)
        if target.half == "scheduler"
        else (RemoteHalf,)
        if relation == "second-process"
        else ()
    )


def start_worker_half(
    config: Any, cache_config: Any, cache: PagedCache, target: Target, *, relation: str
) -> Any:
    """The connector's worker half in the surroundings of a vLLM worker process: parallel groups and current configuration are set.

    With relation `second-process` it lives in a forked process; where the target's half is `scheduler` a stand-in does nothing.
    """
    vllm_api.init_parallel_state()
    if target.half == "scheduler":
        return NoWorkerHalf(config, KVConnectorRole.WORKER, cache_config)

    def create() -> Any:
        with set_current_vllm_config(config), device.current.calling():
            return KVConnectorFactory.create_connector(
                config=config, role=KVConnectorRole.WORKER, kv_cache_config=cache_config
            )

    half = RemoteHalf(create, cache, config) if relation == "second-process" else create()
    wrap_instance_hooks(half)
    return half


def introduce(scheduler_half: Any, ranks: list[Rank]) -> int | None:
    """What the engine core does between the halves before the first request: handshake metadata, number of completion reports.

    Returns that number; None is one report of each rank.
    """
    wrap_instance_hooks(scheduler_half)
    found = {}
    for rank in sorted(ranks, key=lambda rank: rank.place.rank):
        with in_place(rank.place):
            found[rank.place.pp, rank.place.tp] = rank.half.get_handshake_metadata()
    scheduler_half.set_xfer_handshake_metadata_pp_aware(
        {at: said for at, said in found.items() if said is not None}
    )
    count: int | None = scheduler_half.get_finished_count()
    return count


def note_engine_ids(trace: Trace, given: str | None, config: Any, ranks: list[Rank]) -> None:
    """Whether every half's configuration still has the engine id that it was given. Emits engine.id, once per half."""
    for rank in ranks:
        trace.emit(
            "engine.id",
            rank=rank.place.rank,
            half="worker",
            kept=rank.config.kv_transfer_config.engine_id == given,
        )
    trace.emit(
        "engine.id", rank=0, half="scheduler", kept=config.kv_transfer_config.engine_id == given
    )
