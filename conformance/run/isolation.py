# SPDX-License-Identifier: Apache-2.0
"""Parts of a case, or whole runs, in another process: a restart in a new process, the same run under another hash seed, and runs that
would fork a process that is not one to fork.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvconform.files import scratch_root
from kvconform.process import watchdog
from kvconform.process.supervisor import dies_with_parent
from kvconform.process.watchdog import HookTimeout

if TYPE_CHECKING:
    from kvconform.config.target import Target
    from kvconform.contract.case import Variant
    from kvconform.contract.trace import Trace
    from kvconform.kv.provenance import Registry
    from kvconform.run.driver import Driver
    from kvconform.run.promises import Promises
    from kvconform.run.records import Progress, Run

HASH_SEED = "4242"
_BEFORE = frozenset(threading.enumerate())
"""Threads that were there before any connector was."""
LIMIT, HOOKS = 120.0, 6
"""Seconds for a run in a fresh interpreter, or as many hooks at their limit: less than a case may take (watchdog.case_limit)."""


class ElsewhereError(RuntimeError):
    """The other process failed; the text says how."""


def left_behind() -> list[str]:
    """Names of the threads that connectors have left in this process. A forked one would have what waits for them, and not the threads;
    vLLM's processes never begin like that. Threads of native libraries are not seen.
    """
    known = {*_BEFORE, threading.main_thread()}  # of a fork: the one that forked
    return sorted(
        each.name
        for each in threading.enumerate()
        if each not in known and each.name != watchdog.THREAD
    )


def cannot_fork(steps: Sequence[Any], relation: str) -> bool:
    """Whether a run has to begin in a fresh interpreter, because it forks and this process is not one to fork."""
    return (relation == "second-process" or process_restart(steps) is not None) and bool(
        left_behind()
    )


def process_restart(steps: Sequence[Any]) -> int | None:
    """Index of the `restart: process` step, or None."""
    return next(
        (i for i, step in enumerate(steps) if step.op == "restart" and step.arg == "process"), None
    )


class FirstPartEnded(Exception):
    """The run ended in the first process: its trace is complete. `harness_error` is set if the fault was ours."""

    def __init__(self, harness_error: str | None) -> None:
        super().__init__("the run ended before the restart")
        self.harness_error = harness_error


Conclude = Callable[["Driver | None", BaseException], "str | None"]


def run_first_part(
    create: Callable[[], Driver], steps: Sequence[Any], trace: Trace, conclude: Conclude
) -> tuple[Progress, Registry]:
    """Run `steps` in a forked process and take over what it knows: trace, contents, requests. The connector's memory stays behind there.

    `conclude(driver, error)` finishes the trace of a run that ends there and returns the harness's error; then FirstPartEnded is raised.
    """
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    note = Path(tempfile.mkdtemp(prefix="kvconform-", dir=scratch_root())) / "note"

    def child() -> None:
        driver = None
        dies_with_parent()
        watchdog.after_fork(note)
        try:
            try:
                driver = create()
                driver.execute_part(steps)
                answer = pickle.dumps(
                    (trace.events, trace.step, driver.state.progress, driver.registry)
                )
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
    last = watchdog.read_note(note) if process.exitcode == watchdog.EXIT_HANG else None
    shutil.rmtree(note.parent, ignore_errors=True)
    if last is not None:
        watchdog.die_like(last)
    if isinstance(answer, str):
        raise ElsewhereError(f"before the restart, in the first process: {answer}")
    events, step, progress, registry = answer
    trace.events[:], trace.step = events, step
    if isinstance(progress, FirstPartEnded):
        raise progress
    trace.emit("engine.lifecycle", op="restart", pid=1, error=None)
    return progress, registry


def run_elsewhere(
    variant: Variant,
    target: Target,
    *,
    seed: int,
    tmp: Path,
    caps: dict[str, Any] | None,
    relation: str = "hash-seed",
    promises: Promises | None = None,
) -> Run:
    """The same run in a fresh interpreter; for relation `hash-seed` with another PYTHONHASHSEED. ElsewhereError if it gives no answer."""
    from kvconform.run.records import Run

    job = {
        "case": variant.case.model_dump(mode="json", by_alias=True, exclude_defaults=True),
        "axes": variant.axes,
        "target": asdict(target),
        "seed": seed,
        "tmp": str(tmp),
        "caps": caps,
        "path": sys.path,
        "relation": "connector" if relation == "hash-seed" else relation,
        "declared": None if promises is None else promises.declared,
        "limit": watchdog.limit(),
    }
    named = "under another hash seed" if relation == "hash-seed" else "in a fresh interpreter"
    seeded = {"PYTHONHASHSEED": HASH_SEED} if relation == "hash-seed" else {}
    answer: dict[str, Any] | None = None
    with tempfile.TemporaryDirectory(prefix="kvconform-", dir=scratch_root()) as name:
        folder = Path(name)
        said, status = _interpreter(job, folder, seeded)
        last = watchdog.read_note(folder / "note") if status == watchdog.EXIT_HANG else None
        with contextlib.suppress(OSError, ValueError):
            answer = json.loads((folder / "answer.json").read_text(encoding="utf-8"))
    if last is not None:
        watchdog.die_like(last)
    if answer is None:
        why = (
            "gave no answer in time"
            if status is None
            else f"failed: {said.strip().splitlines()[-1:] or status}"
        )
        raise ElsewhereError(f"the run {named} {why}")
    return Run.from_dict(answer, variant, relation, caps or {})


def _interpreter(
    job: dict[str, Any], folder: Path, environment: dict[str, str]
) -> tuple[str, int | None]:
    """Do a job in another interpreter, which writes `answer.json` to `folder`: (what it printed as errors, its exit status or None if it
    did not end in time). Nothing that it started is left, its temporary files are in `folder`, and how it ends once it has answered does
    not matter.
    """
    (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
    limit = max(LIMIT, HOOKS * watchdog.limit())
    with (folder / "errors").open("w+", encoding="utf-8", errors="replace") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "kvconform.run.child", str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env={**os.environ, **environment, "TMPDIR": str(folder)},
            start_new_session=True,
        )
        try:
            status: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        errors.seek(0)
        return errors.read(), status
