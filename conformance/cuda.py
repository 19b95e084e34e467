# SPDX-License-Identifier: Apache-2.0
"""A real CUDA device as an engine uses it, with either its compute stream or the connector's streams made slow."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, TypeVar

import torch

from kvconform.errors import EnvironmentProblem

T = TypeVar("T")
CYCLES = 20_000_000
"""How long a slow stream sleeps, in clock cycles: about 10 ms, many times what the copies of a case take."""


class OnCuda:
    """`work` is queued on the current stream at once, and judged in `finish`, which is the only place where the host waits for it."""

    streamed = True
    early_reads: list[str] = []  # nobody can tell on a real device: what was read too early shows when it is loaded

    def __init__(self, slow: str | None) -> None:
        self.slow = slow
        self._launched: list[tuple[Callable[[Any], None], Any]] = []
        self._idle = True

    lacks = None

    def allocate(self, elements: int) -> torch.Tensor:
        return torch.zeros(elements, dtype=torch.float32, device="cuda")

    def upload(self, host: torch.Tensor) -> torch.Tensor:
        return host.pin_memory().to("cuda", non_blocking=True)

    def launch(self, work: Callable[[], T], judge: Callable[[T], None] | None = None) -> None:
        if self._idle and self.slow == "compute":
            torch.cuda._sleep(CYCLES)
        self._idle = False
        result = work()
        if judge is not None:
            self._launched.append((judge, result))

    overlaps = False  # what the connector has seen of the compute stream cannot be found out

    def position(self) -> int:
        return 0

    def unseen(self, position: int) -> bool:
        return False

    def postpone(self, position: int) -> None:
        """Nothing overlaps."""

    def finish(self) -> None:
        torch.cuda.current_stream().synchronize()
        self._idle = True
        launched, self._launched = self._launched, []
        for judge, result in launched:
            judge(result)

    def calling(self) -> AbstractContextManager[None]:
        return nullcontext()

    def notes(self) -> list[dict[str, Any]]:
        return []

    def used(self) -> dict[str, int]:
        return {}


@contextmanager
def on_cuda(slow: str | None) -> Iterator[OnCuda]:
    """The device. EnvironmentProblem if there is none."""
    if not torch.cuda.is_available():
        raise EnvironmentProblem("--device cuda needs a GPU that torch can use; --emulate-cuda does without one")
    with _sleeping_streams() if slow == "transfers" else nullcontext():
        yield OnCuda(slow)
    torch.cuda.synchronize()


@contextmanager
def _sleeping_streams() -> Iterator[None]:
    """Every other stream than the compute stream sleeps when the connector turns to it by torch.cuda.stream or torch.cuda.set_stream, and
    when it makes it wait by wait_event, wait_stream or torch.cuda.Event.wait. Streams that are used in other ways are as fast as ever."""
    compute, set_stream = torch.cuda.current_stream(), torch.cuda.set_stream
    enter, wait = torch.cuda.StreamContext.__enter__, torch.cuda.Stream.wait_event
    wait_stream, wait_there = torch.cuda.Stream.wait_stream, torch.cuda.Event.wait

    def sleep(stream: Any) -> None:
        if stream is not None and stream != compute:
            before = torch.cuda.current_stream()
            set_stream(stream)
            torch.cuda._sleep(CYCLES)
            set_stream(before)

    def entering(self: Any) -> Any:
        found = enter(self)
        sleep(self.stream)
        return found

    def setting(stream: Any) -> None:
        set_stream(stream)
        sleep(stream)

    def waiting(self: Any, event: Any) -> None:
        wait(self, event)
        sleep(self)

    def waiting_for_stream(self: Any, stream: Any) -> None:
        wait_stream(self, stream)
        sleep(self)

    def waiting_there(self: Any, stream: Any = None) -> None:
        wait_there(self, stream)
        sleep(stream if stream is not None else torch.cuda.current_stream())

    with ExitStack() as patches:
        for owner, name, value in (
            (torch.cuda.StreamContext, "__enter__", entering),
            (torch.cuda, "set_stream", setting),
            (torch.cuda.Stream, "wait_event", waiting),
            (torch.cuda.Stream, "wait_stream", waiting_for_stream),
            (torch.cuda.Event, "wait", waiting_there),
        ):
            patches.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        yield
