# SPDX-License-Identifier: Apache-2.0
"""A connector for disaggregated prefill of models with several KV cache groups."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, SupportsHMA
from vllm.v1.kv_cache_interface import MambaSpec

from kvconform.refimpl.variants.peer import Offer, Peer, PeerMetadata, Pull

if TYPE_CHECKING:
    from collections.abc import Sequence

Tables: TypeAlias = tuple[tuple[int, ...], ...]
"""Blocks of each group. Block 0 stands for what has left a group's window."""


@dataclass(frozen=True)
class GroupedPull(Pull):
    """A pull that fills blocks of every group. `blocks` are those of all groups."""

    tables: Tables = ()


@dataclass
class GroupedOffer(Offer):
    """An offer of blocks of every group."""

    tables: Tables = ()


@dataclass
class GroupedMetadata(PeerMetadata):
    """With the tables of the new offers, by key."""

    tables: dict[str, Tables] = field(default_factory=dict)


class HybridPeer(Peer, SupportsHMA):
    """Hands over the blocks of all groups, of which those in a window are kept only in part.

    All groups have blocks of the same size. Of recurrent layers there is only the state behind the
    last token that the producer computes, and the consumer computes the last token of the prompt
    in any case: the producer leaves that token out, as vLLM's NixlConnector does.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        groups = kv_cache_config.kv_cache_groups
        self._layers_of = [group.layer_names for group in groups]
        self._recurrent = any(isinstance(group.kv_cache_spec, MambaSpec) for group in groups)
        # Requests whose last token was left out.
        self._shortened: set[str] = set()
        self._tables: dict[str, Tables] = {}
        self._lost: set[str] = set()

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        params = request.kv_transfer_params or {}
        if self._recurrent and self.produces and params.get("do_remote_decode"):
            self._leave_last_out(request)
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def _leave_last_out(self, request: Any) -> None:
        """Shorten the prompt by its last token, once; what is sampled behind it is of no use."""
        req = request.request_id
        if req in self._shortened or request.num_prompt_tokens < 2:
            return
        self._shortened.add(req)
        if request.prompt_token_ids is not None:
            del request.prompt_token_ids[-1]
        if request.prompt_embeds is not None:
            request.prompt_embeds = request.prompt_embeds[:-1]
        del request._all_token_ids[-1]
        request.num_prompt_tokens -= 1
        request.max_tokens = 1
        request.block_hashes = request.block_hashes[: request.num_prompt_tokens // self._size]

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        planned = len(self._pulls)
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if len(self._pulls) == planned or not self._pulls[-1].blocks:
            return
        pull = self._pulls.pop()
        end = pull.first + len(pull.blocks)
        tables = tuple(tuple(table[pull.first : end]) for table in blocks.get_block_ids())
        known = tuple(block for table in tables for block in table if block)
        self._pulls.append(GroupedPull(pull.req, pull.engine, pull.key, pull.first, known, tables))

    def request_finished_all_groups(
        self, request: Any, block_ids: Sequence[Sequence[int]]
    ) -> tuple[bool, dict[str, Any] | None]:
        held, params = self.request_finished(request, list(block_ids[0]))
        shortened = request.request_id in self._shortened
        self._shortened.discard(request.request_id)
        if held and params is not None:
            if shortened:
                del params["first_token"]  # it follows another token than the prompt's last one
            key, end = params["remote_request_id"], len(params["remote_block_ids"])
            self._tables[key] = tuple(tuple(table[:end]) for table in block_ids)
            params["remote_block_ids"] = [list(table) for table in self._tables[key]]
        return held, params

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        meta = super().build_connector_meta(scheduler_output)
        assert isinstance(meta, PeerMetadata)
        tables, self._tables = self._tables, {}
        return GroupedMetadata(meta.offers, meta.pulls, tables)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        super().start_load_kv(forward_context, **kwargs)
        meta = self._get_connector_metadata()
        assert isinstance(meta, GroupedMetadata)
        for key, tables in meta.tables.items():
            offer = self.board.offers[key]
            self.board.offers[key] = GroupedOffer(
                offer.req, offer.blocks, offer.left, offer.until, tables
            )

    def _copy(self, pull: Pull, offer: Offer) -> None:
        """Copy what is in the consumer's windows; fail if the producer's have gone on since."""
        board = self.boards[pull.engine][self._rank]
        if isinstance(pull, GroupedPull) and isinstance(offer, GroupedOffer):
            for names, mine, theirs in zip(self._layers_of, pull.tables, offer.tables, strict=True):
                pairs = zip(mine, theirs[pull.first :], strict=False)
                kept = [(to, of) for to, of in pairs if to]
                if not all(of for _, of in kept):
                    self._failed(pull)
                for name in names:
                    for to, of in kept:
                        self.board.pages[name][to] = board.pages[name][of]
        if self.notes:
            board.done.append(pull.key)

    def _failed(self, pull: Pull) -> None:
        """Note the request of a failed pull: of several groups, blocks do not say what was lost."""
        super()._failed(pull)
        if len(self._layers_of) > 1 and pull.blocks:
            self._invalid = set()
            self._lost.add(pull.req)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        results = super().get_transfer_results(finished_req_ids)
        results.failed_recving |= self._lost
        self._lost = set()
        return results
