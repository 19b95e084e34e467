# SPDX-License-Identifier: Apache-2.0
"""Hooks that a connector may offer the conformance suite beyond vLLM's interface; all optional."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvconform.compat.vllm_api import PREEMPTIONS_BY_METADATA
from kvconform.refimpl.cache.codecs import CODECS
from kvconform.refimpl.faults import Faults
from kvconform.refimpl.inspector import Inspector


class SuiteHooks:
    """The suite's hooks: show the plans of a step, make loads fail, declare capabilities."""

    _faults: Faults

    def kvconform_inspector(self) -> Inspector:
        """Return the inspector of this half."""
        return Inspector()

    def kvconform_fail_load(
        self, req_id: str, positions: Iterable[int] | None = None, rank: int | None = None
    ) -> None:
        """Make the chunks of these token positions vanish before the request's next load.

        Scheduler half. None: the chunks of all positions. `rank`: only that rank's shards of them.
        """
        self._faults.arm(req_id, positions, rank)

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        super().bind_connector_metadata(connector_metadata)  # type: ignore[misc]
        # Until 0.19, vLLM calls handle_preemptions without the metadata. So call it here.
        if not PREEMPTIONS_BY_METADATA:
            self.handle_preemptions(connector_metadata)  # type: ignore[attr-defined]

    @classmethod
    def kvconform_capabilities(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        """Return the declared capabilities for a configuration; the suite infers the others."""
        capabilities: dict[str, Any] = {
            "roles": ["kv_both", "kv_producer", "kv_consumer"],
            "context_parallel": True,
            "kv_events": True,
        }
        # By default, a chunk is a block. Other chunks may not be a whole number of blocks, and then
        # no block hash announces them.
        if "chunk_tokens" in extra_config:
            capabilities["kv_events"] = False
            capabilities["chunk_tokens"] = extra_config["chunk_tokens"]
        if "store" in extra_config:  # by default, a store is that of one engine
            capabilities["shared"] = True
        codec = CODECS.get(extra_config.get("codec", "raw"))
        if codec is not None and codec.tolerance:
            capabilities["lossy"] = codec.tolerance
        return capabilities
