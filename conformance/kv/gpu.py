# SPDX-License-Identifier: Apache-2.0
"""Opens the device of a run, which may be a real CUDA device under an engine driven by hand.

On a real device, either the compute stream or the others are slow (`slowed`). The work of the
device is not observed: only wrong bytes reveal a missing wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from kvconform.contract.case import Device, Slow
from kvconform.errors import EnvironmentProblem
from kvconform.kernels.device import AVAILABLE
from kvconform.kv import device
from kvconform.kv.device import Cpu, T, Timeline, Unobserved
from kvconform.kv.held import Holds, on_this_device
from kvconform.kv.late_threads import late_threads
from kvconform.kv.slowed import in_use


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
        torch.cuda.current_stream().synchronize()

    def finish(self) -> None:
        """See Timeline."""
        torch.cuda.current_stream().synchronize()  # releases what the compute stream waits for
        self._idle = True
        if self._holds is not None:
            self._holds.next_step()
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
    with _platform(), on_this_device() if slow else nullcontext() as holds:
        made = OnCuda(slow, holds)
        with in_use(holds, slow) if holds is not None and slow else nullcontext():
            yield made
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
def opened(kind: Device, slow: Slow | None, *, late: bool = False) -> Iterator[Timeline]:
    """Make a device of this kind the current one within the context.

    `slow`: the streams that are late; None: none. `late`: the connector's threads are, on a CPU.
    There is one device per process: a run inside another run (a calibration) shares the outer run's
    device.
    """
    if device.current.streamed and kind != "cpu":
        yield device.current
        return
    with _open(kind, slow, late) as made, device.activate(made):
        yield made


def _open(kind: Device, slow: Slow | None, late: bool) -> AbstractContextManager[Timeline]:
    if kind == "cpu":
        return late_threads() if late else nullcontext(Cpu())
    if kind == "emulated":
        # Imports the emulation, which other devices do not need.
        from kvconform.kv.emulated import emulated

        return emulated(slow)
    return on_cuda(slow)
