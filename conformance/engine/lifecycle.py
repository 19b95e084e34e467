# SPDX-License-Identifier: Apache-2.0
"""Drives the connector's worker half through one step: in code of ours, or in vLLM's own.

The order of the hooks in our own life cycle is that of
vllm/v1/worker/kv_connector_model_runner_mixin.py (V1) and vllm/v1/worker/gpu/kv_connector.py (V2),
which also give the reasons.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Protocol

from vllm.forward_context import get_forward_context, set_forward_context
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

from kvconform.compat.groups import bound_tensors
from kvconform.compat.step import (
    ActiveKVConnector,
    collecting,
    finish_deferred,
    finish_forward,
    finish_step,
    forward_context,
    handle_preemptions,
    has_sync_loads,
    layer_cache,
    maybe_transfer_kv_layer,
    output_without_forward,
    post_forward,
    pre_forward,
    runner_output,
)
from kvconform.compat.vllm_api import KVConnectorOutput, ModelRunnerOutput, kv_transfer_state
from kvconform.engine.fault import EngineFault
from kvconform.engine.worker import Worker


class _InOrder(set[Any]):
    """Copy of a set of ids that is iterated in their order.

    `reported` is the set that the connector returned.
    """

    def __init__(self, reported: set[Any]) -> None:
        super().__init__(reported)
        self.reported = reported

    def __iter__(self) -> Iterator[Any]:
        return iter(sorted(super().__iter__()))


def in_order(result: ModelRunnerOutput) -> ModelRunnerOutput:
    """Return `result` with completion reports that are iterated in the order of their ids.

    vLLM frees blocks while it iterates over these sets, and no run may depend on the hash seed.
    Changes `result`.
    """
    reports = result.kv_connector_output
    for name in ("finished_sending", "finished_recving", "failed_recving", "invalid_block_ids"):
        ids = getattr(reports, name, None)
        if type(ids) is set and len({type(i) for i in ids}) <= 1:
            setattr(reports, name, _InOrder(ids))
    return result


class Lifecycle(Protocol):
    """Driver of one worker and its half of the connector. Changes both, and the worker's cache."""

    def register(self) -> None:
        """Hand the KV tensors to the connector's worker half."""

    def step(self, output: Any) -> ModelRunnerOutput:
        """Run one SchedulerOutput, with or without a forward pass."""


def make_lifecycle(
    kind: str,
    worker: Worker,
    connector: Any,
    config: Any,
    *,
    runner: str,
    speculative: bool,
    graphs: bool,
) -> Lifecycle:
    """Return the life cycle for an engine; `kind` is the engine's name.

    Without a connector, every engine uses the plain step. With `graphs`, steps of one token per
    request replay a graph.
    """
    if connector is None:
        return Plain(worker)
    replays = graphs and not _requires_pieces(connector, config)
    if kind == "reference":
        return Own(
            worker, connector, config, runner=runner, speculative=speculative, replays=replays
        )
    if runner == "v2":
        return VllmV2(worker, connector, config, speculative=speculative, replays=replays)
    return VllmV1(worker, connector, config, speculative=speculative, replays=replays)


def _requires_pieces(connector: Any, config: Any) -> bool:
    """Ask the class, as vllm/config/vllm.py does, whether graphs must leave room for layer hooks.

    Releases before 0.18 do not ask.
    """
    ask = getattr(type(connector), "requires_piecewise_for_cudagraph", None)
    return ask is not None and ask(config.kv_transfer_config.kv_connector_extra_config)


