# SPDX-License-Identifier: Apache-2.0
"""Device and pinned memory, and the reuse of memory that is freed while queued work uses it.

Memory that is allocated here is lent: the bytes belong to the emulation, and the user's tensors
share a storage that holds a lease on them. The end of the lease means that the user has freed the
memory. As torch's allocator does, the emulation reuses the bytes for whatever comes next on the
stream where they were allocated. If work that uses them is still queued on another stream then,
they are overwritten and a note is added.

The bytes themselves live as long as the emulation refers to them, so unmapped memory is never read.
"""

from __future__ import annotations

import bisect
import ctypes
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from enum import StrEnum
from functools import partial
from typing import Any, NamedTuple

import torch

from kvconform.emulation.machine import Machine, Mark, Queue, Work
from kvconform.emulation.note import NotEmulated, caller

POISON = 0xCB  # content of freed and uninitialised bytes
FILLED = 1 << 24  # bytes; larger allocations are not poisoned, which would cost time and memory
GUARDED = 1 << 20  # bytes that are kept free behind an allocation, at most its own size


class Kind(StrEnum):
    """Kind of memory, as CUDA sees it."""

    DEVICE = "device"
    PINNED = "pinned"
    PAGEABLE = "pageable"


class Block:
    """One allocation.

    - `bytes`: a uint8 tensor over it (the emulation's own).
    - `home`: the queue on which it was allocated.
    - `recorded`: the queues that record_stream() named.
    - `leased`: the end of the user's last reference is noticed through `lease`.
    - `guard`: bytes behind the block that are kept free, so that a copy there is a mistake.
    - `watched`: a torch storage lies under it, so `Memory.registration_freed` can query its end.
    - `made`: where it was allocated.
    - `pending`, `raw`: counts of queued work, see machine.Used.
    """

    __slots__ = (
        "__weakref__",
        "bytes",
        "guard",
        "home",
        "kind",
        "lease",
        "leased",
        "made",
        "nbytes",
        "pending",
        "raw",
        "recorded",
        "start",
        "watched",
    )

    def __init__(self, kind: Kind, data: torch.Tensor, home: Queue | None, guard: int = 0) -> None:
        self.kind = kind
        self.guard = guard
        self.bytes = data
        self.home = home
        self.start = data.data_ptr()
        self.nbytes = data.numel()
        self.recorded: set[Queue] = set()
        self.pending = 0
        self.raw = 0
        self.lease: Any = None
        self.leased = False
        self.watched = False
        place = caller()
        self.made = f" allocated at {place}" if place else ""

    @property
    def end(self) -> int:
        """Address of the first byte after the block."""
        return self.start + self.nbytes


class Freed(NamedTuple):
    """A block that the user has freed, and the marks to reach before its memory is reused."""

    block: Block
    marks: list[Mark]


