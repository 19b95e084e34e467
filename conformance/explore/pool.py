# SPDX-License-Identifier: Apache-2.0
"""Worker processes for workloads: as many as asked for, replaced when they die."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from kvconform import watchdog
from kvconform.errors import EnvironmentProblem, UsageError
from kvconform.explore.outcome import DIED, Failure, Outcome
from kvconform.explore.worker import serve
from kvconform.explore.workload import Workload
from kvconform.settings import Settings

RESTARTS = 200
"""Deaths after which a campaign gives up."""
STOP_LIMIT = 60.0
"""Seconds that an idle worker has to stop its servers and end."""


@dataclass
class _Worker:
    process: Any
    connection: Connection
    name: str
    ready: bool = False
    job: tuple[int, Workload] | None = None


class Pool:
    """A context manager; leaving it ends the processes and what they started."""

    def __init__(self, settings: Settings, scratch: Path, count: int) -> None:
        self.settings, self.scratch, self.count = settings, scratch, count
        self.deaths = 0
        self._context = multiprocessing.get_context("spawn")
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

    def outcomes(self, workloads: Iterable[Workload], requirements: list[str] | None = None) -> Iterator[tuple[Workload, Outcome]]:
        """Every workload with what it came to, in the order of the workloads, whatever the number of processes. Raises what a worker could
        not start with, and EnvironmentProblem after too many deaths."""
        source = enumerate(workloads)
        waiting: dict[int, tuple[Workload, Outcome]] = {}
        pending, following = 0, 0
        done = False
        while not done or pending:
            while len(self._workers) < self.count:
                self._workers.append(self._start())
            for worker in self._workers:
                if worker.ready and worker.job is None and not done:
                    job = next(source, None)
                    if job is None:
                        done = True
                        break
                    worker.job, pending = job, pending + 1
                    worker.connection.send((job[1].data, job[1].seed, requirements))
            if done and not pending:
                break
            for worker in self._answering():
                found = self._take(worker)
                if found is not None and worker.job is not None:
                    number, workload = worker.job
                    worker.job, pending = None, pending - 1
                    waiting[number] = workload, found
            while following in waiting:
                yield waiting.pop(following)
                following += 1

    def _start(self) -> _Worker:
        self._started += 1
        name = f"worker{self._started}"
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=serve, args=(theirs, self.settings, self.scratch, name), name=name)
        process.start()
        theirs.close()
        return _Worker(process, ours, name)

    def _answering(self) -> list[_Worker]:
        ends: dict[Any, _Worker] = {}
        for worker in self._workers:
            ends[worker.connection] = worker
            ends[worker.process.sentinel] = worker
        ready = multiprocessing.connection.wait(list(ends))
        return list({id(ends[each]): ends[each] for each in ready}.values())

    def _take(self, worker: _Worker) -> Outcome | None:
        """What a worker has to say; an outcome if it is about its job. A dead one is taken out, and says how it died."""
        try:
            if worker.connection.poll():
                said = worker.connection.recv()
                if "abort" in said:
                    code, message = said["abort"]
                    raise (UsageError if code == UsageError.code else EnvironmentProblem)(message)
                if "ready" in said:
                    worker.ready = True
                    return None
                return Outcome.from_dict(said)
            if worker.process.is_alive():
                return None
        except (EOFError, OSError):
            pass
        return self._died(worker)

    def _log(self, worker: _Worker) -> str:
        """The end of what the process printed."""
        text = (self.scratch / f"{worker.name}.log").read_text(encoding="utf-8", errors="replace")
        return "\n".join(text.splitlines()[-12:])

    def _died(self, worker: _Worker) -> Outcome | None:
        worker.process.join()
        worker.connection.close()
        self._workers.remove(worker)
        self.deaths += 1
        code = worker.process.exitcode
        if worker.job is None or self.deaths > RESTARTS:
            raise EnvironmentProblem(f"a worker process ended before it could run anything (exit code {code}):\n{self._log(worker)}")
        note = watchdog.read_note(self.scratch / f"{worker.name}.note")
        hook = note.hook if note is not None else None
        how = f"did not return within {note.limit:g} s" if note is not None and note.hung else f"ended the process (exit code {code})"
        found = Failure(DIED, f"{hook or 'something outside of a hook'} {how}", hook=hook, step=note.step if note is not None else None)
        return Outcome(failures=[found], reached=[])
