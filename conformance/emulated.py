# SPDX-License-Identifier: Apache-2.0
"""The emulated CUDA device as an engine uses it: see kvconform.emulation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal, TypeVar, cast

import torch

from kvconform.emulation import Emulation, emulate
from kvconform.emulation.vllm_on_cuda import vllm_on_cuda

T = TypeVar("T")


class Emulated:
    """Everything of the harness runs raw, the connector's hooks run as on a GPU; what the engine launches waits in the compute stream."""

    streamed = True

    def __init__(self, cuda: Emulation) -> None:
        self.cuda = cuda
        self._told = 0

    @property
    def early_reads(self) -> int:
        return sum(note.kind == "read_early" for note in self.cuda.notes)

    def copies_pending(self) -> int:
        return self.cuda.pending()

    def allocate(self, elements: int) -> torch.Tensor:
        return self.cuda.to_device(torch.zeros(elements, dtype=torch.float32))

    def launch(self, work: Callable[[], T], judge: Callable[[T], None] | None = None) -> None:
        def run() -> None:
            result = work()
            if judge is not None:
                judge(result)

        self.cuda.launch(run)

    def finish(self) -> None:
        self.cuda.finish_compute()

    def calling(self) -> AbstractContextManager[None]:
        return self.cuda.intercepted()

    def notes(self) -> list[dict[str, Any]]:
        new, self._told = self.cuda.notes[self._told :], len(self.cuda.notes)
        return [{"what": note.kind, "text": note.what, "stream": note.stream} for note in new]


@contextmanager
def emulated(slow: str | None) -> Iterator[Emulated]:
    """An emulated device and vLLM's belief in it; torch and vLLM are as before afterwards."""
    with emulate(cast(Literal["compute", "transfers"] | None, slow)) as cuda, vllm_on_cuda(cuda), cuda.raw():
        yield Emulated(cuda)
