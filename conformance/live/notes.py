# SPDX-License-Identifier: Apache-2.0
"""What the scheduler's side tells the workers about a step: it travels with the SchedulerOutput, also to other processes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

ATTRIBUTE = "kvconform_note"
"""Where it hangs on a SchedulerOutput, whose pickle takes it along."""


@dataclass
class Named:
    """A block whose KV is final: what the model computed for a content id. `plain`: the id of the same tokens under no identity; `upon`:
    the blocks before it."""

    block: int
    content: int
    plain: int
    req: str
    index: int
    upon: tuple[int, ...] = ()


@dataclass
class Granted:
    """A load that the engine granted in this step: positions [start, end) of a request, whose whole block `table` is.

    `contents` are (content id, plain id) of every block of the request that its known tokens fill, from the first one on.
    """

    transfer: str
    req: str
    generation: int
    start: int
    end: int
    is_async: bool
    table: list[int]
    contents: list[tuple[int, int]] = field(default_factory=list)


@dataclass
class StepNote:
    """One step. `step` counts schedule() calls; `digest` is that of the connector's metadata; `written` are blocks that the model may
    write; `fresh` the blocks handed out since the step before, and to whom, `zeroed` those of them that the engine itself clears;
    `tables` the blocks of every request that has some; `scheduled` the requests that compute."""

    step: int
    digest: str | None = None
    named: list[Named] = field(default_factory=list)
    granted: list[Granted] = field(default_factory=list)
    fresh: list[tuple[int, str]] = field(default_factory=list)
    zeroed: list[int] = field(default_factory=list)
    written: set[int] = field(default_factory=set)
    tables: dict[str, list[int]] = field(default_factory=dict)
    scheduled: list[str] = field(default_factory=list)


def note_of(output: Any) -> StepNote | None:
    """The note that hangs on a SchedulerOutput."""
    return getattr(output, ATTRIBUTE, None)
