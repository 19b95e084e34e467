# SPDX-License-Identifier: Apache-2.0
"""Answers that the engine cannot use, and questions that change something."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvconform.refimpl.connector import ReferenceConnector
from kvconform.refimpl.plan import Load, Save
from kvconform.refimpl.tracking import Tracked

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


class NegativeCount(ReferenceConnector):
    """Subtracts the local hit from a stored prefix that is shorter (B044)."""

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        found = self._claim(request, self._stored_prefix(request))
        return found - num_computed_tokens if found else 0, False


class ZeroAsync(ReferenceConnector):
    """Announces an asynchronous load of nothing."""

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return super().get_num_new_matched_tokens(request, num_computed_tokens)[0], True


class FullHit(ReferenceConnector):
    """Claims the last token too: a synchronous load leaves nothing to compute (B035)."""

    def _claim(self, request: Request, found: int) -> int:
        return min(found, request.num_tokens)


class FloatCount(ReferenceConnector):
    """Divides with `/`, so the count is a float."""

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        matched, is_async = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return (matched or 0) / self._block_size * self._block_size, is_async  # type: ignore[return-value]


class TotalCount(ReferenceConnector):
    """Answers the length of the stored prefix instead of what it adds to the local hit (B018)."""

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        matched, is_async = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return (matched + num_computed_tokens if matched else 0), is_async


class PopsOnLookup(ReferenceConnector):
    """Takes a hit out of its table when it is asked, so who has to ask again finds nothing (B015)."""

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        asked: set[str] = self.__dict__.setdefault("_asked", set())
        matched, is_async = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if request.request_id in asked:
            return 0, False
        if matched:
            asked.add(request.request_id)
        return matched, is_async


class NeverAnswers(ReferenceConnector):
    """Asks for more time, forever, where there is something to load."""

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        matched, is_async = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return (matched, is_async) if matched == 0 else (None, False)


class AdvancesOnLookup(ReferenceConnector):
    """Every lookup of a request moves on the mark up to which it counts as stored; a repeated one leaves a hole (B061)."""

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        marks: dict[str, int] = self.__dict__.setdefault("_marks", {})
        marks[request.request_id] = marks.get(request.request_id, -1) + 1
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def _plan_save(self, tracked: Tracked, end: int, scheduled: int, final: bool = False) -> Save:
        tracked.saved = max(
            tracked.saved, self.__dict__.get("_marks", {}).get(tracked.request.request_id, 0)
        )
        return super()._plan_save(tracked, end, scheduled, final)


class ExpectsAllocation(ReferenceConnector):
    """Assumes that a lookup which found something is followed by an allocation in the same step (B015)."""

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        answer = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if answer[0]:
            self.__dict__.setdefault("_expected", set()).add(request.request_id)
        return answer

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        assert self.__dict__.pop("_expected", set()) == set(self._granted)
        return super().build_connector_meta(scheduler_output)


class IgnoresZeroGrant(ReferenceConnector):
    """Loads what its lookup found, although the engine granted nothing (B106, B131)."""

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        answer = super().get_num_new_matched_tokens(request, num_computed_tokens)
        self.__dict__.setdefault("_claims", {})[request.request_id] = answer[0]
        return answer

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        claimed = self.__dict__.get("_claims", {}).pop(request.request_id, 0)
        super().update_state_after_alloc(request, blocks, num_external_tokens or claimed)

    def _plan_load(self, tracked: Tracked, granted: int, is_async: bool) -> Load:
        end = max(tracked.request.num_computed_tokens, granted)
        return Load(
            tracked.request.request_id,
            end - granted,
            end,
            self._pieces(tracked, end - granted, end),
            is_async,
        )


class RepeatsFailedHit(ReferenceConnector):
    """Never forgets that a chunk was stored, not even after its load has failed: the request is looked up and fails forever (B071)."""

    def _stored_prefix(self, request: Request) -> int:
        known: set[str] = self.__dict__.setdefault("_known", set())
        keys: Any = self._keys(request, [], request.num_tokens)
        known.update(key for key in keys if self._store.has(key))
        return (
            next((index for index, key in enumerate(keys) if key not in known), len(keys))
            * self.options.chunk_tokens
        )
