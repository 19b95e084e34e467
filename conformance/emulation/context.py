# SPDX-License-Identifier: Apache-2.0
"""An emulated device: the object that an engine talks to, and that the parts of the emulation share.

Copies between device, pinned and pageable memory: what is read and written when, and which of them make the host wait.

What of the emulation belongs to a thread: which emulation it is part of, its current stream, and whether torch is left alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch

from kvconform.emulation.machine import Delay, Machine, Mark, Queue, Used, Work
from kvconform.emulation.memory import Block, Kind, Memory
from kvconform.emulation.note import Note, caller
from kvconform.emulation.watch import Watch


class Emulation:
    """An emulated CUDA device: its streams, its memory, and what was noted. What `emulate()` gives to its user."""

    def __init__(self, delay: Delay | None, patience: int) -> None:
        self.machine = Machine(delay, patience)
        self.notes: list[Note] = []
        self.memory = Memory(self.machine, self._note_hazard)
        self.copies = Copies(self)
        self.owner = threading.get_ident()  # the engine's thread
        self.streams: dict[int, Any] = {}  # torch.cuda.Stream objects by handle
        self.compute: Any = None  # the compute stream's

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
            self.machine.demand(Mark(self.machine.compute, self.machine.compute.put))

    def drain(self) -> None:
        """Run everything on all streams; not noted."""
        with self.raw():
            self.machine.drain()

    def raw(self) -> Raw:
        """Context in which this thread's torch calls run at once on the bare host tensors, and nothing is noted."""
        return RAW

    def intercepted(self) -> AbstractContextManager[None]:
        """Context inside of `raw()` in which the thread's torch calls go to the emulated device again."""
        return intercepted()

    def pending(self) -> int:
        """How many pieces of work are queued on other streams than the compute stream."""
        with self.machine.lock:
            side = (queue for queue in self.machine.queues if queue is not self.machine.compute)
            return sum(isinstance(entry, Work) for queue in side for entry in queue.entries)

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
        their turn (CU_MEMCPY_SRC_ACCESS_ORDER_ANY). Raises ValueError for a range that is partly outside of its block,
        NotEmulated for host memory that is not a torch tensor, before anything is queued."""
        queue = self.queue if stream is None else stream.queue
        numbers = [
            [value] if isinstance(value, int) else [int(item) for item in value]
            for value in (dst, src, nbytes)
        ]
        self.copies.by_address(queue, list(zip(*numbers, strict=True)), any_order, what)

    # -- for the parts of the emulation

    @property
    def queue(self) -> Queue:
        """The calling thread's current queue."""
        return STATE.queue or self.machine.default

    @property
    def off(self) -> bool:
        """Whether the calling thread's torch calls are to be left alone."""
        return bool(STATE.raw) or not self.machine.open

    def put(
        self,
        queue: Queue,
        function: Callable[[], object],
        uses: Iterable[Used] = (),
        raw: bool = False,
        watch: Watch | None = None,
    ) -> None:
        """Queue work of torch's: it runs outside of the modes (whoever runs work is in `raw()`), and without autograd."""

        def run() -> None:
            with torch.inference_mode():
                function()

        with self.raw():
            work = Work(run, uses, raw)
            work.watch = watch
            self.machine.put(queue, work)

    def watch(self, queue: Queue, what: str, read: Callable[[], list[Any]]) -> Watch | None:
        """What finds out whether work that reads device memory, about to be put on `queue`, runs before the compute stream has written
        what it reads; None where that is no question. The compute stream's work that had been queued by now counts; for a thread that runs
        beside the engine, what the stream was told to wait for, if anything, for there "by now" is chance."""
        machine = self.machine
        if machine.delay != "compute" or queue is machine.compute:
            return None
        beside = threading.get_ident() != self.owner
        where = caller()
        text = f"{what}, queued at {where}, read device memory that the compute stream wrote afterwards"
        return Watch(
            queue.ordered if beside and queue.ordered else machine.compute.put,
            read,
            lambda: self._tell("read_early", text, queue, where),
        )

    def demand(self, mark: Mark, what: str) -> None:
        """The host waits for a mark: noted, unless the harness does."""
        self.note("sync", what, mark.queue)
        with self.raw():
            self.machine.demand(mark)
            mark.queue.seen = max(mark.queue.seen, mark.position)

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
            self._tell(kind, what, queue, caller())

    def _note_hazard(self, kind: str, what: str, queue: Queue | None) -> None:
        self._tell(kind, what, queue, caller())

    def _tell(self, kind: str, what: str, queue: Queue | None, where: str) -> None:
        self.notes.append(
            Note(kind, what, queue.name if queue else "", threading.current_thread().name, where)
        )

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

    def _tensor(
        self, kind: Kind, like: torch.Tensor, home: Queue | None, zero: bool = False
    ) -> torch.Tensor:
        size, stride = like.size(), like.stride()
        span = (
            1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
            if like.numel()
            else 0
        )
        with self.machine.lock, self.raw():
            storage = self.memory.allocate(kind, span * like.element_size(), home, zero=zero)
            return torch.empty(0, dtype=like.dtype).set_(storage, 0, size, stride)

    def stand_in(self, tensor: torch.Tensor, block: Block) -> torch.Tensor:
        """The same view of the same bytes, without the user's lease on them: for work that runs later. For use outside of the modes."""
        if not block.leased:
            return tensor.detach()
        storage = block.bytes.untyped_storage()
        return torch.empty(0, dtype=tensor.dtype).set_(
            storage, tensor.storage_offset(), tensor.size(), tensor.stride()
        )


