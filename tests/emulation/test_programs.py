# SPDX-License-Identifier: Apache-2.0
"""Tests of the emulation with small connectors.

Correct ones give the right bytes under both adversaries. Each missing wait shows under the
adversary that is meant for it.
"""

from __future__ import annotations

import queue
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from kvconform.emulation.emulate import emulate

ADVERSARIES = ("compute", "transfers")
STEPS = 6


def make_kv(cuda, blocks=4):
    return cuda.to_device(torch.zeros(blocks, 8))


def right_under(program, **options):
    """The adversaries under which a program gives what it should."""
    found = []
    for delay in ADVERSARIES:
        with emulate(delay) as cuda:
            if program(cuda, **options):
                found.append(delay)
    return found


def raw(cuda, tensor):
    with cuda.raw():
        return tensor.tolist()


# -- one missing wait each


def save(cuda, wait=True, report=True):
    """Save what the compute stream writes to pinned memory on a side stream; the host reads it."""
    kv, side = make_kv(cuda), torch.cuda.Stream()
    host = torch.zeros(8, pin_memory=True)
    cuda.launch(lambda: kv[1].fill_(5))
    if wait:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        host.copy_(kv[1], non_blocking=True)
    done = side.record_event()
    if report:
        done.synchronize()
    return raw(cuda, host) == [5] * 8


def load(cuda, wait=True):
    """A block comes from pinned memory on a side stream, and the compute stream uses it."""
    kv, side = make_kv(cuda), torch.cuda.Stream()
    host = torch.full((8,), 3.0, pin_memory=True)
    used = torch.zeros(8)
    with torch.cuda.stream(side):
        kv[2].copy_(host, non_blocking=True)
    if wait:
        torch.cuda.current_stream().wait_event(side.record_event())
    cuda.launch(lambda: used.copy_(kv[2]))
    cuda.finish_compute()
    return raw(cuda, used) == [3] * 8


def overwrite(cuda, wait=True):
    """A load into a block that the compute stream still reads."""
    kv, side = make_kv(cuda), torch.cuda.Stream()
    host, used = torch.ones(8, pin_memory=True), torch.zeros(8)
    cuda.launch(lambda: kv[0].fill_(4))
    cuda.finish_compute()
    cuda.launch(lambda: used.copy_(kv[0]))
    if wait:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        kv[0].copy_(host, non_blocking=True)
    cuda.drain()
    return raw(cuda, used) == [4] * 8


def save_then_reuse(cuda, wait=True):
    """A block that is being saved is written again."""
    kv, side = make_kv(cuda), torch.cuda.Stream()
    host = torch.zeros(8, pin_memory=True)
    cuda.launch(lambda: kv[0].fill_(4))
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        host.copy_(kv[0], non_blocking=True)
    if wait:
        torch.cuda.current_stream().wait_stream(side)
    cuda.launch(lambda: kv[0].fill_(9))
    cuda.drain()
    return raw(cuda, host) == [4] * 8


def record_again(cuda, wait=True):
    """Use one event for all steps.

    Record before wait is right; wait before record waits for the previous step.
    """
    kv, side, event = make_kv(cuda), torch.cuda.Stream(), torch.cuda.Event()
    host = torch.zeros(STEPS, 8, pin_memory=True)
    for step in range(STEPS):
        cuda.launch(lambda step=step: kv[0].fill_(step + 1))
        if wait:
            event.record()
        side.wait_event(event)
        event.record()
        with torch.cuda.stream(side):
            host[step].copy_(kv[0], non_blocking=True)
        torch.cuda.current_stream().wait_stream(side)
    cuda.drain()
    return raw(cuda, host[:, 0]) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    "program, exposed_by",
    [
        (save, "compute"),
        (load, "transfers"),
        (overwrite, "compute"),
        (save_then_reuse, "transfers"),
        (record_again, "compute"),
    ],
)
def test_each_missing_wait_shows_under_one_adversary(program, exposed_by):
    assert right_under(program) == list(ADVERSARIES)
    assert right_under(program, wait=False) == [
        delay for delay in ADVERSARIES if delay != exposed_by
    ]


def test_completion_that_is_reported_too_early_shows():
    """Without the synchronisation the bytes are missing: the stream did not have to deliver."""
    assert right_under(save, report=False) == []


