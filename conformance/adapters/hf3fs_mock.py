# SPDX-License-Identifier: Apache-2.0
"""Adapter `hf3fs-mock`: vLLM's HF3FSKVConnector without 3FS and without a GPU.

It runs on the emulated device or in host memory. vLLM has a client that keeps pages in a file where
the 3FS client is missing, and the metadata server; both are used unchanged. The adapter changes:

- The Triton kernels that gather and scatter pages: torch copies on the same stream.
- The address of the metadata server, which the connector does not take from its configuration.
- The end of a read: vLLM's client leaves the copy into a page in its thread's stream without
  waiting, and nothing orders it before the scatter that follows. The adapter waits for it, as the
  3FS client does.

`kvconform_fail_load` makes one load fail: it reads its pages beyond the end of the file, where the
client's read fails.

The connector has no `shutdown`, replaces the process's signal handlers, and leaves closing to
`atexit`. `around` does after each run what the end of the process would have done. By then the
suite has judged what the connector's shutdown left behind.
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
"""Environment variable: URL of the metadata server."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT)
BEYOND = 1 << 40
"""Number of a page that no file has."""
_made: list[Any] = []  # connectors that are not closed
_armed: set[str] = set()  # requests whose next load fails
_loading = threading.local()  # `request`: the request that this thread loads


def install() -> None:
    """Change the connector's class, its operation manager, its client and its metadata client."""
    import torch
    from vllm.distributed.kv_transfer.kv_connector.v1.hf3fs import hf3fs_connector as theirs

    connector = theirs.HF3FSKVConnector
    manager = theirs.AsyncOperationManager
    client = theirs.Hf3fsMetadataClient
    construct = connector.__init__
    connect = client.__init__
    locate = client.get_key_locations
    load = manager._handle_load_task
    read = theirs.Hf3fsClient.batch_read

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
            return [BEYOND] * len(found)
        return found

    def finished(self: Any, offsets: list[int], tensors: list[Any]) -> list[int]:
        results = read(self, offsets, tensors)
        torch.cuda.current_stream().synchronize()
        return results

    theirs.Hf3fsClient.batch_read = finished
    connector.__init__ = noted
    client.__init__ = addressed
    client.get_key_locations = located
    manager._handle_load_task = loading
    connector._gather_or_scatter_kv_caches = _copy
    connector.kvconform_fail_load = _fail_load


def _copy(self: Any, block_ids: list[int], block_buffers: Any, operation: str) -> None:
    """Copy between pages and the blocks of every layer.

    A page is [layers, heads, tokens, content], a layer's cache [blocks, heads, tokens, content].
    """
    for page, block in zip(block_buffers, block_ids, strict=False):
        for layer, cache in enumerate(self._kv_caches.values()):
            if operation == "gather":
                page[layer].copy_(cache[block], non_blocking=True)
            else:
                cache[block].copy_(page[layer], non_blocking=True)


def _fail_load(self: Any, req_id: str, positions: Iterable[int] | None = None) -> None:
    """Make the request's next load fail."""
    _armed.add(req_id)


def _close(made: Any) -> None:
    """Close a connector as at the end of the process.

    Wakes the threads first: otherwise they check only once a second whether they should stop.
    """
    manager = getattr(made, "_async_manager", None)
    if manager is not None:
        manager._stop_event.set()
        manager._save_queue.put(None)  # wakes the thread with an error that it logs
        manager._load_queue.put(None)
    made.close()


@contextmanager
def fresh() -> Iterator[None]:
    """Restore the signal handlers and end the run's threads afterwards. May be nested."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    count = len(_made)
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
    text="Gathers and scatters HF3FS's pages with torch; gives its client the server's address.",
    package="vllm",
    install=install,
    around=fresh,
)