class Memory:
    """The allocations of one emulated device.

    All methods take the machine's lock, or expect the caller to hold it. Of the user's memory they
    change only bytes that were freed. `note` is called with kind, what and queue.
    """

    def __init__(self, machine: Machine, note: Callable[[str, str, Queue | None], None]) -> None:
        self.machine = machine
        self.note = note
        self.blocks: dict[int, Block] = {}  # by address of the storage
        # By the address that was registered, which may lie inside a storage.
        self.registered: dict[int, Block] = {}
        # Addresses [start, end) behind mappings, which are kept free.
        self.guards: list[tuple[int, int]] = []
        self._starts: list[int] = []
        # Blocks whose leases ended. Weak references append to it at any time.
        self._ended: deque[Block] = deque()
        self.lent = 0  # allocations on the device, ever
        self._dying: list[Freed] = []
        # Host storages whose address the user has asked for.
        self._seen: dict[int, weakref.ref[Any]] = {}

    # -- allocation

    def allocate(self, kind: Kind, nbytes: int, home: Queue | None, *, zero: bool = False) -> Any:
        """Return a new storage of at least one byte, filled with zeros or with POISON.

        A large storage is not filled with POISON. The caller is in `raw()`.
        """
        self.collect()
        if kind is Kind.PINNED:
            self.reuse_pinned()
        size = max(nbytes, 1)
        guard = min(size, GUARDED)
        made = torch.zeros if zero else torch.empty
        data = made(size + guard, dtype=torch.uint8)[:size]
        if not zero and size <= FILLED:
            data.fill_(POISON)
        block = Block(kind, data, home, guard)
        loan = data.numpy()
        block.lease = weakref.ref(loan, lambda _: self._ended.append(block))
        block.leased = True
        self._enter(block)
        self.lent += kind is Kind.DEVICE
        if home is not None:
            home.before_work = self._reuse_device
        return torch.from_numpy(loan).untyped_storage()

    def mark(self, tensor: torch.Tensor, kind: Kind) -> None:
        """Declare the whole storage of a tensor to be device or pinned memory, in place.

        The storage is kept alive, and its end is not noticed.
        """
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in self.blocks:
            self._enter(Block(kind, torch.empty(0, dtype=torch.uint8).set_(storage), None))

    def unmark(self, tensors: Iterable[torch.Tensor]) -> None:
        """Undo `mark`."""
        with self.machine.lock:
            for start in {tensor.untyped_storage().data_ptr() for tensor in tensors}:
                if start in self.blocks:
                    self._forget(self.blocks[start])

    def register(self, pointer: int, nbytes: int) -> None:
        """Pin memory by address, as cudaHostRegister does.

        The range may lie in a host tensor or in memory that is not torch's.
        """
        with self.machine.lock:
            storage = self._storage_at(pointer, nbytes)
            if storage is None:
                data = torch.frombuffer(
                    (ctypes.c_ubyte * nbytes).from_address(pointer), dtype=torch.uint8
                )
            else:
                data = torch.empty(0, dtype=torch.uint8).set_(
                    storage, pointer - storage.data_ptr(), (nbytes,)
                )
            block = self.registered[pointer] = Block(Kind.PINNED, data, None)
            block.watched = storage is not None

    def unregister(self, pointer: int) -> bool:
        """Undo `register`; return False if nothing was registered at this address."""
        return self.registered.pop(pointer, None) is not None

    def seen(self, tensor: torch.Tensor) -> None:
        """Record that the user knows the address of this host tensor.

        The address may come back as a bare number.
        """
        storage = tensor.untyped_storage()
        start = storage.data_ptr()
        if start and start not in self.blocks:
            self._seen[start] = weakref.ref(storage)

    # -- look-up

    def block_of(self, tensor: torch.Tensor) -> Block | None:
        """Return the device or pinned block that a tensor lies in.

        Returns None for pageable memory, and for tensors without memory (meta, sparse). Pinned
        memory is found by its address, because numpy and frombuffer make new storages over it;
        device memory cannot be given to them.
        """
        try:
            start = tensor.untyped_storage().data_ptr()
        except (NotImplementedError, RuntimeError):
            return None
        block = self.blocks.get(start) or self._pinned_around(start)
        if block is None and self.registered:
            address = tensor.data_ptr()
            return next(
                (b for b in self.registered.values() if b.start <= address < b.end),
                None,
            )
        return block

    def _pinned_around(self, address: int) -> Block | None:
        """Return the pinned allocation that contains this byte. Takes no lock."""
        starts = self._starts
        at = bisect.bisect_right(starts, address) - 1
        block = self.blocks.get(starts[at]) if at >= 0 else None
        if block is None or block.kind is not Kind.PINNED or address >= block.end:
            return None
        return block

    def resolve(self, pointer: int, nbytes: int) -> Block:
        """Return the block that holds the bytes [pointer, pointer + nbytes).

        For host memory that is not pinned the block is a new one. Raises ValueError for a range
        that is only partly in a known block, or in what is guarded behind one. Raises NotEmulated
        for any other range: it may be a wild address, or host memory that is not torch's.
        """
        self.collect()
        with self.machine.lock:
            at = bisect.bisect_right(self._starts, pointer) - 1
            near = [self.blocks[start] for start in self._starts[max(at, 0) : at + 2]]
        known = [*near, *self.registered.values()]
        for block in known:
            if block.start <= pointer and pointer + nbytes <= block.end:
                return block
        storage = self._storage_at(pointer, nbytes)
        if storage is not None:
            return Block(Kind.PAGEABLE, torch.empty(0, dtype=torch.uint8).set_(storage), None)
        ranges = [(block.start, block.end) for block in known]
        for reference in list(self._seen.values()):
            storage = reference()
            if storage is not None:
                ranges.append((storage.data_ptr(), storage.data_ptr() + storage.nbytes()))
        # No other allocation begins immediately after a block.
        ranges += [(block.start, block.end + max(block.guard, 1)) for block in near]
        ranges += self.guards
        if any(start < pointer + nbytes and pointer < end for start, end in ranges):
            raise ValueError(
                f"A copy of {nbytes} bytes at address {pointer:#x}: "
                "no device, pinned or known host memory holds all of them."
            )
        raise NotEmulated("copies from or to host memory that is not a torch tensor")

    def _storage_at(self, pointer: int, nbytes: int) -> Any:
        """Return the known host storage that holds these bytes, or None."""
        for start, reference in list(self._seen.items()):
            storage = reference()
            if storage is None:
                del self._seen[start]
            elif (
                start == storage.data_ptr()
                and start <= pointer
                and pointer + nbytes <= start + storage.nbytes()
            ):
                return storage
        return None

    # -- the end of allocations

    def record(self, block: Block, queue: Queue) -> None:
        """Handle record_stream(): delay the reuse of a block.

        It is reused only after the work that is queued on `queue` when the block is freed.
        """
        block.recorded.add(queue)

    def collect(self) -> None:
        """Process leases that ended since the last call; changes no bytes."""
        while self._ended:
            block = self._ended.popleft()
            marks = [self.machine.mark(queue) for queue in block.recorded]
            self._dying.append(Freed(block, marks))
        if self._dying:
            self._drop(freed for freed in self._dying if not freed.block.pending)

    def _reuse_device(self, home: Queue) -> None:
        """Reuse freed memory that was allocated on `home`, before new work is queued there."""
        self.collect()
        reused = [
            freed
            for freed in self._dying
            if freed.block.home is home and all(mark.reached for mark in freed.marks)
        ]
        for freed in reused:
            self._dying.remove(freed)
            self.machine.insert(home, Work(partial(self._overwrite_device, freed.block)))

    def reuse_pinned(self) -> None:
        """Reuse freed pinned memory now, and overwrite it if copies by address still use it.

        Copies of torch tensors keep their memory until they are done, as with torch's allocator;
        copies by address cannot.
        """
        self.collect()
        reused = [
            freed.block
            for freed in self._dying
            if freed.block.kind is Kind.PINNED and freed.block.raw
        ]
        for block in reused:
            self._overwrite(block, "freed_pinned", block.raw)
            self._dying = [freed for freed in self._dying if freed.block is not block]

    def overwrite_registered(self, block: Block) -> None:
        """Overwrite memory pinned by address that was freed before work that uses it ran."""
        self._overwrite(block, "freed_pinned", block.raw)
        del self.registered[block.start]

    def registration_freed(self, block: Block) -> bool:
        """Return whether memory pinned by address (cudaHostRegister) has been freed.

        It has if only the blocks registered here still refer to its storage.
        """
        if self.registered.get(block.start) is not block or not block.watched:
            return False
        storage = block.bytes.untyped_storage()
        start = storage.data_ptr()
        ours = sum(
            other.bytes.untyped_storage().data_ptr() == start for other in self.registered.values()
        )
        # The counts of a storage without other references depend on torch's version.
        lonely = torch.empty(1)
        lonely_storage = lonely.untyped_storage()
        others = (
            torch._C._storage_Use_Count(storage._cdata)
            - torch._C._storage_Use_Count(lonely_storage._cdata)
            - (ours - 1)
        )
        return bool(others <= 0) and sys.getrefcount(storage) <= sys.getrefcount(lonely_storage)

    def _overwrite_device(self, block: Block) -> None:
        if block.pending:
            self._overwrite(block, "freed_device", block.pending)
        else:
            self._forget(block)

    def _overwrite(self, block: Block, kind: str, users: int) -> None:
        """Poison a block that queued work still uses, and add a note."""
        block.bytes.fill_(POISON)
        operations = "operation" if users <= 1 else "operations"
        self.note(
            kind,
            f"{block.nbytes} bytes{block.made}, still used by {users} queued {operations}",
            block.home,
        )
        self._forget(block)

    def _enter(self, block: Block) -> None:
        with self.machine.lock:
            starts = self._starts.copy()  # other threads search the old one
            if block.start not in self.blocks:
                bisect.insort(starts, block.start)
            self.blocks[block.start] = block
            self._starts = starts

    def _forget(self, block: Block) -> None:
        """Drop the block's address; work that still uses the block holds its bytes."""
        if self.blocks.get(block.start) is block:
            del self.blocks[block.start]
            starts = self._starts.copy()
            del starts[bisect.bisect_left(starts, block.start)]
            self._starts = starts

    def _drop(self, ended: Iterable[Freed]) -> None:
        """Drop freed blocks that no queued work uses."""
        gone = {id(freed.block) for freed in ended}
        for freed in self._dying:
            if id(freed.block) in gone:
                self._forget(freed.block)
        self._dying = [freed for freed in self._dying if id(freed.block) not in gone]
