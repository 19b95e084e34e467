# SPDX-License-Identifier: Apache-2.0
"""One run of vLLM in a child process, with the connector under test or without a connector."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvconform.adapters.registry import ENVIRONMENT as ADAPTERS
from kvconform.config.settings import HASH_SEED
from kvconform.config.target import Target
from kvconform.contract.capabilities import EXACT, Tolerances
from kvconform.contract.scenario import BLOCK_SIZE, Start
from kvconform.live.job import BOOK, JOB, TOLERANCES, Ask, Job, Outcome, Play
from kvconform.live.outage import Attendant, seconds
from kvconform.live.plugin import FAULT, TRACE
from kvconform.live.process import Ended, python, run
from kvconform.live.start import CPU_ASYNC, EMULATE, ENVIRONMENT
from kvconform.process.servers import Servers

LIMIT = "KVCONFORM_LIVE_SECONDS"
"""Environment variable: seconds that one child may take."""
SECONDS = 300.0
"""Default of LIMIT."""
SLOWER = 6
"""A run with a connector may take this many times as long as its baseline run.

This matters only on a machine where the baseline run is slow; otherwise LIMIT is larger.
"""


@dataclass
class Made:
    """A completed run.

    `outcome`: what the child wrote. `ended`: how its process ended. `traces`: the directory of its
    trace. `words`: the last lines that it printed.
    """

    outcome: Outcome
    ended: Ended
    traces: Path
    words: str


def patience(seconds: float) -> float:
    """Return a time limit, scaled by how far KVCONFORM_LIVE_SECONDS exceeds its default."""
    return seconds * max(1.0, float(os.environ.get(LIMIT, SECONDS)) / SECONDS)


def make_run(
    start: Start,
    plays: list[Play],
    target: Target | None,
    *,
    tmp: Path,
    model: Path,
    book: Path | None,
    drafter: Path | None = None,
    fail: bool = False,
    on_failure: str = "recompute",
    servers: Sequence[Servers] = (),
    pace: float = 0.0,
    tolerances: Tolerances = EXACT,
) -> Made:
    """Make a run, in a child process that has ended when this returns.

    Writes below `tmp` only, apart from what the faults of the phases do to `servers`. `pace`: the
    seconds that the baseline run took on this machine; the time limits grow with it.
    `tolerances`: how far loaded KV may be off. Raises RuntimeError if a fault could not be carried
    out.
    """
    tmp.mkdir(parents=True, exist_ok=True)
    for name in ("tmp", "trace", "work", "connector", "desk"):
        (tmp / name).mkdir(exist_ok=True)
    faults = [fault for play in plays for fault in play.faults]
    job = Job(
        model=str(model),
        drafter=None if drafter is None else str(drafter),
        start=start.model_dump(),
        transfer=transfer_of(target, tmp / "connector", on_failure),
        plays=plays,
        fail=fail,
        adapters=list(target.adapters) if target is not None else [],
        device=target.device if target is not None else "cpu",
        desk=str(tmp / "desk") if faults else None,
        pace=pace,
    )
    job.write(tmp / "job.json")
    environment = {
        **ENVIRONMENT,
        **os.environ,
        **({JOB: str(tmp / "job.json")} if job.served else {}),
        "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(start.processes)),
        "TMPDIR": str(tmp / "tmp"),
        TRACE: str(tmp / "trace"),
        "VLLM_LOGGING_LEVEL": "WARNING",
        "PYTHONPATH": import_path(),
    }
    if any(play.restart for play in plays) and HASH_SEED not in os.environ:
        # Each process has a seed of its own, as in production, and vLLM's block hashes are equal.
        environment.pop(HASH_SEED)
    if target is not None and target.adapters:
        environment[ADAPTERS] = ",".join(target.adapters)
    if target is None:
        environment.pop(FAULT, None)
    if book is not None:
        environment[BOOK] = str(book)
    environment[TOLERANCES] = tolerances.encode()
    if start.scheduling == "async":
        environment[CPU_ASYNC] = "1"
    if target is not None and target.device == "emulated":
        environment[EMULATE] = "1"
    attendant = Attendant(tmp / "desk", servers, tmp / "connector")
    limit = max(float(os.environ.get(LIMIT, SECONDS)), SLOWER * pace) + seconds(faults, servers)
    module = "kvconform.live.served" if job.served else "kvconform.live.child"
    command = python(module, str(tmp / "job.json"), str(tmp / "out.jsonl"))

    def over() -> bool:
        """Carry out the faults that are due, and return whether the child has finished."""
        attendant.look()
        return Outcome.over(tmp / "out.jsonl")

    try:
        ended = run(
            command,
            limit=limit,
            log=tmp / "log",
            environment=environment,
            cwd=tmp / "work",
            over=over,
        )
    finally:
        attendant.close()
    if attendant.problems:
        raise RuntimeError(f"a fault of a server could not be carried out: {attendant.problems[0]}")
    return Made(Outcome.read(tmp / "out.jsonl"), ended, tmp / "trace", _last_words(tmp / "log"))


def import_path() -> str:
    """Return PYTHONPATH for a child process: this process's path, without site-packages."""
    return os.pathsep.join(
        folder
        for folder in sys.path
        if folder and os.path.isdir(folder) and "site-packages" not in folder
    )


def transfer_of(
    target: Target | None, tmp: Path, on_failure: str = "recompute"
) -> dict[str, Any] | None:
    """Return the fields of vLLM's KVTransferConfig for a connector, None without one."""
    if target is None or target.connector is None:
        return None
    found: dict[str, Any] = {
        "kv_connector": target.name,
        "kv_role": target.role or "kv_both",
        "kv_connector_extra_config": target.options(tmp, BLOCK_SIZE),
        "kv_load_failure_policy": on_failure,
    }
    if target.module:
        found["kv_connector_module_path"] = target.module
    return found


def resolved(plays: list[Play], plain: Outcome) -> list[Play]:
    """Return the phases with the prompts of the baseline run.

    A wrong answer with the connector then does not change the prompts of later requests.
    """
    known = plain.answers

    def fixed(ask: Ask) -> Ask:
        if ask.id not in known:
            return ask
        return ask.model_copy(update={"tokens": known[ask.id].prompt, "after": None})

    return [play.model_copy(update={"asks": [fixed(ask) for ask in play.asks]}) for play in plays]


def _last_words(log: Path) -> str:
    """Return the last 4000 characters of a log, without empty lines."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.is_file() else []
    return "\n".join(line for line in lines if line.strip())[-4000:]
