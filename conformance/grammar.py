# SPDX-License-Identifier: Apache-2.0
"""A compiled grammar for structured output that allows every token: what the harness samples is not up to it."""

from __future__ import annotations

from typing import Any

from vllm.v1.structured_output.backend_types import StructuredOutputGrammar


class AnyText(StructuredOutputGrammar):
    """Accepts everything, and never ends. Holds no state."""

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        return True

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        return tokens

    def rollback(self, num_tokens: int) -> None:
        pass

    def fill_bitmask(self, bitmask: Any, batch_index: int) -> None:
        bitmask[batch_index].fill_(-1)

    def is_terminated(self) -> bool:
        return False

    def reset(self) -> None:
        pass
