# SPDX-License-Identifier: Apache-2.0
"""Faults of the engine's worker: hooks of a step that are left out, called twice, or called in another order."""

from __future__ import annotations

import copy
from typing import Any

from kvconform.engine.lifecycle import Own
from kvconform.refimpl.faulty import connector_of, fault, nothing

try:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorTransferResults as Results,
    )
except ImportError:  # until 0.30
    Results = None


@fault(Own, "step")
def never_flushes(step: Any, life: Own, output: Any) -> Any:
    """Does not tell the connector of preemptions: it goes on reading blocks that are overwritten (B010: there was no such hook)."""
    with connector_of(life, handle_preemptions=nothing):
        return step(life, output)


@fault(Own, "step")
def flushes_with_old_metadata(step: Any, life: Own, output: Any) -> Any:
    """Leaves the metadata bound until the next step's is there."""
    with connector_of(life, clear_connector_metadata=nothing):
        return step(life, output)


@fault(Own, "step")
def starts_no_load_without_tokens(step: Any, life: Own, output: Any) -> Any:
    """Skips start_load_kv in a step without tokens, which may be the only one of an asynchronous load (B056)."""
    if output.total_num_scheduled_tokens:
        return step(life, output)
    with connector_of(life, start_load_kv=nothing):
        return step(life, output)


@fault(Own, "step")
def starts_loads_twice(step: Any, life: Own, output: Any) -> Any:
    """Calls start_load_kv before and after the forward pass."""

    def twice(original: Any, *args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        original(*args, **kwargs)

    with connector_of(life, start_load_kv=twice):
        return step(life, output)


@fault(Own, "step")
def loads_after_the_forward_pass(step: Any, life: Own, output: Any) -> Any:
    """Overlooks that the step has a synchronous load, and starts it after the layers have read its blocks."""
    late = copy.copy(output)
    late.has_sync_kv_loads = False
    return step(life, late)


@fault(Own, "step")
def awaits_no_save_without_tokens(step: Any, life: Own, output: Any) -> Any:
    """Skips wait_for_save in a step without tokens: what was finished in the step before is never stored."""
    if output.total_num_scheduled_tokens:
        return step(life, output)
    with connector_of(life, wait_for_save=nothing):
        return step(life, output)


@fault(Own, "step")
def collects_after_clearing(step: Any, life: Own, output: Any) -> Any:
    """Clears the metadata before it collects the results."""

    def late(original: Any, *args: Any) -> Any:
        life.connector.clear_connector_metadata()
        return original(*args)

    with connector_of(life, get_transfer_results=late):
        return step(life, output)


@fault(Own, "step")
def idle_engine_does_not_ask(step: Any, life: Own, output: Any) -> Any:
    """Collects no results in a step without tokens: a request that waits for its load waits until others come (B054)."""
    if output.total_num_scheduled_tokens:
        return step(life, output)

    def none(original: Any, *args: Any) -> Any:
        return Results() if Results is not None else None

    with connector_of(life, get_transfer_results=none):
        return step(life, output)


@fault(Own, "step")
def collects_before_saving(step: Any, life: Own, output: Any) -> Any:
    """Collects the results of a step before it has waited for the step's saves."""

    def first(original: Any, *args: Any) -> Any:
        found = original(*args)
        life.connector._original.wait_for_save()
        return found

    with connector_of(life, wait_for_save=nothing, get_transfer_results=first):
        return step(life, output)


@fault(Own, "_attention")
def skips_layer_waits(attention: Any, life: Own, name: str) -> None:
    """Does not wait for a layer's load before the layer reads its blocks."""
    with connector_of(life, wait_for_layer_load=nothing):
        attention(life, name)


@fault(Own, "step")
def dummy_batch_calls_layer_hooks(step: Any, life: Own, output: Any) -> Any:
    """Runs a dummy batch between two steps with the connector's hooks on (B122)."""
    for name in life.worker.cache.names:
        life.connector.wait_for_layer_load(name)
    return step(life, output)


@fault(Own, "_attention")
def passes_part_of_a_layer(attention: Any, life: Own, name: str) -> None:
    """Passes a part of the layer's tensor to save_kv_layer."""

    def part(original: Any, layer: str, tensor: Any, *args: Any) -> None:
        original(layer, tensor[1:], *args)

    with connector_of(life, save_kv_layer=part):
        attention(life, name)


@fault(Own, "step")
def always_loads_first(step: Any, life: Own, output: Any) -> Any:
    """Calls start_load_kv before the layers in every step."""
    early = copy.copy(output)
    early.has_sync_kv_loads = True
    return step(life, early)


@fault(Own, "step")
def ends_no_forward(step: Any, life: Own, output: Any) -> Any:
    """Does not say when the forward pass is over."""
    with connector_of(life, finish_forward=nothing):
        return step(life, output)


@fault(Own, "_attention")
def takes_another_path(attention: Any, life: Own, name: str) -> None:
    """Runs the model in another way as soon as a connector is there, and reads the wrong state on it (B031)."""
    attention(life, name)
    life.worker._corruption.setdefault(life.worker.rows[0].state.chain.req, 1)
