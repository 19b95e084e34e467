# SPDX-License-Identifier: Apache-2.0
"""One run of vLLM in a child process: with the connector under test, or without any."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvconform.adapters.registry import ENVIRONMENT as ADAPTERS
from kvconform.config.target import Target
from kvconform.contract.scenario import BLOCK_SIZE, Start
from kvconform.live.job import Job, Outcome, Play
from kvconform.live.outage import Attendant, seconds
from kvconform.live.plugin import TRACE
from kvconform.live.process import Ended, python, run
from kvconform.live.start import CPU_ASYNC as ASYNC
from kvconform.live.start import EMULATE as EMULATE
from kvconform.live.start import ENVIRONMENT
from kvconform.process.servers import Servers

LIMIT = "KVCONFORM_LIVE_SECONDS"
"""Environment variable: seconds that one child may take."""
SECONDS = 300.0
SLOWER = 6
"""A connector may take this many times as long as a run without it, on a machine on which that takes long."""
BOOK = "KVCONFORM_LIVE_BOOK"
"""Environment variable of the probe: the file with the KV that a run without connector computed."""


@dataclass
class Made:
    """A run that was made: what the child wrote, how it ended, where its trace is, and the last lines that it printed."""

    outcome: Outcome
    ended: Ended
    traces: Path
    words: str


def patience(seconds: float) -> float:
    """That many seconds, or as many times more as KVCONFORM_LIVE_SECONDS gives a child more than it has by default."""
    return seconds * max(1.0, float(os.environ.get(LIMIT, SECONDS)) / SECONDS)


def make_run(
    start: Start,
    plays: list[Play],
    target: Target | None,
    *,
    tmp: Path,
    model: Path,
    book: Path | None,
    fail: bool = False,
    on_failure: str = "recompute",
    servers: Sequence[Servers] = (),
    pace: float = 0.0,
) -> Made:
    """Make a run. Writes below `tmp` only. Nothing of it is left when this returns, but what the phases' faults did to `servers`.
    RuntimeError if a fault could not be carried out. `pace`: seconds that a run without connector took here; time limits grow with it.
    """
    tmp.mkdir(parents=True, exist_ok=True)
    for name in ("tmp", "trace", "work", "connector", "desk"):
        (tmp / name).mkdir(exist_ok=True)
    job = Job(
        model=str(model),
        start=start.model_dump(),
        transfer=transfer_of(target, tmp / "connector", on_failure),
        plays=plays,
        fail=fail,
        adapters=list(target.adapters) if target is not None else [],
        device=target.device if target is not None else "cpu",
        desk=str(tmp / "desk") if servers else None,
        pace=pace,
    )
    job.write(tmp / "job.json")
    environment = {
        **ENVIRONMENT,
        **os.environ,
        "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(start.processes)),
        "TMPDIR": str(tmp / "tmp"),
        TRACE: str(tmp / "trace"),
        "VLLM_LOGGING_LEVEL": "WARNING",
        "PYTHONPATH": _path(),
    }
    environment |= (
        {ADAPTERS: ",".join(target.adapters)} if target is not None and target.adapters else {}
    )
    environment |= {BOOK: str(book)} if book is not None else {}
    environment |= {ASYNC: "1"} if start.scheduling == "async" else {}
    environment |= {EMULATE: "1"} if target is not None and target.device == "emulated" else {}
    attendant = Attendant(tmp / "desk", servers)
    limit = max(float(os.environ.get(LIMIT, SECONDS)), SLOWER * pace) + seconds(
        [fault for play in plays for fault in play.faults], servers
    )
    command = python("kvconform.live.child", str(tmp / "job.json"), str(tmp / "out.jsonl"))

    def over() -> bool:  # asked again and again
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


def _path() -> str:
    """The import path of this process, for one that knows nothing of what was added to it."""
    import sys

    return os.pathsep.join(
        folder
        for folder in sys.path
        if folder and os.path.isdir(folder) and "site-packages" not in folder
    )


def transfer_of(
    target: Target | None, tmp: Path, on_failure: str = "recompute"
) -> dict[str, Any] | None:
    """The fields of vLLM's KVTransferConfig for a connector."""
    if target is None or target.connector is None:
        return None
    found: dict[str, Any] = {
        "kv_connector": target.name,
        "kv_role": target.role or "kv_both",
        "kv_connector_extra_config": target.options(tmp, BLOCK_SIZE),
        "kv_load_failure_policy": on_failure,
    }
    return found | ({"kv_connector_module_path": target.module} if target.module else {})


def resolved(plays: list[Play], plain: Outcome) -> list[Play]:
    """The phases with the prompts that the run without connector had: whatever a connector does to an answer, all that is asked later is
    the same.
    """
    known = plain.answers
    return [
        play.model_copy(
            update={
                "asks": [
                    a.model_copy(update={"tokens": known[a.id].prompt, "after": None})
                    if a.id in known
                    else a
                    for a in play.asks
                ]
            }
        )
        for play in plays
    ]


def _last_words(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.is_file() else []
    return "\n".join(line for line in lines if line.strip())[-4000:]