_active: list[Emulation] = []


def active() -> Emulation:
    """The emulation that the calling thread is part of: the one in which it was started, or which it entered last. A thread that outlives
    its emulation, as those of a pool do, becomes part of the next one. RuntimeError outside of `emulate()`."""
    mine = STATE.emulation
    if mine is not None and (mine.machine.open or not _active):
        return mine
    if mine is not None:
        STATE.emulation, STATE.queue = _active[-1], None
    if not _active:
        raise RuntimeError("No CUDA emulation is active in this process.")
    return _active[-1]


if TYPE_CHECKING:
    pass


def in_one_piece(dst: torch.Tensor, src: torch.Tensor) -> bool:
    """Whether a copy engine can move one into the other as they lie: the same dtype, sizes and strides, with neither gaps nor overlaps,
    whatever the order of the dimensions. Torch makes no temporary for such a copy."""
    if dst.dtype != src.dtype or dst.size() != src.size():
        return False
    steps = [
        (to, of, size)
        for to, of, size in zip(dst.stride(), src.stride(), dst.size(), strict=True)
        if size != 1
    ]
    expected = 1
    for to, of, size in sorted(steps):
        if to != expected or of != expected:
            return False
        expected *= size
    return True


def direct(dst: torch.Tensor, src: torch.Tensor, to_device: bool) -> bool:
    """Whether a copy that need not block uses the host's tensor itself. If not in one piece, torch puts in order, and converts, what is on
    the device there; a tensor of the host it has to find in order, or there is pageable memory in between."""
    return in_one_piece(dst, src) or (src.expand_as(dst) if to_device else dst).is_contiguous()


