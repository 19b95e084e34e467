# SPDX-License-Identifier: Apache-2.0
"""Starts the two halves of a connector, and records how their start and shutdown went."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

from vllm.config import set_current_vllm_config

from kvconform.compat import vllm_api
from kvconform.compat.vllm_api import KVConnectorFactory, KVConnectorRole
from kvconform.config.target import Target
from kvconform.contract.events import lifecycle, raised
from kvconform.contract.trace import Trace
from kvconform.engine.ranks import Rank, in_place
from kvconform.engine.stand_ins import NoWorkerHalf, RemoteHalf
from kvconform.errors import ordinary
from kvconform.kv import device
from kvconform.kv.cache import PagedCache
from kvconform.observe.digest import pickle_round_trip
from kvconform.observe.probe import wrap_instance_hooks
from kvconform.observe.static_checks import inspect_class
from kvconform.process import watchdog


@contextmanager
def noted(trace: Trace, op: str, connector: type | None = None) -> Iterator[None]:
    """Emit engine.lifecycle, with the error that the body raises, if any.

    Constructors have the time limit of a hook.
    """
    event = trace.emit("engine.lifecycle", **lifecycle(op))
    try:
        with watchdog.hook("__init__" if op == "start" else op):
            yield
    except watchdog.HookTimeout as error:
        if op == "start":  # a hanging `shutdown` is recorded as a hook
            trace.amend(event, **raised(error))
        raise
    except BaseException as error:
        shown = ordinary(error)
        if shown is not error:
            shown = shown.with_traceback(error.__traceback__)
        trace.amend(event, **raised(shown, connector))
        if shown is not error:
            raise shown from error
        raise


def refused(trace: Trace, cls: type, error: Exception, config: Any = None) -> None:
    """Record that a connector does not start because vLLM refuses its class.

    vLLM looks at the class before it constructs it. Emits the static checks of the class; without a
    `config` only the one of its constructor.
    """
    found = inspect_class(cls, {}, config)
    if config is None:
        found = islice(found, 1)
    for item, ok, detail in found:
        trace.emit("api", item=item, ok=ok, detail=detail)
    trace.emit("engine.lifecycle", **lifecycle("start", error=error, connector=cls))


def stand_ins(target: Target, relation: str) -> tuple[type, ...]:
    """Return our classes whose hooks are recorded in place of the connector's own.

    `start_worker_half` may return instances of them.
    """
    if target.half == "scheduler":
        return (NoWorkerHalf,)
    return (RemoteHalf,) if relation == "second-process" else ()


def start_worker_half(
    config: Any, cache_config: Any, cache: PagedCache, target: Target, *, relation: str
) -> Any:
    """Return the connector's worker half, constructed as in a vLLM worker process.

    The parallel groups and the current configuration are set. With relation `second-process` the
    half lives in a forked process. For a target with only a scheduler half, it is a stand-in that
    does nothing.
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


def introduce(scheduler_half: Any, ranks: list[Rank], *, pickled: bool) -> int | None:
    """Do what the engine core does between the two halves before the first request.

    Passes the worker halves' handshake metadata to the scheduler half; `pickled`, or of several
    ranks, as copies that went through pickle, unless it does not. Returns the number of
    completion reports per transfer that the connector announces; None: one from each rank.
    """
    wrap_instance_hooks(scheduler_half)
    found = {}
    for rank in sorted(ranks, key=lambda rank: rank.place.rank):
        with in_place(rank.place):
            said = rank.half.get_handshake_metadata()
        if said is not None and (pickled or len(ranks) > 1):
            said = pickle_round_trip(said)[0] or said
        found[rank.place.pp, rank.place.tp] = said
    scheduler_half.set_xfer_handshake_metadata_pp_aware(
        {at: said for at, said in found.items() if said is not None}
    )
    count: int | None = scheduler_half.get_finished_count()
    return count


def note_engine_ids(trace: Trace, given: str | None, config: Any, ranks: list[Rank]) -> None:
    """Emit engine.id for each half: whether its configuration still has the engine id `given`."""
    for rank in ranks:
        kept = rank.config.kv_transfer_config.engine_id == given
        trace.emit("engine.id", rank=rank.place.rank, half="worker", kept=kept)
    kept = config.kv_transfer_config.engine_id == given
    trace.emit("engine.id", rank=0, half="scheduler", kept=kept)
