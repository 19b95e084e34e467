# SPDX-License-Identifier: Apache-2.0
"""A worker half that does nothing, for connectors whose own cannot run here: their scheduler half is judged alone."""

from __future__ import annotations

from typing import Any

from kvconform.compat import KVConnectorBase_V1

SCHEDULER_AREAS = ("lookup", "allocation", "metadata", "finish", "placeholders", "preemption", "speculation")
"""Areas whose requirements can be judged on the scheduler half alone: nothing in them depends on what a worker stored or reported..."""
NEEDS_REPORTS = frozenset({"lookup.answers-eventually"})
"""...but these: they wait for what only a worker half can report."""


def judged_alone(requirement_id: str, area: str) -> bool:
    """Whether a requirement can be judged without the connector's worker half."""
    return area in SCHEDULER_AREAS and requirement_id not in NEEDS_REPORTS


class NoWorkerHalf(KVConnectorBase_V1):
    """Accepts every worker hook, transfers nothing and reports nothing."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Nothing is kept."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing is loaded."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is awaited."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing is saved."""

    def wait_for_save(self) -> None:
        """Nothing is awaited."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        raise NotImplementedError("a scheduler hook was called on the worker half")

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        raise NotImplementedError("a scheduler hook was called on the worker half")

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        raise NotImplementedError("a scheduler hook was called on the worker half")
