# SPDX-License-Identifier: Apache-2.0
"""Adapter `mooncake-store-cpu`: vLLM's MooncakeStoreConnector over KV in host memory.

The store, its client and the connector's own code are used unchanged. The connector records a CUDA
event after each step, and its threads wait for it. Without CUDA, a step's KV is complete when the
hook is called, so the event that replaces it has nothing to wait for.

The connector's `shutdown` closes the store and nothing else. In production the rest ends with the
process; `around` ends it after each run:

- The sockets of its lookups, for which the next garbage collection would wait forever.
- The threads that transfer KV. Each keeps its worker half and the memory of the closed store.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from kvconform.adapters.registry import Adapter

_made: list[Any] = []
"""The ends of lookup channels (LookupKeyServer, LookupKeyClient) that are not closed."""
_transferring: list[Any] = []
"""The threads that transfer KV (KVTransferThread) and are not ended."""
_left: list[Any] = []
"""Ends whose thread does not stop. They must not be closed, not even by garbage collection."""


class Event:
    """An event of a device that completes all work at once."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def record(self, stream: object = None) -> None:
        """Do nothing: all earlier work is complete."""

    def synchronize(self) -> None:
        """Do nothing: there is nothing to wait for."""

    def query(self) -> bool:
        """Return True."""
        return True

    def wait(self, stream: object = None) -> None:
        """Do nothing: there is nothing to wait for."""


def install() -> None:
    """Replace torch.cuda.Event if there is no CUDA; record lookup channels and transfer threads."""
    import torch
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store import worker

    if not torch.cuda.is_available():
        torch.cuda.Event = Event
    for end in (worker.LookupKeyServer, worker.LookupKeyClient):
        _note(end, _made)
    _note(worker.KVTransferThread, _transferring)
    run = worker.KVTransferThread.run

    def until_exit(self: Any) -> None:
        with suppress(SystemExit):  # an exception in a thread would be kept, with the worker half
            run(self)

    worker.KVTransferThread.run = until_exit


def _note(kind: Any, made: list[Any]) -> None:
    """Append every instance of a class to `made`."""
    construct = kind.__init__

    def noted(self: Any, *args: Any, **kwargs: Any) -> None:
        construct(self, *args, **kwargs)
        made.append(self)

    kind.__init__ = noted


def _reachable(server: Any) -> bool:
    """Return whether the server's path leads to it; a later server takes the path over."""
    with_this_path = [
        each for each in _made if getattr(each, "_ipc_path", None) == server._ipc_path
    ]
    return with_this_path[-1:] == [server]


def _close(end: Any) -> None:
    """Stop an end's threads, then close it.

    libzmq aborts the process if a socket is closed in which another thread waits. An end whose
    thread does not stop is therefore left open, in `_left`.
    """
    import zmq

    server = getattr(end, "thread", None)
    if server is None:
        end.executor.shutdown(wait=False, cancel_futures=True)
    elif server.is_alive() and _reachable(end):
        end.running = False
        with zmq.Context() as context, context.socket(zmq.REQ) as waker, suppress(zmq.ZMQError):
            waker.setsockopt(zmq.LINGER, 0)
            waker.setsockopt(zmq.RCVTIMEO, 2000)
            waker.connect(f"ipc://{end._ipc_path}")
            waker.send(b"")  # unknown request: the server sends an error and then checks `running`
            waker.recv()
    # Ending the context raises an error in a thread that still waits, such as that of a server
    # whose path another has taken over.
    ending = threading.Thread(
        target=end.ctx.term, name="mooncake-store-cpu ends a lookup channel", daemon=True
    )
    ending.start()
    threads = list(end.executor._threads) if server is None else [server]
    for waiting in threads:
        waiting.join(2)
        if waiting.is_alive():
            _left.append(end)
            return
    with suppress(zmq.ZMQError, OSError):
        end.close()
    ending.join(2)


def _exit(request: object) -> None:
    """End the thread. KVTransferThread.run catches every Exception, which SystemExit is not."""
    raise SystemExit


def _end(threads: list[Any]) -> None:
    """End transfer threads with their next request; they have no other end."""
    for thread in threads:
        thread._handle_request = _exit
        thread.request_queue.put(_exit)
    for thread in threads:
        if thread.is_alive():
            thread.join(2)


@contextmanager
def fresh() -> Iterator[None]:
    """End what the run left behind afterwards. May be nested (a run inside a run)."""
    count = len(_made)
    threads = len(_transferring)
    try:
        yield
    finally:
        _end(_transferring[threads:])
        del _transferring[threads:]
        for end in reversed(_made[count:]):  # clients before servers
            _close(end)
        del _made[count:]


ADAPTER = Adapter(
    title="Events of a CPU for Mooncake's store",
    text="Replaces torch.cuda.Event where there is no CUDA: KV is complete when a hook is called.",
    package="mooncake",
    install=install,
    around=fresh,
)
