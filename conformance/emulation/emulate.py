# SPDX-License-Identifier: Apache-2.0
"""`emulate()`: a CUDA device made of host memory, for as long as a `with` block lasts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch._dynamo  # noqa: F401  torch imports it when first asked for a shape, and it would read the patched torch.cuda

from .context import Emulation, _active
from .cuda_patches import patch_cuda
from .machine import Delay
from .patch import Patches
from .tensor_patches import patch_tensors
from .threads import modes, patch_threads


@contextmanager
def emulate(delay: Delay = "compute", *, patience: int = 3) -> Iterator[Emulation]:
    """Emulate a CUDA device in this process, with one of two adversaries: delay="compute" keeps the compute stream back, delay="transfers"
    all others. `patience` is how often a query about one event is answered "not yet". Patches torch, and puts everything back at the end,
    when all that is still queued has run. RuntimeError if an emulation is active already; ValueError for an unknown adversary."""
    if delay not in ("compute", "transfers"):
        raise ValueError(f"delay is {delay!r}, not 'compute' or 'transfers'.")
    if _active:
        raise RuntimeError("A CUDA emulation is active in this process already.")
    emulation = Emulation(delay, patience)
    _active.append(emulation)
    patches = Patches()
    try:
        patch_cuda(patches, emulation)
        patch_tensors(patches, emulation)
        patch_threads(patches, emulation)
        with modes(emulation):
            yield emulation
    finally:
        try:
            with emulation.raw():
                emulation.machine.close()
        finally:
            patches.restore()
            _active.pop()
