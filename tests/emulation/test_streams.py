# SPDX-License-Identifier: Apache-2.0
"""Tests of streams and events: order, marks, who runs when, and what the host can query."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from kvconform.emulation.emulate import emulate
from kvconform.emulation.note import DeviceFault, NotEmulated, shown

ADVERSARIES = ("compute", "transfers")


@pytest.fixture(params=ADVERSARIES)
def cuda(request):
    with emulate(request.param) as emulation:
        yield emulation


def log(cuda, stream, into, what) -> None:
    """Queue something that leaves a trace when it runs."""
    cuda.put(stream.queue, lambda: into.append(what))


def busy(cuda) -> None:
    """Queue something on the compute stream and on another one; one of them has not run it."""
    for stream in (cuda.compute, torch.cuda.Stream()):
        log(cuda, stream, [], "work")


def test_only_the_held_back_side_is_late():
    for delay, first in (("compute", "side"), ("transfers", "compute"), (None, "compute side")):
        with emulate(delay) as cuda:
            ran = []
            log(cuda, cuda.compute, ran, "compute")
            log(cuda, torch.cuda.Stream(), ran, "side")
            assert ran == first.split()
            cuda.drain()
            assert sorted(ran) == ["compute", "side"]


def test_a_stream_runs_in_its_own_order(cuda):
    side, ran = torch.cuda.Stream(), []
    for number in range(5):
        log(cuda, side, ran, number)
        log(cuda, cuda.compute, ran, number + 10)
    cuda.drain()
    assert [n for n in ran if n < 10] == [0, 1, 2, 3, 4]
    assert [n for n in ran if n >= 10] == [10, 11, 12, 13, 14]


def test_what_the_compute_stream_waits_for_is_counted():
    with emulate("transfers") as cuda:
        side, ran = torch.cuda.Stream(), []
        log(cuda, side, ran, "first")
        first = side.record_event()
        log(cuda, side, ran, "second")
        cuda.compute.wait_event(first)
        assert (ran, cuda.machine.held) == (["first"], 1)
        side.synchronize()  # the host waits, not the compute stream
        assert (ran, cuda.machine.held) == (["first", "second"], 1)


def test_a_wait_orders_two_streams(cuda):
    side, ran = torch.cuda.Stream(), []
    log(cuda, cuda.compute, ran, "write")
    side.wait_stream(cuda.compute)
    log(cuda, side, ran, "read")
    cuda.compute.wait_event(side.record_event())
    log(cuda, cuda.compute, ran, "again")
    cuda.drain()
    assert ran == ["write", "read", "again"]


def test_waits_go_through_three_streams(cuda):
    a, b, ran = torch.cuda.Stream(), torch.cuda.Stream(), []
    log(cuda, cuda.compute, ran, 1)
    a.wait_stream(cuda.compute)
    log(cuda, a, ran, 2)
    b.wait_stream(a)
    log(cuda, b, ran, 3)
    cuda.compute.wait_stream(b)
    log(cuda, cuda.compute, ran, 4)
    cuda.drain()
    assert ran == [1, 2, 3, 4]


def test_finish_compute_runs_only_what_the_compute_stream_needs():
    with emulate("transfers") as cuda:
        needed, other, ran = torch.cuda.Stream(), torch.cuda.Stream(), []
        log(cuda, needed, ran, "needed")
        event = needed.record_event()
        log(cuda, needed, ran, "behind the event")
        log(cuda, other, ran, "other")
        cuda.compute.wait_event(event)
        log(cuda, cuda.compute, ran, "compute")
        cuda.finish_compute()
        assert ran == ["needed", "compute"]
        assert cuda.notes == []


def test_side_streams_go_on_as_soon_as_the_compute_stream_has_passed_their_event():
    with emulate("compute") as cuda:
        side, ran = torch.cuda.Stream(), []
        log(cuda, cuda.compute, ran, "one")
        side.wait_stream(cuda.compute)
        log(cuda, side, ran, "side")
        log(cuda, cuda.compute, ran, "two")
        assert ran == []
        cuda.finish_compute()
        assert ran == ["one", "side", "two"]


def test_a_stream_goes_on_as_soon_as_a_later_one_has():
    """Streams are looked at in the order of their creation, again and again, until none moves."""
    with emulate("compute") as cuda:
        a, b, ran = torch.cuda.Stream(), torch.cuda.Stream(), []
        log(cuda, cuda.compute, ran, "one")
        b.wait_stream(cuda.compute)
        log(cuda, b, ran, "b")
        a.wait_stream(b)
        log(cuda, a, ran, "a")
        log(cuda, cuda.compute, ran, "two")
        cuda.finish_compute()
        assert ran == ["one", "b", "a", "two"]


def test_a_prompt_compute_stream_has_run_for_it_what_it_waits_for_at_once_and_no_more():
    with emulate("transfers") as cuda:
        first, second, ran = torch.cuda.Stream(), torch.cuda.Stream(), []
        log(cuda, first, ran, "first")
        event = first.record_event()
        log(cuda, first, ran, "behind the event")
        second.wait_event(event)
        log(cuda, second, ran, "second")
        cuda.compute.wait_stream(second)
        log(cuda, cuda.compute, ran, "compute")
        assert ran == ["first", "second", "compute"]


def test_an_event_marks_the_place_where_it_was_recorded():
    with emulate("transfers") as cuda:
        side, ran = torch.cuda.Stream(), []
        log(cuda, side, ran, "before")
        event = side.record_event()
        log(cuda, side, ran, "after")
        event.synchronize()
        assert ran == ["before"] and event.query() and not side.query()


def test_recording_again_moves_the_mark_but_not_earlier_waits(cuda):
    a, b, ran = torch.cuda.Stream(), torch.cuda.Stream(), []
    event = torch.cuda.Event()
    log(cuda, cuda.compute, ran, "first")
    event.record(cuda.compute)
    a.wait_event(event)
    log(cuda, cuda.compute, ran, "second")
    event.record(cuda.compute)
    b.wait_event(event)
    log(cuda, a, ran, "a")
    log(cuda, b, ran, "b")
    cuda.drain()
    assert ran.index("first") < ran.index("a") and ran.index("second") < ran.index("b")
    if cuda.machine.delay == "compute":  # as early as the old mark permits
        assert ran == ["first", "a", "second", "b"]


def test_an_event_that_was_never_recorded_holds_nobody(cuda):
    event, ran = torch.cuda.Event(), []
    assert event.query()
    event.synchronize()
    cuda.compute.wait_event(event)
    log(cuda, cuda.compute, ran, 1)
    assert torch.Event().query() and torch.cuda.Stream().query()
    cuda.drain()
    assert ran == [1] and cuda.notes == []


def test_query_says_not_yet_a_few_times_and_then_gives_in():
    with emulate("transfers", patience=2) as cuda:
        side, ran = torch.cuda.Stream(), []
        log(cuda, side, ran, 1)
        event = side.record_event()
        log(cuda, side, ran, 2)
        assert [event.query(), event.query()] == [False, False] and ran == []
        assert event.query() and ran == [1]
        assert [side.query(), side.query(), side.query()] == [False, False, True] and ran == [1, 2]
        assert cuda.notes == []  # asking is not waiting


def test_later_ranks_see_the_same_copy_end_later():
    with emulate("transfers", patience=2) as cuda:
        answers = []
        for rank in (0, 1, 2):
            cuda.machine.rank = rank
            side = torch.cuda.Stream()
            log(cuda, side, [], rank)
            event = side.record_event()
            asked = next(number for number in range(20) if event.query())
            log(cuda, side, [], rank)
            answers.append((asked, next(number for number in range(20) if side.query())))
        assert answers == [(2, 2), (4, 4), (6, 6)]


def test_each_record_has_its_own_patience():
    with emulate("transfers", patience=1) as cuda:
        side = torch.cuda.Stream()
        event = torch.cuda.Event()
        for _ in range(2):
            log(cuda, side, [], 1)
            event.record(side)
            assert [event.query(), event.query()] == [False, True]


@pytest.mark.parametrize("wait", ["event", "stream", "device", "accelerator", "cudart"])
def test_the_host_waits_and_is_noted(cuda, wait):
    side, ran = torch.cuda.Stream(), []
    log(cuda, cuda.compute, ran, "compute")
    side.wait_stream(cuda.compute)
    log(cuda, side, ran, "side")
    match wait:
        case "event":
            side.record_event().synchronize()
        case "stream":
            side.synchronize()
        case "device":
            torch.cuda.synchronize()
        case "accelerator":
            torch.accelerator.synchronize()
        case "cudart":
            torch.cuda.cudart().cudaDeviceSynchronize()
    assert ran == ["compute", "side"]
    [note] = cuda.notes
    assert (
        note.kind == "sync"
        and note.where.startswith("emulation/test_streams.py:")
        and note.thread == "MainThread"
    )


def test_places_in_the_source_do_not_depend_on_the_working_directory(cuda, monkeypatch, tmp_path):
    for directory in (Path(__file__).parent, tmp_path):
        monkeypatch.chdir(directory)
        shown.cache_clear()
        busy(cuda)
        torch.cuda.synchronize()
    assert {note.where.partition(":")[0] for note in cuda.notes} == {
        "emulation/test_streams.py"
    } and len(cuda.notes) == 2
    assert (
        shown("<string>") == "<string>"
        and shown("/usr/lib/site-packages/pkg/deep/good.py") == "deep/good.py"
    )


@pytest.mark.parametrize("delay", ADVERSARIES)
def test_waiting_for_what_is_over_is_not_noted(delay):
    with emulate(delay) as cuda:
        slow = cuda.compute if delay == "compute" else torch.cuda.Stream()
        log(cuda, slow, [], 1)
        event = slow.record_event()
        event.synchronize()
        event.synchronize()
        slow.synchronize()
        assert len(cuda.notes) == 1
        log(cuda, slow, [], 1)
        event.synchronize()
        slow.synchronize()
        slow.synchronize()
        assert [note.what for note in cuda.notes] == ["event.synchronize()", "stream.synchronize()"]


def test_the_harness_is_not_noted(cuda):
    def wait():
        busy(cuda)
        torch.cuda.synchronize()

    with cuda.raw():
        wait()
        with cuda.intercepted():
            wait()
        wait()
    assert len(cuda.notes) == 1


def test_an_idle_device_is_waited_for_without_a_note(cuda):
    busy(cuda)
    torch.cuda.synchronize()
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaDeviceSynchronize()
    assert len(cuda.notes) == 1


def test_handles_are_unique_and_follow_the_order_of_creation():
    def handles():
        with emulate("compute"):
            return [torch.cuda.Stream(priority=-1).cuda_stream for _ in range(3)]

    first = handles()
    assert first == handles() and len({0, *first}) == 4


def test_streams_are_equal_when_they_are_the_same_queue(cuda):
    side = torch.cuda.Stream(priority=-1)
    again = torch.cuda.ExternalStream(side.cuda_stream)
    assert (
        side == again
        and hash(side) == hash(again)
        and side != torch.cuda.Stream()
        and side.priority == -1
    )
    assert torch.cuda.current_stream() == cuda.compute != torch.cuda.default_stream()
    assert torch.cuda.default_stream().cuda_stream == 0 != cuda.compute.cuda_stream
    assert side.device == torch.device("cuda", 0) and torch.cuda.Stream.priority_range() == (0, -5)
    with pytest.raises(ValueError, match="handle 0x123456"):
        torch.cuda.ExternalStream(0x123456)


def test_current_stream_follows_contexts_and_set_stream(cuda):
    a, b = torch.cuda.Stream(), torch.Stream(device="cuda")
    with torch.cuda.stream(a):
        assert torch.cuda.current_stream() == a == torch.accelerator.current_stream()
        with b, torch.cuda.stream(None):
            assert torch.cuda.current_stream() == b
        assert torch.cuda.current_stream() == a
    assert torch.cuda.current_stream() == cuda.compute
    torch.cuda.set_stream(b)
    assert torch.cuda.current_stream() == b


def test_record_and_wait_default_to_the_current_stream():
    with emulate("compute") as cuda:
        side, ran = torch.cuda.Stream(), []
        log(cuda, cuda.compute, ran, "compute")
        event = torch.Event()
        event.record()
        with torch.cuda.stream(side):
            event.wait()
        log(cuda, side, ran, "side")
        assert ran == []
        event.synchronize()
        assert ran == ["compute", "side"]


def test_elapsed_time_counts_work_between_two_reached_marks(cuda):
    start, end = torch.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    side = torch.cuda.Stream()
    start.record(side)
    log(cuda, side, [], 1)
    end.record(side)
    if not end.query():
        with pytest.raises(RuntimeError, match="not completed"):
            start.elapsed_time(end)
    end.synchronize()
    assert start.elapsed_time(end) > 0
    with pytest.raises(RuntimeError, match="enable_timing"):
        torch.cuda.Event().elapsed_time(end)
    with pytest.raises(RuntimeError, match="recorded"):
        start.elapsed_time(torch.Event(enable_timing=True))


def test_events_for_timing_may_be_used_again():
    with emulate("transfers") as cuda:
        start, end, side = (
            torch.Event(enable_timing=True),
            torch.Event(enable_timing=True),
            torch.cuda.Stream(),
        )
        times = []
        for works in (5, 1):
            start.record(side)
            for _ in range(works):
                log(cuda, side, [], 1)
            end.record(side)
            with pytest.raises(RuntimeError, match="not completed"):
                start.elapsed_time(end)
            end.synchronize()
            times.append(start.elapsed_time(end))
        assert times[0] > times[1] > 0


def test_parts_of_torch_cuda_that_are_asked_for_now_and_then(cuda):
    side = torch.cuda.Stream()
    assert torch.cuda.get_stream_from_external(side.cuda_stream) == side
    torch.cuda.set_sync_debug_mode("error")
    assert torch.cuda.get_sync_debug_mode() == 0
    for context in (
        torch.cuda.device(0),
        torch.cuda.device("cuda"),
        torch.cuda.device_of(torch.ones(1, device="cuda")),
    ):
        with context:
            assert (
                isinstance(context, torch.cuda.device)
                and torch.cuda.current_device() == context.idx == 0
            )
    with pytest.raises(NotEmulated, match="second device"):
        torch.cuda.device(1)


def test_what_cannot_be_emulated_says_so(cuda):
    for use in (
        lambda: torch.cuda.get_rng_state(),
        lambda: torch.cuda.set_rng_state_all([]),
        lambda: torch.cuda.memory_snapshot(),
        lambda: torch.cuda.CUDAGraph(),
        lambda: torch.cuda.MemPool(),
        lambda: torch.cuda.Event(interprocess=True).ipc_handle(),
        lambda: torch.empty(1, device="cuda:1"),
        lambda: torch.cuda.Stream(device="cuda:1"),
        lambda: torch.cuda.Stream(device=1),
    ):
        with pytest.raises(NotEmulated, match="emulation has no"):
            use()


def test_work_that_fails_raises_where_it_is_waited_for():
    with emulate("compute") as cuda:
        table = torch.zeros(4, device="cuda")
        index = torch.zeros(1, dtype=torch.long, device="cuda")
        index.add_(7)
        table[index]
        with pytest.raises(DeviceFault, match="aten.index.Tensor failed"):
            torch.cuda.synchronize()
        cuda.launch(lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            cuda.finish_compute()
        cuda.drain()


def test_everything_is_put_back_and_what_was_queued_has_run():
    def state():
        names = ("Stream", "Event", "current_stream", "is_available")
        return [vars(torch.cuda)[name] for name in names] + [
            torch.Event,
            torch.Tensor.device,
            threading.Thread.start,
        ]

    def fail():
        with emulate("compute") as cuda:
            log(cuda, cuda.compute, ran, 1)
            raise KeyError(cuda)

    before, ran = state(), []
    with pytest.raises(KeyError) as raised:
        fail()
    assert (
        state() == before
        and ran == [1]
        and torch.zeros(1).device.type == "cpu"
        and "device" not in vars(torch.Tensor)
    )
    with pytest.raises(RuntimeError, match="No CUDA emulation"):
        type(raised.value.args[0].compute)()
    with pytest.raises(ValueError, match="delay is 'both'"), emulate("both"):
        pass


def test_an_emulation_inside_another_shares_nothing_with_it():
    with emulate("compute") as outer:
        kept = torch.zeros(2, device="cuda")
        log(outer, outer.compute, ran := [], "outer")
        with outer.raw(), emulate("transfers") as inner:
            assert torch.cuda.current_stream() == inner.compute and not kept.is_cuda
            assert torch.zeros(1, device="cuda").is_cuda
            busy(inner)
            torch.cuda.synchronize()
            assert ran == [] and len(inner.notes) == 1
        assert kept.is_cuda and torch.cuda.current_stream() == outer.compute and outer.notes == []
