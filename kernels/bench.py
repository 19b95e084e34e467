# SPDX-License-Identifier: Apache-2.0
"""Benchmark of the kernels.

    python -m kvconform.kernels.bench [--tokens 16,8192] [--layouts ...] [--json FILE] [--plot FILE]

Every time is compared with that of copying as many bytes (`tensor.copy_`), measured alternately in
the same run. On CUDA the ratio is of bytes read plus bytes written per second. On the CPU it is of
bytes of cache per second, so 1 means as fast as memcpy.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any

import torch

from kvconform.kernels import bench_show
from kvconform.kernels.bench_cases import Bench, Case
from kvconform.kernels.device import AVAILABLE, INTERPRETED, triton

LAYOUTS = ("LBHNC", "LBNHC", "BLHNC", "kv-first", "kv-second", "mla")
TOKENS = {"cpu": (1024, 4096), "cuda": (16, 128, 1024, 8192, 32768, 131072)}
MEMORY = {"cpu": 6 << 30, "cuda": 96 << 30}
"""Most bytes that a measurement may take, by device."""
THREADS = 2
AHEAD = 1_000_000
"""Clock cycles (half a millisecond) that the host is ahead of the device."""


@dataclass(frozen=True)
class Row:
    """One measurement.

    `gbps`: 10^9 bytes read plus written per second. `ratio`: see the module's docstring.
    `launches`: host time of a call in units of one launch, on CUDA with at most 128 tokens, else
    None.
    """

    kernel: str
    by: str
    layout: str
    dtype: str
    tokens: int
    mbytes: float
    seconds: float
    gbps: float
    ratio: float
    launches: float | None


def timed(call: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of one call: by events of the stream on CUDA, else by the clock.

    On CUDA the stream sleeps first, so that the host has queued the call when its time begins.
    """
    if device.type == "cuda":
        torch.cuda._sleep(AHEAD)
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def host_time(call: Callable[[], object], times: int = 200) -> float:
    """Return the host's seconds per call, without waiting for the device."""
    for _ in range(5):
        call()
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(times):
        call()
    spent = time.perf_counter() - begun
    torch.cuda.synchronize()
    return spent / times


def measure(
    bench: Bench, case: Case, source: torch.Tensor, target: torch.Tensor, rounds: int, each: float
) -> Row:
    """Time a case alternately with the copy; the best time of each counts.

    At least 3 rounds, at most `rounds`, and no further one after about `each` seconds.
    """
    device = bench.device
    case.call()
    target.copy_(source)
    ours: list[float] = []
    copies: list[float] = []
    spent = 0.0
    while len(ours) < 3 or (len(ours) < rounds and spent < each):
        copies.append(timed(lambda: target.copy_(source), device))
        ours.append(timed(case.call, device))
        spent += copies[-1] + ours[-1]
    best, copy = min(ours), min(copies)
    moved = case.passes * bench.nbytes
    ratio = moved / best / (2 * bench.nbytes / copy) if device.type == "cuda" else copy / best
    launches = None
    if device.type == "cuda" and bench.tokens <= 128:
        single = torch.zeros(1, device=device)
        launches = host_time(case.call) / host_time(single.zero_)
    name = str(bench.dtype).removeprefix("torch.")
    return Row(
        case.kernel,
        case.by,
        bench.layout.name,
        name,
        bench.tokens,
        bench.nbytes / 1e6,
        best,
        moved / best / 1e9,
        ratio,
        launches,
    )


