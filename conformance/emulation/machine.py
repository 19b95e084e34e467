# SPDX-License-Identifier: Apache-2.0
"""The streams' queues of work, and the adversary that decides which queue runs next.

Nothing runs in the background: work runs inside a call, because the host waits for it or because
the adversary does not delay it. Each queue runs in its own order. A mark in a queue holds that
queue until the queue that the mark belongs to has reached the marked place.

Two adversaries stretch what CUDA permits to opposite extremes. With delay="compute" the compute
queue runs only on demand, and all others run as far as they can at once. With delay="transfers" it
is the other way round. Every order in which work runs here can occur on a GPU.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Literal, Protocol

from kvconform.emulation.watch import Watch

Delay = Literal["compute", "transfers"]
LAG = 2
"""How many more answers "not yet" a rank gets than the rank before it.

More than one: a connector's thread may queue a copy after the first question about it.
"""


class Used(Protocol):
    """A piece of memory that queued work uses.

    `pending` counts all unfinished work that uses it, `raw` the part of it that uses raw addresses.
    """

    pending: int
    raw: int


class Work:
    """One piece of work on a queue: a function, and the memory that it uses.

    `raw`: it uses the memory by address, which an allocator does not see. `watch` detects whether
    the work ran too early.
    """

    __slots__ = ("function", "raw", "uses", "watch")

    def __init__(
        self, function: Callable[[], object], uses: Iterable[Used] = (), raw: bool = False
    ) -> None:
        self.function = function
        self.uses = tuple(uses)
        self.raw = raw
        self.watch: Watch | None = None


class Mark:
    """A place in a queue, reached when the first `position` entries of the queue are done.

    `polls` counts the queries that returned "not yet".
    """

    __slots__ = ("__weakref__", "polls", "position", "queue")

    def __init__(self, queue: Queue, position: int) -> None:
        self.queue = queue
        self.position = position
        self.polls = 0

    @property
    def reached(self) -> bool:
        """Whether the queue has come this far."""
        return self.queue.done >= self.position


class Queue:
    """The work of one stream. `handle` is its cudaStream_t, 0 for the default stream only."""

    def __init__(self, name: str, handle: int, priority: int) -> None:
        self.name = name
        self.handle = handle
        self.priority = priority
        self.entries: deque[Work | Mark] = deque()  # those that are not done
        self.put = 0  # entries ever queued
        self.done = 0  # entries ever done
        self.polls = 0  # stream queries in a row that returned "not yet"
        self.ordered = 0  # entries of the compute queue that this one has ever waited for
        self.seen = 0  # entries of this queue that a host or another queue knows to be done
        # Called before new work is queued: the allocator reuses freed memory then.
        self.before_work: Callable[[Queue], None] | None = None


class Machine:
    """All queues of one emulated device, under one lock.

    Work runs with the lock held, in the thread that demanded it; no work may wait for another
    thread. Every method may be called from any thread.
    """

    def __init__(self, delay: Delay | None, patience: int) -> None:
        self.delay = delay
        self.patience = patience
        self.rank = 0  # of a tensor-parallel group, whose work is queued and asked for
        self.lock = threading.RLock()
        self.queues: list[Queue] = []
        self.clock = 0  # pieces of work ever run; the time base of timing events
        self.held = 0  # of these, what the compute queue had to wait for
        self._pumping = False
        self._marks: list[weakref.ref[Mark]] = []  # in the compute queue
        self.open = True
        self.watches: list[Watch] = []
        self.default = self.new_queue("default", 0)
        self.compute = self.new_queue("compute", 0)

    @property
    def refusals(self) -> int:
        """How many answers "not yet" the current rank gets before its work is done.

        Each rank gets LAG more than the rank before it.
        """
        return self.patience + LAG * self.rank

    def new_queue(self, name: str, priority: int) -> Queue:
        """Add a queue; handles follow the order of creation."""
        with self.lock:
            queue = Queue(name, 0x100 * len(self.queues), priority)
            self.queues.append(queue)
            return queue

    def put(self, queue: Queue, work: Work) -> None:
        """Queue work, then run whatever the adversary does not delay."""
        with self.lock:
            if queue.before_work is not None:
                queue.before_work(queue)
            self._append(queue, work)
            self.pump()

    def _append(self, queue: Queue, work: Work) -> None:
        for block in work.uses:
            block.pending += 1
            block.raw += work.raw
        queue.entries.append(work)
        queue.put += 1

    def insert(self, queue: Queue, work: Work) -> None:
        """Queue work of the emulation itself, run nothing. The caller holds the lock."""
        self._append(queue, work)

    def mark(self, queue: Queue) -> Mark:
        """Return the place after everything queued so far."""
        with self.lock:
            mark = Mark(queue, queue.put)
            if queue is self.compute:
                self._marks.append(weakref.ref(mark))
            return mark

    def postpone(self, position: int) -> None:
        """Move the compute queue's marks after `position` to the end of what is queued now.

        Only for marks that nothing knows to be reached yet (`Queue.seen`).
        """
        with self.lock:
            later = [
                mark
                for reference in self._marks
                if (mark := reference()) is not None and mark.position > position
            ]
            for mark in later:
                mark.position = self.compute.put
            self._marks = [weakref.ref(mark) for mark in later]

    @staticmethod
    def _saw(mark: Mark) -> None:
        """Record that a host or another queue knows the mark to be reached."""
        mark.queue.seen = max(mark.queue.seen, mark.position)

    def wait(self, queue: Queue, mark: Mark) -> None:
        """Hold what is queued on `queue` from now on until `mark` is reached."""
        with self.lock:
            self._hold(queue, mark)
            self.pump()

    def _hold(self, queue: Queue, mark: Mark) -> None:
        ordered = mark.position if mark.queue is self.compute else mark.queue.ordered
        queue.ordered = max(queue.ordered, ordered)
        if mark.queue is queue:
            return
        if mark.reached:
            self._saw(mark)
        else:
            queue.entries.append(mark)
            queue.put += 1

    def demand(self, mark: Mark) -> None:
        """Run the mark's queue up to it, and other queues as far as its waits need.

        Then run whatever the adversary does not delay. Raises what the work raises.
        """
        with self.lock:
            needed = [mark]
            while needed:
                wanted = needed[-1]
                queue = wanted.queue
                # Empty but not reached: the last entry is running right now, in an outer call.
                if wanted.reached or not queue.entries:
                    needed.pop()
                    continue
                head = queue.entries[0]
                if isinstance(head, Mark) and not head.reached:
                    needed.append(Mark(head.queue, head.position))
                    continue
                self._step(queue)
                self.pump()

    def drain(self) -> None:
        """Run everything."""
        with self.lock:
            for queue in self.queues:
                queue.seen = queue.put
            while busy := [queue for queue in self.queues if queue.entries]:
                for queue in busy:
                    self.demand(Mark(queue, queue.put))

    def poll(self, mark: Mark) -> bool:
        """Return whether the mark is reached, for event.query().

        Returns False at most `refusals` times, then runs the mark's queue up to it.
        """
        with self.lock:
            if not mark.reached:
                if mark.polls < self.refusals:
                    mark.polls += 1
                    return False
                self.demand(mark)
            self._saw(mark)
            return True

    def watch(self, watch: Watch) -> None:
        """Watch what was just read until the compute queue has done `watch.due` entries."""
        if watch.due > self.compute.done:
            self.watches.append(watch)

    def close(self) -> None:
        """Run everything, and from now on all work as soon as it is queued."""
        with self.lock:
            self.open = False
            self.drain()

    def pump(self) -> None:
        """Run what the adversary does not delay. The caller holds the lock."""
        if self._pumping:
            return
        self._pumping = True
        try:
            moved = True
            while moved:
                moved = False
                for queue in self.queues:
                    while queue.entries and self._eager(queue) and self._may_step(queue):
                        self._step(queue)
                        moved = True
        finally:
            self._pumping = False

    def _eager(self, queue: Queue) -> bool:
        """Return whether the adversary runs this queue as soon as it can."""
        if not self.open or self.delay is None:
            return True
        return (queue is self.compute) == (self.delay == "transfers")

    def _may_step(self, queue: Queue) -> bool:
        """Return whether the queue's first entry can be done now.

        An eager compute queue first runs the queues that it waits for; other eager queues are held.
        """
        head = queue.entries[0]
        if isinstance(head, Mark) and not head.reached and queue is self.compute:
            before = self.clock
            self.demand(head)
            self.held += self.clock - before
        return not isinstance(head, Mark) or head.reached

    def _step(self, queue: Queue) -> None:
        """Do the first entry. Work that raises counts as done."""
        entry = queue.entries.popleft()
        watched = self.watches if queue is self.compute and isinstance(entry, Work) else []
        for watch in watched:
            watch.look()
        if isinstance(entry, Mark):
            self._saw(entry)
        try:
            if isinstance(entry, Work):
                self.clock += 1
                entry.function()
                if entry.watch is not None:
                    self.watch(entry.watch)
        finally:
            queue.done += 1
            if watched:
                self.watches = [
                    watch for watch in watched if not watch.changed() and watch.due > queue.done
                ]
            if isinstance(entry, Work):
                for block in entry.uses:
                    block.pending -= 1
                    block.raw -= entry.raw
