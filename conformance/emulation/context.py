# SPDX-License-Identifier: Apache-2.0
"""The emulated device: the object that an engine uses, its copies, and the state of its threads.

A thread's state is the emulation that it is part of, its current stream, and whether its torch
calls go to the bare host tensors (`raw()`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, Protocol

import torch

from kvconform.emulation.machine import Delay, Machine, Mark, Queue, Used, Work
from kvconform.emulation.memory import Block, Kind, Memory
from kvconform.emulation.note import Note, caller
from kvconform.emulation.watch import Watch


class HasQueue(Protocol):
    """A stream, as far as the machine needs one."""

    @property
    def queue(self) -> Queue:
        """The queue that holds the stream's work."""
        ...


class Emulation:
    """An emulated CUDA device: its streams, its memory and its notes. `emulate()` yields it."""

    def __init__(self, delay: Delay | None, patience: int) -> None:
        self.machine = Machine(delay, patience)
        self.notes: list[Note] = []
        self.memory = Memory(self.machine, self._note_hazard)
        self.copies = Copies(self)
        self.owner = threading.get_ident()  # the engine's thread
        self.streams: dict[int, Any] = {}  # torch.cuda.Stream objects by handle
        self.compute: Any = None  # the torch.cuda.Stream object of the compute queue

    # -- for the engine

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """Declare a tensor's storage to be device memory, in place, and return the tensor.

        The emulation keeps the storage alive.
        """
        with self.raw():
            self.memory.mark(tensor, Kind.DEVICE)
        return tensor

    def release(self, tensors: Iterable[torch.Tensor]) -> None:
        """Undo `to_device`: keep the storages of these tensors alive no longer."""
        with self.raw():
            self.memory.unmark(tensors)

    def launch(self, function: Callable[[], object]) -> None:
        """Queue a function on the compute stream.

        It runs in `raw()`. Its exceptions come out of the call that runs it.
        """
        with self.machine.lock, self.raw():
            self.memory.reuse_pinned()
            self.machine.put(self.machine.compute, Work(function))

    def finish_compute(self) -> None:
        """Run the compute stream up to here, and what it waits for.

        Not noted: the engine waits here, not the connector.
        """
        with self.machine.lock, self.raw():
            self.memory.reuse_pinned()
            self.machine.demand(Mark(self.machine.compute, self.machine.compute.put))

    def drain(self) -> None:
        """Run everything on all streams; not noted."""
        with self.raw():
            self.machine.drain()

    def raw(self) -> Raw:
        """Return a context in which this thread's torch calls run on the bare host tensors.

        They run at once, and nothing is noted.
        """
        return RAW

    def intercepted(self) -> AbstractContextManager[None]:
        """Return a context that suspends `raw()`: torch calls go to the emulated device again."""
        return intercepted()

    def pending(self) -> int:
        """Return how many pieces of work are queued on streams other than the compute stream."""
        with self.machine.lock:
            side = (queue for queue in self.machine.queues if queue is not self.machine.compute)
            return sum(isinstance(entry, Work) for queue in side for entry in queue.entries)

    def queue_copy(
        self,
        dst: int | Iterable[int],
        src: int | Iterable[int],
        nbytes: int | Iterable[int],
        stream: HasQueue | None = None,
        *,
        any_order: bool = False,
        what: str = "copy by address",
    ) -> None:
        """Queue copies by raw address as one operation on a stream (default: the current one).

        With `any_order` the sources may be read before their turn (CU_MEMCPY_SRC_ACCESS_ORDER_ANY).
        Before anything is queued, raises ValueError for a range that is partly outside its block,
        and NotEmulated for host memory that is not a torch tensor.
        """
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
        """Whether the calling thread's torch calls are not intercepted."""
        return bool(STATE.raw) or not self.machine.open

    def put(
        self,
        queue: Queue,
        function: Callable[[], object],
        uses: Iterable[Used] = (),
        raw: bool = False,
        watch: Watch | None = None,
    ) -> None:
        """Queue work of a torch call. It runs in `raw()` and without autograd.

        `uses` and `raw`: the memory that it uses, and whether by address (see machine.Work).
        """

        def run() -> None:
            with torch.inference_mode():
                function()

        with self.raw():
            work = Work(run, uses, raw)
            work.watch = watch
            self.machine.put(queue, work)

    def watch(self, queue: Queue, what: str, read: Callable[[], list[Any]]) -> Watch | None:
        """Return a watch for work that reads device memory, about to be put on `queue`.

        It detects whether the work reads before the compute stream has done what is queued there
        now. In a thread other than the engine's, "now" depends on timing: if `queue` has waited for
        a part of the compute stream, only that part counts there. Returns None where there is
        nothing to detect.
        """
        machine = self.machine
        if machine.delay != "compute" or queue is machine.compute:
            return None
        other_thread = threading.get_ident() != self.owner
        due = queue.ordered if other_thread and queue.ordered else machine.compute.put
        where = caller()
        text = (
            f"{what}, queued at {where}, "
            "read device memory that the compute stream wrote afterwards"
        )

        def report() -> None:
            self._add_note("read_early", text, queue, where)

        return Watch(due, read, report)

    def demand(self, mark: Mark, what: str) -> None:
        """Let the host wait for a mark; noted, unless the thread is in `raw()`."""
        self.note("sync", what, mark.queue)
        with self.raw():
            self.machine.demand(mark)
            mark.queue.seen = max(mark.queue.seen, mark.position)

    def synchronize(self, queue: Queue, what: str) -> None:
        """Let the host wait for everything queued so far on one queue."""
        self.demand(self.machine.mark(queue), what)

    def synchronize_device(self, what: str) -> None:
        """Let the host wait for everything on every stream; noted, unless all of it is done."""
        with self.machine.lock:
            if any(queue.done < queue.put for queue in self.machine.queues):
                self.note("sync", what, None)
            self.drain()

    def note(self, kind: str, what: str, queue: Queue | None) -> None:
        """Add a note about this thread, unless it is in `raw()`."""
        if not self.off:
            self._add_note(kind, what, queue, caller())

    def _note_hazard(self, kind: str, what: str, queue: Queue | None) -> None:
        self._add_note(kind, what, queue, caller())

    def _add_note(self, kind: str, what: str, queue: Queue | None, where: str) -> None:
        self.notes.append(
            Note(kind, what, queue.name if queue else "", threading.current_thread().name, where)
        )

    def on_device(self, tensor: object) -> bool:
        """Return whether this is a tensor in device memory."""
        block = self.memory.block_of(tensor) if isinstance(tensor, torch.Tensor) else None
        return block is not None and block.kind is Kind.DEVICE

    def device_tensor(self, like: torch.Tensor) -> torch.Tensor:
        """Return a new device tensor with the shape, strides and dtype of another.

        It is allocated on the current stream. Its contents are undefined.
        """
        return self._tensor(Kind.DEVICE, like, self.queue)

    def pinned_tensor(self, like: torch.Tensor, zero: bool = False) -> torch.Tensor:
        """Return a new pinned tensor with the shape, strides and dtype of another.

        Its contents are zeros or undefined.
        """
        return self._tensor(Kind.PINNED, like, None, zero)

    def _tensor(
        self, kind: Kind, like: torch.Tensor, home: Queue | None, zero: bool = False
    ) -> torch.Tensor:
        size = like.size()
        stride = like.stride()
        span = 0  # elements from the first to the last
        if like.numel():
            span = 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        with self.machine.lock, self.raw():
            storage = self.memory.allocate(kind, span * like.element_size(), home, zero=zero)
            return torch.empty(0, dtype=like.dtype).set_(storage, 0, size, stride)

    def stand_in(self, tensor: torch.Tensor, block: Block) -> torch.Tensor:
        """Return the same view of the same bytes without the user's lease on them.

        For work that runs later. The caller is in `raw()`.
        """
        if not block.leased:
            return tensor.detach()
        storage = block.bytes.untyped_storage()
        return torch.empty(0, dtype=tensor.dtype).set_(
            storage, tensor.storage_offset(), tensor.size(), tensor.stride()
        )


