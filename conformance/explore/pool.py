# SPDX-License-Identifier: Apache-2.0
"""Worker processes for workloads: as many as asked for, replaced when they die.

The process that runs workloads: it has the connector, its servers and a watchdog, and takes one workload after the other.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvconform.config.settings import Settings
from kvconform.config.target import Target
from kvconform.contract.loader import Spec, load_spec
from kvconform.errors import EnvironmentProblem, KvconformError, UsageError
from kvconform.explore.outcome import DIED, Failure, Outcome
from kvconform.explore.workload import Workload
from kvconform.process import watchdog
from kvconform.session.worker import settle_in

if TYPE_CHECKING:
    from kvconform.explore.outcome import Outcome

START_LIMIT = 300.0
"""Seconds for imports, servers and the connector's first start."""


def serve(connection: Connection, settings: Settings, scratch: Path, name: str) -> None:
    """Answer (data, seed, requirements or None) with an outcome's dict, until None comes or the other end is gone."""
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
        from kvconform.observe.probe import Patch
        from kvconform.run import smoke

        target = smoke.target_of(settings)
        smoke.check(target, tmp, START_LIMIT, engine=settings.engine)
    spec = load_spec()
    connection.send({"ready": True})
    with Patch.parking():
        number = 0
        while (job := connection.recv()) is not None:
            number += 1
            connection.send(
                _outcome(
                    job, target, spec, tmp / str(number), watchdog.case_limit(settings.hook_timeout)
                ).to_dict()
            )


def _outcome(
    job: tuple[dict[str, Any], int, list[str] | None],
    target: Target,
    spec: Spec,
    tmp: Path,
    limit: float,
) -> Outcome:
    from kvconform.explore.outcome import Outcome, outcome

    data, seed, requirements = job
    try:
        with watchdog.case(data["id"], limit):
            return outcome(Workload(data, seed), target, spec, tmp, requirements=requirements)
    except (
        Exception,
        SystemExit,
        watchdog.HookTimeout,
    ) as error:  # a workload that is no case, or the harness's fault
        return Outcome(error=f"{type(error).__name__}: {error}".splitlines()[0])


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

    def outcomes(
        self, workloads: Iterable[Workload], requirements: list[str] | None = None
    ) -> Iterator[tuple[Workload, Outcome]]:
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
        process = self._context.Process(
            target=serve, args=(theirs, self.settings, self.scratch, name), name=name
        )
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
            raise EnvironmentProblem(
                f"a worker process ended before it could run anything (exit code {code}):\n{self._log(worker)}"
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
