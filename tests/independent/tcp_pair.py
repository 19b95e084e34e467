# SPDX-License-Identifier: Apache-2.0
"""A KV connector that hands the KV of prompts from a producer to a consumer engine over TCP.

The producer keeps the blocks of a finished prefill and returns `kv_transfer_params` that say where
they are. The consumer's scheduler half turns these into an asynchronous load; its worker half
pulls the blocks in a thread from a server thread in the producer's worker of the same rank, and
says when it is done. The producer frees the blocks after that, or when their lease is over.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import socket
import socketserver
import threading
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, BinaryIO

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
)
from vllm.logger import init_logger
from vllm.utils.network_utils import get_ip
from vllm.v1.kv_cache_interface import FullAttentionSpec, iter_layer_specs
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.request import RequestStatus

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

logger = init_logger(__name__)

ANNOUNCE_SECONDS = 2.0
"""How long a server waits for a transfer that its scheduler half has not announced yet."""


PARAMS = {
    **{"remote_endpoints": list, "remote_transfer_id": str, "remote_block_ids": list},
    **{"remote_block_size": int, "remote_num_tokens": int, "remote_digest": str},
}
"""Parameters that lack one of these are not a producer's: the request is computed here."""


@dataclass
class Endpoint(KVConnectorHandshakeMetadata):
    """Where the server of one producer worker listens."""

    host: str
    port: int


@dataclass
class Pull:
    """Blocks to fetch for a request; without blocks, only a word to the producer to let go."""

    req_id: str
    transfer_id: str
    endpoints: list[list[Any]]
    remote_block_ids: list[int]
    local_block_ids: list[int]


@dataclass
class PairMetadata(KVConnectorMetadata):
    """What the workers begin in one step: pulls, and transfers to offer."""

    pulls: list[Pull] = field(default_factory=list)
    offers: dict[str, tuple[str, list[int]]] = field(default_factory=dict)


@dataclass
class Offer:
    """Blocks that a producer worker holds for a consumer."""

    req_id: str
    block_ids: list[int]
    deadline: float
    readers: int = 0
    taken: bool = False


