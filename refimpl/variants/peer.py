# SPDX-License-Identifier: Apache-2.0
"""A connector for disaggregated prefill: a producer keeps KV until a consumer engine has pulled it.

The consumer learns from kv_transfer_params where the KV is; the parameters have the names that
vLLM's own connectors of this kind use. The network is a dictionary: each worker has a `Board` under
its engine id and its rank, where it offers blocks, and where others note what they have pulled.
Each rank pulls from the same rank of the producer. A pull from an engine with another block size,
other ranks or another data type fails.

Options:

- `lease`: polls until an offer that was not pulled is withdrawn; 0: never, so that the blocks of an
  offer that no consumer comes for are held for good.
- `lease_seconds`: seconds after which an offer that was not pulled is withdrawn; 0: never.
- `delay`: polls that a pull takes.
- `patience`: polls until a pull fails whose KV is not offered (yet).
- `whole_blocks`: leave the rest of the prompt's last block to the consumer.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.v1.request import RequestStatus

from kvconform.refimpl.variants.decoy import Decoy

if TYPE_CHECKING:
    import torch

DONE = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)
CAPABILITIES = {
    "transfer": True,
    "first_token": True,
    "roles": ["kv_both", "kv_producer", "kv_consumer"],
    "store": False,
    "saves": "none",
    "async_load": True,
    "skip_save": "skip_save",  # it stores nothing: transfers are never skipped
}


@dataclass
class Offer:
    """Blocks of a finished request, in order, kept until they are pulled.

    `left`: polls until the offer is withdrawn, `until`: the time of that; None: it never is.
    """

    req: str
    blocks: list[int]
    left: int | None = None
    until: float | None = None


@dataclass(frozen=True)
class Pull:
    """An order to fill `blocks` with the remote blocks from index `first` on.

    Without blocks, it only notifies the producer that the KV is not needed.
    """

    req: str
    engine: str
    key: str
    first: int = 0
    blocks: tuple[int, ...] = ()


@dataclass
class PeerMetadata(KVConnectorMetadata):
    """The new offers (key -> request, blocks) and pulls of the worker half."""

    offers: dict[str, tuple[str, list[int]]] = field(default_factory=dict)
    pulls: list[Pull] = field(default_factory=list)


class Board:
    """What one worker of an engine shows to others: its KV tensors and its offers, by key.

    `pages`: the tensors with one entry for each of the scheduler's `blocks`; an attention kernel
    may split a block into several of its own. `block_size`: tokens per block of the scheduler.
    `ranks`: workers of the engine. `slices`: ranks that split the tokens of a block. `done`: keys
    of offers that others no longer need.
    """

    def __init__(
        self, layers: dict[str, torch.Tensor], blocks: int, block_size: int, ranks: int, slices: int
    ) -> None:
        self.layers = layers
        self.pages = {name: layer.unflatten(0, (blocks, -1)) for name, layer in layers.items()}
        self.block_size = block_size
        self.ranks = ranks
        self.slices = slices
        self.offers: dict[str, Offer] = {}
        self.done: list[str] = []


class Peer(Decoy):
    """Prefill on one engine, decode on another. Read the scheduler half first."""

    boards: ClassVar[dict[str, dict[int, Board]]] = {}
    """By engine id, and rank."""
    kvconform_capabilities = CAPABILITIES

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra = self._kv_transfer_config.kv_connector_extra_config
        self.engine_id = str(self._kv_transfer_config.engine_id)
        self.lease = extra.get("lease", 40)
        self.lease_seconds = extra.get("lease_seconds", 0)
        self.delay = extra.get("delay", 1)
        self.patience = extra.get("patience", 3)
        self.whole_blocks = extra.get("whole_blocks", False)
        # Whether a consumer tells its producer when it no longer needs the KV.
        self.notes = True
        self.produces = self._kv_transfer_config.is_kv_producer
        self.consumes = self._kv_transfer_config.is_kv_consumer
        parallel = vllm_config.parallel_config
        self._rank = parallel.rank
        self._ranks = parallel.world_size
        self._slices = parallel.decode_context_parallel_size
        self._size = vllm_config.cache_config.block_size * self._slices

        # Scheduler half.
        self._offers: dict[str, tuple[str, list[int]]] = {}
        self._pulls: list[Pull] = []
        # Requests whose remote KV was claimed: it can be pulled only once.
        self._taken: set[str] = set()
        self._serial = 0

        # Worker half.
        # Pulls under way: (polls until the KV is there, polls until the pull fails, pull).
        self._pulling: list[tuple[int, int, Pull]] = []
        self._invalid: set[int] = set()

    # -- Scheduler half, consumer

    def _remote(self, request: Any) -> dict[str, Any] | None:
        """Return where the request's KV is, if it is to be pulled and was not claimed yet."""
        params = request.kv_transfer_params
        if not self.consumes or not params or not params.get("do_remote_prefill"):
            return None
        if request.request_id in self._taken:
            return None
        for name in ("remote_engine_id", "remote_request_id"):
            if not isinstance(params.get(name), str):
                return None
        return params

    def _available(self, request: Any, remote: dict[str, Any]) -> int:
        """Return how many of the first tokens can be pulled."""
        tokens = min(int(remote.get("remote_num_tokens") or 0), request.num_prompt_tokens)
        if self.whole_blocks:
            tokens -= tokens % self._size
        return tokens

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        remote = self._remote(request)
        tokens = self._available(request, remote) - num_computed_tokens if remote else 0
        return (tokens, True) if tokens > 0 else (0, False)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Plan the pull of the granted tokens.

        Without tokens (a local hit, or a load by another connector), plan a pull without blocks:
        the producer waits to be notified.
        """
        remote = self._remote(request)
        if remote is None:
            return
        self._taken.add(request.request_id)
        if not num_external_tokens:
            self._pull(request.request_id, remote, request.num_computed_tokens // self._size, ())
            return
        first = (self._available(request, remote) - num_external_tokens) // self._size
        end = -(-(first * self._size + num_external_tokens) // self._size)
        granted = tuple(blocks.get_block_ids()[0][first:end]) if end else ()
        self._pull(request.request_id, remote, first, granted)

    def _pull(self, req: str, remote: dict[str, Any], first: int, blocks: tuple[int, ...]) -> None:
        self._pulls.append(
            Pull(req, remote["remote_engine_id"], remote["remote_request_id"], first, blocks)
        )

    # -- Scheduler half, producer, and the end of a request

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        req = request.request_id
        params = request.kv_transfer_params or {}
        remote = self._remote(request)
        if remote is not None:  # it ended before an allocation
            self._pull(req, remote, 0, ())
        self._taken.discard(req)
        has_consumer = self.produces and params.get("do_remote_decode")
        if not has_consumer or request.status not in DONE or not block_ids:
            return False, None
        key = self._key(request)
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

    def _key(self, request: Any) -> str:
        """Return the key of an offer: unique, even if clients reuse request ids."""
        self._serial += 1
        return f"{request.request_id}/{self._serial}"

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        meta = PeerMetadata(self._offers, self._pulls)
        self._offers = {}
        self._pulls = []
        return meta

    # -- Worker half

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        blocks = self._kv_cache_config.num_blocks
        self.board = Board(kv_caches, blocks, self._size, self._ranks, self._slices)
        self.boards.setdefault(self.engine_id, {})[self._rank] = self.board

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        meta = self._get_connector_metadata()
        assert isinstance(meta, PeerMetadata)
        until = time.monotonic() + self.lease_seconds if self.lease_seconds else None
        for key, (req, blocks) in meta.offers.items():
            self.board.offers[key] = Offer(req, blocks, self.lease or None, until)
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
            if pull.blocks:
                received.add(pull.req)
        self._pulling = still
        return self._released() or None, received or None

    def _board(self, engine: str) -> Board | None:
        """Return the board of the same rank of an engine, or of its first if there is none."""
        boards = self.boards.get(engine, {})
        return boards.get(self._rank, boards.get(0))

    def _offer(self, pull: Pull) -> Offer | None:
        board = self._board(pull.engine)
        return board.offers.get(pull.key) if board is not None and self._reads(board) else None

    def _reads(self, board: Board) -> bool:
        """Return whether the blocks of another engine can be copied into this one's."""
        return self._form(board) == self._form(self.board)

    @staticmethod
    def _form(board: Board) -> tuple[Any, ...]:
        dtypes = {layer.dtype for layer in board.layers.values()}
        return board.block_size, board.ranks, board.slices, *dtypes

    def _copy(self, pull: Pull, offer: Offer) -> None:
        """Copy the blocks, and notify the producer that they are no longer needed."""
        board = self.boards[pull.engine][self._rank]
        source = offer.blocks[pull.first : pull.first + len(pull.blocks)]
        for name, pages in self.board.pages.items():
            for mine, theirs in zip(pull.blocks, source, strict=False):
                pages[mine] = board.pages[name][theirs]
        self._invalid |= set(pull.blocks[len(source) :])
        if self.notes:
            board.done.append(pull.key)

    def _failed(self, pull: Pull) -> None:
        """Note the blocks of a failed pull: the engine will compute them.

        A producer whose blocks cannot be copied is notified on all ranks that they are not needed.
        """
        self._invalid |= set(pull.blocks)
        board = self._board(pull.engine)
        if self.notes and board is not None and not self._reads(board):
            for each in self.boards[pull.engine].values():
                each.done.append(pull.key)

    def _released(self) -> set[str]:
        """Withdraw the offers that were pulled, or not pulled in time; return their requests."""
        ended, self.board.done = self.board.done, []
        for key, offer in self.board.offers.items():
            if offer.left is not None:
                offer.left -= 1
                if offer.left < 0:
                    ended.append(key)
            if offer.until is not None and time.monotonic() > offer.until:
                ended.append(key)
        offers = self.board.offers
        return {offers.pop(key).req for key in dict.fromkeys(ended) if key in offers}

    def get_block_ids_with_load_errors(self) -> set[int]:
        invalid, self._invalid = self._invalid, set()
        return invalid

    def shutdown(self) -> None:
        self._pulling = []
        board = getattr(self, "board", None)
        mine = self.boards.get(self.engine_id, {})
        if board is not None and mine.get(self._rank) is board:
            del mine[self._rank]
            if not mine:
                del self.boards[self.engine_id]
