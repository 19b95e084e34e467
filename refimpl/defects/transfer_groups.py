# SPDX-License-Identifier: Apache-2.0
"""Planted defects of connectors that hand over the blocks of several KV cache groups."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvconform.refimpl.variants.hybrid_peer import HybridPeer
from kvconform.refimpl.variants.peer import Peer, Pull

if TYPE_CHECKING:
    from collections.abc import Sequence


class OneTable(HybridPeer):
    """Takes the producer's table of the first group for that of all groups."""

    def request_finished_all_groups(
        self, request: Any, block_ids: Sequence[Sequence[int]]
    ) -> tuple[bool, dict[str, Any] | None]:
        return super().request_finished_all_groups(request, [block_ids[0]] * len(block_ids))


class WithoutNullBlocks(HybridPeer):
    """Leaves null blocks out of the producer's tables, but not out of the consumer's."""

    def request_finished_all_groups(
        self, request: Any, block_ids: Sequence[Sequence[int]]
    ) -> tuple[bool, dict[str, Any] | None]:
        held, params = super().request_finished_all_groups(request, block_ids)
        if held and params is not None:
            key = params["remote_request_id"]
            self._tables[key] = tuple(tuple(filter(None, table)) for table in self._tables[key])
        return held, params


class HandsOverTheLastBlock(HybridPeer):
    """Takes the last block of a recurrent layer's table for the one with the state (B158)."""

    def request_finished_all_groups(
        self, request: Any, block_ids: Sequence[Sequence[int]]
    ) -> tuple[bool, dict[str, Any] | None]:
        tokens = min(request.num_computed_tokens, request.num_tokens - 1)
        end = -(-tokens // self._size)
        return super().request_finished_all_groups(
            request, [[*table[: end - 1], table[-1]] for table in block_ids]
        )


class LeavesNothingOut(HybridPeer):
    """Hands over the state behind the prompt's last token, which the consumer computes again."""

    def _leave_last_out(self, request: Any) -> None:
        pass


class ReportsBlocksOfGroups(HybridPeer):
    """Reports the blocks of a pull that failed; of several groups, they do not say whose."""

    def _failed(self, pull: Pull) -> None:
        Peer._failed(self, pull)
