# SPDX-License-Identifier: Apache-2.0
"""The ways in which a paged cache's bytes are reached, for tests that must hold for each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvconform.kv import device
from kvconform.kv.cache import PagedCache


class WithTensors(device.Cpu):
    """The CPU as if it were a device with streams: torch reads and writes."""

    streamed = True


class WithKernels(device.Cpu):
    """The CPU as if it were a GPU: the kernels of kernels/ read and write, on their torch path."""

    kernels = True


WAYS: dict[str, type[device.Cpu]] = {
    "arrays": device.Cpu,
    "tensors": WithTensors,
    "kernels": WithKernels,
}


@pytest.fixture(params=WAYS, autouse=True)
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run every test of the module that imports this once per way."""
    with device.activate(WAYS[request.param]()):
        yield request.param


def foreign(cache: PagedCache) -> list[list[int]]:
    """Return the slots that others than the engine have changed, by layer."""
    return [slots.tolist() for slots in cache.foreign()]
