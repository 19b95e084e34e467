# SPDX-License-Identifier: Apache-2.0
"""The device that holds an engine's KV cache, and the order in which it does the engine's work.

The CPU does all work at once. A CUDA device has streams: the engine queues its forward pass on the
compute stream, calls the connector's hooks before that has run, and looks at the result when the
step is over. Either the compute stream or the others are slow (`slow`), so that a missing wait
gives wrong bytes every time, and not once in a week.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol, TypeVar

import torch

T = TypeVar("T")


class Timeline(Protocol):
    """The engine's side of a device."""

    streamed: bool
    kernels: bool
    """Whether the engine's KV is written, compared and digested by the kernels of kernels/."""

    @property
    def early_reads(self) -> list[str]:
        """Where work was queued that read what the compute stream wrote afterwards.

        The work of other streams so far; a few places only.
        """

    @property
    def lacks(self) -> str | None:
        """The sentence about something that the connector asked and the device cannot do, or None.

        If there is one, nothing that the connector did is judged.
        """

    def allocate(self, elements: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return a tensor [elements] of zeros in the device's memory."""

    def release(self, tensors: Sequence[torch.Tensor]) -> None:
        """Do all work that is queued, and keep no reference to these tensors of `allocate`."""

    def upload(self, host: torch.Tensor) -> torch.Tensor:
        """Return a host tensor on the cache's device. The host waits for nothing."""

    def launch(self, work: Callable[[], T], judge: Callable[[T], None] | None = None) -> None:
        """Do `work` on the compute stream, after all that was launched before.

        `judge` gets its result, in `finish` at the latest.
        """

    def settle(self) -> None:
        """Wait until what the engine did without `launch` is done."""

    @property
    def overlaps(self) -> bool:
        """Whether a step's forward pass may be found unfinished by the next step's hooks."""

    @property
    def shows_waits(self) -> bool:
        """Whether other streams do only what the compute stream or the host waits for."""

    def copies(self) -> Callable[[], bool]:
        """Return a question about the work that other streams are given from now on.

        It is asked later: has the compute stream waited, and is all of that work done? It is not if
        there was none.
        """

    def position(self) -> int:
        """Return the place in the compute stream after all that was launched."""

    def unseen(self, position: int) -> bool:
        """Return whether nothing has observed yet that work after this place is done.

        The place is in the compute stream. An observer is a host thread that waited for or polled a
        later place, or another stream that waited for one.
        """

    def postpone(self, position: int) -> None:
        """Move events recorded after this place behind all that is launched now."""

    def exclusive(self) -> AbstractContextManager[Any]:
        """Return a context in which no other thread gets at streams and events."""

    def finish(self) -> None:
        """Wait until all that was launched, and what it waited for, is done and judged.

        Work that nothing waited for need not be done.
        """

    def driving(self, rank: int) -> None:
        """Take note of the rank whose half of the connector is called from now on.

        Where the device decides when transfers are done, those of later ranks take longer, so that
        the ranks report them in different steps.
        """

    def step_over(self) -> None:
        """Take note that a rank has executed a step, where the device makes threads late."""

    def catch_up(self) -> None:
        """Let the connector's threads do what they were given, where the device makes them late."""

    def calling(self) -> AbstractContextManager[None]:
        """Return the context in which the connector is called."""

    def notes(self) -> list[dict[str, Any]]:
        """Return the fields of the `device.note` events since the last call: `what` and `text`."""

    def used(self) -> dict[str, int]:
        """Return what the connector has used of the device so far: the fields of `device.used`.

        Empty on a device that does not observe the connector.
        """


def at_once(work: Callable[[], T], judge: Callable[[T], None] | None) -> None:
    """Do the work, and judge its result."""
    result = work()
    if judge is not None:
        judge(result)


class Unobserved:
    """Base of devices that do not observe what the connector does with them, or sees of them.

    So no step is made unfinished again afterwards.
    """

    early_reads: list[str] = []
    lacks = None
    overlaps = False
    shows_waits = False

    def release(self, tensors: Sequence[torch.Tensor]) -> None:
        """Do nothing: the device has no reference to them."""

    def copies(self) -> Callable[[], bool]:
        """Return a question that is always answered with False."""
        return lambda: False

    def position(self) -> int:
        """Return 0."""
        return 0

    def unseen(self, position: int) -> bool:
        """Return False."""
        return False

    def postpone(self, position: int) -> None:
        """Do nothing."""

    def exclusive(self) -> AbstractContextManager[Any]:
        """Return a context that does nothing."""
        return nullcontext()

    def driving(self, rank: int) -> None:
        """Do nothing: all ranks are alike."""

    def step_over(self) -> None:
        """Do nothing: threads get the time that the machine has for them."""

    def catch_up(self) -> None:
        """Do nothing: see step_over."""

    def calling(self) -> AbstractContextManager[None]:
        """Return a context that does nothing."""
        return nullcontext()

    def notes(self) -> list[dict[str, Any]]:
        """Return an empty list."""
        return []

    def used(self) -> dict[str, int]:
        """Return an empty dict."""
        return {}


class Cpu(Unobserved):
    """The CPU, which has no streams."""

    streamed = False
    kernels = False

    def allocate(self, elements: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """See Timeline."""
        return torch.zeros(elements, dtype=dtype)

    def upload(self, host: torch.Tensor) -> torch.Tensor:
        """Return the tensor itself."""
        return host

    def launch(self, work: Callable[[], T], judge: Callable[[T], None] | None = None) -> None:
        """Do the work at once."""
        at_once(work, judge)

    def settle(self) -> None:
        """Do nothing: all work is done."""

    def finish(self) -> None:
        """Do nothing: all work is done."""


current: Timeline = Cpu()
"""The device of the current run."""


@contextmanager
def activate(device: Timeline) -> Iterator[Timeline]:
    """Make `device` this module's `current` one within the context."""
    global current
    before, current = current, device
    try:
        yield device
    finally:
        current = before
