# SPDX-License-Identifier: Apache-2.0
"""Parts of a case, or whole runs, in another process: a restart in a new process, and the same run under another hash seed."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvconform.watchdog import HookTimeout

if TYPE_CHECKING:
    from kvconform.case import Variant
    from kvconform.driver import Driver
    from kvconform.progress import Progress
    from kvconform.provenance import Registry
    from kvconform.runner import Run
    from kvconform.target import Target
    from kvconform.trace import Trace

HASH_SEED = "4242"


class ElsewhereError(RuntimeError):
    """The other process failed; the text says how."""


def process_restart(steps: Sequence[Any]) -> int | None:
    """Index of the `restart: process` step, or None."""
    return next((i for i, step in enumerate(steps) if step.op == "restart" and step.arg == "process"), None)


class FirstPartEnded(Exception):
    """The run ended in the first process: its trace is complete. `harness_error` is set if the fault was ours."""

    def __init__(self, harness_error: str | None) -> None:
        super().__init__("the run ended before the restart")
        self.harness_error = harness_error


Conclude = Callable[["Driver | None", BaseException], "str | None"]


def run_first_part(
    create: Callable[[], Driver], steps: Sequence[Any], trace: Trace, conclude: Conclude
) -> tuple[Progress, Registry]:  # fmt: skip
    """Run `steps` in a forked process and take over what it knows: trace, contents, requests. The connector's memory stays behind there.

    `conclude(driver, error)` finishes the trace of a run that ends there and returns the harness's error; then FirstPartEnded is raised.
    """
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()

    def child() -> None:
        driver = None
        try:
            try:
                driver = create()
                driver.execute_part(steps)
                answer = pickle.dumps((trace.events, trace.step, driver.progress, driver.registry))
            except (Exception, HookTimeout, SystemExit) as error:
                fault = conclude(driver, error)
                answer = pickle.dumps((trace.events, trace.step, FirstPartEnded(fault), None))
        except BaseException as error:
            answer = pickle.dumps(f"{type(error).__name__}: {error}")
        theirs.send_bytes(answer)
        os._exit(0)

    process = context.Process(target=child, daemon=True)
    process.start()
    theirs.close()
    try:
        answer = pickle.loads(ours.recv_bytes())
    except EOFError:
        answer = "the process died"
    process.join(10)
    if isinstance(answer, str):
        raise ElsewhereError(f"before the restart, in the first process: {answer}")
    events, step, progress, registry = answer
    trace.events[:], trace.step = events, step
    if isinstance(progress, FirstPartEnded):
        raise progress
    trace.emit("engine.lifecycle", op="restart", pid=1, error=None)
    return progress, registry


def run_elsewhere(variant: Variant, target: Target, *, seed: int, tmp: Path, caps: dict[str, Any] | None) -> Run:
    """The same run in a fresh interpreter with another PYTHONHASHSEED."""
    from kvconform.runner import Run

    job = {
        "case": variant.case.model_dump(mode="json", by_alias=True, exclude_defaults=True), "axes": variant.axes, "target": asdict(target),
        "seed": seed, "tmp": str(tmp), "caps": caps, "path": sys.path,
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "kvconform.elsewhere"], input=json.dumps(job), capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHONHASHSEED": HASH_SEED},
    )  # fmt: skip
    answer = _answer(done.stdout)
    if answer is None:
        raise ElsewhereError(f"the run under another hash seed failed: {done.stderr.strip().splitlines()[-1:] or done.returncode}")
    return Run(variant, "hash-seed", answer["trace"], caps or {}, frozenset(answer["channels"]), answer["harness_error"])


def _answer(text: str) -> dict[str, Any] | None:
    """What the other interpreter found, if it said so. How it ended afterwards does not matter: native libraries may take it down then."""
    try:
        found = json.loads(text.splitlines()[-1])
    except (IndexError, ValueError):
        return None
    return found if isinstance(found, dict) and "trace" in found else None


def main() -> None:
    """Entry of the other interpreter: a job as JSON on stdin, the run as one line of JSON on stdout."""
    job = json.load(sys.stdin)
    sys.path[:] = [*job["path"], *(folder for folder in sys.path if folder not in job["path"])]  # where the connector's package is
    from kvconform.case import Case, Variant
    from kvconform.runner import run_variant
    from kvconform.target import Target

    case = Case.model_validate(job["case"], strict=False)
    run = run_variant(Variant(case, **job["axes"]), Target(**job["target"]), seed=job["seed"], tmp=Path(job["tmp"]), caps=job["caps"])
    print()
    print(json.dumps({"trace": run.trace, "channels": sorted(run.channels), "harness_error": run.harness_error}), flush=True)


if __name__ == "__main__":
    main()
