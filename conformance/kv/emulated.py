# SPDX-License-Identifier: Apache-2.0
"""The emulated CUDA device under an engine driven by hand (docs/emulation.md)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch

from kvconform.contract.case import Slow
from kvconform.emulation.context import Emulation
from kvconform.emulation.emulate import emulate
from kvconform.emulation.errors import DeviceFault, NotEmulated
from kvconform.emulation.settle import settle
from kvconform.emulation.vllm_on_cuda import vllm_on_cuda
from kvconform.kv.device import T, at_once

SHOWN = 3


class Emulated:
    """All of the harness runs raw, only the connector's hooks run as on a GPU; what the engine launches waits in the compute stream."""

    streamed = True

    def __init__(self, cuda: Emulation) -> None:
        self.cuda = cuda
        self._told = 0
        self._fault: DeviceFault | None = None
        self._raised = len(NotEmulated.raised)
        self._raw = cuda.raw()
        self._raw.__enter__()

    def close(self) -> None:
        """The emulation is nobody's business any more: what is still queued is done, and nobody is told what fails of it."""
        while self.cuda.pending() or self.cuda.machine.compute.entries:
            with suppress(DeviceFault):
                self.cuda.drain()
        self._raw.__exit__(None, None, None)

    @property
    def early_reads(self) -> list[str]:
        return list(
            dict.fromkeys(
                f"{note.what} at {note.where}"
                for note in self.cuda.notes
                if note.kind == "read_early"
            )
        )[:SHOWN]

    @property
    def lacks(self) -> str | None:
        return next(iter(NotEmulated.raised[self._raised :]), None)

    def allocate(self, elements: int) -> torch.Tensor:
        return self.cuda.to_device(torch.zeros(elements, dtype=torch.float32))

    def upload(self, host: torch.Tensor) -> torch.Tensor:
        return host

    def launch(self, work: Callable[[], T], judge: Callable[[T], None] | None = None) -> None:
        try:
            self.cuda.launch(partial(at_once, work, judge))  # which may make other streams go on
        except DeviceFault as fault:
            self._fault = self._fault or fault

    @property
    def overlaps(self) -> bool:
        return self.cuda.machine.delay == "compute"

    def position(self) -> int:
        return self.cuda.machine.compute.put

    def unseen(self, position: int) -> bool:
        return self.cuda.machine.compute.seen <= position

    def postpone(self, position: int) -> None:
        self.cuda.machine.postpone(position)

    def finish(self) -> None:
        settle()
        while True:
            try:
                return self.cuda.finish_compute()
            except DeviceFault as fault:  # the connector's work, for the engine's own raises other things: told in the next hook
                self._fault = self._fault or fault

    @contextmanager
    def calling(self) -> Iterator[None]:
        """As on CUDA, a fault of queued work comes out of whatever is called next."""
        fault, self._fault = self._fault, None
        if fault is not None:
            raise fault
        self._raw.__exit__(None, None, None)
        try:
            yield
        finally:
            self._raw = self.cuda.raw()
            self._raw.__enter__()

    def used(self) -> dict[str, int]:
        cuda = self.cuda  # the machine has two queues of its own
        return {
            "streams": len(cuda.machine.queues) - 2,
            "by_address": cuda.copies.made_by_address,
            "allocated": cuda.memory.lent,
        }

    def notes(self) -> list[dict[str, Any]]:
        new, here = self.cuda.notes[self._told :], threading.current_thread().name
        self._told += len(new)
        told = [
            note for note in new if note.kind != "sync" or note.thread == here
        ]  # a thread of the connector's may wait
        return [{"what": note.kind, "text": f"{note.what} at {note.where}"} for note in told]


@contextmanager
def emulated(slow: Slow | None) -> Iterator[Emulated]:
    """An emulated device, and vLLM's belief in it. `slow`: compute, transfers, or None for streams that do all at once."""
    with emulate(slow) as cuda, vllm_on_cuda(cuda):
        device = Emulated(cuda)
        try:
            yield device
        finally:
            device.close()
