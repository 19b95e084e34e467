# SPDX-License-Identifier: Apache-2.0
"""What engines that were shut down leave in the process, compared from one to the next.

What does not grow is not reported: a pool or a client that all connectors of a process share lives
on. So a case needs several restarts in one process.
"""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise

from torch.multiprocessing.reductions import StorageWeakRef

from kvconform.compat import vllm_api
from kvconform.contract.steps import Step, restarts_process
from kvconform.contract.trace import Trace
from kvconform.engine.engine import Engine
from kvconform.kv import device
from kvconform.observe.probe import Probe
from kvconform.process import descriptors

LEAST = 3
"""Engines that must have ended: what only the second one adds may be made when it is needed."""
PAUSES = (0.02, 0.1, 0.4, 1.5, 3.0)
"""Seconds in which threads may close what is left, while there is more of it than before."""
KV = "KV tensors"

Found = Counter[str]


def restarts_here(steps: Sequence[Step]) -> int:
    """Count the restarts of a case in one process, if they suffice for a comparison; else 0."""
    here = sum(step.op == "restart" for step in steps)
    return here if here >= LEAST and not any(map(restarts_process, steps)) else 0


class Leftovers:
    """Counts of what is left after each of some restarts. `dropped` emits what has grown.

    It is counted when nothing but the connector refers to its halves, and garbage was collected.
    """

    def __init__(self, trace: Trace, restarts: int) -> None:
        vllm_api.init_parallel_state()  # has sockets, which all engines of the process share
        gc.collect()
        self.trace = trace
        self.restarts = restarts
        self._counts: list[Found] = []
        self._start = descriptors.by_kind()
        self._storages: list[StorageWeakRef] = []

    def shut_down(self, engine: Engine) -> None:
        """Note the KV tensors of an engine that was shut down, and keep none of them."""
        for rank in engine.ranks.members:
            storages = {tensor.untyped_storage() for tensor in rank.cache.tensors}
            self._storages += map(StorageWeakRef, storages)
            device.current.release(rank.cache.tensors)
            rank.config.compilation_config.static_forward_context.clear()  # as vLLM's workers do

    def dropped(self) -> None:
        """Count what is left; to be called when the harness does not have the engine any more.

        After the last of the restarts, emit restart.grown and restart.compared.
        """
        Probe.active = None
        before = self._counts[-1] if self._counts else None
        self._counts.append(_at_rest(self._left, before))
        if len(self._counts) == self.restarts:
            self._compare()

    def _left(self) -> Found:
        gc.collect()
        now = descriptors.by_kind()
        found = Counter({kind: now[kind] - self._start[kind] for kind in descriptors.KINDS})
        found[KV] = sum(not storage.expired() for storage in self._storages)
        return found

    def _compare(self) -> None:
        checked = [KV, *(descriptors.KINDS if descriptors.can_list() else ())]
        for what in checked:
            numbers = [found[what] for found in self._counts]
            if all(before < after for before, after in pairwise(numbers)):
                self.trace.emit("restart.grown", what=what, numbers=numbers)
        self.trace.emit("restart.compared", restarts=self.restarts, checked=checked)


def _at_rest(count: Callable[[], Found], before: Found | None) -> Found:
    """Return a count; while it exceeds the one before, count again after each of PAUSES.

    What the first engine leaves for a while only makes growth less.
    """
    found = count()
    for pause in PAUSES:
        if before is None or all(number <= before[what] for what, number in found.items()):
            break
        time.sleep(pause)
        found = count()
    return found
