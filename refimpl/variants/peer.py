# SPDX-License-Identifier: Apache-2.0
"""A connector for disaggregated prefill: a producer keeps the KV of its requests until a consumer engine has pulled it.

What a consumer is told travels in kv_transfer_params, with the names that vLLM's own connectors of this kind use. The network is a
dictionary: each engine's worker has a `Board` under its engine id, on which it offers blocks and takes notes from others. Options:
`lease`: polls until an offer that nobody fetched is withdrawn (0: never); `delay`: polls that a pull takes; `patience`: polls until a pull
of something that is not (yet) on offer fails; `whole_blocks`: leave the rest of the prompt's last block to the consumer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
)
from vllm.v1.request import RequestStatus

if TYPE_CHECKING:
    import torch

DONE = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)
CAPABILITIES = {
    "transfer": True,
    "roles": ["kv_both", "kv_producer", "kv_consumer"],
    "store": False,
    "saves": "none",
    "async_load": True,
}


@dataclass
class Offer:
    """Blocks of a finished request, by position, kept for whoever has the key; `left`: polls until they are withdrawn, if ever."""

    req: str
    blocks: list[int]
    left: int | None = None


@dataclass(frozen=True)
class Pull:
    """Fill `blocks` with the remote blocks from index `first` on. Without blocks: only tell the producer that nothing more is needed."""

    req: str
    engine: str
    key: str
    first: int = 0
    blocks: tuple[int, ...] = ()


@dataclass
class PeerMetadata(KVConnectorMetadata):
    """What the worker half is to offer (key -> request, blocks) and to pull."""

    offers: dict[str, tuple[str, list[int]]] = field(default_factory=dict)
    pulls: list[Pull] = field(default_factory=list)


class Board:
    """What one engine's worker shows to others: its KV tensors, its offers; and the keys that others are done with."""

    def __init__(self, layers: dict[str, torch.Tensor]) -> None:
        self.layers, self.offers = layers, dict[str, Offer]()
        self.done: list[str] = []


