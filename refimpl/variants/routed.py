# SPDX-License-Identifier: Apache-2.0
"""Disaggregated prefill with a router that makes the parameters of both engines (as Mooncake's).

The router gives a request a transfer id and names the producer. The producer keeps the KV under
that id, and returns no parameters.
"""

from __future__ import annotations

from typing import Any

from kvconform.refimpl.variants.peer import Peer


class Router:
    """Makes the kv_transfer_params of a producer's and a consumer's requests (docs, `router`)."""

    def prefill(self, request: str, producer: str) -> dict[str, Any] | None:
        """Return the parameters of a request to the producer: a transfer id of our own."""
        return {"do_remote_decode": True, "transfer_id": f"transfer-{request}"}

    def decode(
        self,
        request: str,
        producer: str,
        sent: dict[str, Any] | None,
        returned: dict[str, Any] | None,
    ) -> dict[str, Any] | None:
        """Return the parameters of a request to the consumer: the same id, and the producer."""
        assert sent is not None
        return {
            "do_remote_prefill": True,
            "remote_engine_id": producer,
            "remote_request_id": sent["transfer_id"],
        }


class RouterAtOnce(Router):
    """Sends the consumer its request while the producer computes."""

    at_once = True


class Routed(Peer):
    """Keeps KV under the transfer id of the router. All of the prompt is there, or nothing."""

    def _available(self, request: Any, remote: dict[str, Any]) -> int:
        """Return the tokens of the prompt but the last: the producer was sent the same prompt."""
        tokens = int(request.num_prompt_tokens) - 1
        return tokens - tokens % self._size if self.whole_blocks else tokens

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        held, _ = super().request_finished(request, block_ids)
        return held, None

    def _key(self, request: Any) -> str:
        return str(request.kv_transfer_params.get("transfer_id"))
