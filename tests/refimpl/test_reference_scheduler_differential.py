# SPDX-License-Identifier: Apache-2.0
"""Tests of the reference scheduler against vLLM's on random workloads.

Everything observable must be equal after every event. Compared are the scheduler outputs, the
client's outputs, and every hook of the connector with its arguments and the state of its request at
that moment. Between events the whole state is compared: requests (C, P, N, in flight, stale,
drafts, status), block tables, queues, reference counts, block hashes, and the order of the free
queue. Intended differences are first repaired in vLLM's scheduler (scheduler_rig.repair).
"""

from __future__ import annotations

import os
from typing import Any

from hypothesis import HealthCheck, example, given, note, settings

from scheduler_rig import Ask, Setup, difference
from scheduler_workloads import play, workloads

EXAMPLES = int(os.environ.get("KVCONFORM_SCHEDULER_EXAMPLES", "150"))

# Drafts beyond the last token that is wanted are computed, too, and move the window on.
DRAFTS_BEYOND_THE_END = (
    Setup(scheduling="sync", num_blocks=9, max_seqs=1, spec=3, windows=(5,)),
    [("add", Ask("r0", (0, 1, 2, 3), max_tokens=3, accepted=(0, 2))), ("more", "r0", (), 1)],
)


@settings(
    max_examples=EXAMPLES,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(workloads())
@example(DRAFTS_BEYOND_THE_END)
def test_both_schedulers_do_the_same(workload: tuple[Setup, list[tuple[Any, ...]]]) -> None:
    setup, events = workload
    ours, theirs = play("reference", setup, events), play("vllm", setup, events)
    note(f"{ours.steps} steps, {len(ours.trace)} entries")
    assert not difference(ours.trace, theirs.trace)
    if not ours.s.has_requests():
        pool = ours.s.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == len(pool.blocks) - 1
