# SPDX-License-Identifier: Apache-2.0
"""Opens the device of a run, which may be a real CUDA device under an engine driven by hand.

On a real device, kernels that sleep make either the compute stream or the others slow. The work of
the device is not observed: only wrong bytes reveal a missing wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from kvconform.contract.case import Device, Slow
from kvconform.emulation.patch import Patches
from kvconform.errors import EnvironmentProblem
from kvconform.kernels.device import AVAILABLE
from kvconform.kv import device
from kvconform.kv.device import Cpu, T, Timeline, Unobserved

CYCLES = 10_000_000
"""Sleep of a slow stream in clock cycles: about 5 ms.

That is many times what a case's copies take, and what the host takes between two calls for work. It
is not what the host takes to load a kernel for the first time.
"""


class OnCuda(Unobserved):
    """A real CUDA device.

    Work is queued on the current stream at once, and judged in `finish`, which is the only place
    where the host waits for it.
    """

    streamed = True
    kernels = AVAILABLE
    """Without Triton the kernels would be torch operations that make the host wait."""

    def __init__(self, slow: Slow | None) -> None:
        self.slow = slow
        self._launched: list[tuple[Callable[[Any], None], Any]] = []
        self._idle = True

    def allocate(self, elements: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """See Timeline."""
        return torch.zeros(elements, dtype=dtype, device="cuda")

    def upload(self, host: torch.Tensor) -> torch.Tensor:
        """See Timeline."""
        return host.pin_memory().to("cuda", non_blocking=True)

    def launch(self, work: Callable[[], T], judge: Callable[[T], None] | None = None) -> None:
        """See Timeline."""
        if self._idle and self.slow == "compute":
            torch.cuda._sleep(CYCLES)
        self._idle = False
        result = work()
        if judge is not None:
            self._launched.append((judge, result))

    def settle(self) -> None:
        """See Timeline."""
        torch.cuda.current_stream().synchronize()

    def finish(self) -> None:
        """See Timeline."""
        torch.cuda.current_stream().synchronize()
        self._idle = True
        launched, self._launched = self._launched, []
        for judge, result in launched:
            judge(result)


@contextmanager
def on_cuda(slow: Slow | None) -> Iterator[OnCuda]:
    """Provide the device. EnvironmentProblem if there is none."""
    if not torch.cuda.is_available():
        raise EnvironmentProblem(
            "--device cuda needs a GPU that torch can use; --emulate-cuda does without one"
        )
    with _platform(), _sleeping_streams() if slow == "transfers" else nullcontext():
        yield OnCuda(slow)
    torch.cuda.synchronize()


def _platform() -> AbstractContextManager[None]:
    """Return a context in which vLLM's platform is CUDA for connectors.

    A vLLM without compiled parts has the CPU's, which its engine keeps.
    """
    # Imports vLLM, which the devices themselves do not need.
    from vllm.platforms import current_platform

    from kvconform.emulation.vllm_platform import platform_is_cuda

    if current_platform.is_cuda():
        return nullcontext()
    return platform_is_cuda(torch.cuda.get_device_name(), torch.cuda.get_device_capability())


@contextmanager
def _sleeping_streams() -> Iterator[None]:
    """Make every stream but the compute stream sleep when the connector uses it.

    That is when the connector makes it the current one by torch.cuda.stream or
    torch.cuda.set_stream, or makes it wait by wait_event, wait_stream or torch.cuda.Event.wait.
    Streams that are used in other ways stay fast.
    """
    compute, set_stream = torch.cuda.current_stream(), torch.cuda.set_stream

    def followed_by_sleep(
        call: Callable[..., Any], whose: Callable[..., Any]
    ) -> Callable[..., Any]:
        def sleeping(*args: Any, **kwargs: Any) -> Any:
            found, stream = call(*args, **kwargs), whose(*args, **kwargs)
            if stream is not None and stream != compute:
                before = torch.cuda.current_stream()
                set_stream(stream)
                torch.cuda._sleep(CYCLES)
                set_stream(before)
            return found

        return sleeping

    def waiting(event: Any, stream: Any = None) -> Any:
        return stream if stream is not None else torch.cuda.current_stream()

    patches = Patches()
    try:
        for owner, name, whose in (
            (torch.cuda.StreamContext, "__enter__", lambda self: self.stream),
            (torch.cuda, "set_stream", lambda stream: stream),
            (torch.cuda.Stream, "wait_event", lambda self, event: self),
            (torch.cuda.Stream, "wait_stream", lambda self, stream: self),
            (torch.cuda.Event, "wait", waiting),
        ):
            patches.set(owner, name, followed_by_sleep(getattr(owner, name), whose))
        yield
    finally:
        patches.restore()


@contextmanager
def opened(kind: Device, slow: Slow | None) -> Iterator[Timeline]:
    """Make a device of this kind the current one within the context.

    `slow`: the streams that are late; None: none. There is one device per process: a run inside
    another run (a calibration) shares the outer run's device.
    """
    if device.current.streamed and kind != "cpu":
        yield device.current
        return
    with _open(kind, slow) as made, device.activate(made):
        yield made


def _open(kind: Device, slow: Slow | None) -> AbstractContextManager[Timeline]:
    if kind == "cpu":
        return nullcontext(Cpu())
    if kind == "emulated":
        # Imports the emulation, which other devices do not need.
        from kvconform.kv.emulated import emulated

        return emulated(slow)
    return on_cuda(slow)