EMULATIONS: list[Emulation] = []
"""Open emulations of this process, the innermost last."""


def active() -> Emulation:
    """Return the emulation that the calling thread was started in, or entered last.

    A thread that outlives its emulation, such as a pool's, becomes part of the next one. Raises
    RuntimeError outside `emulate()`.
    """
    mine = STATE.emulation
    if mine is not None and (mine.machine.open or not EMULATIONS):
        return mine
    if mine is not None:
        STATE.emulation = EMULATIONS[-1]
        STATE.queue = None
    if not EMULATIONS:
        raise RuntimeError("No CUDA emulation is active in this process.")
    return EMULATIONS[-1]


# -- copies


def in_one_piece(dst: torch.Tensor, src: torch.Tensor) -> bool:
    """Return whether a copy engine can copy one into the other as one range of bytes.

    They need the same dtype, sizes and strides, with neither gaps nor overlaps, in any order of
    dimensions. Torch makes no temporary tensor for such a copy.
    """
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
    """Return whether a non-blocking copy between host and device uses the host tensor itself.

    If the copy is not in one piece, torch reorders and converts on the device, and needs a
    contiguous host tensor; otherwise it stages the copy in pageable memory.
    """
    if in_one_piece(dst, src):
        return True
    host_tensor = src.expand_as(dst) if to_device else dst
    return host_tensor.is_contiguous()


class AddressedCopy(NamedTuple):
    """One range of a copy by address."""

    target: Block
    target_offset: int
    source: Block
    source_offset: int
    nbytes: int
    staged: torch.Tensor | None
    """The source's bytes, if they were read at the call."""

    def source_bytes(self) -> torch.Tensor:
        """Return the source's range, as it is now."""
        return self.source.bytes[self.source_offset : self.source_offset + self.nbytes]

    def run(self) -> None:
        """Copy the bytes."""
        target = self.target.bytes[self.target_offset : self.target_offset + self.nbytes]
        target.copy_(self.source_bytes() if self.staged is None else self.staged)


