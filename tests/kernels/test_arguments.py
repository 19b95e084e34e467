# SPDX-License-Identifier: Apache-2.0
"""Tests of what the kernels refuse, and of what they need to be imported."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

import kvconform.kernels.digest as digest_module
import kvconform.kernels.transfer as transfer_module
import kvconform.kernels.verify as verify_module
import kvconform.kernels.write as write_module
from kvconform.kernels import device
from kvconform.kernels.digest import digest
from kvconform.kernels.layout import Layout
from kvconform.kernels.paged import Paged
from kvconform.kernels.poison import poison
from kvconform.kernels.transfer import gather, scatter
from kvconform.kernels.verify import verify
from kvconform.kernels.write import write


def cache() -> tuple[Paged, torch.Tensor]:
    """2 layers of 3 blocks of 4 slots, and a view of all their bytes."""
    tensors = Layout.named("LBHNC").allocate(2, 3, 1, 4, 16, torch.float32)
    return Paged(tensors, "LBHNC"), torch.stack(tensors)


def ids(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


ROWS = torch.ones(2, 1, 1, 2, 16)
REFUSED: list[tuple[str, Callable[[Paged], Any], str]] = [
    ("slot", lambda p: write(p, ids(0, 12), ids(1, 2)), "slot 12 does not exist: the cache has 12"),
    ("slot", lambda p: verify(p, ids(0, 12), ids(1, 2)), "slot 12 does not exist"),
    ("slot", lambda p: gather(p, ids(99)), "slot 99 does not exist"),
    ("slot", lambda p: scatter(p, ids(12), ROWS), "slot 12 does not exist"),
    ("block", lambda p: poison(p, ids(0, 3), ids(1, 2)), "block 3 does not exist: the cache has 3"),
    ("block", lambda p: digest(p, ids(3)), "block 3 does not exist"),
    (
        "dtype",
        lambda p: write(p, ids(0).to(torch.int32), ids(1)),
        "slots must be one axis of int64, not 1 of torch.int32",
    ),
    (
        "shape",
        lambda p: write(p, ids(0).view(1, 1), ids(1)),
        "slots must be one axis of int64, not 2",
    ),
    ("count", lambda p: write(p, ids(0), ids(1, 2)), "content must be 1 ids of int64 or uint64"),
    (
        "dtype",
        lambda p: verify(p, ids(0), torch.ones(1)),
        "content must be 1 ids of int64 or uint64",
    ),
    ("rows", lambda p: scatter(p, ids(0), ROWS[:1]), "rows must be"),
    ("rows", lambda p: scatter(p, ids(0), ROWS.to(torch.float16)), "rows must be"),
    (
        "rows",
        lambda p: gather(p, ids(0), torch.ones(2, 1, 1, 16, 2).transpose(3, 4)),
        "rows must be contiguous",
    ),
    ("backend", lambda p: write(p, ids(0), ids(1), backend="cuda"), "a backend is"),
]


@pytest.mark.parametrize(
    "call, says",
    [case[1:] for case in REFUSED],
    ids=[f"{number}-{case[0]}" for number, case in enumerate(REFUSED)],
)
def test_refused_in_one_sentence_and_nothing_changes(
    call: Callable[[Paged], Any], says: str
) -> None:
    paged, memory = cache()
    with pytest.raises(ValueError, match=says):
        call(paged)
    assert (
        not memory.any()
        and not torch.stack([layer.view(torch.int32) for layer in paged.stacks[0].bits]).any()
    )


@pytest.mark.parametrize(
    "layers, says",
    [
        ([], "at least one layer"),
        (
            [torch.zeros(3, 1, 4, 32), torch.zeros(3, 1, 5, 32)],
            "one shape, one dtype and one device",
        ),
        (
            [torch.zeros(3, 1, 4, 32), torch.zeros(3, 1, 4, 32, dtype=torch.float16)],
            "one shape, one dtype and one device",
        ),
        (
            [torch.zeros(3, 1, 4, 32, dtype=torch.float64)],
            "a cache of torch.float64 is not supported",
        ),
        ([torch.zeros(3, 1, 4, 30)], "at least 16 elements to hold a code, not 15"),
        (
            [torch.zeros(1, dtype=torch.uint8).expand(1 << 16, 1, 1 << 15, 32)],
            "fewer than 2\\^31 slots",
        ),
        ([torch.zeros(1, dtype=torch.uint8).expand(2, 4096, 4, 32)], "fewer than 4096 heads"),
    ],
)
def test_a_cache_that_no_kernel_takes_is_refused(layers: list[torch.Tensor], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Paged(layers, "LBHNC")


def test_numbers_must_be_as_many_as_layers() -> None:
    with pytest.raises(ValueError, match="2 layers need as many numbers, not 1"):
        Paged([torch.zeros(3, 1, 4, 32)] * 2, "LBHNC", [5])


def test_validate_says_what_the_kernels_on_a_device_do_not() -> None:
    paged, _ = cache()
    paged.validate(ids(-5, 11))
    with pytest.raises(ValueError, match="slot 12 does not exist"):
        paged.validate(ids(12))


@pytest.mark.skipif(
    device.INTERPRETED, reason="TRITON_INTERPRET=1 is set, so Triton does run on the CPU"
)
def test_triton_is_refused_where_it_cannot_run() -> None:
    paged, _ = cache()
    with pytest.raises(ValueError, match="Triton is not installed|Triton cannot run on cpu"):
        write(paged, ids(0), ids(1), backend="triton")


def test_content_may_be_unsigned() -> None:
    paged, _ = cache()
    write(paged, ids(3), torch.tensor([2**64 - 1], dtype=torch.uint64))
    assert verify(paged, ids(3), ids(-1)).holds()


ALONE = """
import sys
for name in ("triton", "vllm", "pydantic", "rich", "typer", "matplotlib", "transformers"):
    sys.modules[name] = None  # importing it fails
