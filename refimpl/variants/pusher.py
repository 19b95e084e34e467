# SPDX-License-Identifier: Apache-2.0
"""A connector for disaggregated prefill that pushes KV chunk by chunk (systems.md B13).

After every step of the producer, its worker pushes the blocks that the step has filled into a
mailbox. So nothing has to be kept when the request ends, and the consumer finds all of it. The
options are those of `Peer`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from kvconform.refimpl.tracking import first_group, scheduled
from kvconform.refimpl.variants.peer import DONE, Offer, Peer, PeerMetadata, Pull

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch


@dataclass
class Mailbox(Offer):
    """What was pushed of one request: its first `tokens` tokens, in blocks by number and layer."""

    tokens: int = 0
    pages: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)


@dataclass(frozen=True)
class Push:
    """An order to push `blocks`, the request's blocks from number `first` on.

    `tokens`: how many tokens are pushed then.
    """

    req: str
    key: str
    first: int
    blocks: tuple[int, ...]
    tokens: int


@dataclass
class PushMetadata(PeerMetadata):
    """The pushes of a step, too, and the keys of mailboxes that no consumer will ask for."""

    pushes: list[Push] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)


@dataclass
class Progress:
    """A request that is pushed: its blocks, and how many of its tokens were pushed."""

    request: Any
    key: str
    table: list[int]
    tokens: int = 0


class Pusher(Peer):
    """Pushes while the producer computes. Read the scheduler half first."""

    mailboxes: ClassVar[dict[tuple[str, int, str], Mailbox]] = {}
    """By engine id and rank of the producer, and key."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        # Scheduler half.
        self._progress: dict[str, Progress] = {}
        self._dropped: list[str] = []
        # Worker half.
        self._pushed: KVConnectorMetadata | None = None

    # -- Scheduler half, producer

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Begin to push a request, or begin again: a resumed request has other blocks."""
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        params = request.kv_transfer_params or {}
        if not self.produces or not params.get("do_remote_decode"):
            return
        req = request.request_id
        if req in self._progress:
            key = self._progress[req].key
        else:
            self._serial += 1
            key = f"{req}/{self._serial}"
        self._progress[req] = Progress(request, key, first_group(blocks.get_block_ids()))

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        pushes = []
        for req, computed, new_blocks, replaces in self._scheduled(scheduler_output):
            progress = self._progress.get(req)
            if progress is None:
                continue
            if replaces:
                progress.table = first_group(new_blocks or ())
            elif new_blocks is not None:
                progress.table += first_group(new_blocks)
            count = scheduler_output.num_scheduled_tokens[req]
            end = min(computed + count, progress.request.num_tokens)
            if end > progress.tokens:
                pushes.append(self._push(req, progress, end))
        pulls = super().build_connector_meta(scheduler_output)
        assert isinstance(pulls, PeerMetadata)
        dropped, self._dropped = self._dropped, []
        return PushMetadata(pulls.offers, pulls.pulls, pushes, dropped)

    def _scheduled(self, scheduler_output: Any) -> Iterable[Any]:
        """Return the requests of a step; a defect takes resumed ones for running ones."""
        return scheduled(scheduler_output)

    def _push(self, req: str, progress: Progress, end: int) -> Push:
        """Plan a push; a block that was pushed before it was full is pushed again."""
        first = progress.tokens // self._size
        progress.tokens = end
        blocks = tuple(progress.table[first : -(-end // self._size)])
        return Push(req, progress.key, first, blocks, end)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Return where the KV is. The engine may free the blocks: all of it was pushed."""
        _, params = super().request_finished(request, block_ids)
        self._offers.clear()
        progress = self._progress.pop(request.request_id, None)
        if progress is None:
            return False, None
        if params is None or request.status not in DONE:
            self._dropped.append(progress.key)
            return False, None
        tokens = min(progress.tokens, params["remote_num_tokens"])
        return False, {
            **params,
            "remote_request_id": progress.key,
            "remote_block_ids": [],
            "remote_num_tokens": tokens,
        }

    # -- Scheduler half, consumer

    def _pull(self, req: str, remote: dict[str, Any], first: int, blocks: tuple[int, ...]) -> None:
        """Wait for as many tokens as the producer has promised: a step may be under way."""
        super()._pull(req, remote, first, blocks)
        pull = self._pulls[-1]
        tokens = int(remote.get("remote_num_tokens") or 0)
        self._pulls[-1] = dataclasses.replace(pull, key=f"{pull.key} {tokens}")

    # -- Worker half

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        super().start_load_kv(forward_context, **kwargs)
        meta = self._get_connector_metadata()
        assert isinstance(meta, PushMetadata)
        for key in meta.dropped:
            self.mailboxes.pop((self.engine_id, self._rank, key), None)

    def wait_for_save(self) -> None:
        """Push the blocks that the step has filled. May be called twice."""
        meta = self._get_connector_metadata()
        assert isinstance(meta, PushMetadata)
        if meta is not self._pushed:
            for push in meta.pushes:
                self._deliver(push)
        self._pushed = meta

    def _deliver(self, push: Push) -> None:
        place = self.engine_id, self._rank, push.key
        mailbox = self.mailboxes.setdefault(place, Mailbox(push.req, []))
        for number, block in enumerate(push.blocks, push.first):
            mailbox.pages[number] = {
                name: pages[block].clone() for name, pages in self.board.pages.items()
            }
        mailbox.tokens = push.tokens

    def _offer(self, pull: Pull) -> Offer | None:
        board = self._board(pull.engine)
        if board is not None and not self._reads(board):
            return None
        key, _, tokens = pull.key.rpartition(" ")
        mailbox = self.mailboxes.get((pull.engine, self._rank, key))
        return mailbox if mailbox is not None and mailbox.tokens >= int(tokens) else None

    def _copy(self, pull: Pull, offer: Offer) -> None:
        """Copy the blocks out of the mailbox, and remove it."""
        assert isinstance(offer, Mailbox)
        for number, block in enumerate(pull.blocks, pull.first):
            page = offer.pages.get(number)
            if page is None:
                self._invalid.add(block)
                continue
            for name, pages in self.board.pages.items():
                pages[block] = page[name]
        self.mailboxes.pop((pull.engine, self._rank, pull.key.rpartition(" ")[0]), None)

    def shutdown(self) -> None:
        super().shutdown()
        for engine, rank, key in [*self.mailboxes]:
            if (engine, rank) == (self.engine_id, self._rank):
                del self.mailboxes[engine, rank, key]
