# SPDX-License-Identifier: Apache-2.0
"""Runs, or the first part of a case, in another process.

The reasons: the case restarts in a new process, or in a new interpreter; the run must have another
hash seed; the run forks, and this process has threads that make forking unsafe, or a CUDA device,
which a forked process cannot use; the run loaded KV of other runs, which this process may hold; or
it pauses before it restarts its process.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from kvconform.config.settings import HASH_SEED
from kvconform.contract.events import lifecycle
from kvconform.contract.steps import forks, restarts_process
from kvconform.files import scratch_root
from kvconform.process import alive, scratch, watchdog, wire
from kvconform.process.clock import monotonic
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

OTHER_SEED = "4242"
RESEEDED = "KVCONFORM_RESEEDED"
"""Environment variable: the socket of a process that has OTHER_SEED and forks for runs.

kvconform.session.gateways starts it. Runs that may have any seed use it, too. Without it, or if it
is gone, each such run has a new interpreter, which imports vLLM.
"""
LIMIT = 120.0
HOOKS = 6
"""Time limit of a run in a fresh interpreter: LIMIT seconds, or HOOKS hooks at their limit.

The larger one applies. One such run ends before the limit of its case (watchdog.case_limit). If a
case makes several, they share that limit, and it may come first.
"""


class ElsewhereError(RuntimeError):
    """A failure of the other process; the text says which."""


def left_behind() -> list[str]:
    """Return the names of the threads that connectors have left in this process.

    Code in a forked process may wait for these threads, but they do not exist there. vLLM never
    starts a process like that.
    """
    threads = sorted(each.name for each in alive.threads_of_connectors())
    return threads + alive.native_threads_of_connectors()


def cannot_fork(steps: Sequence[Any], relation: str) -> bool:
    """Return whether a run would fork, and threads in this process make that unsafe.

    Such a run must begin in a fresh interpreter.
    """
    restart = process_restart(steps)
    forked = restart is not None and forks(steps[restart])
    return (forked or relation == "second-process") and bool(left_behind())


def process_restart(steps: Sequence[Any]) -> int | None:
    """Return the index of the step that restarts in another process or interpreter, or None."""
    for index, step in enumerate(steps):
        if restarts_process(step):
            return index
    return None


def needs_another_seed(variant: Variant) -> bool:
    """Return whether a run, or a part of it, is made with another hash seed, too."""
    steps = variant.case.steps
    restart = process_restart(steps)
    is_reseeded = restart is not None and not forks(steps[restart])
    return is_reseeded or "hash-seed" in variant.case.relations


@dataclass
class FirstPart:
    """What the first part of a case leaves for the second one: `left` is set when it has ended."""

    left: tuple[Progress, Registry] | None = None


class FirstPartEnded(Exception):
    """The run ended in the first process, and its trace is complete.

    `harness_error` is set if the harness was at fault, `lacks` if the run cannot be judged: what it
    lacked.
    """

    def __init__(self, harness_error: str | None, lacks: str | None) -> None:
        super().__init__("the run ended before the restart")
        self.harness_error = harness_error
        self.lacks = lacks

    def __reduce__(self) -> tuple[type[FirstPartEnded], tuple[str | None, str | None]]:
        return type(self), (self.harness_error, self.lacks)


Conclude = Callable[["Driver | None", BaseException], FirstPartEnded]


def run_first_part(
    create: Callable[[], Driver],
    steps: Sequence[Any],
    trace: Trace,
    conclude: Conclude,
    tmp: Path,
    killed_at: float | None = None,
) -> tuple[Progress, Registry]:
    """Run `steps` in a forked process, and take over its trace, contents and requests.

    The memory of the connector is lost with that process. With `killed_at`, the process ends in the
    midst of a save to files below `tmp` (kvconform.run.killer). If the run ends there,
    `conclude(driver, error)` completes its trace and returns the FirstPartEnded that is raised.
    ElsewhereError if the process dies.
    """
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    folder = scratch.make("elsewhere", scratch_root())
    note = folder / "note"

    def left(driver: Driver) -> bytes:
        return pickle.dumps((trace.events, trace.step, driver.state.progress, driver.registry))

    def child() -> None:
        driver = None
        dies_with_parent()
        watchdog.after_fork(note)

        def killed() -> None:
            assert driver is not None
            driver.engine.ranks.leader.worker.sample()  # its step has computed what was being saved
            trace.emit("engine.lifecycle", **lifecycle("killed"))
            # The successor's steps follow those that were scheduled already, too.
            trace.step = max([trace.step, *(flight.step for flight in driver.engine.queue)])
            theirs.send_bytes(left(driver))
            os._exit(0)

        try:
            try:
                driver = create()
                if killed_at is not None:
                    # Imported here, because it imports vLLM, which a controller does not.
                    from kvconform.run.killer import Killer

                    driver.killer = Killer(driver.engine.probe, tmp, killed_at, killed)
                driver.execute_part(steps)
                answer = left(driver)
            except (Exception, HookTimeout, SystemExit) as error:
                ended = conclude(driver, error)
                answer = pickle.dumps((trace.events, trace.step, ended, None))
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
    scratch.discard(folder)
    if last is not None:
        watchdog.die_like(last)
    if isinstance(answer, str):
        raise ElsewhereError(f"before the restart, in the first process: {answer}")
    events, step, progress, registry = answer
    trace.events[:], trace.step = events, step
    if isinstance(progress, FirstPartEnded):
        raise progress
    trace.emit("engine.lifecycle", **lifecycle("restart", pid=1))
    return progress, registry


def run_first_part_afresh(
    variant: Variant,
    target: Target,
    trace: Trace,
    *,
    seed: int,
    tmp: Path,
    relation: str,
    caps: dict[str, Any],
    promises: Promises | None,
    rests: bool,
    reseeded: bool,
) -> tuple[Progress, Registry]:
    """Run the steps before the restart in a fresh interpreter, as `run_first_part` does in a fork.

    `reseeded`: its hash seed is random or OTHER_SEED unless the target prescribes one. vLLM's block
    hashes are those of this process in any case.
    """
    job = _job(variant, target, seed, tmp, caps, relation, promises, rests)
    job["first_part"] = True
    hash_seed = os.environ.get(HASH_SEED)
    if hash_seed is not None:
        job["hash_seed"] = hash_seed
    without = (HASH_SEED,) if reseeded and not target.hash_seed else ()
    left = _answer(job, "before the restart, in the first interpreter,", {}, without=without)
    trace.events[:], trace.step, ended, part = pickle.loads(left)
    if part.left is None:
        raise ended
    trace.emit("engine.lifecycle", **lifecycle("restart", pid=1))
    return part.left  # type: ignore[no-any-return]


def run_elsewhere(
    variant: Variant,
    target: Target,
    *,
    seed: int,
    tmp: Path,
    caps: dict[str, Any] | None,
    relation: str = "hash-seed",
    promises: Promises | None = None,
    rests: bool = False,
) -> Run:
    """Make a run in a fresh interpreter; for relation `hash-seed` with another PYTHONHASHSEED.

    ElsewhereError if the interpreter fails or does not end in time.
    """
    from kvconform.run.records import Run

    reseeded = relation == "hash-seed"
    made_as = "connector" if reseeded else relation
    job = _job(variant, target, seed, tmp, caps, made_as, promises, rests)
    named = "under another hash seed" if reseeded else "in a fresh interpreter"
    answer = _answer(job, named, {HASH_SEED: OTHER_SEED} if reseeded else {})
    return Run.from_dict(json.loads(answer), variant, relation, caps or {})


def _job(
    variant: Variant,
    target: Target,
    seed: int,
    tmp: Path,
    caps: dict[str, Any] | None,
    relation: str,
    promises: Promises | None,
    rests: bool,
) -> dict[str, Any]:
    """Return the description of a run that kvconform.run.child reads."""
    return {
        "case": variant.case.model_dump(mode="json", by_alias=True, exclude_defaults=True),
        "axes": variant.axes,
        "target": asdict(target),
        "seed": seed,
        "tmp": str(tmp),
        "caps": caps,
        "path": sys.path,
        "relation": relation,
        "rests": rests,
        "declared": None if promises is None else promises.declared,
        "limit": watchdog.limit(),
        "first_part": False,
    }


def _answer(
    job: dict[str, Any], named: str, environment: dict[str, str], without: Sequence[str] = ()
) -> bytes:
    """Do a job in another interpreter and return what it wrote; ElsewhereError without an answer.

    `named` says in an error which run it is.
    """
    answer: bytes | None = None
    with scratch.temporary("elsewhere", scratch_root()) as folder:
        said, status = _interpreter(job, folder, environment, without)
        last = watchdog.read_note(folder / "note") if status == watchdog.EXIT_HANG else None
        with contextlib.suppress(OSError):
            answer = (folder / "answer").read_bytes()
    if last is not None:
        watchdog.die_like(last)
    if answer is None:
        if status is None:
            raise ElsewhereError(f"the run {named} did not end in time")
        lines = said.strip().splitlines()
        raise ElsewhereError(f"the run {named} failed: {lines[-1] if lines else status}")
    return answer


def _interpreter(
    job: dict[str, Any], folder: Path, environment: dict[str, str], without: Sequence[str]
) -> tuple[str, int | None]:
    """Do a job in another interpreter, which writes the file `answer` to `folder`.

    Its environment has `environment` in addition, and not the variables `without`. Returns its
    standard error and its exit status, which is None if it did not end in time. Ends all processes
    that it started. Its temporary files are in `folder`. Once `answer` is there, the exit status
    does not matter.
    """
    inherited = {name: value for name, value in os.environ.items() if name not in without}
    own = {**inherited, **environment, "TMPDIR": str(folder)}
    (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
    limit = max(LIMIT, HOOKS * watchdog.limit())
    with (folder / "errors").open("w+", encoding="utf-8", errors="replace") as errors:
        place = os.environ.get(RESEEDED)
        if place is not None and own.get(HASH_SEED, OTHER_SEED) == OTHER_SEED:
            with contextlib.suppress(OSError, EOFError):
                return _forked(place, folder, own, errors, limit)
        process = subprocess.Popen(
            [sys.executable, "-m", "kvconform.run.child", str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env=own,
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


def _forked(
    place: str, folder: Path, environment: dict[str, str], errors: IO[str], limit: float
) -> tuple[str, int | None]:
    """Do a job in a process that the one at the socket `place` forks, as `_interpreter` does.

    The limit includes the time that this one may still take to import vLLM. OSError or EOFError if
    it has ended, and nothing was done.
    """
    until = monotonic() + limit
    pid, status = None, None
    with socket.socket(socket.AF_UNIX) as connection, open(os.devnull, "r+b") as nothing:
        connection.connect(place)
        request = wire.request_of("run") | {"environment": environment, "folder": str(folder)}
        wire.send(connection, request, [nothing.fileno(), nothing.fileno(), errors.fileno()])
        try:
            connection.settimeout(limit)
            pid = int(wire.receive(connection)[0]["pid"])
            connection.settimeout(max(0.001, until - monotonic()))
            status = int(wire.receive(connection)[0]["exit"])
        except TimeoutError:
            pass
        except (OSError, EOFError):
            if pid is None:
                raise
            status = -signal.SIGKILL  # with the process that has forked it
        if pid is not None:
            with contextlib.suppress(OSError):
                os.killpg(pid, signal.SIGKILL)
    errors.seek(0)
    return errors.read(), status