class Plain:
    """The life cycle without a connector."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker

    def register(self) -> None:
        """Do nothing: there is no connector to register with."""

    def step(self, output: Any) -> ModelRunnerOutput:
        """See Lifecycle."""
        worker = self.worker
        worker.poison_fresh()
        if not output.total_num_scheduled_tokens:
            return runner_output()
        worker.forward(worker.attend)
        worker.copy_states()
        worker.draft(worker.attend)
        return worker.sample()


class _WithConnector:
    def __init__(
        self,
        worker: Worker,
        connector: Any,
        config: Any,
        *,
        runner: str = "v1",
        speculative: bool = False,
        replays: bool = False,
    ) -> None:
        self.worker = worker
        self.connector = connector
        self.config = config
        self.runner = runner
        self.speculative = speculative
        self.replays = replays
        layers = self.config.compilation_config.static_forward_context
        self.bound = bound_tensors(worker.cache)
        for name, tensor in self.bound.items():
            layer = layers.setdefault(name, SimpleNamespace(layer_name=name))
            layer.kv_cache = layer_cache(tensor)

    def register(self) -> None:
        self.connector.register_kv_caches(
            dict(zip(self.worker.cache.names, self.worker.cache.tensors, strict=True))
        )
        self.connector.set_host_xfer_buffer_ops(_copy_blocks)

    def _forward(self, attention: Callable[[str], None]) -> None:
        """Run the layers, with `attention` and its hooks, or by a replay without hooks.

        vLLM replays a full graph if every request has one token, be it the last of a prompt of
        which all others were loaded.
        """
        one_token_each = all(row.count == 1 for row in self.worker.rows)
        is_replay = self.replays and one_token_each and not self.speculative
        self.worker.forward(self.worker.attend if is_replay else attention)

    @contextmanager
    def _agent(self) -> Any:
        before = kv_transfer_state._KV_CONNECTOR_AGENT
        kv_transfer_state._KV_CONNECTOR_AGENT = self.connector
        try:
            yield
        finally:
            kv_transfer_state._KV_CONNECTOR_AGENT = before

    @contextmanager
    def _context(self, output: Any) -> Any:
        metadata, mapping = self.worker.attention_metadata()
        with forward_context(
            metadata,
            self.config,
            num_tokens=output.total_num_scheduled_tokens,
            slot_mapping=mapping,
        ):
            yield metadata


def _copy_blocks(*args: Any, **kwargs: Any) -> None:
    """Stand in for the host-buffer copy operation that a worker offers.

    No connector needs it, because the cache itself is in host memory.
    """
    raise RuntimeError("the copy operation was called although the cache is in host memory")


class Own(_WithConnector):
    """The reference life cycle: vLLM's hooks in vLLM's order, for both runner protocols."""

    def step(self, output: Any) -> ModelRunnerOutput:
        """See Lifecycle."""
        worker = self.worker
        connector = self.connector
        with self._agent():
            handle_preemptions(connector, output)
            connector.bind_connector_metadata(output.kv_connector_metadata)
            if not output.total_num_scheduled_tokens:
                if self.runner == "v2":
                    connector.finish_forward()
                with set_forward_context(None, self.config):
                    self._load({})
                return output_without_forward(self._collect(output, defer=False))
            with self._context(output) as metadata:
                arguments = self._load_arguments(output, metadata)
                if has_sync_loads(output):
                    self._load(arguments)
                self._forward(self.attention)
                if self.runner == "v2":
                    connector.finish_forward()
                if not has_sync_loads(output):
                    self._load(arguments)
                defer = self.speculative and self.runner == "v1"
                collected = self._collect(output, defer=defer)
                result = worker.sample()
                if defer:
                    connector.wait_for_save()
                    connector.clear_connector_metadata()
            result.kv_connector_output = collected
            return result

    def _load_arguments(self, output: Any, metadata: Any) -> dict[str, Any]:
        if self.runner == "v1":
            return {}
        return {**_v2_arguments(self.worker, output), "attn_metadata": metadata}

    def _load(self, arguments: dict[str, Any]) -> None:
        self.connector.start_load_kv(get_forward_context(), **arguments)

    def attention(self, name: str) -> None:
        """Run one layer: load, attend, save. Changes the KV cache."""
        metadata = get_forward_context().attn_metadata[name]
        self.connector.wait_for_layer_load(name)
        self.worker.attend(name)
        self.connector.save_kv_layer(name, self.bound[name], metadata)

    def _collect(self, output: Any, *, defer: bool) -> KVConnectorOutput:
        connector = self.connector
        result = KVConnectorOutput()
        if not defer:
            connector.wait_for_save()
        transfers = connector.get_transfer_results(output.finished_req_ids)
        reports = ("finished_sending", "finished_recving", "failed_recving")
        if not all(hasattr(transfers, name) for name in reports):
            raise EngineFault(
                f"get_transfer_results returned {type(transfers).__name__},"
                " which is not transfer results"
            )
        result.finished_sending = transfers.finished_sending or None
        result.finished_recving = transfers.finished_recving or None
        result.failed_recving = transfers.failed_recving
        result.invalid_block_ids = connector.get_block_ids_with_load_errors()
        result.kv_connector_stats = connector.get_kv_connector_stats()
        result.kv_cache_events = connector.get_kv_connector_kv_cache_events()
        result.kv_connector_worker_meta = connector.build_connector_worker_meta()
        if not defer:
            connector.clear_connector_metadata()
        return result


def _v2_arguments(worker: Worker, output: Any) -> dict[str, Any]:
    return {
        "scheduler_output": output,
        "request_state_indices": list(range(len(worker.rows))),
        "request_ids": [row.state.chain.req for row in worker.rows],
        "num_tokens": output.total_num_scheduled_tokens,
    }


class VllmV1(_WithConnector):
    """vLLM's KVConnectorModelRunnerMixin and its decorator for the layer hooks."""

    def step(self, output: Any) -> ModelRunnerOutput:
        """See Lifecycle."""
        worker = self.worker
        with self._agent():
            handle_preemptions(self.connector, output)
            if not output.total_num_scheduled_tokens:
                return KVConnectorModelRunnerMixin.kv_connector_no_forward(output, self.config)
            attention = _decorated(worker)
            with (
                self._context(output),
                collecting(output, defer=self.speculative) as collected,
            ):
                self._forward(attention)
            worker.copy_states()
            with self._context(output):
                worker.draft(attention)
            result = worker.sample()
            if self.speculative:
                finish_deferred()
            result.kv_connector_output = collected
            return result


