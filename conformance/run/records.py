# SPDX-License-Identifier: Apache-2.0
"""Records of a run: the state that its parts share, and its result."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from kvconform.contract.case import Variant
from kvconform.contract.steps import Add
from kvconform.contract.trace import Event, Trace
from kvconform.engine.batch import Info
from kvconform.kv.provenance import Identity, Memory
from kvconform.run.promises import Promises


class Snapshot:
    """Tokens of a request, for prompts built on its outputs. Does not keep the request alive."""

    def __init__(self, request: Any) -> None:
        self._ref: Any = weakref.ref(request)
        # The list itself: it outlives the request and is extended in place.
        self._tokens = request._all_token_ids
        self.num_prompt_tokens = request.num_prompt_tokens
        self.request_id = request.request_id

    @property
    def all_token_ids(self) -> list[int]:
        """Prompt tokens, and the output tokens so far."""
        return list(self._tokens)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_ref": None, "_tokens": list(self._tokens)}

    @property
    def live(self) -> Any:
        """The request, or None if it is gone."""
        return self._ref() if self._ref is not None else None


@dataclass
class Reload:
    """A request that repeats the content of request `of`.

    Its next lookup is compared with the promise if it was preempted `due` times or more.
    """

    of: str
    due: int = 0


@dataclass
class Progress:
    """State that a process hands to the next one, when the case restarts in a new process.

    `infos`, `generations` and `reloads` are keyed by request id, the other maps by the case's name
    of a request. `reloads` has the requests that repeat the content of another one. `hurried`:
    stored content was asked for while connectors had threads or processes, which may be storing.
    `works_aside`: connectors had some then, or at the end.
    """

    memory: Memory = field(default_factory=Memory)
    infos: dict[str, Info] = field(default_factory=dict)
    adds: dict[str, Add] = field(default_factory=dict)
    prompts: dict[str, list[int]] = field(default_factory=dict)
    identities: dict[str, Identity] = field(default_factory=dict)
    ids: dict[str, str] = field(default_factory=dict)
    requests: dict[str, Snapshot] = field(default_factory=dict)
    generations: dict[str, int] = field(default_factory=dict)
    reloads: dict[str, Reload] = field(default_factory=dict)
    hurried: bool = False
    works_aside: bool = False


@dataclass(kw_only=True)
class RunState(Progress):
    """State that the driver of a run shares with expectations and handovers.

    `failing` has the ids of requests whose load was made to fail, `cleared` the names of those
    whose content a controller has cleared. `tolerance` is that of content that was compressed.
    """

    variant: Variant
    trace: Trace
    caps: dict[str, Any]
    promises: Promises | None
    failing: set[str] = field(default_factory=set)
    cleared: set[str] = field(default_factory=set)
    tolerance: float = 0.0

    @classmethod
    def resume(cls, before: Progress | None, **run: Any) -> RunState:
        """Return the state of a run that continues where another process has stopped."""
        return cls(**_shared(before or Progress()), **run)

    @property
    def progress(self) -> Progress:
        """The part that the next process takes over. The maps are shared, not copied."""
        return Progress(**_shared(self))

    def info(self, req_id: str) -> Info:
        """Return the data about the live incarnation of a request id, or raise KeyError."""
        return self.infos[req_id]

    def generation(self, name: str) -> int:
        """Return the incarnation that a case's name stands for.

        Names with the same client id are numbered in the order of the case.
        """
        same = [other for other in self.adds if self.ids[other] == self.ids[name]]
        return same.index(name)

    def start_alike(self, name: str, other: str) -> bool:
        """Return whether the prompts of two requests begin with the same token."""
        return self.prompts[name][:1] == self.prompts[other][:1]

    def incarnation(self, name: str) -> tuple[str, int]:
        """Return the request id and the incarnation that a case's name stands for."""
        return self.ids[name], self.generation(name)


def _shared(progress: Progress) -> dict[str, Any]:
    return {each.name: getattr(progress, each.name) for each in fields(Progress)}


@dataclass
class Run:
    """Result of one run of an engine.

    `caps` are the capabilities that it is judged by, and `channels` the kinds of events that the
    engine observes. `unmet` has the stimuli that did not happen. `traceback` is that of a crash.
    `lacks` says what could not be judged: what the device does not support, refused settings, a
    stand-in that was called, damage that found nothing. `hurried`, `works_aside`: see Progress.
    """

    variant: Variant
    relation: str
    trace: list[Event]
    caps: dict[str, Any]
    channels: frozenset[str]
    harness_error: str | None = None
    unmet: list[str] = field(default_factory=list)
    traceback: str | None = None
    lacks: str | None = None
    hurried: bool = False
    works_aside: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return the run as JSON data, without variant, relation and capabilities.

        The process that asked for the run knows these.
        """
        sent = ("trace", "harness_error", "unmet", "traceback", "lacks", "hurried", "works_aside")
        return {name: getattr(self, name) for name in sent} | {"channels": sorted(self.channels)}

    @classmethod
    def from_dict(
        cls, data: dict[str, Any], variant: Variant, relation: str, caps: dict[str, Any]
    ) -> Run:
        """Return the run that `to_dict` converted to `data`."""
        channels = frozenset(data["channels"])
        return cls(variant, relation, caps=caps, **{**data, "channels": channels})


def common_prefix(tokens: Sequence[int], others: Sequence[int]) -> int:
    """Return how many tokens both begin with."""
    for position, (token, other) in enumerate(zip(tokens, others, strict=False)):
        if token != other:
            return position
    return min(len(tokens), len(others))
