# SPDX-License-Identifier: Apache-2.0
"""Builds an engine in vLLM's order: worker halves of the connector, KV caches, scheduler."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vllm.config import set_current_vllm_config

from kvconform.compat.groups import of_scheduler, registered, resolve_hits, resolve_layout
from kvconform.compat.kernel_blocks import add_layers
from kvconform.compat.local_hits import LocalHits
from kvconform.config.target import Target
from kvconform.contract.case import Config, Inspection, Variant
from kvconform.contract.trace import Trace
from kvconform.engine.batch import Batch, Info
from kvconform.engine.configs import build_cache_config, build_config, kv_dtype, run_id
from kvconform.engine.engine import Engine, EngineParts
from kvconform.engine.executor import Executor
from kvconform.engine.halves import introduce, note_engine_ids, noted, refused, start_worker_half
from kvconform.engine.lifecycle import make_lifecycle
from kvconform.engine.ranks import (
    Follower,
    Place,
    Rank,
    Ranks,
    config_of,
    layers_of,
    places,
    shard,
    widen,
)
from kvconform.engine.schedulers import build_scheduler
from kvconform.engine.view import EngineView
from kvconform.engine.worker import Worker
from kvconform.kv.cache import UNLIKE, PagedCache, groups_of
from kvconform.kv.oracle import Oracle
from kvconform.kv.provenance import Memory, Registry
from kvconform.observe.ledger import Ledger, RankReports
from kvconform.observe.observer import Observer
from kvconform.observe.probe import Probe
from kvconform.observe.relay import Relay
from kvconform.observe.static_checks import (
    bound,
    constructor,
    inspect_class,
    inspect_engine,
    inspect_instance,
)
from kvconform.observe.statistics import Statistics
from kvconform.observe.telemetry import HashBook, Telemetry, Watch

Shard = tuple[PagedCache, Registry]


def build(
    variant: Variant,
    target: Target,
    trace: Trace,
    registry: Registry,
    memory: Memory,
    info: Callable[[str], Info],
    tmp: Path,
    *,
    relation: str,
) -> Engine:
    """Build the engine of a run, with the connector of `target` unless it is the baseline run.

    `info(req_id)` returns what the harness knows of a live request, or raises KeyError. Emits
    events of the start; raises what vLLM or the connector raises.
    """
    connected = relation != "no-connector" and target.connector is not None
    inspection = variant.case.inspect if connected else None
    probe = Probe(trace)
    Probe.active = probe
    config, shards = _configure(variant, target, trace, registry, tmp, connected=connected)
    given_id = config.kv_transfer_config.engine_id if connected else None
    ranks = Ranks(_ranks(config, shards, variant.case.config), trace)
    view = EngineView(info, ranks)
    hashes = HashBook(variant.hash_size, view.identity)
    watch = Watch(trace, probe, hashes, view.generation)
    telemetry = Telemetry(
        trace, probe, hashes, config, groups=max(1, len(variant.case.config.groups))
    )
    statistics = Statistics(trace, probe, config, alone=telemetry.is_alone)
    # MultiConnector relays what its children give; the reports of several ranks are joined.
    siblings = bool(variant.case.config.multi)
    alone = len(ranks.members) == 1 and not siblings
    is_pickled = relation == "pickled-metadata" or variant.late
    relay = Relay(trace, probe, pickled=is_pickled) if alone else None
    if connected:
        try:
            with noted(trace, "start", target.resolve()):
                _start_worker_halves(ranks, target, relation)
        except Exception:
            if inspection is not None:
                _inspect_constructor(trace, variant, target, tmp)
            raise
    if inspection is not None:
        _inspect_classes(trace, variant, target, ranks.leader, tmp, inspection)
    _build_workers(variant, trace, view, memory, pickled=is_pickled)
    with noted(trace, "start", target.resolve()) if connected else nullcontext():
        view.scheduler = build_scheduler(
            variant, config, of_scheduler(ranks.first.cache_config), with_connector=connected
        )
    reports = None
    if connected:
        connector = view.scheduler.connector
        count = introduce(connector, ranks.members, pickled=is_pickled)
        note_engine_ids(trace, given_id, config, ranks.members)
        if inspection is not None:
            _inspect_instance(trace, connector)
        if len(ranks.members) > 1:
            reports = RankReports(trace, connector, len(ranks.members), count, siblings=siblings)
    observer = Observer(trace, probe, memory, view, private=(str(tmp), run_id(tmp)))
    if len(variant.case.config.groups) > 1:  # one group's hit cannot diverge
        observer.local_hits = LocalHits(view.scheduler.kv_cache_manager)
    ledger = Ledger(trace, view, observer, is_async=variant.scheduling == "async")
    executor = Executor(
        variant,
        trace,
        view,
        observer,
        ledger,
        reports=reports,
        pickled=is_pickled,
    )
    executor.listen(probe)
    return Engine(
        EngineParts(
            variant,
            trace,
            probe,
            view.scheduler,
            view,
            executor,
            observer,
            ledger,
            watch,
            telemetry,
            statistics,
            relay,
        )
    )


def _configure(
    variant: Variant,
    target: Target,
    trace: Trace,
    registry: Registry,
    tmp: Path,
    *,
    connected: bool,
) -> tuple[Any, list[tuple[Place, Shard]]]:
    """Return the VllmConfig, and the place, cache and registry of each rank."""
    settings = variant.case.config
    config = None
    try:
        config = build_config(variant, target, tmp, with_connector=connected)
        layout = resolve_layout(config, settings.layout)
    except Exception as error:
        if connected:
            refused(trace, target.resolve(), error, config)
        raise
    groups = groups_of(
        settings.groups,
        layers=registry.book.layers,
        block_size=variant.block_size,
        heads=registry.book.heads,
        window=settings.window,
        narrow=settings.narrow_layer if layout in UNLIKE else None,
    )
    size = (settings.num_blocks, variant.block_size)
    layers = (settings.layer_numbers, settings.hidden_layers)
    kind = (settings.kernel_block_size, kv_dtype(settings))
    found = [
        (place, shard(registry, place, *size, layout, *layers, groups, *kind))
        for place in places(settings, with_connector=connected)
    ]
    for _, (cache, _) in found:
        cache.hash_size = variant.hash_size
        cache.retention_interval = settings.retention_interval
        cache.drafter = len(cache.names) - 1 if settings.drafter else None
        cache.drafts = settings.spec_tokens
    return config, found


def _add_experts(config: Any, settings: Config, place: Place) -> None:
    """Register a layer without KV per number of the rank's stage that no layer with KV has.

    Mixtures of experts are such layers. vLLM registers them with those that have KV.
    """
    layers = config.compilation_config.static_forward_context
    for number in {*layers_of(place, settings.hidden_layers)} - {*settings.layer_numbers}:
        name = f"model.layers.{number}.mlp.experts"
        layers[name] = SimpleNamespace(layer_name=name)


def _ranks(config: Any, shards: list[tuple[Place, Shard]], settings: Config) -> list[Rank]:
    """Return the ranks, without worker and half. Writes their number into `config`."""
    leading, (cache, _) = shards[-1]
    leading_config = build_cache_config(cache)
    widen(config, leading)
    layers = leading_config.kv_cache_groups[0].layer_names
    ranks = []
    for place, (cache, registry) in shards:
        cache_config = leading_config if cache.names == layers else build_cache_config(cache)
        own = config_of(config, place)
        _add_experts(own, settings, place)
        if cache.kernel_block_size is not None:
            add_layers(own, cache.names, cache.kernel_block_size)
        ranks.append(Rank(place, cache, registry, own, cache_config))
    resolve_hits(config, [leading_config, *(rank.cache_config for rank in ranks)])
    return ranks


def _start_worker_halves(ranks: Ranks, target: Target, relation: str) -> None:
    for rank in ranks.members:
        with ranks.driving(rank):
            rank.half = start_worker_half(
                rank.config, rank.cache_config, rank.cache, target, relation=relation
            )


def _inspect_constructor(trace: Trace, variant: Variant, target: Target, tmp: Path) -> None:
    """Emit why vLLM cannot construct the connector's class, if that is the reason."""
    item, ok, detail = constructor(target.resolve(), target.options(tmp, variant.block_size))
    if not ok:
        trace.emit("api", item=item, ok=ok, detail=detail)


