# SPDX-License-Identifier: Apache-2.0
"""Parts of a case, or whole runs, in another process: a restart in a new process, and the same run under another hash seed."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvconform import watchdog
from kvconform.guard import dies_with_parent
from kvconform.watchdog import HookTimeout

if TYPE_CHECKING:
    from kvconform.case import Variant
    from kvconform.driver import Driver
    from kvconform.progress import Progress
    from kvconform.promise import Promises
    from kvconform.provenance import Registry
    from kvconform.runner import Run
    from kvconform.target import Target
    from kvconform.trace import Trace

HASH_SEED = "4242"
_BEFORE = frozenset(threading.enumerate())
"""Threads that were there before any connector was."""


LIMIT = 120.0
"""Seconds for a run in a fresh interpreter. Less than a case may take."""
_ANSWERED = ("trace", "harness_error", "unmet", "traceback", "lacks")
"""What is told of a run, beside its channels."""


class ElsewhereError(RuntimeError):
    """The other process failed; the text says how."""


def left_behind() -> list[str]:
    """Names of the threads that connectors have left in this process. A forked one would have what waits for them, and not the threads;
    vLLM's processes never begin like that."""
    return sorted(each.name for each in threading.enumerate() if each not in _BEFORE and each.name != watchdog.THREAD)


def cannot_fork(steps: Sequence[Any], relation: str) -> bool:
    """Whether a run has to begin in a fresh interpreter, because it forks and this process is not one to fork."""
    return (relation == "second-process" or process_restart(steps) is not None) and bool(left_behind())


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
        dies_with_parent()
        watchdog.after_fork()
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


def run_elsewhere(
    variant: Variant, target: Target, *, seed: int, tmp: Path, caps: dict[str, Any] | None, relation: str = "hash-seed",
    promises: Promises | None = None,
) -> Run:  # fmt: skip
    """The same run in a fresh interpreter; for relation `hash-seed` with another PYTHONHASHSEED. ElsewhereError if it gives no answer."""
    from kvconform.runner import Run

    job = {
        "case": variant.case.model_dump(mode="json", by_alias=True, exclude_defaults=True), "axes": variant.axes, "target": asdict(target),
        "seed": seed, "tmp": str(tmp), "caps": caps, "path": sys.path, "relation": "connector" if relation == "hash-seed" else relation,
        "declared": None if promises is None else promises.declared, "limit": watchdog.limit(),
    }  # fmt: skip
    named = "under another hash seed" if relation == "hash-seed" else "in a fresh interpreter"
    env = {**os.environ, "PYTHONHASHSEED": HASH_SEED} if relation == "hash-seed" else None
    command = [sys.executable, "-m", "kvconform.elsewhere"]
    try:
        done = subprocess.run(command, input=json.dumps(job), capture_output=True, text=True, timeout=LIMIT, env=env)
    except subprocess.TimeoutExpired:
        raise ElsewhereError(f"the run {named} gave no answer within {LIMIT:g} s") from None
    answer = _answer(done.stdout)
    if answer is None:
        raise ElsewhereError(f"the run {named} failed: {done.stderr.strip().splitlines()[-1:] or done.returncode}")
    channels = frozenset(answer.pop("channels"))
    return Run(variant, relation, caps=caps or {}, channels=channels, **answer)


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
    from kvconform.infer import promises_of
    from kvconform.runner import run_variant
    from kvconform.target import Target

    variant = Variant(Case.model_validate(job["case"], strict=False), **job["axes"])
    target, tmp = Target(**job["target"]), Path(job["tmp"])
    promises = None if job["declared"] is None else promises_of(target, tmp / "calibration", job["caps"], declared=job["declared"])
    watchdog.start(job["limit"])
    run = run_variant(
        variant, target, seed=job["seed"], tmp=tmp, relation=job["relation"], caps=job["caps"], promises=promises, may_fork=True
    )
    watchdog.stop()
    print()
    print(json.dumps({name: getattr(run, name) for name in _ANSWERED} | {"channels": sorted(run.channels)}), flush=True)


if __name__ == "__main__":
    main()