def test_reads_that_came_too_early_are_noted():
    with emulate("compute") as cuda:
        save(cuda, wait=False)
        cuda.finish_compute()
        [note] = [note for note in cuda.notes if note.kind == "read_early"]
        assert "in save" in note.where and note.stream == "stream 1"
    for wait, delay in ((True, "compute"), (False, "transfers")):
        with emulate(delay) as cuda:
            save(cuda, wait=wait)
            cuda.finish_compute()
            assert "read_early" not in [note.kind for note in cuda.notes]


def test_a_read_of_what_compute_writes_only_later_is_not_early():
    """No alarm in three situations.

    The compute stream's work is queued after the copy, writes other bytes, or belongs to a second
    copy.
    """
    with emulate("compute") as cuda:
        kv, side = make_kv(cuda), torch.cuda.Stream()
        host = torch.zeros(8, pin_memory=True)
        cuda.launch(lambda: kv[1].fill_(2))
        with torch.cuda.stream(side):
            host.copy_(kv[0], non_blocking=True)
            kv[0].copy_(torch.ones(8, pin_memory=True), non_blocking=True)
        cuda.launch(lambda: kv[0].fill_(3))
        cuda.drain()
        assert cuda.notes == []


def test_a_read_that_was_ordered_is_not_early_when_the_block_is_written_again():
    with emulate("compute") as cuda:
        kv, side = make_kv(cuda), torch.cuda.Stream()
        host = torch.zeros(8, pin_memory=True)
        cuda.launch(lambda: kv[1].fill_(2))
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            host.copy_(kv[1], non_blocking=True)
        cuda.finish_compute()
        cuda.launch(lambda: kv[1].fill_(3))
        cuda.launch(lambda: kv[1].fill_(4))
        cuda.drain()
        assert raw(cuda, host) == [2] * 8 and cuda.notes == []


@pytest.mark.parametrize("beside", [True, False])
def test_what_a_thread_was_told_to_wait_for_is_all_that_its_reads_can_be_early_for(beside):
    """A thread waits for its event and for nothing more.

    How far the engine has come when the thread gets to its copy is chance. The engine's own thread
    has seen the second write being queued.
    """
    with emulate("compute") as cuda:
        kv, side = make_kv(cuda), torch.cuda.Stream()
        host = torch.zeros(8, pin_memory=True)
        cuda.launch(lambda: kv[1].fill_(2))
        written = torch.cuda.current_stream().record_event()
        cuda.launch(lambda: kv[1].fill_(3))

        def copy():
            side.wait_event(written)
            with torch.cuda.stream(side):
                host.copy_(kv[1], non_blocking=True)

        if beside:
            thread = threading.Thread(target=copy)
            thread.start()
            thread.join(timeout=20)
        else:
            copy()
        cuda.drain()
        assert raw(cuda, host) == [2] * 8
        assert [note.kind for note in cuda.notes] == ["read_early"] * (not beside)


def test_gathers_on_a_side_stream_are_watched_too():
    for ordered in (True, False):
        with emulate("compute") as cuda:
            kv, side = make_kv(cuda), torch.cuda.Stream()
            cuda.launch(lambda kv=kv: kv[1].fill_(2))
            if ordered:
                side.wait_stream(torch.cuda.current_stream())
            cuda.launch(lambda kv=kv: kv[2].fill_(2))  # no business of the gather's
            with torch.cuda.stream(side):
                gathered = kv[torch.ones(1, dtype=torch.long, device="cuda")] + 1
                host = gathered.to("cpu", non_blocking=True)
            cuda.drain()
            assert raw(cuda, host)[0][0] == (3 if ordered else 1)
            assert ("read_early" in [note.kind for note in cuda.notes]) != ordered


def test_an_index_that_becomes_wild_is_a_read_that_came_too_early():
    with emulate("compute") as cuda:
        kv, index, side = (
            make_kv(cuda),
            cuda.to_device(torch.ones(1, dtype=torch.long)),
            torch.cuda.Stream(),
        )
        cuda.launch(lambda: index.fill_(99))
        with torch.cuda.stream(side):
            gathered = kv[index]
        cuda.drain()
        assert gathered.shape == (1, 8) and [note.kind for note in cuda.notes] == ["read_early"]


