# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for a connector's worker half.

`RemoteHalf` stands for a worker half in another process, as with vLLM's multi-process executor:
only objects that pickle cross over. The child is forked, so it starts in milliseconds. From then
on it has its own copy of all module state. The KV tensors are in shared memory.

`NoWorkerHalf` stands for a worker half that cannot run here. The scheduler half is judged alone.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from vllm.forward_context import set_forward_context

from kvconform.compat.groups import bound_tensors
from kvconform.compat.vllm_api import KVConnectorBase_V1, KVConnectorRole
from kvconform.kv.cache import PagedCache
from kvconform.observe.probe import Probe, hook_names
from kvconform.process.supervisor import dies_with_parent
from kvconform.process.watchdog import HookTimeout


class RemoteError(RuntimeError):
    """An exception of the worker half in its process; the text is that of the original."""


class _WorkerHalf(KVConnectorBase_V1):
    """Base of worker halves: scheduler hooks are never called, but KVConnectorBase_V1 has them."""

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Raise NotImplementedError."""
        raise NotImplementedError("a scheduler hook was called on the worker half")

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Raise NotImplementedError."""
        raise NotImplementedError("a scheduler hook was called on the worker half")

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """Raise NotImplementedError."""
        raise NotImplementedError("a scheduler hook was called on the worker half")


class RemoteHalf(_WorkerHalf):
    """Stand-in, in the engine's process, for a worker half in a child process.

    Every hook is one round trip. `shutdown` also ends the child.
    """

    def __init__(self, create: Callable[[], Any], cache: PagedCache, config: Any) -> None:
        self._role = KVConnectorRole.WORKER
        self._connector_metadata = None
        self._cache = cache
        for tensor in cache.tensors:
            tensor.share_memory_()
        context = multiprocessing.get_context("fork")
        self._pipe, theirs = context.Pipe()
        self._child = context.Process(
            target=_serve, args=(theirs, create, cache, config), daemon=True
        )
        self._child.start()
        theirs.close()
        self._answer()

    def _answer(self) -> Any:
        try:
            ok, value = pickle.loads(self._pipe.recv_bytes())
        except EOFError:
            raise RemoteError("the worker process died") from None
        except HookTimeout:
            self._child.kill()  # it hangs, and is never called again
            raise
        if not ok:
            raise RemoteError(value)
        return value

    def call(self, hook: str, *args: Any, **kwargs: Any) -> Any:
        """Run a hook in the child.

        RemoteError if it raised there, TypeError if an argument does not pickle.
        """
        self._pipe.send_bytes(pickle.dumps((hook, args, kwargs)))
        return self._answer()

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """Bind the metadata in the child, and here, where the probe looks for it."""
        self._connector_metadata = connector_metadata
        self.call("bind_connector_metadata", connector_metadata)

    def clear_connector_metadata(self) -> None:
        """Clear the metadata in the child, and here."""
        self._connector_metadata = None
        self.call("clear_connector_metadata")

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Register the child's own tensors, which are on the same shared memory."""
        self.call("register_kv_caches")

    def set_host_xfer_buffer_ops(self, copy_operation: Any) -> None:
        """Do nothing: functions do not cross processes, and a cache on the host needs none."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Start the load in the child, which rebuilds the forward context."""
        kwargs.pop("scheduler_output", None)
        self.call("start_load_kv", forward_context.attn_metadata, forward_context.slot_mapping)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """See KVConnectorBase_V1."""
        self.call("wait_for_layer_load", layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Save the child's own tensor of the layer."""
        self.call("save_kv_layer", layer_name, attn_metadata)

    def wait_for_save(self) -> None:
        """See KVConnectorBase_V1."""
        self.call("wait_for_save")

    def shutdown(self) -> None:
        """Shut the half down in the child, then end the child."""
        if not self._child.is_alive():
            return
        try:
            self.call("shutdown")
        finally:
            if self._child.is_alive():
                self._pipe.send_bytes(pickle.dumps((None, (), {})))
                self._child.join(10)


def _forward(hook: str) -> Callable[..., Any]:
    def call(self: RemoteHalf, *args: Any, **kwargs: Any) -> Any:
        return self.call(hook, *args, **kwargs)

    call.__name__ = hook
    return call


for _hook in (
    "handle_preemptions",
    "finish_forward",
    "reset_capture_state",
    "get_finished",
    "get_transfer_results",
    "get_block_ids_with_load_errors",
    "get_kv_connector_stats",
    "get_kv_connector_kv_cache_events",
    "build_connector_worker_meta",
    "get_handshake_metadata",
):
    if _hook in hook_names():
        setattr(RemoteHalf, _hook, _forward(_hook))


def _serve(pipe: Connection, create: Callable[[], Any], cache: PagedCache, config: Any) -> None:
    """Run the child: construct the worker half, then serve hooks until the message to stop."""
    dies_with_parent()
    Probe.active = None
    try:
        half = create()
        pipe.send_bytes(pickle.dumps((True, None)))
    except Exception as error:
        pipe.send_bytes(pickle.dumps((False, f"{type(error).__name__}: {error}")))
        os._exit(1)
    while True:
        hook, args, kwargs = pickle.loads(pipe.recv_bytes())
        if hook is None:
            os._exit(0)
        try:
            answer = pickle.dumps((True, _dispatch(half, cache, config, hook, args, kwargs)))
        except Exception as error:
            answer = pickle.dumps((False, f"{type(error).__name__}: {error}"))
        pipe.send_bytes(answer)


def _dispatch(
    half: Any,
    cache: PagedCache,
    config: Any,
    hook: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    if hook == "register_kv_caches":
        return half.register_kv_caches(dict(zip(cache.names, cache.tensors, strict=True)))
    if hook == "start_load_kv":
        from vllm.forward_context import get_forward_context

        metadata, mapping = args
        with set_forward_context(metadata, config, num_tokens=None, slot_mapping=mapping):
            return half.start_load_kv(get_forward_context())
    if hook == "save_kv_layer":
        name, metadata = args
        return half.save_kv_layer(name, bound_tensors(cache)[name], metadata)
    return getattr(half, hook)(*args, **kwargs)


SCHEDULER_AREAS = (
    "lookup",
    "allocation",
    "metadata",
    "finish",
    "placeholders",
    "preemption",
    "speculation",
)
"""Areas whose requirements can be judged on the scheduler half alone.

Except for NEEDS_REPORTS, nothing in them depends on what a worker stored or reported.
"""
NEEDS_REPORTS = frozenset({"lookup.answers-eventually"})
"""Requirements of these areas that wait for reports of a worker half."""


def judged_alone(requirement_id: str, area: str) -> bool:
    """Whether a requirement can be judged without the connector's worker half."""
    return area in SCHEDULER_AREAS and requirement_id not in NEEDS_REPORTS


class NoWorkerHalf(_WorkerHalf):
    """Accepts every worker hook, transfers nothing and reports nothing."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Keep nothing."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Load nothing."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Wait for nothing."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Save nothing."""

    def wait_for_save(self) -> None:
        """Wait for nothing."""
