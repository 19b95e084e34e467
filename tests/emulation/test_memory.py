# SPDX-License-Identifier: Apache-2.0
"""Tests of device and pinned memory: raw addresses, and memory freed while work still uses it."""

from __future__ import annotations

import gc
import mmap
import os

import numpy as np
import pytest
import torch

from kvconform.emulation.emulate import emulate
from kvconform.emulation.note import NotEmulated
from kvconform.emulation.shared_files import Files, Mappings

ADVERSARIES = ("compute", "transfers")
POISONED = 0xCB


def kinds(cuda):
    return [note.kind for note in cuda.notes]


def device_bytes(cuda, value, size=16):
    """A tensor of the engine's."""
    return cuda.to_device(torch.full((size,), value, dtype=torch.uint8))


# -- copies by address


@pytest.mark.parametrize("delay", ADVERSARIES)
def test_a_list_of_copies_is_one_operation_on_a_stream(delay):
    with emulate(delay) as cuda:
        kv, host, side = (
            device_bytes(cuda, 7),
            torch.zeros(16, dtype=torch.uint8, pin_memory=True),
            torch.cuda.Stream(),
        )
        a, b = kv.data_ptr(), host.data_ptr()
        cuda.queue_copy([b, b + 8], [a + 4, a], np.array([4, 2], dtype=np.uint64), side)
        assert cuda.pending() == (delay == "transfers")
        side.synchronize()
        assert host.tolist() == [7] * 4 + [0] * 4 + [7] * 2 + [0] * 6


def test_pageable_sources_are_read_at_the_call_and_pageable_destinations_make_the_host_wait():
    with emulate("transfers") as cuda:
        kv, host, side = (
            device_bytes(cuda, 0),
            torch.ones(16, dtype=torch.uint8),
            torch.cuda.Stream(),
        )
        cuda.queue_copy(kv.data_ptr(), host.data_ptr(), 16, side)
        host.zero_()
        assert kinds(cuda) == []
        cuda.queue_copy(host.data_ptr(), kv.data_ptr(), 16, side)
        assert host.tolist() == [1] * 16 and kinds(cuda) == ["sync"]


def test_sources_that_may_be_read_in_any_order_are_read_too_early_or_late():
    """CU_MEMCPY_SRC_ACCESS_ORDER_ANY: the stream's waits do not hold the reading."""
    for delay, seen in (("compute", 0), ("transfers", 1)):
        with emulate(delay) as cuda:
            kv, host, side = (
                device_bytes(cuda, 0),
                torch.empty(16, dtype=torch.uint8, pin_memory=True),
                torch.cuda.Stream(),
            )
            cuda.launch(lambda kv=kv: kv.fill_(1))
            side.wait_stream(cuda.compute)
            cuda.queue_copy(host.data_ptr(), kv.data_ptr(), 16, side, any_order=True, what="store")
            side.synchronize()
            assert host.tolist() == [seen] * 16
            assert ("read_early" in kinds(cuda)) == (delay == "compute")


def test_a_block_behind_a_mapping_is_refused(tmp_path):
    file = tmp_path / "region"
    file.write_bytes(bytes(4 * mmap.PAGESIZE))
    with emulate("compute") as cuda, open(file, "r+b") as opened:
        kv = device_bytes(cuda, 0)
        maps = Mappings(lambda start, end: cuda.memory.guards.append((start, end)))
        mapped = maps.mmap(opened.fileno(), 4 * mmap.PAGESIZE)
        [(end, behind)] = cuda.memory.guards
        assert behind - end == 4 * mmap.PAGESIZE
        cuda.memory.register(end - 4 * mmap.PAGESIZE, 4 * mmap.PAGESIZE)
        cuda.queue_copy(end - 16, kv.data_ptr(), 16)
        for wrong in (end, end + mmap.PAGESIZE, behind - 16):
            with pytest.raises(ValueError, match="no device, pinned or known host memory"):
                cuda.queue_copy(wrong, kv.data_ptr(), 16)
        cuda.drain()
        maps.restore()
        assert mapped[-16:] == bytes(16)