def _decorated(worker: Worker) -> Callable[[str], None]:
    """Return what runs a layer: with vLLM's decorator, which recurrent layers do not have."""
    decorated = maybe_transfer_kv_layer(worker.attend)

    def attention(layer_name: str) -> None:
        run = worker.attend if worker.is_recurrent(layer_name) else decorated
        run(layer_name)

    return attention


class VllmV2(_WithConnector):
    """vLLM's ActiveKVConnector (Model Runner V2)."""

    active: ActiveKVConnector

    def register(self) -> None:
        """See Lifecycle."""
        with self._agent():
            self.active = ActiveKVConnector(
                self.config,
                dict(zip(self.worker.cache.names, self.worker.cache.tensors, strict=True)),
            )

    def step(self, output: Any) -> ModelRunnerOutput:
        """See Lifecycle."""
        worker = self.worker
        with self._agent():
            if not output.total_num_scheduled_tokens:
                return self.active.no_forward(output)
            arguments = _v2_arguments(worker, output)
            batch = SimpleNamespace(
                idx_mapping=arguments["request_state_indices"],
                req_ids=arguments["request_ids"],
                num_tokens=arguments["num_tokens"],
            )
            attention = _decorated(worker)
            with self._context(output) as metadata:
                pre_forward(
                    self.active, output, batch, metadata, {**arguments, "attn_metadata": metadata}
                )
                self._forward(attention)
                finish_forward(self.active)
                worker.copy_states()
                worker.draft(attention)
                collected = post_forward(self.active, output, defer=self.speculative)
            result = worker.sample()
            if self.speculative:
                finish_step(self.active)
            result.kv_connector_output = collected
            return result
