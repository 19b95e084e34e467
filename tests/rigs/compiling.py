# SPDX-License-Identifier: Apache-2.0
"""Compile the kernels for Hopper on any machine: `python compiling.py`.

Prints a JSON list with the result of compiling each launch. The wrappers are called unchanged, on
CPU tensors. Only the launch is replaced by a compilation with the same arguments, specialised as
Triton's launcher does: integers that are 1 or multiples of 16 unless that is forbidden, and
pointers aligned to 16 bytes.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource
from triton.compiler import compile as compile_for

from kvconform.kernels import digest, transfer, verify, write
from kvconform.kernels.layout import Layout
from kvconform.kernels.paged import BITS, Paged

NAMES = {torch.int64: "*i64", torch.int32: "*i32", torch.int16: "*i16", torch.uint8: "*u8"}
COMPILED: list[dict[str, Any]] = []


class Compiled:
    """Stands for a kernel; a launch compiles it."""

    def __init__(self, kernel: Any, about: str) -> None:
        self.kernel, self.about = kernel, about

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self.launch

    def launch(self, *arguments: Any) -> None:
        """Compile for these arguments and note what came of it."""
        signature, constants, attributes = {}, {}, {}
        for number, (parameter, value) in enumerate(
            zip(self.kernel.params, arguments, strict=True)
        ):
            free = not parameter.do_not_specialize
            if parameter.is_constexpr or (
                free and not isinstance(value, torch.Tensor) and value == 1
            ):
                signature[parameter.name], constants[(number,)] = "constexpr", value
            elif isinstance(value, torch.Tensor):
                signature[parameter.name], attributes[(number,)] = (
                    NAMES[value.dtype],
                    [["tt.divisibility", 16]],
                )
            else:
                signature[parameter.name] = "i32" if abs(value) < 1 << 31 else "i64"
                if free and value % 16 == 0:
                    attributes[(number,)] = [["tt.divisibility", 16]]
        made = compile_for(
            ASTSource(self.kernel, signature, constants, attributes),
            target=GPUTarget("cuda", 90, 32),
        )
        code, tensors = made.asm["ptx"], made.asm["ttgir"]
        COMPILED.append(
            {
                "kernel": self.kernel.__name__,
                "about": self.about,
                "spilled": spilled(code),
                "loads": sorted(set(re.findall(r"ld\.global\.(?:v\d\.)?b\d+", code))),
                "stores": sorted(set(re.findall(r"st\.global\.(?:v\d\.)?b\d+", code))),
                "orders": orders(tensors),
            }
        )


def spilled(code: str) -> int:
    """Return the bytes that a kernel in PTX keeps in memory for want of registers, by thread."""
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(code)
        file.flush()
        ptxas = [get_ptxas(90).path, "-v", "--gpu-name=sm_90a", "-o", os.devnull, file.name]
        said = subprocess.run(ptxas, stderr=subprocess.PIPE, text=True, check=True).stderr
    return sum(map(int, re.findall(r"(\d+) bytes spill", said)))


def orders(code: str) -> list[str]:
    """Return the orders of axes, fastest first, in which rows are accessed, of a kernel in TTGIR.

    Neighbouring threads access neighbours on the first axis.
    """
    layouts = dict(re.findall(r"^#(\w+) = #ttg\.blocked<\{.*order = (\[.*?\])\}>", code, re.M))
    used = re.findall(r"tt\.(?:load|store) .*tensor<\d+x\d+x!tt\.ptr<i\d+>, #(\w+)>", code)
    return sorted({layouts[name] for name in used})


def compile_all(layout: str, dtype: torch.dtype, heads: int, dim: int) -> None:
    """Compile all kernels for a cache of this layout, dtype and head."""
    about = f"{layout} {dtype} {heads}x{dim}"
    paged = Paged(Layout.named(layout).allocate(2, 8, heads, 16, dim, dtype), layout)
    slots = torch.arange(paged.slots)
    found = torch.zeros(2 + len(slots), dtype=torch.int64)
    rows = torch.zeros(2, len(slots), heads, paged.sides, dim, dtype=BITS[dtype.itemsize])
    kernels = [
        (write, "write_kernel"),
        (verify, "verify_kernel"),
        (transfer, "transfer_kernel"),
        (digest, "digest_kernel"),
    ]
    kept = [getattr(module, name) for module, name in kernels]
    for (module, name), kernel in zip(kernels, kept, strict=True):
        setattr(module, name, Compiled(kernel, about))
    write.write_triton(paged, slots, slots)
    write.write_triton(paged, slots[:8], slots[:8], blocks=True)
    verify.verify_triton(paged, slots, slots, found)
    transfer.gather_triton(paged, slots, rows)
    transfer.scatter_triton(paged, slots, rows)
    digest.digest_triton(paged, slots[:8], torch.zeros(8, 2, paged.sides, dtype=torch.int64))
    for (module, name), kernel in zip(kernels, kept, strict=True):
        setattr(module, name, kernel)


if __name__ == "__main__":
    compile_all("LBHNC", torch.bfloat16, 2, 128)
    compile_all("LBNHC", torch.float8_e4m3fn, 2, 128)
    compile_all("kv-first", torch.float32, 2, 128)
    compile_all("mla", torch.bfloat16, 1, 576)
    compile_all("mla", torch.float32, 1, 576)
    compile_all("mla", torch.bfloat16, 1, 577)
    compile_all("BLNHC", torch.uint8, 3, 18)
    compile_all("BLNHC", torch.bfloat16, 3, 18)
    compile_all("LBNHC", torch.float32, 3, 17)
    print(json.dumps(COMPILED))