def run(
    device: torch.device,
    layouts: Sequence[str],
    tokens: Sequence[int],
    dtypes: Sequence[torch.dtype],
    rounds: int,
    each: float,
    memory: int,
    kernels: Sequence[str] = (),
) -> tuple[list[Row], list[str]]:
    """Return (measurements, notes on what was left out). `kernels`: only these, or all if empty."""
    rows: list[Row] = []
    notes: list[str] = []
    for dtype in dtypes:
        for layout in layouts:
            for count in tokens:
                if Bench.bytes_of(layout, count, dtype) > memory:
                    notes.append(f"{layout}, {count} tokens: takes more than {memory >> 30} GiB")
                    continue
                bench = Bench(layout, count, dtype, device)
                source = torch.ones(bench.nbytes, dtype=torch.uint8, device=device)
                target = torch.zeros_like(source)
                name = str(dtype).removeprefix("torch.")
                for case in (
                    *bench.kernels(),
                    *bench.torch_index(),
                    *bench.vllm(),
                    *bench.lmcache(),
                ):
                    if isinstance(case, str):
                        notes.append(case)
                    elif not kernels or case.kernel in kernels:
                        rows.append(measure(bench, case, source, target, rounds, each))
                if not kernels or "copy" in kernels:
                    copy = min(timed(partial(target.copy_, source), device) for _ in range(3))
                    size, speed = bench.nbytes / 1e6, 2 * bench.nbytes / copy / 1e9
                    row = Row("copy", "torch", layout, name, count, size, copy, speed, 1.0, None)
                    rows.append(row)
                del bench, source, target
                if device.type == "cuda":
                    torch.cuda.empty_cache()
    return rows, list(dict.fromkeys(notes))


def machine(device: torch.device) -> dict[str, Any]:
    """Return the hardware and software versions of the measurement, without the machine's name."""
    capability: object
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        capability = torch.cuda.get_device_capability(device)
    else:
        name = f"CPU, {platform.machine()}"
        capability = torch.backends.cpu.get_cpu_capability()
    return {
        "device": name,
        "capability": capability,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "triton": triton.__version__ if AVAILABLE else None,
        "python": platform.python_version(),
        "date": datetime.now(UTC).date().isoformat(),
    }


def main(arguments: list[str] | None = None) -> int:
    """Measure, print a table, write the JSON file and the plot; return the exit status."""
    parser = argparse.ArgumentParser(prog="kvconform.kernels.bench", description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--tokens",
        type=_numbers,
        help=f"default: {TOKENS['cuda']} on CUDA, {TOKENS['cpu']} on the CPU",
    )
    parser.add_argument(
        "--layouts", type=_names, default=LAYOUTS, help=f"default: {','.join(LAYOUTS)}"
    )
    parser.add_argument("--dtypes", type=_names, default=("bfloat16",), help="default: bfloat16")
    parser.add_argument("--kernels", type=_names, default=(), help="only these; copy counts as one")
    parser.add_argument(
        "--rounds", type=int, default=30, help="most measurements of a call (default: 30)"
    )
    parser.add_argument(
        "--seconds", type=float, default=2.0, help="approximate time for each case (default: 2)"
    )
    parser.add_argument(
        "--threads", type=int, default=THREADS, help=f"of torch, on the CPU (default: {THREADS})"
    )
    parser.add_argument("--json", metavar="FILE", help="write the measurements there")
    parser.add_argument("--plot", metavar="FILE.svg", help="draw them there (needs matplotlib)")
    given = parser.parse_args(arguments)
    device = torch.device(given.device)
    if INTERPRETED:
        print(
            "TRITON_INTERPRET=1 is set: measurements under the interpreter are meaningless",
            file=sys.stderr,
        )
        return 2
    if device.type == "cpu":
        torch.set_num_threads(given.threads)
    dtypes = [getattr(torch, name) for name in given.dtypes]
    tokens = given.tokens or TOKENS[device.type]
    rows, notes = run(
        device,
        given.layouts,
        tokens,
        dtypes,
        given.rounds,
        given.seconds,
        MEMORY[device.type],
        given.kernels,
    )
    about = machine(device)
    found = [asdict(row) for row in rows]
    bench_show.table(found, about, notes)
    if given.json:
        bench_show.save(given.json, found, about, notes)
    if given.plot:
        bench_show.plot(given.plot, found, about)
    return 0


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


if __name__ == "__main__":
    sys.exit(main())
