# SPDX-License-Identifier: Apache-2.0
"""Opens the device of a run, which may be a real CUDA device under an engine driven by hand.

On a real device, either the compute stream or the others are held (`held`), which makes them slow.
The work of the device is not observed: only wrong bytes reveal a missing wait.
"""

from __future__ import annotations

import time
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
from kvconform.kv.held import Holds, on_this_device

STILL = 0.001
"""Seconds after which a compute stream that goes on doing nothing is taken to wait for another."""


class OnCuda(Unobserved):
    """A real CUDA device.

    Work is queued on the current stream at once, and judged in `finish`, which is the only place
    where the host waits for it.
    """

    streamed = True
    kernels = AVAILABLE
    """Without Triton the kernels would be torch operations that make the host wait."""

    def __init__(self, slow: Slow | None, holds: Holds | None) -> None:
        """Take the holds of this device; None if no streams are slow."""
        self._slow, self._holds = slow, holds
        self._wait = torch.cuda.Stream.synchronize  # the one that releases nothing
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
        if self._idle and self._holds is not None and self._slow == "compute":
            self._holds.hold(torch.cuda.current_stream().cuda_stream)
        self._idle = False
        result = work()
        if judge is not None:
            self._launched.append((judge, result))

    def settle(self) -> None:
        """See Timeline."""
        self._catch_up()

    def finish(self) -> None:
        """See Timeline."""
        self._catch_up()
        self._idle = True
        launched, self._launched = self._launched, []
        for judge, result in launched:
            judge(result)

    def _catch_up(self) -> None:
        """Wait for the compute stream; release others only if that waits for them."""
        compute = torch.cuda.current_stream()
        holds = self._holds
        if holds is not None and not (self._slow == "transfers" and _ends_soon(compute)):
            holds.release()
        self._wait(compute)


def _ends_soon(stream: torch.cuda.Stream) -> bool:
    """Return whether a stream does all that it was given, and does not stand still before."""
    until = time.monotonic() + STILL
    while not (done := stream.query()) and time.monotonic() < until:
        pass
    return done


@contextmanager
def on_cuda(slow: Slow | None) -> Iterator[OnCuda]:
    """Provide the device. EnvironmentProblem if there is none."""
    if not torch.cuda.is_available():
        raise EnvironmentProblem(
            "--device cuda needs a GPU that torch can use; --emulate-cuda does without one"
        )
    with _platform(), on_this_device() if slow else nullcontext() as holds:
        made = OnCuda(slow, holds)
        with _held(holds, slow) if holds is not None and slow else nullcontext():
            yield made
        if holds is not None:
            holds.release()
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
def _held(holds: Holds, slow: Slow) -> Iterator[None]:
    """Release all streams when the host waits; if transfers are slow, hold each when it is used.

    A stream is in use when the connector makes it the current one by torch.cuda.stream or
    torch.cuda.set_stream, or makes it wait by wait_event, wait_stream or torch.cuda.Event.wait.
    Streams that are used in other ways stay fast. The host waits by `synchronize` of torch.cuda, a
    stream or an event. Where it waits in another way, a hold ends after its time limit.
    """
    compute = torch.cuda.current_stream()

    def followed_by_hold(call: Callable[..., Any], whose: Callable[..., Any]) -> Callable[..., Any]:
        def holding(*args: Any, **kwargs: Any) -> Any:
            found, stream = call(*args, **kwargs), whose(*args, **kwargs)
            if stream is not None and stream != compute:
                holds.hold(stream.cuda_stream)
            return found

        return holding

    def after_release(call: Callable[..., Any]) -> Callable[..., Any]:
        def releasing(*args: Any, **kwargs: Any) -> Any:
            holds.release()
            return call(*args, **kwargs)

        return releasing

    def waiting(event: Any, stream: Any = None) -> Any:
        return stream if stream is not None else torch.cuda.current_stream()

    patches = Patches()
    try:
        for owner in (torch.cuda, torch.cuda.Stream, torch.cuda.Event, torch.accelerator):
            patches.set(owner, "synchronize", after_release(owner.synchronize))
        for owner, name, whose in (
            (torch.cuda.StreamContext, "__enter__", lambda self: self.stream),
            (torch.cuda, "set_stream", lambda stream: stream),
            (torch.cuda.Stream, "wait_event", lambda self, event: self),
            (torch.cuda.Stream, "wait_stream", lambda self, stream: self),
            (torch.cuda.Event, "wait", waiting),
        ):
            if slow == "transfers":
                patches.set(owner, name, followed_by_hold(getattr(owner, name), whose))
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
