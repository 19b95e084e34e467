# SPDX-License-Identifier: Apache-2.0
"""Records of requests in the scheduler half, and the parts of a step's output that it reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


@dataclass
class Tracked:
    """A request that has blocks, as the scheduler half sees it."""

    request: Request
    table: list[int]
    """The ids of its blocks."""
    saved: int = 0
    """The chunks before this one are settled: saved, or not to be saved."""
    first: int = 0
    """The first chunk that may be saved."""
    fresh: bool = True
    """It was admitted since the last metadata was built."""
    planned: bool = False
    """A save was planned for it."""
    outdated: bool = False
    """The store was emptied since its admission."""
    keys: list[str] = field(default_factory=list)
    """The keys of its whole chunks, as far as they were needed."""
    tables: list[list[int]] = field(default_factory=list)
    """Block ids per KV cache group, in connectors that support several groups."""


def scheduled(
    output: SchedulerOutput,
) -> Iterator[tuple[str, int, Sequence[Sequence[int]] | None, bool]]:
    """Yield (request id, C, new block ids, whether they replace its table) per request of a step.

    A "new" entry may be a request that resumes after a preemption (model runner V2). A cached entry
    may have no new blocks even in the step that completes a chunk.
    """
    for new in output.scheduled_new_reqs:
        yield new.req_id, new.num_computed_tokens, new.block_ids, True
    cached = output.scheduled_cached_reqs
    for req_id, computed, blocks in zip(
        cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
    ):
        yield req_id, computed, blocks, req_id in cached.resumed_req_ids


def first_group(block_ids: Sequence[Sequence[int]]) -> list[int]:
    """Return a copy of the first group's block ids: the engine shares and changes its lists."""
    return list(block_ids[0]) if block_ids else []