def _inspect_classes(
    trace: Trace,
    variant: Variant,
    target: Target,
    leader: Rank,
    tmp: Path,
    inspection: Inspection,
) -> None:
    """Emit the static checks of the connector's class and, on engine vllm, of vLLM itself."""
    options = target.options(tmp, variant.block_size)
    for item, ok, detail in inspect_class(target.resolve(), options, leader.config):
        trace.emit("api", item=item, ok=ok, detail=detail)
    if variant.engine == "vllm":
        child = inspection.child_registered_as
        for item, ok, detail in inspect_engine(leader.config, leader.cache_config, child):
            trace.emit("engine.api", item=item, ok=ok, detail=detail)
    # The pool is asked for before the KV tensors are allocated.
    if hasattr(leader.half, "get_mem_pool_context"):
        leader.half.get_mem_pool_context()


def _inspect_instance(trace: Trace, connector: Any) -> None:
    """Emit the checks of the scheduler half's instance, and of what was bound to it."""
    called = {
        event["hook"]
        for event in trace.events
        if event["kind"] == "hook.called" and event["half"] == "scheduler"
    }
    for item, ok, detail in (*inspect_instance(connector), bound(connector, called)):
        trace.emit("api", item=item, ok=ok, detail=detail)


def _build_workers(
    variant: Variant, trace: Trace, view: EngineView, memory: Memory, *, pickled: bool
) -> None:
    """Give each rank its oracle, worker and lifecycle, and register the KV caches.

    `pickled`: the workers get copies of what the scheduler puts out, as several ranks do.
    """
    settings = variant.case.config
    ranks = view.ranks
    in_process = not pickled and len(ranks.members) == 1
    batch = view.batch = Batch(
        variant.block_size,
        view.incarnation,
        ranks.leader.cache.groups,
        extends_lists=in_process and variant.runner == "v1",
    )
    for rank in ranks.members:
        oracle = Oracle(rank.cache, rank.registry, trace, view.held_blocks)
        kind = Worker if rank is ranks.leader else Follower
        rank.worker = kind(rank.cache, rank.registry, trace, oracle, batch, memory)
        rank.lifecycle = make_lifecycle(
            variant.engine,
            rank.worker,
            rank.half,
            rank.config,
            runner=variant.runner,
            speculative=settings.spec_tokens > 0,
            graphs=settings.graphs,
        )
        with set_current_vllm_config(rank.config), ranks.driving(rank):
            rank.lifecycle.register()
        trace.emit(
            "kv.registered",
            **registered(rank.cache, rank.config, rank.cache_config, settings.layout),
        )
    for rank in ranks.members[:-1]:
        assert isinstance(rank.worker, Follower)
        rank.worker.leader = ranks.leader.worker
