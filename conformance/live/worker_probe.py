# SPDX-License-Identifier: Apache-2.0
"""Watches one vLLM worker.

It records the worker's steps, the layer hooks of the connector's worker half, and the KV memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kvconform.contract.trace import Trace
from kvconform.live.blocks import WATCHED, BlockOracle, Blocks
from kvconform.live.book import Book
from kvconform.live.state import StepNote, note_of, shape_of
from kvconform.observe.call import Call
from kvconform.observe.metadata import MetadataObserver
from kvconform.observe.observer import emit_layer
from kvconform.observe.probe import Probe


@dataclass(frozen=True)
class Wishes:
    """How a worker's KV is watched. `poison`: fill newly allocated blocks with poison."""

    poison: bool = True


class WorkerProbe:
    """The probe of one vLLM worker. Emits events, and writes only poison into fresh blocks.

    `alone`: the scheduler is in another process.
    """

    def __init__(
        self, trace: Trace, probe: Probe, worker: Any, book: Book, wishes: Wishes, *, alone: bool
    ) -> None:
        self.trace = trace
        self.probe = probe
        self.rank = int(getattr(worker, "rank", 0))
        parallel = worker.vllm_config.parallel_config
        self.ranks = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
        trace.rank = self.rank if self.ranks > 1 else None
        self.metadata: MetadataObserver | None = None
        if alone:
            self.metadata = MetadataObserver(trace)
            self.metadata.watch_worker(probe)
        self.tensors = registered(worker)
        self.oracle = self._oracle(worker, book, wishes)
        for hook in ("wait_for_layer_load", "save_kv_layer"):
            probe.on(hook, after=self._layer_hook)
        self._listen()
        self.note: StepNote | None = None
        self.forward = False

    def _oracle(self, worker: Any, book: Book, wishes: Wishes) -> BlockOracle | None:
        """Return the oracle of the worker's KV, and emit live.kv.

        None unless there is one group of layers, whose tensors have all blocks along one axis.
        """
        config = worker.model_runner.kv_cache_config
        shape = shape_of(config)
        tensors = [
            by_block(self.tensors[name], shape.num_blocks)
            for name in shape.names
            if name in self.tensors
        ]
        known = [tensor for tensor in tensors if tensor is not None]
        usable = (
            len(shape.groups) == 1
            and len(known) == len(shape.names) > 0
            and len({(t.shape, t.dtype) for t in known}) == 1
        )
        size = sum(t.numel() * t.element_size() for t in known)
        blocks = Blocks(known, shape.block_size) if usable else None
        poison = wishes.poison and usable and worker.vllm_config.kv_transfer_config is not None
        self.trace.emit(
            "live.kv",
            rank=self.rank,
            watched=blocks is not None and blocks.shadow is not None,
            compared=usable,
            poisoned=poison,
            blocks=shape.num_blocks,
            size=shape.block_size,
            layers=len(shape.names),
            bytes=min(size, WATCHED * 1024),
        )
        return None if blocks is None else BlockOracle(self.trace, blocks, book, poison=poison)

    def _listen(self) -> None:
        """Have the oracle called around the hooks of the worker half."""
        oracle = self.oracle
        on = self.probe.on
        if oracle is None:
            return
        # The model runner has taken the step over, which may clear blocks, and no load has begun.
        on("bind_connector_metadata", before=lambda call: oracle.poison_fresh())
        on("start_load_kv", after=lambda call: oracle.check(call.hook, also=oracle.note.written))
        on("wait_for_layer_load", after=lambda call: oracle.read(self.layer(call)))
        on(
            "get_transfer_results",
            after=lambda call: oracle.reports(call.result) if call.legal else None,
        )
        on(
            "get_block_ids_with_load_errors",
            after=lambda call: oracle.errors(set(call.result or ())) if call.legal else None,
        )

    def layer(self, call: Call) -> int:
        """Return the number of the layer that is passed to a layer hook."""
        return list(self.tensors).index(call.arg(0, "layer_name"))

    def _layer_hook(self, call: Call) -> None:
        """Emit the event of a layer hook."""
        emit_layer(self.trace, call, self.tensors)

    # -- steps
    def begin(self, output: Any) -> None:
        """Begin a step, when the worker receives it. A step without a note is not watched."""
        Probe.active = self.probe
        self.note = note_of(output)
        if self.note is None:
            return
        self.trace.step = self.note.step
        if self.metadata is not None:
            self.metadata.current_digest = self.note.digest
        self.forward = output.total_num_scheduled_tokens > 0
        self.trace.emit("worker.step_begin")
        self.first = len(self.trace.events)
        if self.oracle is not None:
            self.oracle.begin(self.note)

    def end(self, *, failed: bool = False) -> None:
        """End the step, when the worker has completed it. `failed`: it raised an exception."""
        if self.note is None:
            return
        self.note = None
        if self.oracle is not None and not failed:
            self.oracle.end()
        ranks = [self.rank] if self.ranks > 1 and self._bound() else []
        self.trace.emit("worker.step_end", forward=self.forward, ranks=ranks)

    def _bound(self) -> bool:
        """Return whether the connector's metadata was bound in this step."""
        return any(
            e["kind"] == "hook.called" and e["hook"] == "bind_connector_metadata"
            for e in self.trace.events[self.first :]
        )


def registered(worker: Any) -> dict[str, torch.Tensor]:
    """Return the KV tensors of a worker by layer name."""
    layers = worker.vllm_config.compilation_config.static_forward_context
    names = [
        name
        for group in worker.model_runner.kv_cache_config.kv_cache_groups
        for name in group.layer_names
    ]
    found = {name: getattr(layers.get(name), "kv_cache", None) for name in names}
    return {name: tensor for name, tensor in found.items() if isinstance(tensor, torch.Tensor)}


def by_block(tensor: torch.Tensor, blocks: int) -> torch.Tensor | None:
    """Return a view with the blocks along the first axis; None if no axis has that length."""
    axis = next((n for n, length in enumerate(tensor.shape) if length == blocks), None)
    return None if axis is None else tensor.movedim(axis, 0)
