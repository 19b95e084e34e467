# SPDX-License-Identifier: Apache-2.0
"""Mistakes that show inside of MultiConnector only."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_transfer_state import get_kv_transfer_group

from kvconform.refimpl.connector import ReferenceConnector


class AsksForTheGroup(ReferenceConnector):
    """Saves only if it is the engine's connector: inside of another one it never is."""

    def wait_for_save(self) -> None:
        if get_kv_transfer_group() is self:
            super().wait_for_save()


class KnowsAllReports(ReferenceConnector):
    """Looks every reported request up among its own, siblings' requests too."""

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
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


class LoadsUnchosen(ReferenceConnector):
    """Loads what its lookup found, whoever was chosen."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        found = super().get_num_new_matched_tokens(request, num_computed_tokens)
        self.__dict__.setdefault("_found", {})[request.request_id] = found[0]
        return found

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, self.__dict__.get("_found", {}).pop(request.request_id, 0))
