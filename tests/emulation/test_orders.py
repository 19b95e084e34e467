# SPDX-License-Identifier: Apache-2.0
"""Tests of random programs over three streams.

An ordered program gives the bytes of sequential execution. In an unordered one, the adversary
reverses two conflicting pieces of work as it promises.

The promise covers two pieces of work that touch the same bytes. At least one of them writes, one is
on the compute stream and one on another stream, and nothing orders them. If the compute stream's
was queued first, delay="compute" runs it second; if the other stream's was queued first,
delay="transfers" runs that one second. Nothing is promised about two streams neither of which is
the compute stream.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvconform.emulation.emulate import emulate

STREAMS, CELLS, EVENTS = 3, 4, 2  # stream 0 is the compute stream
stream, cell, event = (
    st.integers(0, STREAMS - 1),
    st.integers(0, CELLS - 1),
    st.integers(0, EVENTS - 1),
)
STEP = st.one_of(
    st.tuples(st.just("mix"), stream, cell, cell),
    st.tuples(st.just("mix"), stream, cell, cell),
    st.tuples(st.just("copy"), stream, cell, cell),
    st.tuples(st.just("record"), stream, event),
    st.tuples(st.just("wait"), stream, event),
    st.tuples(st.just("join"), stream, stream),
    st.tuples(st.just("join"), stream, stream),
    st.tuples(st.just("host"), event),
    st.tuples(st.just("finish")),
)
PROGRAM = st.lists(STEP, min_size=2, max_size=20)
QUICK = settings(
    max_examples=150,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
)


@dataclass
class Access:
    """A piece of work.

    Holds its number, its stream, its place in the stream, the number of pieces per stream that are
    known to be done before it, and the cells that it uses.
    """

    number: int
    stream: int
    place: int
    known: tuple[int, ...]
    writes: int
    reads: set[int] = field(default_factory=set)

    def after(self, other: Access) -> bool:
        return self.known[other.stream] >= other.place

    def conflicts(self, other: Access) -> bool:
        return self.writes in {other.writes, *other.reads} or other.writes in self.reads


def join(a, b):
    return tuple(max(x, y) for x, y in zip(a, b, strict=True))


def accesses(program) -> list[Access]:
    """The program's work with vector clocks: what CUDA guarantees, worked out without any queue."""
    nothing = (0,) * STREAMS
    clocks, events, host, found = [nothing] * STREAMS, [nothing] * EVENTS, nothing, []
    for number, (what, *rest) in enumerate(program):
        if what in ("mix", "copy"):
            on, dst, src = rest
            known = join(clocks[on], host)
            place = known[on] + 1
            clocks[on] = tuple(place if n == on else clock for n, clock in enumerate(known))
            found.append(
                Access(number, on, place, known, dst, {src, dst} if what == "mix" else {src})
            )
        elif what == "record":
            events[rest[1]] = clocks[rest[0]]
        elif what == "wait":
            clocks[rest[0]] = join(clocks[rest[0]], events[rest[1]])
        elif what == "join":
            clocks[rest[0]] = join(clocks[rest[0]], clocks[rest[1]])
        elif what == "host":
            host = join(host, events[rest[0]])
        else:
            host = join(host, clocks[0])
    return found


def unordered(work):
    """Return conflicting pairs on different streams that nothing orders, in program order."""
    return [
        (a, b)
        for n, b in enumerate(work)
        for a in work[:n]
        if a.stream != b.stream and a.conflicts(b) and not b.after(a)
    ]


def promised(work, delay):
    """Those of them that this adversary turns round."""
    first_on_compute = delay == "compute"
    return [
        (a, b)
        for a, b in unordered(work)
        if (a.stream == 0) == first_on_compute and 0 in (a.stream, b.stream)
    ]


def factor(number):
    """Return an odd factor, different for each piece of work.

    An odd factor loses no value; different factors make an exchange of two pieces visible.
    """
    return 2654435761 * (2 * number + 3)