def test_a_shared_file_has_a_name_until_the_last_worker_has_opened_it(tmp_path, monkeypatch):
    monkeypatch.setattr("kvconform.emulation.shared_files._workers", lambda: 2)
    path = str(tmp_path / "region")
    files = Files()
    first = files.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    files.unlink(path)
    with pytest.raises(FileExistsError):
        files.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    second = files.open(path, os.O_RDWR)
    assert os.fstat(first).st_ino == os.fstat(second).st_ino
    assert not os.path.exists(path)
    files.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    files.unlink(path)
    files.restore()
    assert not os.path.exists(path)


def test_ranges_that_run_over_the_end_of_their_block_are_refused():
    with emulate("compute") as cuda:
        kv, host = device_bytes(cuda, 0), torch.zeros(16, dtype=torch.uint8, pin_memory=True)
        known = torch.zeros(16, dtype=torch.uint8)
        start, end, known_end = host.data_ptr(), host.data_ptr() + 16, known.data_ptr() + 16
        for dst, size in (
            (end - 1, 2),
            (start - 1, 2),
            (start - 1, 20),
            (end, 1),
            (end + 12, 4),  # a block behind the last
            (known_end - 1, 2),
        ):
            with pytest.raises(ValueError, match="no device, pinned or known host memory"):
                cuda.queue_copy(dst, kv.data_ptr(), size)
        with pytest.raises(ValueError, match="no device, pinned or known host memory"):
            cuda.queue_copy(start, kv.data_ptr() + 9, 8)
        assert cuda.pending() == 0 and not cuda.compute.queue.entries


def test_host_memory_that_is_not_torchs_cannot_be_told_from_wild_addresses():
    with emulate("compute") as cuda:
        kv, buffer = device_bytes(cuda, 3), np.zeros(16, dtype=np.uint8)
        for dst, src in (
            (0x1000, kv.data_ptr()),
            (buffer.ctypes.data, kv.data_ptr()),
            (kv.data_ptr(), buffer.ctypes.data),
        ):
            with pytest.raises(NotEmulated, match="not a torch tensor"):
                cuda.queue_copy(dst, src, 16)
        assert cuda.pending() == 0 and not cuda.compute.queue.entries
        gone = torch.zeros(16, pin_memory=True)
        address = gone.data_ptr()
        del gone
        with pytest.raises(NotEmulated, match="not a torch tensor"):
            cuda.queue_copy(address, kv.data_ptr(), 4)


@pytest.mark.parametrize(
    "view",
    [
        lambda arena: torch.from_numpy(arena.numpy()[16:]),
        lambda arena: torch.from_numpy(arena.numpy()),
        lambda arena: torch.frombuffer(memoryview(arena.numpy()), dtype=torch.uint8, offset=16),
        lambda arena: torch.frombuffer(memoryview(arena.numpy()), dtype=torch.uint8, count=16),
    ],
)
def test_pinned_memory_is_pinned_whatever_shows_it(view):
    with emulate("transfers") as cuda:
        arena, kv, side = (
            torch.zeros(32, dtype=torch.uint8, pin_memory=True),
            device_bytes(cuda, 5),
            torch.cuda.Stream(),
        )
        before, after = torch.zeros(32, dtype=torch.uint8), torch.zeros(32, dtype=torch.uint8)
        part = view(arena)[:16]
        assert (
            part.is_pinned()
            and part.pin_memory() is part
            and part.is_cpu
            and not before.is_pinned()
            and not after.is_pinned()
        )
        with torch.cuda.stream(side):
            part.copy_(kv, non_blocking=True)
        assert part.tolist() == [0] * 16 and kinds(cuda) == []
        side.synchronize()
        assert part.tolist() == [5] * 16 and arena.sum().item() == 80
        with torch.cuda.stream(side):
            kv.copy_(part, non_blocking=True)
        part.fill_(6)
        side.synchronize()
        assert kv.tolist() == [6] * 16
        del arena
        assert part.is_pinned()  # its storage keeps the arena


