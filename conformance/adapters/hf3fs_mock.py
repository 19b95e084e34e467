# SPDX-License-Identifier: Apache-2.0
"""Adapter `hf3fs-mock`: vLLM's HF3FSKVConnector without 3FS and without a GPU, on the emulated device or in host memory.

vLLM brings a client of its own that keeps pages in a file where the 3FS client is missing, and the metadata server; both are used as they
are. What is exchanged: the Triton kernels that gather and scatter pages (torch copies on the same stream), and the address of the metadata
server, which the connector does not take from its configuration. That client leaves the copy into a page in its thread's stream without
waiting, which nothing orders against the scatter that follows; the adapter waits for it, as the client of 3FS does. `kvconform_fail_load`
makes the metadata server's answer to one load say that the pages are gone, as it does after they were cleared.

The connector has no `shutdown`, takes over the process's signals, and leaves closing to `atexit`: `around` does after each run what the end
of the process would have done. What is left over when a run's connector was shut down was judged by then.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from kvconform.adapters.registry import Adapter

URL = "KVCONFORM_HF3FS_URL"
"""Environment variable: the metadata server."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT)
_made: list[Any] = []
_armed: set[str] = set()
_loading = threading.local()


def install() -> None:
    """Changes the connector's class, its operation manager and its metadata client."""
    import torch
    from vllm.distributed.kv_transfer.kv_connector.v1.hf3fs import hf3fs_connector as theirs

    connector, manager, client = (
        theirs.HF3FSKVConnector,
        theirs.AsyncOperationManager,
        theirs.Hf3fsMetadataClient,
    )
    construct, connect, locate, load = (
        connector.__init__,
        client.__init__,
        client.get_key_locations,
        manager._handle_load_task,
    )

    def noted(self: Any, *args: Any, **kwargs: Any) -> None:
        construct(self, *args, **kwargs)
        _made.append(self)

    def addressed(self: Any, base_url: str = "", *args: Any, **kwargs: Any) -> None:
        connect(self, base_url or os.environ.get(URL, "http://localhost:18000"), *args, **kwargs)

    def loading(self: Any, task: Any) -> None:
        _loading.request = task[0]
        try:
            load(self, task)
        finally:
            _loading.request = None

    def located(self: Any, rank: int, keys: list[str]) -> Any:
        found = locate(self, rank, keys)
        if getattr(_loading, "request", None) in _armed:
            _armed.discard(_loading.request)
            return [None] * len(found)
        return found

    read = theirs.Hf3fsClient.batch_read

    def finished(self: Any, offsets: list[int], tensors: list[Any]) -> list[int]:
        results = read(self, offsets, tensors)
        torch.cuda.current_stream().synchronize()
        return results

    theirs.Hf3fsClient.batch_read = finished
    connector.__init__, client.__init__, client.get_key_locations = noted, addressed, located
    manager._handle_load_task = loading
    connector._gather_or_scatter_kv_caches = _copy
    connector.kvconform_fail_load = _fail_load


def _copy(self: Any, block_ids: list[int], block_buffers: Any, operation: str) -> None:
    """Pages [layers, heads, tokens, content] from or to the blocks of every layer's [blocks, heads, tokens, content]."""
    for page, block in zip(block_buffers, block_ids, strict=False):
        for layer, cache in enumerate(self._kv_caches.values()):
            if operation == "gather":
                page[layer].copy_(cache[block], non_blocking=True)
            else:
                cache[block].copy_(page[layer], non_blocking=True)


def _fail_load(self: Any, req_id: str, positions: Iterable[int] | None = None) -> None:
    _armed.add(req_id)


def _close(made: Any) -> None:
    """As at the end of the process, but without waiting until the threads look up from their queues, once a second."""
    manager = getattr(made, "_async_manager", None)
    if manager is not None:
        manager._stop_event.set()
        manager._save_queue.put(None)  # an error that they note
        manager._load_queue.put(None)
    made.close()


@contextmanager
def fresh() -> Iterator[None]:
    """The process's signals and threads as before. May be entered inside itself (a run inside a run)."""
    before, count = {number: signal.getsignal(number) for number in SIGNALS}, len(_made)
    try:
        yield
    finally:
        for made in _made[count:]:
            _close(made)
        del _made[count:]
        _armed.clear()
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                signal.signal(number, handler)


ADAPTER = Adapter(
    title="Torch copies for HF3FS's Triton kernels",
    text="Gathers and scatters HF3FS's pages with torch, and tells its metadata client where the server is.",
    package="vllm",
    install=install,
    around=fresh,
)