def sequential(program):
    cells = torch.arange(CELLS, dtype=torch.int64) + 1
    for number, (what, *rest) in enumerate(program):
        if what == "mix":
            cells[rest[1]] = cells[rest[1]] * factor(number) + cells[rest[2]] * 3 + number + 1
        elif what == "copy":
            cells[rest[1]] = cells[rest[2]]
    return cells.tolist()


def emulated(program, delay):
    """The cells at the end, and the order in which the work ended."""
    with emulate(delay) as cuda:
        kv = cuda.to_device(torch.arange(CELLS, dtype=torch.int64) + 1)
        streams = [cuda.compute, *(torch.cuda.Stream() for _ in range(STREAMS - 1))]
        events, order = [torch.cuda.Event() for _ in range(EVENTS)], []
        for number, (what, *rest) in enumerate(program):
            if what == "mix":
                with torch.cuda.stream(streams[rest[0]]):
                    source = kv[rest[2]] * 3
                    kv[rest[1]].mul_(factor(number)).add_(source).add_(number + 1)
                cuda.put(streams[rest[0]].queue, lambda number=number: order.append(number))
            elif what == "copy":
                address = kv.data_ptr()
                cuda.queue_copy(address + rest[1] * 8, address + rest[2] * 8, 8, streams[rest[0]])
                cuda.put(streams[rest[0]].queue, lambda number=number: order.append(number))
            elif what == "record":
                events[rest[1]].record(streams[rest[0]])
            elif what == "wait":
                streams[rest[0]].wait_event(events[rest[1]])
            elif what == "join":
                streams[rest[0]].wait_stream(streams[rest[1]])
            elif what == "host":
                events[rest[0]].synchronize()
            else:
                cuda.finish_compute()
        cuda.drain()
        with cuda.raw():
            return kv.tolist(), order


def ordered(program):
    """Return the program with a wait before each piece of work for all that it conflicts with.

    Only waits are inserted; the rest stays unchanged.
    """
    made = []
    for step in program:
        made.append(step)
        while races := unordered(accesses(made)):
            a, b = races[0]
            made.insert(len(made) - 1, ("join", b.stream, a.stream))
    return made


@QUICK
@given(PROGRAM)
def test_ordered_programs_give_the_bytes_of_sequential_execution(program):
    program = ordered(program)
    assert not unordered(accesses(program))
    for delay in ("compute", "transfers", None):
        assert emulated(program, delay)[0] == sequential(program), delay


@QUICK
@given(PROGRAM)
def test_unordered_pairs_are_turned_round_as_promised(program):
    work = accesses(program)
    for delay in ("compute", "transfers"):
        order = emulated(program, delay)[1]
        assert sorted(order) == [access.number for access in work]
        for a, b in promised(work, delay):
            assert order.index(b.number) < order.index(a.number), (delay, a, b)
        for n, b in enumerate(work):
            for a in work[:n]:
                assert not b.after(a) or order.index(a.number) < order.index(b.number), (
                    delay,
                    a,
                    b,
                )


@QUICK
@given(PROGRAM)
def test_a_race_with_the_compute_stream_shows_in_the_bytes(program):
    """Of programs that only mix, so that no value is ever lost again."""
    program = [("mix", *step[1:]) if step[0] == "copy" else step for step in program]
    work = accesses(program)
    if any(promised(work, delay) for delay in ("compute", "transfers")):
        assert any(
            emulated(program, delay)[0] != sequential(program) for delay in ("compute", "transfers")
        )


def test_the_generator_makes_both_kinds_of_programs():
    """Without races, or without ordered conflicts, the tests above would say nothing."""
    racy = [("mix", 0, 0, 0), ("mix", 1, 0, 0)]
    fixed = [racy[0], ("join", 1, 0), racy[1]]
    assert len(unordered(accesses(racy))) == 1 and ordered(racy) == fixed
    assert promised(accesses(racy), "compute") and not promised(accesses(racy), "transfers")
    assert emulated(racy, "compute")[0] != sequential(racy) == emulated(racy, "transfers")[0]
    assert emulated(fixed, "compute")[0] == emulated(fixed, "transfers")[0] == sequential(fixed)