def test_memory_that_is_not_torchs_can_be_pinned_by_address():
    with emulate("transfers") as cuda, mmap.mmap(-1, 4096) as region:
        view = torch.frombuffer(region, dtype=torch.uint8)
        runtime, kv, side = torch.cuda.cudart(), device_bytes(cuda, 5), torch.cuda.Stream()
        for address in (view.data_ptr(), np.frombuffer(region, dtype=np.uint8).ctypes.data):
            runtime.cudaHostRegister(address, 4096, 0)
            assert view[9:].is_pinned()
            runtime.cudaMemcpyAsync(address + 32, kv.data_ptr(), 16, 4, side.cuda_stream)
            assert view[32].item() == 0 and kinds(cuda) == []
            side.synchronize()
            assert view[30:34].tolist() == [0, 0, 5, 5] and kinds(cuda) == ["sync"]
            runtime.cudaHostUnregister(address)
            assert not view.is_pinned()
            view.zero_()
            cuda.notes.clear()
        del view
        gc.collect()


# -- memory that is freed


def store_from_temporary(cuda, side, *, record=False, wait=False, wait_after=False, size=16):
    """Copy a temporary of the compute stream to pinned memory on a side stream, and drop it."""
    host = torch.zeros(size, dtype=torch.uint8, pin_memory=True)
    temporary = device_bytes(cuda, 3, size) + 1
    side.wait_stream(cuda.compute)
    with torch.cuda.stream(side):
        host.copy_(temporary, non_blocking=True)
    if record:
        temporary.record_stream(side)
    if wait:
        cuda.compute.wait_stream(side)
    del temporary
    if wait_after:
        cuda.compute.wait_stream(side)
    cuda.launch(lambda: None)  # whatever comes next may get the memory
    cuda.finish_compute()
    side.synchronize()
    return host.tolist()


def test_device_memory_freed_while_another_stream_uses_it_is_handed_out_again():
    with emulate("transfers") as cuda:
        assert store_from_temporary(cuda, torch.cuda.Stream()) == [POISONED] * 16
        assert (
            kinds(cuda) == ["freed_device", "sync"]
            and "16 bytes allocated at emulation/test_memory.py:" in cuda.notes[0].what
        )


@pytest.mark.parametrize("delay", ADVERSARIES)
@pytest.mark.parametrize("how", ["record", "wait", "wait_after"])
def test_record_stream_or_a_wait_keeps_it(delay, how):
    with emulate(delay) as cuda:
        assert store_from_temporary(cuda, torch.cuda.Stream(), **{how: True}) == [4] * 16
        assert set(kinds(cuda)) <= {"sync"}


def test_a_temporary_of_the_stream_that_uses_it_is_safe():
    for delay in ADVERSARIES:
        with emulate(delay) as cuda:
            kv, side = device_bytes(cuda, 3), torch.cuda.Stream()
            host = torch.zeros(16, dtype=torch.uint8, pin_memory=True)
            side.wait_stream(cuda.compute)
            with torch.cuda.stream(side):
                for _ in range(3):
                    host.copy_(kv * 2 + 1, non_blocking=True)
            cuda.finish_compute()
            side.synchronize()
            assert host.tolist() == [7] * 16 and set(kinds(cuda)) <= {"sync"}


def test_a_side_streams_temporary_that_compute_uses_is_handed_out_again():
    with emulate("compute") as cuda:
        kv, side = device_bytes(cuda, 0), torch.cuda.Stream()
        with torch.cuda.stream(side):
            loaded = torch.full((16,), 9, dtype=torch.uint8, device="cuda")
        cuda.compute.wait_stream(side)
        kv.copy_(loaded)
        del loaded
        with torch.cuda.stream(side):
            torch.zeros(16, dtype=torch.uint8, device="cuda")
        cuda.finish_compute()
        assert kinds(cuda) == ["freed_device"]
        assert kv.tolist() == [POISONED] * 16


