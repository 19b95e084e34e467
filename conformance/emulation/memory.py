# SPDX-License-Identifier: Apache-2.0
"""Which memory is the device's, which is pinned, and what happens to memory that is freed while queued work still uses it.

Device and pinned memory that is allocated here is lent to the user: the bytes belong to the emulation, the user's tensors share a storage
that holds a lease on them. When the lease ends, the user has freed the memory. As torch's allocator does, the bytes are handed out again to
whatever comes next on the stream where they were allocated; if work that uses them is still queued on another stream then, they are
overwritten and a note is left. The bytes themselves live as long as anything here refers to them, so nothing ever reads unmapped memory.
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
from typing import Any

import torch

from kvconform.emulation.errors import NotEmulated
from kvconform.emulation.machine import Machine, Mark, Queue, Work
from kvconform.emulation.note import caller

POISON = 0xCB  # what freed and uninitialised bytes hold
FILLED = 1 << 24  # larger allocations are not filled with it: they would take real time and memory


class Kind(StrEnum):
    """Where memory is, as CUDA sees it."""

    DEVICE = "device"
    PINNED = "pinned"
    PAGEABLE = "pageable"


class Block:
    """One allocation: `bytes` is a uint8 tensor over it (the emulation's own), `home` the queue it was allocated on, `recorded` the queues
    that record_stream() named, `leased` whether the user's last reference will be noticed, `watched` whether it can be asked for.
    `made` says where it was allocated. `pending` and `raw` count queued work, see machine.Used."""

    __slots__ = (
        "__weakref__",
        "bytes",
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

    def __init__(self, kind: Kind, data: torch.Tensor, home: Queue | None) -> None:
        self.kind, self.bytes, self.home = kind, data, home
        self.start, self.nbytes = data.data_ptr(), data.numel()
        self.recorded: set[Queue] = set()
        self.pending = self.raw = 0
        self.lease: Any = None
        self.leased = self.watched = False
        place = caller()
        self.made = f" allocated at {place}" if place else ""


class Memory:
    """The allocations of one emulated device. All methods expect the machine's lock to be held by the caller or take it, and change
    nothing of the user's but bytes that were freed. `note` is called with kind, what and queue."""

    def __init__(self, machine: Machine, note: Callable[[str, str, Queue | None], None]) -> None:
        self.machine, self.note = machine, note
        self.blocks: dict[int, Block] = {}  # by address of the storage
        self.registered: dict[
            int, Block
        ] = {}  # by address that was registered, anywhere inside a storage
        self._starts: list[int] = []
        self._ended: deque[Block] = (
            deque()
        )  # leases ended; appended to by weak references, at any time
        self.lent = 0  # allocations on the device, ever
        self._dying: list[tuple[Block, list[Mark]]] = []
        self._seen: dict[
            int, weakref.ref[Any]
        ] = {}  # host storages whose address somebody asked for

    # -- allocation

    def allocate(self, kind: Kind, nbytes: int, home: Queue | None, *, zero: bool = False) -> Any:
        """A new storage of at least one byte, filled with POISON unless it is large, or with zeros. The caller works outside of the
        modes."""
        self.collect()
        if kind is Kind.PINNED:
            self.reuse_pinned()
        size = max(nbytes, 1)
        data = (
            torch.zeros(size, dtype=torch.uint8) if zero else torch.empty(size, dtype=torch.uint8)
        )
        if not zero and size <= FILLED:
            data.fill_(POISON)
        block = Block(kind, data, home)
        loan = data.numpy()
        block.lease = weakref.ref(loan, lambda _: self._ended.append(block))
        block.leased = True
        self._enter(block)
        self.lent += kind is Kind.DEVICE
        if home is not None:
            home.before_work = self._hand_out
        return torch.from_numpy(loan).untyped_storage()

    def mark(self, tensor: torch.Tensor, kind: Kind) -> None:
        """Declare the whole storage of a tensor to be device or pinned memory, in place. It is kept alive, and its end is not noticed."""
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in self.blocks:
            self._enter(Block(kind, torch.empty(0, dtype=torch.uint8).set_(storage), None))

    def register(self, pointer: int, nbytes: int) -> None:
        """Pin memory by address, as cudaHostRegister does: a range of a host tensor, or of memory that is not torch's."""
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
        """Undo `register`; False if nothing was registered at this address."""
        return self.registered.pop(pointer, None) is not None

    def seen(self, tensor: torch.Tensor) -> None:
        """The address of this host tensor is known to the user from now on, and may come back as a bare number."""
        storage = tensor.untyped_storage()
        start = storage.data_ptr()
        if start and start not in self.blocks:
            self._seen[start] = weakref.ref(storage)

    # -- questions

    def block_of(self, tensor: torch.Tensor) -> Block | None:
        """The device or pinned block that a tensor lies in; None for pageable memory, and for tensors without memory (meta, sparse). Pinned
        memory is known by its address, for numpy and frombuffer make storages of their own over it; device memory cannot go there."""
        try:
            start = tensor.untyped_storage().data_ptr()
        except (NotImplementedError, RuntimeError):
            return None
        block = self.blocks.get(start) or self._pinned_around(start)
        if block is None and self.registered:
            address = tensor.data_ptr()
            return next(
                (b for b in self.registered.values() if b.start <= address < b.start + b.nbytes),
                None,
            )
        return block

    def _pinned_around(self, address: int) -> Block | None:
        """The pinned allocation that this byte is part of. Takes no lock."""
        starts = self._starts
        at = bisect.bisect_right(starts, address) - 1
        block = self.blocks.get(starts[at]) if at >= 0 else None
        return (
            block
            if block is not None
            and block.kind is Kind.PINNED
            and address < block.start + block.nbytes
            else None
        )

    def resolve(self, pointer: int, nbytes: int) -> Block:
        """The block that holds bytes [pointer, pointer + nbytes). Host memory that is not pinned gets a block for the occasion. Raises
        ValueError for a range that is only partly in a known block, or begins where one ends; NotEmulated for one that is nowhere near:
        nothing tells host memory that is not torch's from a wild address."""
        self.collect()
        with self.machine.lock:
            at = bisect.bisect_right(self._starts, pointer) - 1
            near = [self.blocks[start] for start in self._starts[max(at, 0) : at + 2]]
        spans = [
            (block.start, block.start + block.nbytes, block)
            for block in [*near, *self.registered.values()]
        ]
        for start, end, block in spans:
            if start <= pointer and pointer + nbytes <= end:
                return block
        storage = self._storage_at(pointer, nbytes)
        if storage is not None:
            return Block(Kind.PAGEABLE, torch.empty(0, dtype=torch.uint8).set_(storage), None)
        seen = [
            known
            for known in (reference() for reference in list(self._seen.values()))
            if known is not None
        ]
        ranges = [span[:2] for span in spans] + [
            (known.data_ptr(), known.data_ptr() + known.nbytes()) for known in seen
        ]
        ranges += [
            (block.start, block.start + block.nbytes + 1) for block in near
        ]  # no other allocation begins right behind one
        if any(start < pointer + nbytes and pointer < end for start, end in ranges):
            raise ValueError(
                f"A copy of {nbytes} bytes at address {pointer:#x}: no device, pinned or known host memory holds all of them."
            )
        raise NotEmulated("copies from or to host memory that is not a torch tensor")

    def _storage_at(self, pointer: int, nbytes: int) -> Any:
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
        """record_stream(): the block is not handed out before the work queued on `queue` when it is freed has ended."""
        block.recorded.add(queue)

    def collect(self) -> None:
        """Take notice of leases that ended since the last call; changes no bytes."""
        while self._ended:
            block = self._ended.popleft()
            self._dying.append((block, [self.machine.mark(queue) for queue in block.recorded]))
        if self._dying:
            self._drop(entry for entry in self._dying if not entry[0].pending)

    def _hand_out(self, home: Queue) -> None:
        """Before new work is queued on `home`: memory that was allocated there and freed belongs to somebody else from here on."""
        self.collect()
        for entry in [
            e for e in self._dying if e[0].home is home and all(mark.reached for mark in e[1])
        ]:
            self._dying.remove(entry)
            self.machine.insert(home, Work(partial(self._overwrite_device, entry[0])))

    def reuse_pinned(self) -> None:
        """Freed pinned memory is handed out to somebody else now, and written. Copies of torch tensors hold theirs, as torch's allocator
        has them do; copies by address cannot."""
        self.collect()
        for block, _ in [
            entry for entry in self._dying if entry[0].kind is Kind.PINNED and entry[0].raw
        ]:
            self._overwrite(block, "freed_pinned", block.raw)
            self._dying = [entry for entry in self._dying if entry[0] is not block]

    def overwrite_registered(self, block: Block) -> None:
        """Memory that was pinned by address was freed before the work that uses it ran."""
        self._overwrite(block, "freed_pinned", block.raw)
        del self.registered[block.start]

    def forsaken(self, block: Block) -> bool:
        """Whether memory that was pinned by address (cudaHostRegister) has been freed: only what is registered here still refers to its
        storage."""
        if self.registered.get(block.start) is not block or not block.watched:
            return False
        storage = block.bytes.untyped_storage()
        start = storage.data_ptr()
        ours = sum(
            other.bytes.untyped_storage().data_ptr() == start for other in self.registered.values()
        )
        lonely = torch.empty(
            1
        )  # what these counts are when nobody else refers to a storage depends on torch's version
        other = lonely.untyped_storage()
        others = (
            torch._C._storage_Use_Count(storage._cdata)
            - torch._C._storage_Use_Count(other._cdata)
            - (ours - 1)
        )
        return bool(others <= 0) and sys.getrefcount(storage) <= sys.getrefcount(other)

    def _overwrite_device(self, block: Block) -> None:
        if block.pending:
            self._overwrite(block, "freed_device", block.pending)
        else:
            self._forget(block)

    def _overwrite(self, block: Block, kind: str, users: int) -> None:
        block.bytes.fill_(POISON)
        self.note(
            kind,
            f"{block.nbytes} bytes{block.made}, still used by {users} queued operation{'s' * (users > 1)}",
            block.home,
        )
        self._forget(block)

    def _enter(self, block: Block) -> None:
        with self.machine.lock:
            starts = self._starts.copy()  # other threads search the old one
            if block.start not in self.blocks:
                bisect.insort(starts, block.start)
            self.blocks[block.start], self._starts = block, starts

    def _forget(self, block: Block) -> None:
        """The block's address means nothing any more; work that still uses it holds its bytes."""
        if self.blocks.get(block.start) is block:
            del self.blocks[block.start]
            starts = self._starts.copy()
            del starts[bisect.bisect_left(starts, block.start)]
            self._starts = starts

    def _drop(self, ended: Iterable[tuple[Block, list[Mark]]]) -> None:
        gone = {id(block) for block, _ in ended}
        for block, _ in self._dying:
            if id(block) in gone:
                self._forget(block)
        self._dying = [entry for entry in self._dying if id(entry[0]) not in gone]
