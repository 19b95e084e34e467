# SPDX-License-Identifier: Apache-2.0
"""The emulated CUDA device under an engine driven by hand (docs/emulation.md)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from typing import Any

import torch

from kvconform.contract.case import Slow
from kvconform.emulation.context import Emulation
from kvconform.emulation.emulate import emulate
from kvconform.emulation.note import DeviceFault, NotEmulated
from kvconform.emulation.threads import settle
from kvconform.emulation.vllm_on_cuda import vllm_on_cuda
from kvconform.kv.device import T, at_once

SHOWN = 3


class Emulated:
    """The emulated device of one run.

    Only the connector's hooks run as on a GPU; all other code of the harness runs raw, which means
    without the emulation. The engine's work waits in the compute stream.
    """

    streamed = True
    kernels = False

    def __init__(self, cuda: Emulation) -> None:
        self.cuda = cuda
        self._noted = 0
        self._fault: DeviceFault | None = None
        self._raised = len(NotEmulated.raised)
        self._raw = cuda.raw()
        self._raw.__enter__()

    def close(self) -> None:
        """End the emulation: do the work that is still queued, and ignore its faults."""
        self._do_all()
        self._raw.__exit__(None, None, None)

    def _do_all(self) -> None:
        while self.cuda.pending() or self.cuda.machine.compute.entries:
            with suppress(DeviceFault):
                self.cuda.drain()

    @property
    def early_reads(self) -> list[str]:
        """See Timeline."""
        early = (note for note in self.cuda.notes if note.kind == "read_early")
        return list(dict.fromkeys(f"{note.what} at {note.where}" for note in early))[:SHOWN]

    @property
    def lacks(self) -> str | None:
        """See Timeline."""
        return next(iter(NotEmulated.raised[self._raised :]), None)

    def allocate(self, elements: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """See Timeline."""
        return self.cuda.to_device(torch.zeros(elements, dtype=dtype))

    def release(self, tensors: Sequence[torch.Tensor]) -> None:
        """See Timeline. Faults of the work that is queued are ignored."""
        self._do_all()
        self.cuda.release(tensors)

    def upload(self, host: torch.Tensor) -> torch.Tensor:
        """Return the tensor itself: in raw code, memory of the device is memory of the host."""
        return host

    def launch(self, work: Callable[[], T], judge: Callable[[T], None] | None = None) -> None:
        """See Timeline. Other streams may go on because of the work, and their work may fail."""
        try:
            self.cuda.launch(partial(at_once, work, judge))
        except DeviceFault as fault:
            self._fault = self._fault or fault

    def settle(self) -> None:
        """Do nothing: in raw code, all work is done at once."""

    @property
    def overlaps(self) -> bool:
        """See Timeline."""
        return self.cuda.machine.delay == "compute"

    @property
    def shows_waits(self) -> bool:
        """See Timeline."""
        return self.cuda.machine.delay == "transfers"

    def copies(self) -> Callable[[], bool]:
        """See Timeline."""
        machine = self.cuda.machine
        held = machine.held
        put = {queue: queue.put for queue in machine.queues}

        def joined() -> bool:
            given = [
                queue
                for queue in machine.queues
                if queue is not machine.compute and queue.put > put.get(queue, 0)
            ]
            all_done = bool(given) and not any(queue.entries for queue in given)
            return all_done and machine.held > held

        return joined

    def position(self) -> int:
        """See Timeline."""
        return self.cuda.machine.compute.put

    def unseen(self, position: int) -> bool:
        """See Timeline."""
        return self.cuda.machine.compute.seen <= position

    def postpone(self, position: int) -> None:
        """See Timeline."""
        self.cuda.machine.postpone(position)

    def exclusive(self) -> AbstractContextManager[Any]:
        """See Timeline."""
        return self.cuda.machine.lock

    def driving(self, rank: int) -> None:
        """See Timeline."""
        self.cuda.machine.rank = rank

    def finish(self) -> None:
        """See Timeline. A fault of the connector's work is raised in the next hook.

        The engine's own work does not raise DeviceFault.
        """
        settle()
        while True:
            try:
                return self.cuda.finish_compute()
            except DeviceFault as fault:
                self._fault = self._fault or fault

    def step_over(self) -> None:
        """Do nothing: streams are late here, and threads are waited for."""

    def catch_up(self) -> None:
        """Do nothing: see step_over."""

    @contextmanager
    def calling(self) -> Iterator[None]:
        """Run a hook as on a GPU. As on CUDA, a fault of queued work is raised by the next call."""
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
        """See Timeline."""
        return {
            "streams": len(self.cuda.machine.queues) - 2,  # two queues are the machine's own
            "by_address": self.cuda.copies.made_by_address,
            "allocated": self.cuda.memory.lent,
        }

    def notes(self) -> list[dict[str, Any]]:
        """See Timeline. A thread of the connector's may wait for a stream: that is left out."""
        new, here = self.cuda.notes[self._noted :], threading.current_thread().name
        self._noted += len(new)
        shown = [note for note in new if note.kind != "sync" or note.thread == here]
        return [{"what": note.kind, "text": f"{note.what} at {note.where}"} for note in shown]


@contextmanager
def emulated(slow: Slow | None) -> Iterator[Emulated]:
    """Provide an emulated device that vLLM takes for a real one.

    `slow` is compute, transfers, or None for streams that do all work at once.
    """
    with emulate(slow) as cuda, vllm_on_cuda(cuda):
        device = Emulated(cuda)
        try:
            yield device
        finally:
            device.close()