@pytest.mark.parametrize(
    "use",
    [
        lambda kv, temporary: kv.index_put_((torch.arange(16, device="cuda"),), temporary),
        lambda kv, temporary: kv.__setitem__(torch.arange(16, device="cuda"), temporary),
        lambda kv, temporary: kv.add_(temporary - 0),
        lambda kv, temporary: kv.copy_(temporary),
        lambda kv, temporary: torch.add(temporary, 0, out=kv),
        lambda kv, temporary: torch._foreach_add_([kv], [temporary]),
        lambda kv, temporary: kv.scatter_(0, torch.arange(16, device="cuda"), temporary),
    ],
)
@pytest.mark.parametrize("record", [False, True])
def test_queued_operators_do_not_keep_the_users_memory(use, record):
    with emulate("transfers") as cuda:
        kv, side = device_bytes(cuda, 0), torch.cuda.Stream()
        temporary = device_bytes(cuda, 3) + 1
        side.wait_stream(cuda.compute)
        with torch.cuda.stream(side):
            use(kv, temporary)
        if record:
            temporary.record_stream(side)
        del temporary
        cuda.launch(lambda: None)
        side.synchronize()
        assert kv.tolist() == [4 if record else POISONED] * 16
        assert kinds(cuda).count("freed_device") == (not record)


def test_memory_is_not_handed_out_while_a_view_of_it_lives():
    with emulate("transfers") as cuda:
        temporary = device_bytes(cuda, 3) + 1
        view, side = temporary[:4], torch.cuda.Stream()
        host = torch.zeros(16, dtype=torch.uint8, pin_memory=True)
        side.wait_stream(cuda.compute)
        with torch.cuda.stream(side):
            host.copy_(temporary, non_blocking=True)
        del temporary
        cuda.launch(lambda: None)
        side.synchronize()
        assert host.tolist() == [4] * 16 and kinds(cuda) == ["sync"] and view.is_cuda


def load_from_buffer(cuda, buffer, side, by_address):
    """Copy a pinned buffer to the device on a side stream, and drop it before the copy is done."""
    kv = device_bytes(cuda, 0)
    if by_address:
        cuda.queue_copy(kv.data_ptr(), buffer.data_ptr(), 16, side)
    else:
        with torch.cuda.stream(side):
            kv.copy_(buffer, non_blocking=True)
    return kv


@pytest.mark.parametrize("by_address", [True, False])
def test_pinned_memory_freed_too_early_is_lost_to_copies_by_address_only(by_address):
    """torch's allocator keeps pinned memory for the copies that torch made, and for no others."""
    with emulate("transfers") as cuda:
        buffer, side = torch.full((16,), 6, dtype=torch.uint8, pin_memory=True), torch.cuda.Stream()
        kv = load_from_buffer(cuda, buffer, side, by_address)
        del buffer
        torch.empty(4, pin_memory=True)  # memory with another owner
        torch.cuda.synchronize()
        assert kv.tolist() == [POISONED if by_address else 6] * 16
        assert ("freed_pinned" in kinds(cuda)) == by_address


@pytest.mark.parametrize("delay", ADVERSARIES)
def test_pinned_memory_freed_after_its_copy_is_no_hazard(delay):
    with emulate(delay) as cuda:
        buffer, side = torch.full((16,), 6, dtype=torch.uint8, pin_memory=True), torch.cuda.Stream()
        kv = load_from_buffer(cuda, buffer, side, True)
        side.record_event().synchronize()
        del buffer
        torch.empty(4, pin_memory=True)
        cuda.finish_compute()
        assert kv.tolist() == [6] * 16 and "freed_pinned" not in kinds(cuda)


@pytest.mark.parametrize("freed", [True, False])
def test_memory_pinned_by_address_and_freed_too_early(freed):
    with emulate("transfers") as cuda:
        buffer, side = torch.full((16,), 6, dtype=torch.uint8), torch.cuda.Stream()
        torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), 16, 0)
        kv = load_from_buffer(cuda, buffer, side, True)
        kept = [] if freed else [buffer.untyped_storage()]
        del buffer
        torch.cuda.synchronize()
        assert kv.tolist() == [POISONED if freed else 6] * 16
        assert ("freed_pinned" in kinds(cuda)) == freed and len(kept) == (not freed)


def test_addresses_are_forgotten_with_their_memory():
    """Memory that the host gets at the address of a device tensor that is gone is the host's."""
    with emulate("compute") as cuda:
        for _ in range(200):
            temporary = torch.empty(4096, device="cuda") + 1
            del temporary
            cuda.drain()
            assert not torch.empty(4096).is_cuda and not torch.empty(4096).is_pinned()
        cuda.memory.collect()
        assert len(cuda.memory.blocks) < 5