import torch
from kvconform.kernels import bench, device, digest, poison, transfer, verify, write
from kvconform.kernels.layout import Layout
from kvconform.kernels.paged import Paged
assert not device.AVAILABLE
paged = Paged(Layout.named("kv-first").allocate(2, 3, 2, 4, 16, torch.bfloat16), "kv-first")
slots, content = torch.arange(12), torch.arange(12)
write.write(paged, slots, content)
transfer.scatter(paged, slots, transfer.gather(paged, slots))
assert verify.verify(paged, slots, content).holds()
assert len(digest.digest(paged)) == 3
poison.poison(paged, torch.tensor([1]), torch.tensor([99]))
assert verify.verify(paged, slots, content).wrong.nonzero().flatten().tolist() == [4, 5, 6, 7]
"""


def test_torch_and_numpy_are_all_that_is_needed() -> None:
    subprocess.run([sys.executable, "-c", ALONE], check=True)


def test_the_package_itself_imports_nothing() -> None:
    subprocess.run(
        [sys.executable, "-c", "import sys, kvconform.kernels; assert 'torch' not in sys.modules"],
        check=True,
    )


class Compiles:
    """Stands for a kernel: notes what it was compiled for, and what was launched on which grid."""

    def __init__(self) -> None:
        self.compiled: list[tuple[Any, ...]] = []
        self.launched: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def compile_(*args: Any) -> Any:
            self.compiled.append(args)
            return Compiled(self, args)

        return compile_


class Compiled:
    """Stands for a compiled kernel, which takes addresses for tensors, and a grid of three axes."""

    def __init__(self, kernel: Compiles, of: tuple[Any, ...]) -> None:
        self.kernel, self.of = kernel, of

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        return lambda *args: self.kernel.launched.append((self.of, grid, args))


class Elsewhere:
    """Stands for a tensor on another device, at the address of this one."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.dtype, self.device = tensor.dtype, torch.device("cuda", 1)
        self.data_ptr = tensor.data_ptr


def test_a_kernel_is_compiled_anew_only_for_what_it_depends_on() -> None:
    kernel, other = Compiles(), Compiles()
    memory = torch.zeros(64, dtype=torch.int16)
    aligned = memory[-memory.data_ptr() // 2 % 8 :][:40]
    calls: list[tuple[Any, Any, int, int]] = [
        (kernel, aligned, 3, 7),
        (kernel, aligned[1:], 3, 7),
        (kernel, aligned[2:], 3, 7),
        (kernel, aligned[4:], 3, 7),
        (kernel, aligned, 3, 8),
        (kernel, aligned.view(torch.uint16), 3, 7),
        (kernel, Elsewhere(aligned), 3, 7),
        (other, aligned, 3, 7),
    ]
    for _ in range(2):
        for which, one, number, constant in calls:
            device.start(which, (5, 2), (one,), (number,), (constant,))
    device.start(kernel, (6, 3), (aligned[8:],), (4,), (7,))
    assert (len(kernel.compiled), len(other.compiled)) == (7, 1)
    assert kernel.launched == [
        *((of, (5, 2, 1), (of[0].data_ptr(), *of[1:])) for of in kernel.compiled),
        (kernel.compiled[0], (6, 3, 1), (aligned[8:].data_ptr(), 4, 7)),
    ]


@pytest.mark.skipif(not device.AVAILABLE, reason="Triton is not installed")
def test_the_numbers_of_a_kernel_are_those_that_it_is_not_specialised_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise one that is compiled for 1 would be launched for 2 (`device.start`)."""
    launched: list[str] = []

    def start(kernel: Any, grid: Any, tensors: Any, numbers: Any, constants: Any) -> None:
        names = kernel.arg_names
        assert len(names) == len(tensors) + len(numbers) + len(constants)
        assert names[len(tensors) : len(tensors) + len(numbers)] == unspecialised(kernel)
        launched.append(kernel.fn.__name__)

    for module in (write_module, verify_module, transfer_module, digest_module):
        monkeypatch.setattr(module, "start", start)
    paged, _ = cache()
    slots = ids(0, 5)
    write_module.write_triton(paged, slots, slots)
    verify_module.verify_triton(paged, slots, slots, ids(0, 0, 0, 0))
    transfer_module.scatter_triton(paged, slots, torch.zeros(2, 2, 1, 2, 16))
    digest_module.digest_triton(paged, ids(0), torch.zeros(1, 2, 2, dtype=torch.int64))
    assert launched == ["write_kernel", "verify_kernel", "transfer_kernel", "digest_kernel"]


def unspecialised(kernel: Any) -> list[str]:
    """Return the parameters with do_not_specialize, of a compiled kernel or an interpreted one."""
    if hasattr(kernel, "params"):
        return [each.name for each in kernel.params if each.do_not_specialize]
    names: list[str] = kernel.kwargs["do_not_specialize"]
    return names
