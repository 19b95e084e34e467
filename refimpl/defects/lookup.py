# SPDX-License-Identifier: Apache-2.0
"""Planted defects: lookups with unusable answers, and lookups with side effects."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvconform.refimpl.connector import Lookup, ReferenceConnector
from kvconform.refimpl.plan import Load, Save
from kvconform.refimpl.tracking import Tracked

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


class NegativeCount(ReferenceConnector):
    """Subtracts the local hit from a stored prefix that is shorter (B044)."""

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> Lookup:
        found = self._claim(request, self._stored_prefix(request))
        return found - num_computed_tokens if found else 0, False


class ZeroAsync(ReferenceConnector):
    """Announces an asynchronous load of nothing."""

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> Lookup:
        return super().get_num_new_matched_tokens(request, num_computed_tokens)[0], True


class FullHit(ReferenceConnector):
    """Claims the last token too, so that a synchronous load leaves nothing to compute (B035)."""

    def _claim(self, request: Request, found: int) -> int:
        return min(found, request.num_tokens)


class FloatCount(ReferenceConnector):
    """Divides with `/`, so that the count is a float."""

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> Lookup:
        matched, is_async = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return (matched or 0) / self._block_size * self._block_size, is_async  # type: ignore[return-value]


class TotalCount(ReferenceConnector):
    """Returns the length of the stored prefix, instead of what it adds to the local hit (B018)."""

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> Lookup:
        matched, is_async = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return (matched + num_computed_tokens if matched else 0), is_async


class PopsOnLookup(ReferenceConnector):
    """Removes a hit from its table when it is looked up: a repeated lookup finds nothing (B015)."""

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> Lookup:
        asked: set[str] = self.__dict__.setdefault("_asked", set())
        matched, is_async = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if request.request_id in asked:
            return 0, False
        if matched:
            asked.add(request.request_id)
        return matched, is_async


class NeverAnswers(ReferenceConnector):
    """Asks for more time in every lookup that finds something to load."""

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> Lookup:
        matched, is_async = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return (matched, is_async) if matched == 0 else (None, False)


class AdvancesOnLookup(ReferenceConnector):
    """Counts one more chunk as stored at every lookup: a repeated lookup leaves a gap (B061)."""

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> Lookup:
        marks: dict[str, int] = self.__dict__.setdefault("_marks", {})
        marks[request.request_id] = marks.get(request.request_id, -1) + 1
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def _plan_save(self, tracked: Tracked, end: int, scheduled: int, final: bool = False) -> Save:
        mark = self.__dict__.get("_marks", {}).get(tracked.request.request_id, 0)
        tracked.saved = max(tracked.saved, mark)
        return super()._plan_save(tracked, end, scheduled, final)


class ExpectsSamplingParameters(ReferenceConnector):
    """Reads an option of its own from the sampling parameters, which may be None (B160)."""

    def _stored_prefix(self, request: Request) -> int:
        if (request.sampling_params.extra_args or {}).get("kvconform_skip_lookup"):  # type: ignore[union-attr]
            return 0
        return super()._stored_prefix(request)


class ExpectsAllocation(ReferenceConnector):
    """Assumes that an allocation follows in the same step if a lookup found something (B015)."""

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> Lookup:
        answer = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if answer[0]:
            self.__dict__.setdefault("_expected", set()).add(request.request_id)
        return answer

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        assert self.__dict__.pop("_expected", set()) == set(self._granted)
        return super().build_connector_meta(scheduler_output)


class IgnoresZeroGrant(ReferenceConnector):
    """Loads what its lookup found, although the engine granted nothing (B106, B131)."""

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> Lookup:
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
        start = end - granted
        pieces = self._pieces(tracked, start, end)
        return Load(tracked.request.request_id, start, end, pieces, is_async)


class RepeatsFailedHit(ReferenceConnector):
    """Never forgets that a chunk was stored, even if its load has failed (B071).

    The request is then looked up, and fails, forever.
    """

    def _stored_prefix(self, request: Request) -> int:
        known: set[str] = self.__dict__.setdefault("_known", set())
        keys = self._keys(request, [], request.num_tokens)
        known.update(key for key in keys if self._store.has(key))
        unknown = (index for index, key in enumerate(keys) if key not in known)
        return next(unknown, len(keys)) * self.options.chunk_tokens


class ReleasesTwice(ReferenceConnector):
    """Releases chunks twice that a lookup found and the load does not need (B148).

    They are those of the local hit. The index still has them, so the next hit asserts.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._freed: set[str] = set()
        self._unneeded: dict[str, set[str]] = {}

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> Lookup:
        tokens, is_async = super().get_num_new_matched_tokens(request, num_computed_tokens)
        chunk = self.options.chunk_tokens
        found = self._keys(request, [], request.num_tokens)[: self._stored_prefix(request) // chunk]
        assert not tokens or self._freed.isdisjoint(found)
        self._unneeded[request.request_id] = set(found[: num_computed_tokens // chunk])
        return tokens, is_async

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        if num_external_tokens:
            self._freed |= self._unneeded.pop(request.request_id, set())
        super().update_state_after_alloc(request, blocks, num_external_tokens)