class Copies:
    """The copy operations of one emulation."""

    def __init__(self, emulation: Emulation) -> None:
        self.emulation = emulation
        self.made_by_address = 0

    def by_address(
        self, queue: Queue, copies: list[tuple[int, int, int]], any_order: bool, what: str
    ) -> None:
        """Queue copies given as (destination, source, bytes). Pageable sources are read at the call, as staging does; a pageable
        destination makes the host wait. Pinned and device memory is used when the work's turn comes, and nothing keeps it from being freed
        until then."""
        emulation = self.emulation
        self.made_by_address += 1
        with emulation.machine.lock, emulation.raw():
            early = any_order and emulation.machine.delay == "compute"
            blocks: list[Block] = []
            parts: list[tuple[Block, int, Block, int, int, torch.Tensor | None]] = []
            waits = False
            for dst, src, nbytes in copies:
                to, of = (
                    emulation.memory.resolve(dst, nbytes),
                    emulation.memory.resolve(src, nbytes),
                )
                at = src - of.start
                staged = (
                    of.bytes[at : at + nbytes].clone()
                    if early or of.kind is Kind.PAGEABLE
                    else None
                )
                parts.append((to, dst - to.start, of, at, nbytes, staged))
                blocks += [to] if staged is not None else [to, of]
                waits = waits or to.kind is Kind.PAGEABLE
            held = list(dict.fromkeys(blocks))

            def run() -> None:
                for block in held:
                    if emulation.memory.forsaken(block):
                        emulation.memory.overwrite_registered(block)
                for to, into, of, at, nbytes, staged in parts:
                    to.bytes[into : into + nbytes].copy_(
                        of.bytes[at : at + nbytes] if staged is None else staged
                    )

            sources = [(of, at, n) for _, _, of, at, n, _ in parts if of.kind is Kind.DEVICE]
            watch = (
                emulation.watch(
                    queue, what, lambda: [of.bytes[at : at + n] for of, at, n in sources]
                )
                if sources
                else None
            )
            if early and watch is not None:
                emulation.machine.watch(watch)  # it has been read just now
            emulation.put(queue, run, held, raw=True, watch=None if early else watch)
        if waits:
            emulation.synchronize(queue, f"{what} to pageable memory")

    def of_tensors(self, dst: torch.Tensor, src: torch.Tensor, non_blocking: bool) -> None:
        """tensor.copy_() where at least one of the two is in device memory; at least one of them makes this the current stream's work."""
        emulation = self.emulation
        queue = emulation.queue
        with emulation.machine.lock, emulation.raw():
            to, of = emulation.memory.block_of(dst), emulation.memory.block_of(src)
            to_device = to is not None and to.kind is Kind.DEVICE
            from_device = of is not None and of.kind is Kind.DEVICE
            unstaged = non_blocking and to_device != from_device and direct(dst, src, to_device)
            if not from_device and not (of is not None and unstaged):
                source = src.clone()  # staged, or the host waits anyway
            else:
                source = (
                    emulation.stand_in(src, of) if from_device and of is not None else src.detach()
                )
            target = emulation.stand_in(dst, to) if to_device and to is not None else dst.detach()
            uses = [
                block
                for block in (to, of)
                if block is not None and not (block is of and not from_device and source is not src)
            ]
            watch = emulation.watch(queue, "copy_", lambda: [source]) if from_device else None
            emulation.put(queue, lambda: target.copy_(source), uses, watch=watch)
        if to_device and from_device:
            return
        asynchronous = non_blocking and (to_device or (to is not None and unstaged))
        if not asynchronous:
            emulation.synchronize(
                queue, "blocking copy to the device" if to_device else "blocking copy to the host"
            )


if TYPE_CHECKING:
    pass


class ThreadState(threading.local):
    """`emulation`: the one that the thread was started in, or entered; None in threads that are older. `queue`: the current one, None for
    the default stream, as in a thread that never chose one. `raw`: how many raw() are open; while one is, `guards` keep torch's calls out
    of the modes."""

    emulation: Emulation | None = None
    queue: Queue | None = None
    raw = 0
    guards: Any = None


STATE = ThreadState()


def _guard() -> None:
    functions = torch._C.DisableTorchFunction()
    functions.__enter__()
    STATE.guards = functions, torch._C._DisableTorchDispatch()


def _unguard() -> None:
    functions, dispatch = STATE.guards
    STATE.guards = None
    del dispatch  # its end is the guard's end
    functions.__exit__(None, None, None)


class Raw:
    """A context in which the thread's torch calls run at once on the bare host tensors. Entering it again inside costs nothing."""

    __slots__ = ()

    def __enter__(self) -> None:
        if not STATE.raw:
            _guard()
        STATE.raw += 1

    def __exit__(self, *exc: object) -> None:
        STATE.raw -= 1
        if not STATE.raw:
            _unguard()


RAW = Raw()


@contextmanager
def intercepted() -> Iterator[None]:
    """Suspends every raw() of the thread."""
    depth = STATE.raw
    if depth:
        STATE.raw = 0
        _unguard()
    try:
        yield
    finally:
        if depth:
            _guard()
            STATE.raw = depth


@contextmanager
def member(emulation: Emulation, queue: Queue | None) -> Iterator[None]:
    """The thread is part of an emulation, with this current stream and no raw(); afterwards it is what it was before."""
    outer = STATE.emulation, STATE.queue
    STATE.emulation, STATE.queue = emulation, queue
    try:
        with intercepted():
            yield
    finally:
        STATE.emulation, STATE.queue = outer
