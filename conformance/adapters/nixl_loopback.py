# SPDX-License-Identifier: Apache-2.0
"""Adapter `nixl-loopback`: vLLM's NixlConnector in two engines of one process.

NIXL's agents, their transfers (UCX over TCP) and the connector's own code are used unchanged.
The adapter changes only their environment:

- The port of the side channel comes from one environment variable, which is the same for both
  engines of a process. Here each engine has its own port.
- The connector asks vLLM for the block sizes of the attention kernel. The harness's model has no
  such kernel and allows any size. Where there are attention
  layers (the live engine), vLLM's own function is used.
- On a CPU the worker half binds the thread that constructs it to one core for good, the same core
  in every process. The adapter undoes that at once.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvconform.adapters._kernels import any_block_size
from kvconform.adapters.registry import Adapter
from kvconform.process.servers import Ports

_ports = Ports()
_count = 0


def install() -> None:
    """Change the constructors of the connector's scheduler and worker, and their environment."""
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_scheduler, base_worker

    scheduler = base_scheduler.NixlBaseConnectorScheduler
    construct = scheduler.__init__

    def on_its_own_port(self: Any, *args: Any, **kwargs: Any) -> None:
        global _count
        construct(self, *args, **kwargs)
        if "VLLM_NIXL_SIDE_CHANNEL_PORT" not in os.environ:
            _count += 1
            self.side_channel_port = _ports.choose(f"side-channel-{_count}")

    worker = base_worker.NixlBaseConnectorWorker
    construct_worker = worker.__init__

    def on_every_core(self: Any, *args: Any, **kwargs: Any) -> None:
        with _cores():
            construct_worker(self, *args, **kwargs)

    scheduler.__init__ = on_its_own_port
    worker.__init__ = on_every_core
    base_worker.get_current_attn_backends = any_block_size(base_worker.get_current_attn_backends)


@contextmanager
def _cores() -> Iterator[None]:
    """Restore the thread's CPU affinity afterwards."""
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    try:
        yield
    finally:
        if cores is not None:
            os.sched_setaffinity(0, cores)


@contextmanager
def fresh() -> Iterator[None]:
    """Release the run's ports afterwards."""
    try:
        yield
    finally:
        _ports.renew(100)


ADAPTER = Adapter(
    title="Side channels and block sizes for NIXL in one process",
    text="Gives engines side channel ports; allows any block size where there is no kernel.",
    package="nixl",
    install=install,
    around=fresh,
)
