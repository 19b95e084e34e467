# SPDX-License-Identifier: Apache-2.0
"""`emulate()`: a CUDA device made of host memory, for as long as a `with` block lasts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch._dynamo  # noqa: F401  torch imports it when first asked for a shape, and it would read the patched torch.cuda

from kvconform.emulation.context import Emulation, _active, member
from kvconform.emulation.cuda_patches import patch_cuda, stream_of
from kvconform.emulation.machine import Delay
from kvconform.emulation.patch import Patches
from kvconform.emulation.tensor_patches import patch_tensors
from kvconform.emulation.threads import modes, patch_threads


@contextmanager
def emulate(delay: Delay | None = "compute", *, patience: int = 3) -> Iterator[Emulation]:
    """Emulate a CUDA device in this process, with one of two adversaries: delay="compute" keeps the compute stream back, delay="transfers"
    all others; with None everything runs as soon as it may. `patience` is how often a query about one event is answered "not yet". Patches
    torch, and puts everything back at the end, when all that is still queued has run. May be entered inside another emulation, by the
    thread that is in that one: the two share nothing, and threads stay with the one that they were started in. ValueError for an unknown
    adversary."""
    if delay not in ("compute", "transfers", None):
        raise ValueError(f"delay is {delay!r}, not 'compute', 'transfers' or None.")
    emulation = Emulation(delay, patience)
    patches = Patches()
    outermost = not _active
    _active.append(emulation)
    try:
        if outermost:
            patch_cuda(patches)
            patch_tensors(patches)
            patch_threads(patches)
        with member(emulation, emulation.machine.compute), ExitStack() as stack:
            emulation.compute = stream_of(emulation.machine.compute)
            if outermost:
                stack.enter_context(modes())
            yield emulation
    finally:
        try:
            with emulation.raw():
                emulation.machine.close()
        finally:
            patches.restore()
            _active.remove(emulation)
