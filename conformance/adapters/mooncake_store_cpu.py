# SPDX-License-Identifier: Apache-2.0
"""Adapter `mooncake-store-cpu`: vLLM's MooncakeStoreConnector over KV in host memory.

The store, its client and the connector's own code are used as they are. The connector records a CUDA event behind each step and lets its
threads wait for it; where there is no CUDA, a step's KV is computed when the hook is called, and the event that stands in has nothing to
wait for.

The connector's `shutdown` leaves the sockets of its lookups open, which in production end with the process; here the next collection of
garbage would wait for them without end. `around` closes them after each run.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from kvconform.adapters.registry import Adapter

_made: list[Any] = []
_left: list[Any] = []
"""Ends with a thread that does not come to its end. Nobody may close them, garbage collection included."""


class Event:
    """An event of a device that does all at once."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def record(self, stream: object = None) -> None:
        """Nothing: what was before is done."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """It is done."""
        return True

    def wait(self, stream: object = None) -> None:
        """Nothing to wait for."""


def install() -> None:
    """Changes torch.cuda.Event, unless there is CUDA; and notes every end of a lookup channel that is made."""
    import torch
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store import worker

    if not torch.cuda.is_available():
        torch.cuda.Event = Event
    for end in (worker.LookupKeyServer, worker.LookupKeyClient):
        _note(end)


def _note(end: Any) -> None:
    construct = end.__init__

    def noted(self: Any, *args: Any, **kwargs: Any) -> None:
        construct(self, *args, **kwargs)
        _made.append(self)

    end.__init__ = noted


def _reachable(server: Any) -> bool:
    """Whether its path leads to it: a server that was made later has taken the path over."""
    return [each for each in _made if getattr(each, "_ipc_path", None) == server._ipc_path][
        -1:
    ] == [server]


def _close(end: Any) -> None:
    """Close an end whose threads have come to theirs: libzmq ends the process where a socket is closed in which another thread waits."""
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
            waker.send(
                b""
            )  # no request that it knows: it says so, and looks whether it is to go on
            waker.recv()
    ending = threading.Thread(
        target=end.ctx.term, name="mooncake-store-cpu ends a lookup channel", daemon=True
    )
    ending.start()  # whoever still waits gets an error, such as a server whose path another has taken over
    for waiting in list(end.executor._threads) if server is None else [server]:
        waiting.join(2)
        if waiting.is_alive():
            _left.append(end)
            return
    with suppress(zmq.ZMQError, OSError):
        end.close()
    ending.join(2)


@contextmanager
def fresh() -> Iterator[None]:
    """The sockets of the run are closed. May be entered inside itself (a run inside a run)."""
    count = len(_made)
    try:
        yield
    finally:
        for end in reversed(_made[count:]):  # clients before servers
            _close(end)
        del _made[count:]


ADAPTER = Adapter(
    title="Events of a CPU for Mooncake's store",
    text="Stands in for torch.cuda.Event where there is no CUDA and all is computed when a hook is called.",
    package="mooncake",
    install=install,
    around=fresh,
)
