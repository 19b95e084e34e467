# SPDX-License-Identifier: Apache-2.0
"""What one part of a case hands to the next, also from one process to another."""

from __future__ import annotations

import weakref
from dataclasses import asdict, dataclass, field
from typing import Any

from kvconform.contract.case import Variant
from kvconform.engine.batch import Info
from kvconform.kv.provenance import Memory


class Snapshot:
    """Follows a request without keeping it alive: tokens and status as of the last look, for prompts built on outputs."""

    def __init__(self, request: Any) -> None:
        self._ref: Any = weakref.ref(request)
        self._tokens = (
            request._all_token_ids
        )  # the list itself: it outlives the request and is extended in place
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


@dataclass
class Run:
    """One engine run: its trace, the capabilities it was judged by, the channels that the engine has, the traceback of a crash, and what
    the device could not do for it."""

    variant: Variant
    relation: str
    trace: list[dict[str, Any]]
    caps: dict[str, Any]
    channels: frozenset[str]
    harness_error: str | None = None
    unmet: list[str] = field(default_factory=list)
    traceback: str | None = None
    lacks: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON-able, without what the process that asked for the run knows: variant, relation and capabilities."""
        sent = {
            name: getattr(self, name)
            for name in ("trace", "harness_error", "unmet", "traceback", "lacks")
        }
        return sent | {"channels": sorted(self.channels)}

    @classmethod
    def from_dict(
        cls, data: dict[str, Any], variant: Variant, relation: str, caps: dict[str, Any]
    ) -> Run:
        """The inverse of `to_dict`."""
        return cls(
            variant, relation, caps=caps, **{**data, "channels": frozenset(data["channels"])}
        )


@dataclass
class CaseReport:
    """What one variant came to. Everything is JSON-able.

    `rows` are verdict.Row dicts, one per requirement; `unmet` are stimuli that did not happen; `timelines` maps a failed requirement to the
    events around its first violation; `trace` is the whole trace if it was asked for; `story` the run for the timeline of
    report.html (kvconform.report.html.story), if a requirement failed.
    """

    variant: str
    case: str
    axes: dict[str, Any]
    rows: list[dict[str, Any]]
    unmet: list[str] = field(default_factory=list)
    timelines: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    harness_error: str | None = None
    capabilities: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    trace: list[dict[str, Any]] | None = None
    story: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """A plain dict."""
        return asdict(self)
