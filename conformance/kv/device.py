# SPDX-License-Identifier: Apache-2.0
"""Where an engine's KV cache is, and in which order what the engine asks of that device is done.

On the CPU all is done at once. A CUDA device has streams: the engine queues its forward pass on the compute stream, calls the connector's
hooks while that is still to run, and looks at what came of it when the step is over. Either the compute stream is slow or the others
are (`slow`), so that a wait that is missing becomes wrong bytes every time and not once in a week.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol, TypeVar

import torch

T = TypeVar("T")


class Timeline(Protocol):
    """The engine's side of a device."""

    streamed: bool

    @property
    def early_reads(self) -> list[str]:
        """Work on other streams that read what the compute stream wrote afterwards, so far: where it was queued, a few of them."""

    @property
    def lacks(self) -> str | None:
        """What the connector asked of the device that it cannot do, in a sentence: then nothing that it did is judged."""

    def allocate(self, elements: int) -> torch.Tensor:
        """A float32 tensor [elements] of zeros in the device's memory."""

    def upload(self, host: torch.Tensor) -> torch.Tensor:
        """A host tensor where the cache is; the host waits for nothing."""

    def launch(self, work: Callable[[], T], judge: Callable[[T], None] | None = None) -> None:
        """Do `work` on the compute stream, behind all that was launched before; `judge` what came of it, by `finish` at the latest."""

    @property
    def overlaps(self) -> bool:
        """Whether a step's forward pass may be found unfinished by the next step's hooks."""

    def position(self) -> int:
        """The place in the compute stream behind all that was launched."""

    def unseen(self, position: int) -> bool:
        """Whether nobody knows yet that anything behind this place in the compute stream is done: no host that waited or asked, no other
        stream that waited and went on."""

    def postpone(self, position: int) -> None:
        """Events recorded behind this place are reached behind all that is launched now."""

    def finish(self) -> None:
        """All that was launched is done and judged, and so is what it waited for; what nothing waited for need not be."""

    def calling(self) -> AbstractContextManager[None]:
        """Around every call of the connector."""

    def notes(self) -> list[dict[str, Any]]:
        """What the device noticed since the last call: `what`, `text` and `stream` of `device.note` events."""

    def used(self) -> dict[str, int]:
        """What the connector has used of the device so far: fields of `device.used`; nothing where nobody can tell."""


def at_once(work: Callable[[], T], judge: Callable[[T], None] | None) -> None:
    """Do the work, and judge it."""
    result = work()
    if judge is not None:
        judge(result)


class Untold:
    """A device of which nobody can tell what the connector did with it, or has seen of it: so no step is found unfinished later."""

    early_reads: list[str] = []
    lacks = None
    overlaps = False

    def position(self) -> int:
        return 0

    def unseen(self, position: int) -> bool:
        return False

    def postpone(self, position: int) -> None:
        """There is nothing to postpone."""

    def calling(self) -> AbstractContextManager[None]:
        return nullcontext()

    def notes(self) -> list[dict[str, Any]]:
        return []

    def used(self) -> dict[str, int]:
        return {}


class Cpu(Untold):
    """No streams."""

    streamed = False

    def allocate(self, elements: int) -> torch.Tensor:
        return torch.zeros(elements, dtype=torch.float32)

    def upload(self, host: torch.Tensor) -> torch.Tensor:
        return host

    def launch(self, work: Callable[[], T], judge: Callable[[T], None] | None = None) -> None:
        at_once(work, judge)

    def finish(self) -> None:
        """Nothing is left to do."""


current: Timeline = Cpu()
"""The device of the run that is being made."""


@contextmanager
def activate(device: Timeline) -> Iterator[Timeline]:
    """Make `device` the current one while the block runs. Changes this module's `current`."""
    global current
    before, current = current, device
    try:
        yield device
    finally:
        current = before
