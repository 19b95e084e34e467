# SPDX-License-Identifier: Apache-2.0
"""The one emulation that is active in this process, and what of it belongs to a thread: its current stream, and whether it is left
alone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch

from .copies import Copies
from .machine import Delay, Machine, Mark, Queue, Used, Work
from .memory import Block, Kind, Memory
from .note import Note, caller


class Local(threading.local):
    """Per thread: how many raw() are open, and the current queue (None: the default stream, as in a thread that never chose one)."""

    raw = 0
    queue: Queue | None = None


class Raw:
    """What `Emulation.raw()` gives. Entering it again inside costs nothing."""

    __slots__ = ("dispatch", "functions", "local")

    def __init__(self, local: Local) -> None:
        self.local = local
        self.functions: Any = None
        self.dispatch: Any = None

    def __enter__(self) -> None:
        if not self.local.raw:
            self.functions, self.dispatch = torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch()
            self.functions.__enter__()
        self.local.raw += 1

    def __exit__(self, *exc: object) -> None:
        self.local.raw -= 1
        if self.functions is not None:
            self.dispatch = None  # its end is the guard's end
            self.functions.__exit__(*exc)


class Emulation:
    """An emulated CUDA device: its streams, its memory, and what was noted. What `emulate()` gives to its user."""

    def __init__(self, delay: Delay, patience: int) -> None:
        self.machine = Machine(delay, patience)
        self.notes: list[Note] = []
        self.memory = Memory(self.machine, self._note_hazard)
        self.copies = Copies(self)
        self.local = Local()
        self.local.queue = self.machine.compute
        self.compute: Any = None  # the compute stream as a torch.cuda.Stream, set by emulate()

    # -- for the engine

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """Declare a tensor's storage to be device memory, in place, and return the tensor. The emulation keeps the storage alive."""
        with self.raw():
            self.memory.mark(tensor, Kind.DEVICE)
        return tensor

    def launch(self, function: Callable[[], object]) -> None:
        """Queue a function on the compute stream. It runs outside of the modes when its turn comes; what it raises comes out of the call
        that runs it."""
        with self.machine.lock, self.raw():
            self.memory.reuse_pinned()
            self.machine.put(self.machine.compute, Work(function))

    def finish_compute(self) -> None:
        """Run the compute stream up to here, and what it waits for. Not a host synchronisation of the connector's, so not noted."""
        with self.machine.lock, self.raw():
            self.memory.reuse_pinned()
            self.machine.demand(self.machine.mark(self.machine.compute))

    def drain(self) -> None:
        """Run everything on all streams; not noted."""
        with self.raw():
            self.machine.drain()

    def raw(self) -> Raw:
        """Context in which this thread's torch calls run at once on the bare host tensors, and nothing is noted."""
        return Raw(self.local)

    def queue_copy(
        self,
        dst: int | Iterable[int],
        src: int | Iterable[int],
        nbytes: int | Iterable[int],
        stream: Any = None,
        *,
        any_order: bool = False,
        what: str = "copy by address",
    ) -> None:
        """Copies by raw address as one operation on a stream (default: the current one). With `any_order` the sources may be read before
        their turn (CU_MEMCPY_SRC_ACCESS_ORDER_ANY). Raises ValueError for an address that nobody allocated, before anything is queued."""
        queue = self.queue if stream is None else stream.queue
        numbers = [[value] if isinstance(value, int) else [int(item) for item in value] for value in (dst, src, nbytes)]
        self.copies.by_address(queue, list(zip(*numbers, strict=True)), any_order, what)

    # -- for the parts of the emulation

    @property
    def queue(self) -> Queue:
        """The calling thread's current queue."""
        return self.local.queue or self.machine.default

    @property
    def off(self) -> bool:
        """Whether the calling thread's torch calls are to be left alone."""
        return bool(self.local.raw) or not self.machine.open

    def put(self, queue: Queue, function: Callable[[], object], uses: Iterable[Used] = (), raw: bool = False) -> None:
        """Queue work of torch's: it runs outside of the modes (whoever runs work is in `raw()`), and without autograd."""

        def run() -> None:
            with torch.inference_mode():
                function()

        with self.raw():
            self.machine.put(queue, Work(run, uses, raw))

    def demand(self, mark: Mark, what: str) -> None:
        """The host waits for a mark: noted, unless the harness does."""
        self.note("sync", what, mark.queue)
        with self.raw():
            self.machine.demand(mark)

    def synchronize(self, queue: Queue, what: str) -> None:
        """The host waits for everything queued so far."""
        self.demand(self.machine.mark(queue), what)

    def synchronize_device(self, what: str) -> None:
        """The host waits for everything on every stream."""
        self.note("sync", what, None)
        self.drain()

    def note(self, kind: str, what: str, queue: Queue | None) -> None:
        """Note what this thread did, unless it is the harness."""
        if not self.off:
            self.notes.append(Note(kind, what, queue.name if queue else "", threading.current_thread().name, caller()))

    def _note_hazard(self, kind: str, what: str, queue: Queue | None) -> None:
        self.notes.append(Note(kind, what, queue.name if queue else "", threading.current_thread().name, caller()))

    def on_device(self, tensor: object) -> bool:
        """Whether this is a tensor in device memory."""
        block = self.memory.block_of(tensor) if isinstance(tensor, torch.Tensor) else None
        return block is not None and block.kind is Kind.DEVICE

    def device_tensor(self, like: torch.Tensor) -> torch.Tensor:
        """A new device tensor with the shape, strides and dtype of another, allocated on the current stream; its contents are nobody's
        business."""
        return self._tensor(Kind.DEVICE, like, self.queue)

    def pinned_tensor(self, like: torch.Tensor, zero: bool = False) -> torch.Tensor:
        """The same in pinned memory."""
        return self._tensor(Kind.PINNED, like, None, zero)

    def _tensor(self, kind: Kind, like: torch.Tensor, home: Queue | None, zero: bool = False) -> torch.Tensor:
        size, stride = like.size(), like.stride()
        span = 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) if like.numel() else 0
        with self.machine.lock, self.raw():
            storage = self.memory.allocate(kind, span * like.element_size(), home, zero=zero)
            return torch.empty(0, dtype=like.dtype).set_(storage, 0, size, stride)

    def stand_in(self, tensor: torch.Tensor, block: Block) -> torch.Tensor:
        """The same view of the same bytes, without the user's lease on them: for work that runs later. For use outside of the modes."""
        if not block.leased:
            return tensor.detach()
        storage = block.bytes.untyped_storage()
        return torch.empty(0, dtype=tensor.dtype).set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())


_active: list[Emulation] = []


def active() -> Emulation:
    """The emulation of this process; RuntimeError outside of `emulate()`."""
    if not _active:
        raise RuntimeError("No CUDA emulation is active in this process.")
    return _active[-1]