class Copies:
    """The copies between device, pinned and pageable memory of one emulation.

    They decide what is read and written when, and whether the host waits.
    """

    def __init__(self, emulation: Emulation) -> None:
        self.emulation = emulation
        self.made_by_address = 0

    def by_address(
        self, queue: Queue, copies: list[tuple[int, int, int]], any_order: bool, what: str
    ) -> None:
        """Queue copies given as (destination, source, bytes).

        Pageable sources are read at the call, as staging does. A pageable destination makes the
        host wait. Pinned and device memory is used when the work's turn comes, and nothing keeps it
        from being freed until then.
        """
        emulation = self.emulation
        memory = emulation.memory
        self.made_by_address += 1
        with emulation.machine.lock, emulation.raw():
            read_at_once = any_order and emulation.machine.delay == "compute"
            used: list[Block] = []
            parts: list[AddressedCopy] = []
            waits = False
            for dst, src, nbytes in copies:
                target = memory.resolve(dst, nbytes)
                source = memory.resolve(src, nbytes)
                part = AddressedCopy(
                    target, dst - target.start, source, src - source.start, nbytes, None
                )
                used.append(target)
                if read_at_once or source.kind is Kind.PAGEABLE:
                    part = part._replace(staged=part.source_bytes().clone())
                else:
                    used.append(source)
                parts.append(part)
                waits = waits or target.kind is Kind.PAGEABLE
            blocks = list(dict.fromkeys(used))

            def run() -> None:
                for block in blocks:
                    if memory.registration_freed(block):
                        memory.overwrite_registered(block)
                for part in parts:
                    part.run()

            from_device = [part for part in parts if part.source.kind is Kind.DEVICE]
            watch = None
            if from_device:
                watch = emulation.watch(
                    queue, what, lambda: [part.source_bytes() for part in from_device]
                )
            if read_at_once and watch is not None:
                emulation.machine.watch(watch)  # its sources were read above, not in `run`
                watch = None
            emulation.put(queue, run, blocks, raw=True, watch=watch)
        if waits:
            emulation.synchronize(queue, f"{what} to pageable memory")

    def of_tensors(self, dst: torch.Tensor, src: torch.Tensor, non_blocking: bool) -> None:
        """Queue tensor.copy_() on the current stream; one tensor or both are in device memory."""
        emulation = self.emulation
        queue = emulation.queue
        with emulation.machine.lock, emulation.raw():
            to = emulation.memory.block_of(dst)
            of = emulation.memory.block_of(src)
            to_device = to is not None and to.kind is Kind.DEVICE
            from_device = of is not None and of.kind is Kind.DEVICE
            unstaged = non_blocking and to_device != from_device and direct(dst, src, to_device)
            if of is not None and from_device:
                source = emulation.stand_in(src, of)
            elif of is not None and unstaged:
                source = src.detach()  # pinned: read when its turn comes
            else:
                source = src.clone()  # staged, or the host waits anyway
            target = emulation.stand_in(dst, to) if to is not None and to_device else dst.detach()
            uses = []
            if to is not None:
                uses.append(to)
            if of is not None and from_device:
                uses.append(of)
            watch = emulation.watch(queue, "copy_", lambda: [source]) if from_device else None
            emulation.put(queue, lambda: target.copy_(source), uses, watch=watch)
        if to_device and from_device:
            return
        asynchronous = non_blocking and (to_device or (to is not None and unstaged))
        if not asynchronous:
            emulation.synchronize(
                queue, "blocking copy to the device" if to_device else "blocking copy to the host"
            )


# -- state of a thread


class ThreadState(threading.local):
    """The emulation's state of one thread."""

    emulation: Emulation | None = None
    """The one that the thread was started in, or entered; None in a thread that is older."""
    queue: Queue | None = None
    """Its current queue; None for the default stream, as in a thread that never chose one."""
    raw = 0
    """How many `raw()` contexts are open."""
    guards: Any = None
    """While one is open: the guards that keep torch's calls out of the modes."""


STATE = ThreadState()


def _guard() -> None:
    functions = torch._C.DisableTorchFunction()
    functions.__enter__()
    STATE.guards = functions, torch._C._DisableTorchDispatch()


def _unguard() -> None:
    functions, dispatch = STATE.guards
    STATE.guards = None
    del dispatch  # the guard lasts as long as the object
    functions.__exit__(None, None, None)


class Raw:
    """A context in which the thread's torch calls run at once on the bare host tensors.

    It may be entered again inside itself, at no cost.
    """

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
    """Suspend every raw() of the thread."""
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
    """Make the thread part of an emulation, with this current stream and no raw().

    Restores its former state at the end.
    """
    outer = STATE.emulation, STATE.queue
    STATE.emulation, STATE.queue = emulation, queue
    try:
        with intercepted():
            yield
    finally:
        STATE.emulation, STATE.queue = outer
