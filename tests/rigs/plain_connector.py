# SPDX-License-Identifier: Apache-2.0
"""The smallest connector: only the abstract methods of the base class."""

from __future__ import annotations

from typing import Any

from kvconform.compat.vllm_api import KVConnectorBase_V1, KVConnectorMetadata, KVConnectorRole


class Plain(KVConnectorBase_V1):
    """Implements what must be implemented.

    `role` None stands for an instance whose base constructor has not run.
    """

    def __init__(self, role: KVConnectorRole | None = KVConnectorRole.SCHEDULER) -> None:
        if role is not None:
            self._role, self._connector_metadata = role, None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self.wait_for_save()

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        raise LookupError(f"no {layer_name}\nat all")

    def wait_for_save(self) -> None:
        self.handle_preemptions(KVConnectorMetadata())

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return 0, type(self) is Plain

    def update_state_after_alloc(
        self, request: Any, blocks: Any, num_external_tokens: int
    ) -> None: ...

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    @staticmethod
    def get_finished_count() -> int | None:  # type: ignore[override]
        return 7

    @classmethod
    def take_events(cls) -> Any:
        return [cls.__name__]
