# SPDX-License-Identifier: Apache-2.0
"""Connectors that leave loads to a sibling, and write into the KV cache all the same."""

from __future__ import annotations

from typing import Any, ClassVar

from kvconform.refimpl.connector import Lookup
from kvconform.refimpl.variants.loading import NeverHits


class LoadsToo(NeverHits):
    """Loads what it has stored, although it claimed nothing and its sibling was chosen."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Lookup:
        self._found = self._stored_prefix(request) - num_computed_tokens
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, max(0, self._found))


class Scribbles(NeverHits):
    """Changes a block that no request has, in one of its hooks."""

    hook: ClassVar[str]

    def _scribble(self, hook: str) -> None:
        if hook == self.hook:
            for layer in self._layers.values():
                layer[-1] += 1

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        super().start_load_kv(forward_context, **kwargs)
        self._scribble("start_load_kv")

    def wait_for_layer_load(self, layer_name: str) -> None:
        super().wait_for_layer_load(layer_name)
        self._scribble("wait_for_layer_load")

    def wait_for_save(self) -> None:
        super().wait_for_save()
        self._scribble("wait_for_save")

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        found = super().get_finished(finished_req_ids)
        self._scribble("get_transfer_results")
        return found

    def get_block_ids_with_load_errors(self) -> set[int]:
        self._scribble("get_block_ids_with_load_errors")
        return super().get_block_ids_with_load_errors()