class TcpPairConnector(KVConnectorBase_V1):
    """Producer or consumer of KV, by the parameters of each request."""

    _cache_hit_source = CacheHitSource.P2P

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        parallel = vllm_config.parallel_config
        if parallel.world_size != parallel.tensor_parallel_size:
            raise ValueError("TcpPairConnector supports tensor parallelism only.")
        if parallel.decode_context_parallel_size > 1:
            raise ValueError("TcpPairConnector does not support context parallelism.")
        if len(kv_cache_config.kv_cache_groups) != 1:
            raise ValueError("TcpPairConnector needs a model with one KV cache group.")
        spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
        if not all(isinstance(layer, FullAttentionSpec) for layer in iter_layer_specs(spec)):
            raise ValueError("TcpPairConnector supports models with full attention only.")
        config = self._kv_transfer_config
        self._is_producer = config.is_kv_producer
        self._host = config.get_from_extra_config("host", None) or get_ip()
        self._lease = float(config.get_from_extra_config("lease_seconds", 10.0))
        self._timeout = float(config.get_from_extra_config("timeout", 5.0))
        self._block_size = spec.block_size
        self._rank = parallel.rank
        self._world_size = parallel.world_size
        # The scheduler half.
        self._endpoints: list[tuple[str, int]] = []
        self._next = PairMetadata()
        self._local_hits: dict[str, int] = {}
        self._pulled: set[str] = set()
        self._to_fail: set[str] = set()
        # The worker half; all threads share what is below under the lock.
        self._layers: list[torch.Tensor] = []
        self._server: socketserver.ThreadingTCPServer | None = None
        self._pool = ThreadPoolExecutor(4, "tcp-pair-pull")
        self._changed = threading.Condition()
        self._offers: dict[str, Offer] = {}
        self._received: set[str] = set()
        self._failed: set[str] = set()

    # ---------------------------------------------------------------- scheduler half

    def set_xfer_handshake_metadata(
        self, metadata: dict[int, KVConnectorHandshakeMetadata]
    ) -> None:
        """Learn where this engine's own servers listen, rank by rank."""
        ends = [metadata[rank] for rank in sorted(metadata)]
        self._endpoints = [(end.host, end.port) for end in ends if isinstance(end, Endpoint)]

    @staticmethod
    def _digest(request: Request, num_tokens: int) -> str:
        """Name all that the KV of these prompt tokens depends on."""
        adapter = request.lora_request.lora_name if request.lora_request else None
        media = [(f.identifier, f.mm_position.offset) for f in request.mm_features]
        media = [item for item in media if item[1] < num_tokens]
        tokens = list(request.prompt_token_ids or ())[:num_tokens]
        parts = [tokens, request.cache_salt, adapter, media]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def _remote(self, request: Request) -> dict[str, Any] | None:
        """Return the parameters of a transfer that this request has still to begin."""
        params = request.kv_transfer_params
        if not params or not params.get("do_remote_prefill"):
            return None
        well_formed = all(isinstance(params.get(name), kind) for name, kind in PARAMS.items())
        return params if well_formed and request.request_id not in self._pulled else None

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Offer what the producer has of the prompt behind the local hit."""
        params = self._remote(request)
        if params is None:
            return 0, False
        num_tokens = params["remote_num_tokens"]
        external = num_tokens - num_computed_tokens
        described = len(params["remote_block_ids"]) * self._block_size
        if external <= 0 or num_tokens > min(request.num_prompt_tokens, described):
            return 0, False
        same = (params["remote_block_size"], len(params["remote_endpoints"]))
        if same != (self._block_size, self._world_size):
            logger.warning("The producer has another block size, or number of ranks.")
            return 0, False
        if params["remote_digest"] != self._digest(request, num_tokens):
            logger.warning("The producer's KV is of another prompt than %s", request.request_id)
            return 0, False
        self._local_hits[request.request_id] = num_computed_tokens
        return external, True

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Plan the pull into the blocks behind the local hit, or let the producer's blocks go."""
        params = self._remote(request)
        if params is None:
            return
        local = self._local_hits.pop(request.request_id, 0)
        first = end = local // self._block_size
        if num_external_tokens > 0:
            end = -(-(local + num_external_tokens) // self._block_size)
        self._pulled.add(request.request_id)
        self._plan_pull(request, params, first, blocks.get_block_ids()[0][first:end])

    def _plan_pull(
        self, request: Request, params: dict[str, Any], first: int, block_ids: list[int]
    ) -> None:
        ends = params["remote_endpoints"]
        remote = params["remote_block_ids"][first : first + len(block_ids)]
        transfer_id = params["remote_transfer_id"]
        if block_ids and request.request_id in self._to_fail:
            self._to_fail.remove(request.request_id)
            transfer_id = "lost"
        self._next.pulls.append(Pull(request.request_id, transfer_id, ends, remote, block_ids))

    def kvconform_fail_load(self, req_id: str, positions: Sequence[int] | None = None) -> None:
        """Ask for a transfer that the producer does not know, so that all of a load fails."""
        self._to_fail.add(req_id)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Hand over what was planned since the last step."""
        meta, self._next = self._next, PairMetadata()
        return meta

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Hold the blocks of a finished prefill; let go of a producer's that were never pulled."""
        params = self._remote(request)
        if params is not None:
            self._plan_pull(request, params, 0, [])
        self._pulled.discard(request.request_id)
        self._local_hits.pop(request.request_id, None)
        asked = (request.kv_transfer_params or {}).get("do_remote_decode")
        prefilled = request.status == RequestStatus.FINISHED_LENGTH_CAPPED
        of_tokens = request.prompt_token_ids is not None and request.prompt_embeds is None
        if not (self._is_producer and self._endpoints and asked and prefilled and of_tokens):
            return False, None
        computed = request.num_computed_tokens - request.num_in_flight_tokens
        num_tokens = min(request.num_prompt_tokens, computed)
        held = block_ids[: -(-num_tokens // self._block_size)]
        if not held:
            return False, None
        transfer_id = uuid.uuid4().hex
        self._next.offers[transfer_id] = (request.request_id, held)
        return True, {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_endpoints": [[host, port] for host, port in self._endpoints],
            "remote_request_id": request.request_id,
            "remote_transfer_id": transfer_id,
            "remote_block_ids": list(held),
            "remote_block_size": self._block_size,
            "remote_num_tokens": num_tokens,
            "remote_digest": self._digest(request, num_tokens),
        }

    # ------------------------------------------------------------------- worker half

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Keep a view of each layer with one row per block, and start a producer's server."""
        blocks = self._kv_cache_config.num_blocks
        for name in sorted(kv_caches):
            cache = kv_caches[name]
            self._layers.append(cache.unflatten(0, (blocks, cache.shape[0] // blocks)))
        if self._is_producer:
            connector = self

            class Handler(socketserver.StreamRequestHandler):
                timeout = self._timeout

                def handle(self) -> None:
                    """Serve one pull; a consumer that goes away may come again."""
                    with contextlib.suppress(OSError, ValueError, KeyError):
                        connector._serve(self.rfile, self.wfile)

            self._server = socketserver.ThreadingTCPServer((self._host, 0), Handler)
            self._server.daemon_threads = True
            threading.Thread(
                target=self._server.serve_forever, args=(0.05,), name="tcp-pair", daemon=True
            ).start()

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Say where this worker's server listens."""
        if self._server is None:
            return None
        return Endpoint(self._host, self._server.server_address[1])

    def _serve(self, rfile: BinaryIO, wfile: BinaryIO) -> None:
        """Answer a pull with the blocks' bytes, layer by layer, and wait for the last word."""
        order = json.loads(rfile.readline())
        transfer_id, block_ids = order["transfer_id"], order["block_ids"]
        with self._changed:
            self._changed.wait_for(lambda: transfer_id in self._offers, ANNOUNCE_SECONDS)
            offer = self._offers.get(transfer_id)
            if offer is None or offer.taken or not set(block_ids) <= set(offer.block_ids):
                wfile.write(b'{"layers": -1}\n')
                return
            offer.readers += 1
        try:
            wfile.write(json.dumps({"layers": len(self._layers)}).encode() + b"\n")
            for layer in self._layers if block_ids else ():
                blocks = layer[torch.tensor(block_ids, device=layer.device)].contiguous()
                wfile.write(blocks.view(-1).view(torch.uint8).cpu().numpy().tobytes())
            taken = rfile.readline() == b"done\n"
        except OSError:
            taken = False
        with self._changed:
            offer.readers -= 1
            offer.taken |= taken

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Announce what may be pulled from here, and begin this step's own pulls."""
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, PairMetadata)
        with self._changed:
            deadline = time.monotonic() + self._lease
            for transfer_id, (req_id, block_ids) in metadata.offers.items():
                self._offers[transfer_id] = Offer(req_id, block_ids, deadline)
            self._changed.notify_all()
        for pull in metadata.pulls:
            self._pool.submit(self._run_pull, pull)

    def _run_pull(self, pull: Pull) -> None:
        failed = set()
        try:
            self._pull(pull)
        except Exception as error:
            logger.warning("The pull of request %s failed: %r", pull.req_id, error)
            failed = {pull.req_id}
        if pull.local_block_ids:
            with self._changed:
                self._received.add(pull.req_id)
                self._failed |= failed

    def _pull(self, pull: Pull) -> None:
        host, port = pull.endpoints[self._rank]
        with (
            socket.create_connection((host, port), self._timeout) as connection,
            connection.makefile("rwb") as file,
        ):
            order = {"transfer_id": pull.transfer_id, "block_ids": pull.remote_block_ids}
            file.write(json.dumps(order).encode() + b"\n")
            file.flush()
            if json.loads(file.readline())["layers"] != len(self._layers):
                raise ConnectionError("the producer does not have these blocks any more")
            count = len(pull.local_block_ids)
            for layer in self._layers if count else ():
                size = count * layer[0].numel() * layer.element_size()
                data = file.read(size)
                if len(data) != size:
                    raise ConnectionError("the producer stopped in the middle of a layer")
                rows = torch.frombuffer(bytearray(data), dtype=layer.dtype)
                rows = rows.view(count, *layer.shape[1:]).to(layer.device)
                layer[torch.tensor(pull.local_block_ids, device=layer.device)] = rows
                if layer.device.type != "cpu":
                    torch.accelerator.synchronize(layer.device)
            file.write(b"done\n")

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Report pulls that ended, and offers that were taken or whose lease is over."""
        with self._changed:
            results = KVConnectorTransferResults(set(), self._received, self._failed)
            self._received, self._failed = set(), set()
            now = time.monotonic()
            for transfer_id, offer in list(self._offers.items()):
                if not offer.readers and (offer.taken or now > offer.deadline):
                    results.finished_sending.add(offer.req_id)
                    del self._offers[transfer_id]
        return results

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Wait for nothing: a request is scheduled when its load is complete."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing is saved in a step; blocks are read when a consumer asks for them."""

    def wait_for_save(self) -> None:
        """Nothing is saved in a step."""

    def shutdown(self) -> None:
        """End the server and the pulls."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None
        self._pool.shutdown(wait=True, cancel_futures=True)
