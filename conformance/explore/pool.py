# SPDX-License-Identifier: Apache-2.0
"""Worker processes that run workloads, and the pool that replaces those that die.

A worker has the connector, its servers and a watchdog, and runs one workload after the other.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from kvconform.config.settings import Settings
from kvconform.config.target import Target
from kvconform.contract.loader import Spec, load_spec
from kvconform.errors import EnvironmentProblem, KvconformError, UsageError
from kvconform.explore.outcome import DIED, Failure, Outcome, outcome
from kvconform.explore.workload import Workload
from kvconform.judge.foreign import ForeignKV
from kvconform.process import watchdog
from kvconform.process.forking import forked_after_import
from kvconform.session.worker import START_LIMIT, settle_in

RESTARTS = 200
"""Deaths of workers after which a campaign gives up."""
STOP_LIMIT = 60.0
"""Seconds that an idle worker has to stop its servers and end."""


def serve(connection: Connection, settings: Settings, scratch: Path, name: str) -> None:
    """Run the jobs (data, seed, requirements or None) from a connection; the body of a worker.

    Replies to each with an outcome's dict. Ends when None arrives or the other end is closed.
    """
    servers, settings = settle_in(settings, scratch, name, scratch)
    watchdog.start(settings.hook_timeout, scratch / f"{name}.note")
    try:
        servers.up()
        _serve(connection, settings, scratch / name)
    except KvconformError as error:
        connection.send({"abort": (error.code, error.message)})
    except (EOFError, BrokenPipeError, KeyboardInterrupt):
        pass
    finally:
        watchdog.stop()
        servers.down()


def _serve(connection: Connection, settings: Settings, tmp: Path) -> None:
    with watchdog.case("start", START_LIMIT):
        from kvconform.run import smoke

        target = smoke.target_of(settings)
        smoke.check(target, tmp, START_LIMIT, engine=settings.engine)
    spec = load_spec()
    connection.send({"ready": True})
    number = 0
    while (job := connection.recv()) is not None:
        number += 1
        limit = watchdog.case_limit(settings.hook_timeout)
        connection.send(_outcome(job, target, spec, tmp / str(number), limit).to_dict())


def _outcome(
    job: tuple[dict[str, Any], int, list[str] | None],
    target: Target,
    spec: Spec,
    tmp: Path,
    limit: float,
) -> Outcome:
    data, seed, requirements = job
    try:
        with watchdog.case(data["id"], limit):
            return outcome(Workload(data, seed), target, spec, tmp, requirements=requirements)
    except ForeignKV:
        raise  # it would be found with other workloads, too
    # The workload is not a case, or the harness is at fault.
    except (Exception, SystemExit, watchdog.HookTimeout) as error:
        return Outcome(error=f"{type(error).__name__}: {error}".splitlines()[0])


@dataclass
class _Worker:
    process: Any
    connection: Connection
    name: str
    ready: bool = False
    job: tuple[int, Workload] | None = None


class Pool:
    """`count` worker processes; a context manager that ends them and what they started.

    `end`: the time, by time.monotonic, at which jobs that still run are given up.
    """

    def __init__(
        self, settings: Settings, scratch: Path, count: int, end: float | None = None
    ) -> None:
        self.settings, self.scratch, self.count = settings, scratch, count
        self.end = end
        self.deaths = 0
        # A variable may change what importing vLLM does, and a GPU is not used by forked processes.
        apart = bool(settings.env) or settings.device == "cuda"
        self._context = multiprocessing.get_context("spawn") if apart else forked_after_import()
        self._workers: list[_Worker] = []
        self._started = 0

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *exception: object) -> None:
        for worker in self._workers:
            if worker.process.is_alive() and worker.job is None:
                with contextlib.suppress(OSError):
                    worker.connection.send(None)
        for worker in self._workers:
            worker.process.join(STOP_LIMIT if worker.job is None and worker.ready else 0)
            if worker.process.is_alive():
                worker.process.terminate()
                worker.process.join(10)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
            worker.connection.close()
        self._workers.clear()

    @property
    def over(self) -> bool:
        """Whether the time is over."""
        return self.end is not None and time.monotonic() >= self.end

    def outcomes(
        self, workloads: Iterable[Workload], requirements: list[str] | None = None
    ) -> Iterator[tuple[Workload, Outcome]]:
        """Yield every workload with its outcome, in order, whatever the number of processes.

        When the time is over, workloads that still run have no outcome, and none is started. Raises
        the error with which a worker failed to start, and EnvironmentProblem after RESTARTS deaths.
        """
        source = enumerate(workloads)
        waiting: dict[int, tuple[Workload, Outcome]] = {}
        pending = 0
        following = 0
        done = False
        while (not done or pending) and not self.over:
            while len(self._workers) < self.count:
                self._workers.append(self._start())
            for worker in self._workers:
                if worker.ready and worker.job is None and not done:
                    job = next(source, None)
                    if job is None:
                        done = True
                        break
                    worker.job = job
                    pending += 1
                    worker.connection.send((job[1].data, job[1].seed, requirements))
            if done and not pending:
                break
            for worker in self._readable():
                found = self._take(worker)
                if found is not None and worker.job is not None:
                    number, workload = worker.job
                    worker.job = None
                    pending -= 1
                    waiting[number] = workload, found
            while following in waiting:
                yield waiting.pop(following)
                following += 1
        for number in sorted(waiting):  # those before them were given up
            yield waiting[number]

    def _start(self) -> _Worker:
        self._started += 1
        name = f"worker{self._started}"
        ours, theirs = self._context.Pipe()
        process = self._context.Process(
            target=serve, args=(theirs, self.settings, self.scratch, name), name=name
        )
        process.start()
        theirs.close()
        return _Worker(process, ours, name)

    def _readable(self) -> list[_Worker]:
        """Wait until workers have sent something or died, or the time is over; return them."""
        ends: dict[Any, _Worker] = {}
        for worker in self._workers:
            ends[worker.connection] = worker
            ends[worker.process.sentinel] = worker
        left = None if self.end is None else max(0.0, self.end - time.monotonic())
        ready = multiprocessing.connection.wait(list(ends), left)
        return list({id(ends[each]): ends[each] for each in ready}.values())

    def _take(self, worker: _Worker) -> Outcome | None:
        """Read a worker's message; return the outcome of its job if it is one.

        A dead worker is removed; its outcome is a failure `process.died`. Raises the error with
        which the worker failed to start.
        """
        try:
            if worker.connection.poll():
                message = worker.connection.recv()
                if "abort" in message:
                    code, sentence = message["abort"]
                    raise (UsageError if code == UsageError.code else EnvironmentProblem)(sentence)
                if "ready" in message:
                    worker.ready = True
                    return None
                return Outcome.from_dict(message)
            if worker.process.is_alive():
                return None
        except (EOFError, OSError):
            pass
        return self._died(worker)

    def _log(self, worker: _Worker) -> str:
        """Return the end of what the worker printed."""
        text = (self.scratch / f"{worker.name}.log").read_text(encoding="utf-8", errors="replace")
        return "\n".join(text.splitlines()[-12:])

    def _died(self, worker: _Worker) -> Outcome:
        """Remove a dead worker; return the failure of its job.

        EnvironmentProblem if it had no job, or after RESTARTS deaths.
        """
        worker.process.join()
        worker.connection.close()
        self._workers.remove(worker)
        self.deaths += 1
        code = worker.process.exitcode
        ended = f"(exit code {code}):\n{self._log(worker)}"
        if worker.job is None:
            raise EnvironmentProblem(f"a worker process ended outside of a workload {ended}")
        if self.deaths > RESTARTS:
            raise EnvironmentProblem(
                f"more than {RESTARTS} worker processes ended, the last {ended}"
            )
        note = watchdog.read_note(self.scratch / f"{worker.name}.note")
        hook = note.hook if note is not None else None
        how = (
            f"did not return within {note.limit:g} s"
            if note is not None and note.hung
            else f"ended the process (exit code {code})"
        )
        found = Failure(
            DIED,
            f"{hook or 'something outside of a hook'} {how}",
            hook=hook,
            step=note.step if note is not None else None,
        )
        return Outcome(failures=[found], reached=[])