class Peer(KVConnectorBase_V1):
    """Prefill on one engine, decode on another. Each half is short; read the scheduler's first."""

    boards: ClassVar[dict[str, Board]] = {}
    kvconform_capabilities = CAPABILITIES

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra = self._kv_transfer_config.kv_connector_extra_config
        self.engine_id = str(self._kv_transfer_config.engine_id)
        self.lease, self.delay, self.patience = (
            extra.get("lease", 0),
            extra.get("delay", 1),
            extra.get("patience", 3),
        )
        self.whole_blocks = extra.get("whole_blocks", False)
        self.produces, self.consumes = (
            self._kv_transfer_config.is_kv_producer,
            self._kv_transfer_config.is_kv_consumer,
        )
        self._size = vllm_config.cache_config.block_size
        self._offers: dict[str, tuple[str, list[int]]] = {}
        self._pulls: list[Pull] = []
        self._taken: set[str] = set()  # requests whose remote KV was asked for: it can be had once
        self._serial = 0
        self._pulling: list[
            tuple[int, int, Pull]
        ] = []  # polls until it is there, polls until it fails
        self._invalid: set[int] = set()

    # ---- Scheduler half, consumer ----

    def _remote(self, request: Any) -> dict[str, Any] | None:
        """Where the request's KV is, if it is to be pulled and has not been."""
        params = request.kv_transfer_params
        wanted = (
            self.consumes
            and params
            and params.get("do_remote_prefill")
            and request.request_id not in self._taken
        )
        known = (
            wanted
            and isinstance(params.get("remote_engine_id"), str)
            and isinstance(params.get("remote_request_id"), str)
        )
        return params if known else None

    def _available(self, request: Any, remote: dict[str, Any]) -> int:
        """Tokens that can be pulled, from the first one on."""
        tokens = min(int(remote.get("remote_num_tokens") or 0), request.num_prompt_tokens)
        return tokens // self._size * self._size if self.whole_blocks else tokens

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        remote = self._remote(request)
        tokens = self._available(request, remote) - num_computed_tokens if remote else 0
        return (tokens, True) if tokens > 0 else (0, False)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Without tokens too: who has it all, or loads it from elsewhere, must say so to the producer, which waits."""
        remote = self._remote(request)
        if remote is None:
            return
        self._taken.add(request.request_id)
        first, end = request.num_computed_tokens // self._size, 0
        if num_external_tokens:
            first = (self._available(request, remote) - num_external_tokens) // self._size
            end = -(-(first * self._size + num_external_tokens) // self._size)
        self._pull(
            request.request_id,
            remote,
            first,
            tuple(blocks.get_block_ids()[0][first:end]) if end else (),
        )

    def _pull(self, req: str, remote: dict[str, Any], first: int, blocks: tuple[int, ...]) -> None:
        self._pulls.append(
            Pull(req, remote["remote_engine_id"], remote["remote_request_id"], first, blocks)
        )

    # ---- Scheduler half, producer, and the end of a request ----

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        req, params = request.request_id, request.kv_transfer_params or {}
        remote = self._remote(request)
        if remote is not None:  # it never got as far as an allocation
            self._pull(req, remote, 0, ())
        self._taken.discard(req)
        if (
            not (self.produces and params.get("do_remote_decode"))
            or request.status not in DONE
            or not block_ids
        ):
            return False, None
        self._serial += 1
        key = f"{req}/{self._serial}"  # of this request and no other, whatever ids clients choose
        tokens = min(request.num_computed_tokens, request.num_tokens - 1)
        self._offers[key] = (req, list(block_ids[: -(-tokens // self._size)]))
        return True, {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self.engine_id,
            "remote_request_id": key,
            "remote_block_ids": self._offers[key][1],
            "remote_host": "localhost",
            "remote_port": 0,
            "remote_num_tokens": tokens,
            "first_token": request.output_token_ids[0],
            "tp_size": 1,
        }

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        meta = PeerMetadata(self._offers, self._pulls)
        self._offers, self._pulls = {}, []
        return meta

    # ---- Worker half ----

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.board = self.boards[self.engine_id] = Board(kv_caches)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        meta = self._get_connector_metadata()
        assert isinstance(meta, PeerMetadata)
        for key, (req, blocks) in meta.offers.items():
            self.board.offers[key] = Offer(req, blocks, self.lease or None)
        self._pulling += [(self.delay, self.patience, pull) for pull in meta.pulls]

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        received: set[str] = set()
        still: list[tuple[int, int, Pull]] = []
        for wait, patience, pull in self._pulling:
            offer = self._offer(pull)
            if offer is not None and wait <= 0:
                self._copy(pull, offer)
            elif offer is None and (patience <= 0 or pull.engine not in self.boards):
                self._failed(pull)
            else:
                still.append((wait - 1, patience - (offer is None), pull))
                continue
            received |= {pull.req} if pull.blocks else set()
        self._pulling = still
        return self._released() or None, received or None

    def _offer(self, pull: Pull) -> Offer | None:
        board = self.boards.get(pull.engine)
        return board.offers.get(pull.key) if board is not None else None

    def _copy(self, pull: Pull, offer: Offer) -> None:
        """The blocks, at once, and a note that they are not needed any more."""
        board, source = (
            self.boards[pull.engine],
            offer.blocks[pull.first : pull.first + len(pull.blocks)],
        )
        for name, layer in self.board.layers.items():
            for mine, theirs in zip(pull.blocks, source, strict=False):
                layer[mine] = board.layers[name][theirs]
        self._invalid |= set(pull.blocks[len(source) :])
        board.done.append(pull.key)

    def _failed(self, pull: Pull) -> None:
        """Nobody offers it: the engine computes these blocks itself."""
        self._invalid |= set(pull.blocks)

    def _released(self) -> set[str]:
        """Requests whose blocks nobody needs any more: fetched, or not fetched in time. From now on there is no such offer."""
        ended, self.board.done = self.board.done, []
        for key, offer in self.board.offers.items():
            if offer.left is not None:
                offer.left -= 1
                if offer.left < 0:
                    ended.append(key)
        return {
            self.board.offers.pop(key).req
            for key in dict.fromkeys(ended)
            if key in self.board.offers
        }

    def get_block_ids_with_load_errors(self) -> set[int]:
        invalid, self._invalid = self._invalid, set()
        return invalid

    def shutdown(self) -> None:
        self._pulling = []
        if (
            getattr(self, "board", None) is not None
            and self.boards.get(self.engine_id) is self.board
        ):
            del self.boards[self.engine_id]

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        return

    def wait_for_save(self) -> None:
        return
