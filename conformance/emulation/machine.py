# SPDX-License-Identifier: Apache-2.0
"""The machine behind the streams: queues of work, the marks that events set in them, and the adversary that decides what runs when.

Nothing runs on its own. A queue runs in its own order; a mark in a queue holds it until another queue has come as far as the mark says. Two
adversaries stretch what CUDA permits into opposite extremes. With delay="compute" the compute queue moves only when somebody demands it,
and all others as far as they can at once; with delay="transfers" it is the other way round. Every order in which things happen here can
happen on a GPU.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Literal, Protocol

from kvconform.emulation.watch import Watch

Delay = Literal["compute", "transfers"]


class Used(Protocol):
    """A piece of memory that queued work uses: how many pieces of work that have not ended use it, at all and by raw address."""

    pending: int
    raw: int


class Work:
    """One thing to do on a queue: a function, and the memory that it will touch (`raw` if by address, which no allocator knows of).
    `watch` finds out whether it ran too early."""

    __slots__ = ("function", "raw", "uses", "watch")

    def __init__(
        self, function: Callable[[], object], uses: Iterable[Used] = (), raw: bool = False
    ) -> None:
        self.function, self.uses, self.raw = function, tuple(uses), raw
        self.watch: Watch | None = None


class Mark:
    """A place in a queue: reached when the first `position` entries of it are done. `polls` counts the questions that were answered "not
    yet"."""

    __slots__ = ("__weakref__", "polls", "position", "queue")

    def __init__(self, queue: Queue, position: int) -> None:
        self.queue, self.position, self.polls = queue, position, 0

    @property
    def reached(self) -> bool:
        return self.queue.done >= self.position


class Queue:
    """One stream's work: `entries` not yet done, `put` and `done` how many were ever queued and done; `ordered` is how much of the compute
    queue it ever waited for, `seen` how much of it somebody knows to be done. `handle` is its cudaStream_t, 0 for
    the default stream only."""

    def __init__(self, name: str, handle: int, priority: int) -> None:
        self.name, self.handle, self.priority = name, handle, priority
        self.entries: deque[Work | Mark] = deque()
        self.put = self.done = 0
        self.polls = self.ordered = self.seen = 0
        self.before_work: Callable[[Queue], None] | None = (
            None  # the allocator's: freed memory is handed out before the next work
        )


class Machine:
    """All queues of one emulated device, under one lock. Work runs with the lock held, in whichever thread demanded it; nothing that runs
    may wait for another thread. Every method may be called from any thread."""

    def __init__(self, delay: Delay | None, patience: int) -> None:
        self.delay, self.patience = delay, patience
        self.lock = threading.RLock()
        self.queues: list[Queue] = []
        self.clock = 0  # pieces of work ever run; the time base of timing events
        self._pumping = False
        self._marks: list[weakref.ref[Mark]] = []  # in the compute queue
        self.open = True
        self.watches: list[Watch] = []
        self.default = self.new_queue("default", 0)
        self.compute = self.new_queue("compute", 0)

    def new_queue(self, name: str, priority: int) -> Queue:
        """Add a queue; handles follow the order of creation."""
        with self.lock:
            queue = Queue(name, 0x100 * len(self.queues), priority)
            self.queues.append(queue)
            return queue

    def put(self, queue: Queue, work: Work) -> None:
        """Queue work; whatever the adversary lets run at once runs before this returns."""
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
        """Queue work of the emulation's own without running anything; the caller holds the lock."""
        self._append(queue, work)

    def mark(self, queue: Queue) -> Mark:
        """The place behind everything queued so far."""
        with self.lock:
            mark = Mark(queue, queue.put)
            if queue is self.compute:
                self._marks.append(weakref.ref(mark))
            return mark

    def postpone(self, position: int) -> None:
        """Move the marks in the compute queue that are behind `position` behind all that it holds now. For marks of which nobody knows yet
        that they are reached (`Queue.seen`)."""
        with self.lock:
            known = [
                mark
                for reference in self._marks
                if (mark := reference()) is not None and mark.position > position
            ]
            for mark in known:
                mark.position = self.compute.put
            self._marks = [weakref.ref(mark) for mark in known]

    @staticmethod
    def _saw(mark: Mark) -> None:
        mark.queue.seen = max(mark.queue.seen, mark.position)

    def wait(self, queue: Queue, mark: Mark) -> None:
        """Hold what is queued on `queue` from now on until `mark` is reached."""
        with self.lock:
            self._hold(queue, mark)
            self.pump()

    def _hold(self, queue: Queue, mark: Mark) -> None:
        queue.ordered = max(
            queue.ordered, mark.position if mark.queue is self.compute else mark.queue.ordered
        )
        if mark.queue is not queue and not mark.reached:
            queue.entries.append(mark)
            queue.put += 1
        elif mark.queue is not queue:
            self._saw(mark)

    def demand(self, mark: Mark) -> None:
        """Run the mark's queue up to it, and other queues as far as its waits need; then whatever may run at once. Raises what the work
        raises."""
        with self.lock:
            needed = [mark]
            while needed:
                queue = needed[-1].queue
                if (
                    needed[-1].reached or not queue.entries
                ):  # empty and not reached: the entry is running right now, further out
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

    def answer(self, mark: Mark) -> bool:
        """Whether the mark is reached, as event.query() asks: "not yet" at most `patience` times, then its queue is run up to it."""
        with self.lock:
            if not mark.reached:
                if mark.polls < self.patience:
                    mark.polls += 1
                    return False
                self.demand(mark)
            self._saw(mark)
            return True

    def watch(self, watch: Watch) -> None:
        """Watch what something has just read, until the compute queue is as far as it should have been."""
        if watch.due > self.compute.done:
            self.watches.append(watch)

    def close(self) -> None:
        """Run everything, and from now on all work at once."""
        with self.lock:
            self.open = False
            self.drain()

    def pump(self) -> None:
        """Run what the adversary does not delay; the caller holds the lock."""
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
        return (
            not self.open
            or self.delay is None
            or (queue is self.compute) == (self.delay == "transfers")
        )

    def _may_step(self, queue: Queue) -> bool:
        """Whether the queue's first entry can be done now. The prompt compute queue makes those run that it waits for; the prompt others
        are held."""
        head = queue.entries[0]
        if isinstance(head, Mark) and not head.reached and queue is self.compute:
            self.demand(head)
        return not isinstance(head, Mark) or head.reached

    def _step(self, queue: Queue) -> None:
        """Do the first entry; work that raises counts as done."""
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
