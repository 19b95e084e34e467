# SPDX-License-Identifier: Apache-2.0
"""The forward pass that is still running when the next step's hooks are called, as asynchronous scheduling has it on a GPU.

The engine has judged a step when it is over. What the step wrote is then taken back out of the device's memory and written once more
where the compute stream gets to it: behind whatever the next step's hooks find there, and before that step's own forward pass. Who copies
KV of the step before without waiting for the compute stream gets what was there earlier. Nobody can have seen the step's end before
that: it is only done if no host has waited for a place in the compute stream behind the beginning of the forward pass or was told that it
is reached, and no other stream went on because of it. Events that were recorded there are reached later, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from kvconform import device
from kvconform.compat import torch
from kvconform.kvcache import PagedCache


@dataclass
class Written:
    """KV of one layer that the forward pass wrote: slots [n], what they held before [n, ...]."""

    layer: int
    slots: np.ndarray
    before: torch.Tensor


class Overlap:
    """What one worker wrote in the current step. On a device whose compute stream is not slow, nothing is kept and nothing happens."""

    def __init__(self, cache: PagedCache) -> None:
        self.cache, self.device = cache, device.current
        self._written: list[Written] = []
        self._held: set[int] = set()  # blocks
        self._began = 0

    def begin(self) -> None:
        """A forward pass begins."""
        self._written, self._began = [], self.device.position()

    def note(self, layer: int, slots: np.ndarray) -> None:
        """These slots [n] are about to be written. To be called when that is done."""
        if self.device.overlaps:
            self._written.append(Written(layer, slots, self.cache.peek(layer, slots)))

    def take_back(self) -> None:
        """The step has been judged: let it be unfinished once more. Changes the cache's tensors, not its shadow."""
        written, self._written = self._written, []
        if not written or not self.device.unseen(self._began):
            return
        for part in written:
            now = self.cache.peek(part.layer, part.slots)
            self.cache.poke(part.layer, part.slots, part.before)
            self.device.launch(partial(self.cache.poke, part.layer, part.slots, now))
            self._held.update((part.slots // self.cache.stride).tolist())
        self.device.launch(self._held.clear)
        self.device.postpone(self._began)

    def holds(self, blocks: list[int]) -> bool:
        """Whether one of `blocks` is part of what was taken back."""
        return not self._held.isdisjoint(blocks)

    @property
    def pending(self) -> bool:
        """Whether anything is taken back now."""
        return bool(self._held)
