# SPDX-License-Identifier: Apache-2.0
"""What a connector may offer the conformance suite beyond vLLM's interface. All of it is optional."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvconform.compat.vllm_api import PREEMPTIONS_BY_METADATA
from kvconform.refimpl.faults import Faults
from kvconform.refimpl.inspector import Inspector


class SuiteHooks:
    """Lets the suite see what is planned, not only what happens; lose chunks before a load; and know what to expect."""

    _faults: Faults

    def kvconform_inspector(self) -> Inspector:
        """A window into this half: see ``Inspector``."""
        return Inspector()

    def kvconform_fail_load(self, req_id: str, positions: Iterable[int] | None = None) -> None:
        """Scheduler half: the next load planned for the request finds the chunks of these token positions gone (None: of all positions)."""
        self._faults.arm(req_id, positions)

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """Releases until 0.19 do not show the metadata to handle_preemptions: what is done there is done here."""
        super().bind_connector_metadata(connector_metadata)  # type: ignore[misc]
        if not PREEMPTIONS_BY_METADATA:
            self.handle_preemptions(connector_metadata)  # type: ignore[attr-defined]

    @classmethod
    def kvconform_capabilities(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        """Declared capabilities for a configuration; what is not declared is found out. The chunk is a block unless configured."""
        chunk = {name: extra_config[name] for name in ("chunk_tokens",) if name in extra_config}
        roles = ["kv_both", "kv_producer", "kv_consumer"]
        events = not chunk  # a chunk that is no whole number of blocks is announced by no hash
        return {"roles": roles, "context_parallel": True, "kv_events": events, **chunk}
