# SPDX-License-Identifier: Apache-2.0
"""Adapter `mooncake-loopback`: vLLM's MooncakeConnector in two engines on one machine, over TCP, without a router.

Mooncake's transfer engine and the connector's own code are used as they are. What is exchanged are the surroundings:

- Mooncake's router gives each request a `transfer_id` and tells the consumer where the producer's bootstrap server is. Here the producer
  makes the id itself, and returns what the router would send, as vLLM's other connectors do.
- The port of the bootstrap server comes from one environment variable: each engine gets its own, on the loopback device.
- `torch.accelerator` has no device to name on a machine without one: it is device 0.
- The harness's model has no attention kernel that would limit the size of blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvconform.adapters._kernels import any_block_size
from kvconform.adapters.registry import Adapter
from kvconform.process.servers import Ports, is_free

_ports = Ports()
_places: dict[str, int] = {}


def _port(engine_id: str) -> int:
    """Of an engine's bootstrap server."""
    if engine_id not in _places:
        _places[engine_id] = _ports.choose(f"bootstrap-{len(_ports.numbers)}")
    return _places[engine_id]


def _usable(port: int) -> int:
    """The port, or a new one for its engine: one that starts again finds its old server there, which only its process's end would end."""
    if not is_free(port):
        engine_id = next(name for name, number in _places.items() if number == port)
        del _places[engine_id]
        port = _port(engine_id)
    return port


def _engine(half: Any) -> str:
    """The id of the engine that a scheduler half belongs to."""
    return str(half.vllm_config.kv_transfer_config.engine_id)


def install() -> None:
    """Changes what the connector's module finds when an engine is made, and the answers of its scheduler half to its engine."""
    import torch
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake import mooncake_connector as theirs

    scheduler = theirs.MooncakeConnectorScheduler
    look_up, finished, server = (
        scheduler.get_num_new_matched_tokens,
        scheduler.request_finished,
        theirs.MooncakeBootstrapServer,
    )

    def with_id(self: Any, request: Any, num_computed_tokens: int) -> Any:
        params = request.kv_transfer_params
        if params and params.get("do_remote_decode") and "transfer_id" not in params:
            params["transfer_id"] = f"{_engine(self)}/{request.request_id}"
        return look_up(self, request, num_computed_tokens)

    def as_router(self: Any, request: Any, block_ids: Any) -> Any:
        kept, params = finished(self, request, block_ids)
        given = request.kv_transfer_params
        if kept and params is None and given.get("do_remote_decode"):
            address = f"http://127.0.0.1:{_port(_engine(self))}"
            params = {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "remote_engine_id": _engine(self),
                "remote_bootstrap_addr": address,
                "transfer_id": given["transfer_id"],
            }
        return kept, params

    scheduler.get_num_new_matched_tokens, scheduler.request_finished = with_id, as_router
    theirs.get_mooncake_bootstrap_addr = lambda config: (
        "127.0.0.1",
        _port(config.kv_transfer_config.engine_id),
    )
    theirs.MooncakeBootstrapServer = lambda _host, port: server("127.0.0.1", _usable(port))
    theirs.get_current_attn_backends = any_block_size(theirs.get_current_attn_backends)
    if not torch.accelerator.is_available():
        torch.accelerator.current_device_index = lambda: 0


@contextmanager
def fresh() -> Iterator[None]:
    """Engines of the next run get ports of their own, though they may have the same ids. May be entered inside itself."""
    before = dict(_places)
    try:
        yield
    finally:
        _places.clear()
        _places.update(before)
        _ports.renew(200)


ADAPTER = Adapter(
    title="The router's part, and ports, for Mooncake on one machine",
    text="Hands the parameters on that Mooncake's router makes, gives each engine its own bootstrap port, and lets blocks have any size.",
    package="mooncake",
    install=install,
    around=fresh,
)