def test_operands_of_in_place_operators_are_watched_too():
    for ordered in (True, False):
        with emulate("compute") as cuda:
            kv, side = make_kv(cuda), torch.cuda.Stream()
            cuda.launch(lambda kv=kv: kv[1].fill_(2))
            if ordered:
                side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                torch.zeros(8, device="cuda").add_(kv[1])
            cuda.launch(lambda kv=kv: kv[1].fill_(3))
            cuda.drain()
            assert [note.kind for note in cuda.notes] == ["read_early"] * (not ordered)


# -- right programs


def double_buffered(cuda, wait=True):
    """Save blocks through two staging buffers on the device, each reused when its copy is done."""
    kv, side = make_kv(cuda, STEPS), torch.cuda.Stream()
    host = torch.zeros(STEPS, 8, pin_memory=True)
    buffers = [torch.empty(8, device="cuda") for _ in range(2)]
    free = [torch.cuda.Event() for _ in range(2)]
    compute = torch.cuda.current_stream()
    for step in range(STEPS):
        cuda.launch(lambda step=step: kv[step].fill_(step))
        if wait:
            compute.wait_event(free[step % 2])
        buffers[step % 2].copy_(kv[step])
        side.wait_event(compute.record_event())
        with torch.cuda.stream(side):
            host[step].copy_(buffers[step % 2], non_blocking=True)
        free[step % 2].record(side)
    side.synchronize()
    return raw(cuda, host[:, 0]) == list(range(STEPS))


def through_three_streams(cuda, wait=True):
    """Gather on one stream, convert on a second, store from a third."""
    kv = make_kv(cuda)
    gather, convert, store = (torch.cuda.Stream() for _ in range(3))
    host = torch.zeros(2, 8, dtype=torch.float16, pin_memory=True)
    cuda.launch(lambda: kv[1:3].fill_(7))
    gather.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(gather):
        index = torch.tensor([2, 1]).to("cuda", non_blocking=True)
        gathered = kv[index]
    if wait:
        convert.wait_stream(gather)
    with torch.cuda.stream(convert):
        half = gathered.to(torch.float16) * 2
    store.wait_event(convert.record_event())
    with torch.cuda.stream(store):
        host.copy_(half, non_blocking=True)
    for tensor, stream in ((gathered, convert), (half, store)):
        tensor.record_stream(stream)
    del gathered, half
    store.synchronize()
    return raw(cuda, host) == [[14] * 8] * 2


def polled(cuda, wait=True):
    """Completion by event.query(), once per step."""
    kv, side = make_kv(cuda, STEPS), torch.cuda.Stream()
    host, seen, flying = torch.zeros(STEPS, 8, pin_memory=True), [], []
    for step in range(STEPS * 4):
        if step < STEPS:
            cuda.launch(lambda step=step: kv[step].fill_(step + 1))
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                host[step].copy_(kv[step], non_blocking=True)
            flying.append((step, side.record_event()))
        cuda.finish_compute()
        while flying and (not wait or flying[0][1].query()):
            seen.append(raw(cuda, host[flying.pop(0)[0]])[0])
    return seen == [1, 2, 3, 4, 5, 6]


def threaded(cuda, wait=True):
    """A copy thread takes jobs from a queue, and waits for the compute stream's event itself."""
    kv, side = make_kv(cuda, STEPS), torch.cuda.Stream()
    host, jobs, done = torch.zeros(STEPS, 8, pin_memory=True), queue.SimpleQueue(), []

    def copier():
        assert torch.cuda.current_stream() == torch.cuda.default_stream() and kv.is_cuda
        while (job := jobs.get()) is not None:
            step, written = job
            with torch.cuda.stream(side):
                if wait:
                    side.wait_event(written)
                cuda.queue_copy(host[step].data_ptr(), kv[step].data_ptr(), 32)
            event = torch.Event()
            event.record(side)
            done.append((step, event))

    thread = threading.Thread(target=copier)
    thread.start()
    for step in range(STEPS):
        cuda.launch(lambda step=step: kv[step].fill_(step + 1))
        jobs.put((step, torch.cuda.current_stream().record_event()))
        until = time.monotonic() + 20
        # so that it is not chance which of them is first
        while len(done) <= step and thread.is_alive() and time.monotonic() < until:
            time.sleep(0.0005)
    jobs.put(None)
    thread.join()
    for _, event in done:
        event.synchronize()
    return raw(cuda, host[:, 0]) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    "program, exposed_by",
    [
        (double_buffered, "transfers"),
        (through_three_streams, None),
        (polled, "transfers"),
        (threaded, "compute"),
    ],
)
def test_right_programs_are_right_under_both(program, exposed_by):
    assert right_under(program) == list(ADVERSARIES)
    if exposed_by:
        assert exposed_by not in right_under(program, wait=False)


