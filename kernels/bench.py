# SPDX-License-Identifier: Apache-2.0
"""How fast the kernels are: `python -m kvconform.kernels.bench [--tokens 16,8192] [--layouts ...] [--json FILE] [--plot FILE]`.

Every time is set beside that of copying as many bytes (`tensor.copy_`) in the same run, measured in turns with it. On CUDA the ratio is of
bytes read plus bytes written per second; on the CPU it is of bytes of cache per second, so 1 means: as fast as memcpy copies them.
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
THREADS = 2


@dataclass(frozen=True)
class Row:
    """One measurement. `gbps`: 10^9 bytes read plus written per second. `ratio` as the module says. `launches`: host time of a call in
    units of one launch, on CUDA at no more than 128 tokens, else None."""

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
    """Seconds of one call: by events of the stream on CUDA, else on the clock."""
    if device.type == "cuda":
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def host_time(call: Callable[[], object], times: int = 200) -> float:
    """Seconds that the host takes per call when it does not wait for the device."""
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
    """Time a case in turns with the copy, at least 3 times and at most `rounds` times or about `each` seconds; the best of each counts."""
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
    """(measurements, what was left out and why). `kernels`: only these; none: all."""
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
                    rows.append(
                        Row(
                            "copy",
                            "torch",
                            layout,
                            name,
                            count,
                            bench.nbytes / 1e6,
                            copy,
                            2 * bench.nbytes / copy / 1e9,
                            1.0,
                            None,
                        )
                    )
                del bench, source, target
                if device.type == "cuda":
                    torch.cuda.empty_cache()
    return rows, list(dict.fromkeys(notes))


def machine(device: torch.device) -> dict[str, Any]:
    """What the numbers were measured on, without the machine's name."""
    made = triton.__version__ if AVAILABLE else None
    return {
        "device": torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"CPU, {platform.machine()}",
        "capability": torch.cuda.get_device_capability(device)
        if device.type == "cuda"
        else torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "triton": made,
        "python": platform.python_version(),
        "date": datetime.now(UTC).date().isoformat(),
    }


def main(arguments: list[str] | None = None) -> int:
    """Measure, print a table, write the JSON file and the plot that were asked for; returns the exit status."""
    parser = argparse.ArgumentParser(prog="kvconform.kernels.bench", description=__doc__)
    numbers, names = (
        (lambda text: tuple(int(part) for part in text.split(","))),
        (lambda text: tuple(text.split(","))),
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--tokens",
        type=numbers,
        help=f"default: {TOKENS['cuda']} on CUDA, {TOKENS['cpu']} on the CPU",
    )
    parser.add_argument(
        "--layouts", type=names, default=LAYOUTS, help=f"default: {','.join(LAYOUTS)}"
    )
    parser.add_argument("--dtypes", type=names, default=("bfloat16",), help="default: bfloat16")
    parser.add_argument("--kernels", type=names, default=(), help="only these; copy counts as one")
    parser.add_argument(
        "--rounds", type=int, default=30, help="how often a call is timed at most (default: 30)"
    )
    parser.add_argument(
        "--seconds", type=float, default=2.0, help="for about how long one is timed (default: 2)"
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
            "TRITON_INTERPRET=1 is set: nothing that is measured under the interpreter means anything",
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


if __name__ == "__main__":
    sys.exit(main())
