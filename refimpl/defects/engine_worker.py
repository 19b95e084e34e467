# SPDX-License-Identifier: Apache-2.0
"""Faults of the engine's worker: hooks left out, called twice, out of order, or changed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from kvconform.refimpl.defects import targets
from kvconform.refimpl.faulty import connector_of, skipped, twice, with_arguments

try:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorTransferResults as Results,
    )
except ImportError:  # until 0.30
    Results = None


def _without_tokens(life: Any, output: Any) -> bool:
    return not output.total_num_scheduled_tokens


def _no_results(original: Any, *args: Any) -> Any:
    """Change of get_transfer_results: return that nothing has finished."""
    return Results() if Results is not None else None


def _with_sync_loads(flag: bool) -> Callable[[Any, Any], tuple[Any, Any]]:
    """Return a change of a step's arguments: whether its output has synchronous loads."""

    def change(life: Any, output: Any) -> tuple[Any, Any]:
        changed = copy.copy(output)
        changed.has_sync_kv_loads = flag
        return life, changed

    return change


never_flushes = targets.STEP.during(handle_preemptions=skipped)
"""Skip handle_preemptions: the connector goes on reading blocks that are overwritten (B010)."""

flushes_with_old_metadata = targets.STEP.during(clear_connector_metadata=skipped)
"""Leave the metadata bound until the next step binds its own."""

starts_no_load_without_tokens = targets.STEP.during(when=_without_tokens, start_load_kv=skipped)
"""Skip start_load_kv in a step without tokens, perhaps an asynchronous load's only step (B056)."""

starts_loads_twice = targets.STEP.during(start_load_kv=twice)
"""Call start_load_kv two times in a step."""

ends_no_forward = targets.STEP.during(finish_forward=skipped)
"""Do not report the end of the forward pass."""

awaits_no_save_without_tokens = targets.STEP.during(when=_without_tokens, wait_for_save=skipped)
"""Skip wait_for_save in a step without tokens: what the step before finished is never stored."""

idle_engine_does_not_ask = targets.STEP.during(
    when=_without_tokens, get_transfer_results=_no_results
)
"""Collect no results in a step without tokens.

A request that waits for its load then waits until other requests come (B054).
"""

skips_layer_waits = targets.ATTENTION.during(wait_for_layer_load=skipped)
"""Do not wait for a layer's load before the layer reads its blocks."""

passes_part_of_a_layer = targets.ATTENTION.during(
    save_kv_layer=with_arguments(lambda layer, kv, *others: (layer, kv[1:], *others))
)
"""Pass a part of the layer's tensor to save_kv_layer."""

loads_after_the_forward_pass = targets.STEP.replaced_by(with_arguments(_with_sync_loads(False)))
"""Overlook that the step has a synchronous load, and start it after the layers have read."""

always_loads_first = targets.STEP.replaced_by(with_arguments(_with_sync_loads(True)))
"""Call start_load_kv before the layers in every step."""


@targets.STEP.before
def dummy_batch_calls_layer_hooks(life: Any, output: Any) -> None:
    """Run a dummy batch between two steps with the connector's hooks on (B122)."""
    for name in life.worker.cache.names:
        life.connector.wait_for_layer_load(name)


@targets.STEP.replaced_by
def collects_after_clearing(step: Any, life: Any, output: Any) -> Any:
    """Clear the metadata before the results are collected."""

    def late(original: Any, *args: Any) -> Any:
        life.connector.clear_connector_metadata()
        return original(*args)

    with connector_of(life, get_transfer_results=late):
        return step(life, output)


@targets.STEP.replaced_by
def collects_before_saving(step: Any, life: Any, output: Any) -> Any:
    """Collect the results of a step before waiting for its saves."""
    connector = life.connector

    def first(original: Any, *args: Any) -> Any:
        found = original(*args)
        connector.wait_for_save()
        return found

    with connector_of(life, wait_for_save=skipped, get_transfer_results=first):
        return step(life, output)


@targets.STEP.replaced_by
def loses_reports_without_tokens(step: Any, life: Any, output: Any) -> Any:
    """Drop what the worker half reports in a step without tokens, as an idle engine's output."""
    result = step(life, output)
    if _without_tokens(life, output):
        result = copy.copy(result)
        result.kv_connector_output = None
    return result


@targets.STEP.replaced_by
def binds_nothing_without_tokens(step: Any, life: Any, output: Any) -> Any:
    """Pass None for the metadata of a step without tokens, as a dummy step's."""
    if _without_tokens(life, output):
        output = copy.copy(output)
        output.kv_connector_metadata = None
    return step(life, output)


@targets.ATTENTION.after
def takes_another_path(_: None, life: Any, name: str) -> None:
    """Run the model on another path if there is a connector, and read the wrong state (B031)."""
    life.worker._corruption.setdefault(life.worker.rows[0].state.chain.req, 1)
