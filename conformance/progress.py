# SPDX-License-Identifier: Apache-2.0
"""What one part of a case hands to the next, also from one process to another."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

from kvconform.engines.info import Info
from kvconform.memory import Memory


class Snapshot:
    """Follows a request without keeping it alive: tokens and status as of the last look, for prompts built on outputs."""

    def __init__(self, request: Any) -> None:
        self._ref: Any = weakref.ref(request)
        self._tokens = request._all_token_ids  # the list itself: it outlives the request and is extended in place
        self.num_prompt_tokens = request.num_prompt_tokens
        self.request_id = request.request_id

    @property
    def all_token_ids(self) -> list[int]:
        """Prompt and output tokens so far."""
        return list(self._tokens)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_ref": None, "_tokens": list(self._tokens)}

    @property
    def live(self) -> Any:
        """The request, or None when nobody keeps it any more."""
        return self._ref() if self._ref is not None else None


@dataclass
class Progress:
    """What one part of a case hands to the next, also from one process to another."""

    memory: Memory = field(default_factory=Memory)
    infos: dict[str, Info] = field(default_factory=dict)
    adds: dict[str, Any] = field(default_factory=dict)
    prompts: dict[str, list[int]] = field(default_factory=dict)
    ids: dict[str, str] = field(default_factory=dict)
    requests: dict[str, Snapshot] = field(default_factory=dict)
    generations: dict[str, int] = field(default_factory=dict)
    reloads: dict[str, str] = field(default_factory=dict)
