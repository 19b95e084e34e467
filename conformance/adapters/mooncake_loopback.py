# SPDX-License-Identifier: Apache-2.0
"""Adapter `mooncake-loopback`: vLLM's MooncakeConnector in two engines on one machine.

The engines use TCP and have no router. Mooncake's transfer engine and the connector's own code are
used unchanged. The adapter changes only their environment:

- Mooncake's router gives each request a `transfer_id`, and the consumer the address of the
  producer's bootstrap server. Here the producer makes the id itself, and returns what the router
  would send, as vLLM's other connectors do.
- The port of the bootstrap server comes from one environment variable. Here each engine has its own
  port, on the loopback device.
- On a machine without a device, `torch.accelerator.current_device_index` returns 0.
- The harness's model has no attention kernel that would limit the block sizes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvconform.adapters._kernels import any_block_size
from kvconform.adapters.registry import Adapter
from kvconform.process.servers import Ports, is_free

_ports = Ports()
_places: dict[str, int] = {}  # bootstrap ports by engine id


def _port(engine_id: str) -> int:
    """Return the port of an engine's bootstrap server."""
    if engine_id not in _places:
        _places[engine_id] = _ports.choose(f"bootstrap-{len(_ports.numbers)}")
    return _places[engine_id]


def _usable(port: int) -> int:
    """Return the port, or a new one for its engine if the port is taken.

    The old server of an engine that starts again occupies the port until the process ends.
    """
    if not is_free(port):
        engine_id = next(name for name, number in _places.items() if number == port)
        del _places[engine_id]
        port = _port(engine_id)
    return port


def _engine(half: Any) -> str:
    """Return the id of the engine that a scheduler half belongs to."""
    return str(half.vllm_config.kv_transfer_config.engine_id)


def install() -> None:
    """Change the connector's environment, and what its scheduler half returns to its engine."""
    import torch
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake import mooncake_connector as theirs

    scheduler = theirs.MooncakeConnectorScheduler
    look_up = scheduler.get_num_new_matched_tokens
    finished = scheduler.request_finished
    server = theirs.MooncakeBootstrapServer

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

    scheduler.get_num_new_matched_tokens = with_id
    scheduler.request_finished = as_router
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
    """Give each run's engines new ports, even for the same engine ids. May be nested."""
    before = dict(_places)
    try:
        yield
    finally:
        _places.clear()
        _places.update(before)
        _ports.renew(200)


ADAPTER = Adapter(
    title="The router's part, and ports, for Mooncake on one machine",
    text="Does the work of Mooncake's router; gives engines their ports; allows any block size.",
    package="mooncake",
    install=install,
    around=fresh,
)
