# SPDX-License-Identifier: Apache-2.0
"""What the scheduler half remembers of a request, and how it reads a step's output."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


@dataclass
class Tracked:
    """A request that has blocks, as the scheduler half sees it.

    ``saved``: its first ``saved`` chunks need no further thought; a boundary, not a count of stores. ``first``: the first chunk
    that may be stored at all. ``fresh``: admitted since the last metadata was built. ``planned``: has had saves. ``outdated``: the
    store was emptied since its admission. ``tables``: one per KV cache group, for those who support several.
    """

    request: Request
    table: list[int]
    saved: int = 0
    first: int = 0
    fresh: bool = True
    planned: bool = False
    outdated: bool = False
    keys: list[str] = field(default_factory=list)
    tables: list[list[int]] = field(default_factory=list)


def scheduled(
    output: SchedulerOutput,
) -> Iterator[tuple[str, int, Sequence[Sequence[int]] | None, bool]]:
    """(request, C, block ids, whether they replace its table) of all requests of a step.

    A *new* entry may be a request that resumes (model runner V2); a cached one may come without blocks in the very step that
    completes a chunk.
    """
    for new in output.scheduled_new_reqs:
        yield new.req_id, new.num_computed_tokens, new.block_ids, True
    cached = output.scheduled_cached_reqs
    for req_id, computed, blocks in zip(
        cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
    ):
        yield req_id, computed, blocks, req_id in cached.resumed_req_ids


def first_group(block_ids: Sequence[Sequence[int]]) -> list[int]:
    """A list of our own: those of the engine are shared and change."""
    return list(block_ids[0]) if block_ids else []