def test_a_missing_wait_between_side_streams_shows_when_the_first_of_them_waits():
    """The first side stream lags behind the compute stream, which makes the missing wait visible.

    The adversaries set the compute stream against the others, not the others against each other.
    """
    assert right_under(through_three_streams, wait=False) == []


def test_a_right_thread_leaves_no_notes_of_the_main_thread():
    with emulate("compute") as cuda:
        assert threaded(cuda)
        assert {note.kind for note in cuda.notes} == {"sync"} and all(
            "in threaded" in note.where for note in cuda.notes
        )


def test_a_thread_may_synchronise_while_the_main_thread_waits_for_it():
    """The emulation's lock is not held by who waits for another thread."""
    for delay in ADVERSARIES:
        with emulate(delay) as cuda:
            kv = make_kv(cuda)
            cuda.launch(lambda kv=kv: kv.fill_(2))
            event, seen = torch.cuda.current_stream().record_event(), []

            def wait(event=event, kv=kv, seen=seen):
                event.synchronize()
                seen.append(kv.cpu()[0, 0].item())

            thread = threading.Thread(target=wait)
            thread.start()
            thread.join(timeout=20)
            assert seen == [2] and not thread.is_alive()
            assert {note.thread for note in cuda.notes} == {thread.name}


def test_many_threads_at_once():
    """Eight threads with a stream each; a switch of threads at almost every instruction."""
    import sys

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for delay in ADVERSARIES:
            with emulate(delay) as cuda:
                kv = cuda.to_device(torch.zeros(8, 16))
                sums = [0.0] * 8

                def work(n, kv=kv, sums=sums):
                    with torch.cuda.stream(torch.cuda.Stream()) as stream:
                        host = torch.zeros(16, pin_memory=True)
                        for _ in range(20):
                            kv[n].add_(torch.ones(16, device="cuda"))
                            host.copy_(kv[n], non_blocking=True)
                        stream.synchronize()
                        sums[n] = host.sum().item()

                threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join(timeout=60)
                assert sums == [320] * 8
                assert {note.kind for note in cuda.notes} <= {"sync"}
    finally:
        sys.setswitchinterval(interval)


def test_a_thread_that_outlives_its_emulation_works_on_the_host():
    go, results = threading.Event(), []

    def late():
        go.wait(timeout=20)
        results.append(torch.ones(2).sum().item())
        results.append(torch.zeros(1).device.type)

    with emulate("compute"):
        thread = threading.Thread(target=late)
        thread.start()
    go.set()
    thread.join(timeout=20)
    assert results == [2, "cpu"]


def test_a_pools_thread_goes_from_one_emulation_to_the_next():
    with ThreadPoolExecutor(max_workers=1) as pool:
        for _ in range(3):
            with emulate("compute") as cuda:
                kv, host = make_kv(cuda), torch.zeros(8, pin_memory=True)
                cuda.launch(lambda kv=kv: kv[1].fill_(2))
                written, side = torch.cuda.current_stream().record_event(), torch.cuda.Stream()

                def copy(kv=kv, host=host, written=written, side=side):
                    torch.cuda.set_stream(side)
                    side.wait_event(written)
                    host.copy_(kv[1], non_blocking=True)
                    side.synchronize()
                    return host.tolist()

                assert pool.submit(copy).result(timeout=20) == [2] * 8 and len(cuda.notes) == 1
            assert pool.submit(lambda: torch.ones(1).tolist()).result(timeout=20) == [1]


def test_threads_of_an_outer_emulation_stay_in_it():
    go, results = threading.Event(), []
    with emulate("compute") as outer:
        kv = make_kv(outer)
        outer.launch(lambda: kv.fill_(1))
        written = torch.cuda.current_stream().record_event()

        def late():
            go.wait(timeout=20)
            results.append(kv.is_cuda)
            torch.cuda.current_stream().wait_event(written)
            results.append(torch.cuda.current_stream() == outer.streams[0])
            results.append(kv.cpu()[0, 0].item())

        thread = threading.Thread(target=late)
        thread.start()
        with outer.raw(), emulate("transfers") as inner:
            go.set()
            thread.join(timeout=20)
            assert not inner.notes
        assert results == [True, True, 1]
