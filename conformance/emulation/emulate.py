# SPDX-License-Identifier: Apache-2.0
"""`emulate()`: a CUDA device over host memory for the duration of a `with` block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

# torch imports this module when it first computes a shape. It would find torch.cuda patched then.
import torch._dynamo  # noqa: F401

from kvconform.emulation.context import EMULATIONS, Emulation, member
from kvconform.emulation.cuda_patches import patch_cuda, stream_of
from kvconform.emulation.machine import Delay
from kvconform.emulation.patch import Patches
from kvconform.emulation.tensor_patches import patch_tensors
from kvconform.emulation.threads import modes, patch_threads


@contextmanager
def emulate(delay: Delay | None = "compute", *, patience: int = 3) -> Iterator[Emulation]:
    """Emulate a CUDA device in this process.

    `delay` chooses the adversary: "compute" delays the compute stream, "transfers" all other
    streams. With None everything runs as soon as it may. A query about one event returns "not yet"
    at most `patience` times. Raises ValueError for an unknown adversary.

    Patches torch. At the end everything that is still queued runs, and torch is restored. One
    emulation may be entered inside another, by the thread that is in the outer one: the two share
    nothing, and threads stay with the emulation in which they were started.
    """
    if delay not in ("compute", "transfers", None):
        raise ValueError(f"delay is {delay!r}, not 'compute', 'transfers' or None.")
    emulation = Emulation(delay, patience)
    patches = Patches()
    outermost = not EMULATIONS
    EMULATIONS.append(emulation)
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
            EMULATIONS.remove(emulation)
