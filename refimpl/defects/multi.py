# SPDX-License-Identifier: Apache-2.0
"""Planted defects that show only inside MultiConnector."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from vllm.config import get_current_vllm_config
from vllm.distributed.kv_transfer.kv_transfer_state import get_kv_transfer_group

from kvconform.refimpl.connector import Finish, Lookup, ReferenceConnector
from kvconform.refimpl.faulty import Target, with_arguments
from kvconform.refimpl.plan import Save
from kvconform.refimpl.tracking import Tracked

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

MULTI = "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector:MultiConnector"
BUILD_STATS = Target(f"{MULTI}.build_kv_connector_stats")


class AsksForTheGroup(ReferenceConnector):
    """Saves only if it is the engine's connector, which it never is inside another one."""

    def wait_for_save(self) -> None:
        if get_kv_transfer_group() is self:
            super().wait_for_save()


class KnowsAllReports(ReferenceConnector):
    """Looks up every reported request among its own, including those of its siblings."""

    def request_finished(self, request: Any, block_ids: list[int]) -> Finish:
        held, params = super().request_finished(request, block_ids)
        if held:
            self._final_ids.add(request.request_id)
        return held, params

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._final_ids: set[str] = set()

    def update_connector_output(self, connector_output: Any) -> None:
        for req in connector_output.finished_sending or ():
            self._final_ids.remove(req)
        super().update_connector_output(connector_output)


class KnowsAllFailures(ReferenceConnector):
    """Looks each block that failed to load up among those that it loads itself."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._owners: dict[int, str] = {}

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if num_external_tokens:
            for block in blocks.get_block_ids()[0]:
                self._owners[block] = request.request_id

    def update_connector_output(self, connector_output: Any) -> None:
        super().update_connector_output(connector_output)
        for block in connector_output.invalid_block_ids:
            del self._owners[block]


class SavesRejected(ReferenceConnector):
    """Keeps the load that its lookup found when it is not chosen, and saves it instead (B142).

    It has no block table for that request.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._found: dict[str, int] = {}
        self._rejected: list[tuple[Request, int]] = []

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> Lookup:
        answer = super().get_num_new_matched_tokens(request, num_computed_tokens)
        self._found[request.request_id] = num_computed_tokens + (answer[0] or 0)
        return answer

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        found = self._found.pop(request.request_id, 0)
        if found and not num_external_tokens:
            self._rejected.append((request, found))
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        rejected, self._rejected = self._rejected, []
        self._final += [self._plan_save(Tracked(request, []), end, 0) for request, end in rejected]
        return super().build_connector_meta(scheduler_output)


class LoadsUnchosen(ReferenceConnector):
    """Loads what its lookup found, even if a sibling was chosen."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Lookup:
        found = super().get_num_new_matched_tokens(request, num_computed_tokens)
        self.__dict__.setdefault("_found", {})[request.request_id] = found[0]
        return found

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        found = self.__dict__.get("_found", {}).pop(request.request_id, 0)
        super().update_state_after_alloc(request, blocks, found)


class SavesWhatItIsTold(ReferenceConnector):
    """Saves all computed tokens of a request whose prompt it sees for the second time.

    A sibling may still be loading some of them.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._seen: set[str] = set()
        self._twice: set[str] = set()

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Lookup:
        keys = self._keys(request, [], request.num_tokens)
        if keys[0] in self._seen:
            self._twice.add(request.request_id)
        self._seen.update(keys)
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def _worth_saving(self, request: Any, end: int) -> int:
        return end if request.request_id in self._twice else 0

    def _plan_saves(self, scheduler_output: SchedulerOutput) -> Iterator[Save]:
        yield from super()._plan_saves(scheduler_output)
        for req_id, tracked in self._tracked.items():
            if req_id not in scheduler_output.num_scheduled_tokens:
                computed = tracked.request.num_computed_tokens
                yield self._plan_save(tracked, self._worth_saving(tracked.request, computed), 0)


class CopiesFreedBlocks(ReferenceConnector):
    """Stores what a sibling has loaded, and copies it when the blocks have been freed.

    Keeps nothing else. It returns False from request_finished, because it computed nothing.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._fetched: set[str] = set()

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if request.num_computed_tokens and not num_external_tokens:
            self._fetched.add(request.request_id)

    def _save_bound(self, request: Any, computed: int, scheduled: int) -> int:
        return 0

    def _finish_bound(self, request: Any) -> int:
        return super()._finish_bound(request) if request.request_id in self._fetched else 0

    def request_finished(self, request: Any, block_ids: list[int]) -> Finish:
        super().request_finished(request, block_ids)
        self._final = [replace(save, final=False) for save in self._final]
        return False, None


class KnowsItsPeers(ReferenceConnector):
    """Takes all handshake metadata for its own, including that of its siblings."""

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        super().set_xfer_handshake_metadata_pp_aware(metadata)
        self._stores = [peer.store for peer in metadata.values()]


class ReadsTheEnginesOptions(ReferenceConnector):
    """Takes the number of reports from the engine's configuration.

    Inside MultiConnector, that has only the options of the parent.
    """

    readers: ClassVar[int | None] = None

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if role.name == "WORKER":
            engine = get_current_vllm_config().kv_transfer_config
            assert engine is not None
            ReadsTheEnginesOptions.readers = (
                1 if "store" in engine.kv_connector_extra_config else None
            )

    def get_finished_count(self) -> int | None:
        return self.readers


class LayoutByRole(ReferenceConnector):
    """Requires another layout as a consumer than as a producer."""

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        return "NHD" if vllm_config.kv_transfer_config.kv_role == "kv_consumer" else "HND"


forgets_child_statistics = BUILD_STATS.replaced_by(with_arguments(lambda data=None: ({},)))
"""Rebuild nothing of what a child of MultiConnector counted."""
