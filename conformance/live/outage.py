# SPDX-License-Identifier: Apache-2.0
"""Faults of back ends: the child, which runs the engine, asks for them when their moment has come; the parent, whose servers they are,
carries them out.

They talk through a directory. The child writes `<n>.ask` and waits; the parent, which looks every quarter of a second, writes `<n>.done`.
So a fault strikes between two steps, or at a place within a step, and not by the clock.


Faults of back ends, in the process of the engine: finds their moment, asks for them, and writes down that they struck.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvconform.contract.scenario import Fault, numbered
from kvconform.errors import KvconformError
from kvconform.files import replace
from kvconform.live.job import Play
from kvconform.process.servers import Servers

LIMIT = 180.0
"""Seconds that the parent may take: a server that is restarted has to become ready."""
POLL = 0.02


class Unanswered(Exception):
    """The parent did not carry a fault out."""


class Desk:
    """The child's end."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.count = folder, 0

    def ask(self, fault: Fault, limit: float = LIMIT) -> None:
        """Have it carried out, and wait for that (or, if the server first stands still, for the beginning). Unanswered if it is not."""
        self.count += 1
        replace(self.folder / f"{self.count}.ask", fault.model_dump_json())
        answer, until = self.folder / f"{self.count}.done", time.monotonic() + limit
        while not answer.is_file():
            if time.monotonic() > until:
                raise Unanswered(f"nobody carried out fault {fault.do!r} within {limit:g} s")
            time.sleep(POLL)
        problem = json.loads(answer.read_text(encoding="utf-8"))["problem"]
        if problem:
            raise Unanswered(problem)


class Attendant:
    """The parent's end: what is asked for in `folder` is done to all of `servers`. `look` has to be called now and then."""

    def __init__(self, folder: Path, servers: Sequence[Servers]) -> None:
        self.folder, self.servers = folder, list(servers)
        self.problems: list[str] = []
        self._served = 0
        self._later: tuple[float, Fault] | None = None

    def look(self) -> None:
        """Do what was asked for, and what is due now. What cannot be done is in `problems`, and told to the child if it still waits."""
        if self._later is not None and time.monotonic() >= self._later[0]:
            self._complete()
        asked = self.folder / f"{self._served + 1}.ask"
        if not asked.is_file():
            return
        while (
            self._later is not None
        ):  # the phases were faster than the server's standstill: one after the other
            self._complete(wait=True)
        fault = Fault.model_validate_json(asked.read_text(encoding="utf-8"))
        self._served += 1
        before = len(self.problems)
        if fault.still:
            self._each(lambda servers, name: servers.freeze(name))
            self._later = time.monotonic() + fault.still, fault
        else:
            self._do(fault)
        problem = "; ".join(self.problems[before:]) or None
        replace(self.folder / f"{self._served}.done", json.dumps({"problem": problem}))

    def close(self) -> None:
        """The run is over: whatever stands still goes on."""
        self._later = None
        self._each(lambda servers, name: servers.thaw(name))

    def _complete(self, wait: bool = False) -> None:
        assert self._later is not None
        when, fault = self._later
        if wait:
            time.sleep(max(0.0, when - time.monotonic()))
        self._later = None
        self._do(fault)

    def _do(self, fault: Fault) -> None:
        if fault.do in ("pause", "clear"):  # one that is to forget has to hear of it
            self._each(lambda servers, name: servers.thaw(name))
        if fault.do == "kill":
            self._each(lambda servers, name: servers.kill(name))
        elif fault.do == "restart":
            self._each(lambda servers, name: servers.restart(name))
        elif fault.do == "clear":
            self._each(lambda servers, name: servers.all[name].lose())

    def _each(self, deed: Callable[[Servers, str], Any]) -> None:
        for servers in self.servers:
            for name in servers.all:
                try:
                    deed(servers, name)
                except KvconformError as error:
                    self.problems.append(error.message)


def seconds(faults: Sequence[Fault], servers: Sequence[Servers]) -> float:
    """How much longer a run may take for these faults: standstills, and servers that have to become ready again."""
    ready = sum(server.spec.timeout for each in servers for server in each.all.values())
    return sum(fault.still + (ready if fault.do == "restart" else 5.0) for fault in faults)


HOOKS = {"load": "start_load_kv", "save": "wait_for_save"}


class Striking:
    """The faults of the phase that is being played, in their order. Without a `desk` there are none."""

    def __init__(self, desk: str | None) -> None:
        self._desk = Desk(Path(desk)) if desk is not None else None
        self._faults: list[tuple[int, Fault]] = []
        self._step = self._running = 0
        self._listens = False

    def phase(self, play: Play) -> None:
        """A phase begins. What is left of the one before never strikes."""
        self._faults = numbered(play.faults) if self._desk is not None else []
        if self._faults and not self._listens:
            self._listen()

    def step(self, step: int, running: int) -> bool:
        """Before step `step` of the phase (the first is 0), in which so many requests run: strike if it is time. Says whether it was."""
        self._step, self._running = step, running
        struck = False
        while self._faults and self._faults[0][1].before is None and self._faults[0][1].at <= step:
            self._strike()
            struck = True
        return struck

    def _listen(self) -> None:
        """Be told of hooks from now on, before they are called."""
        recorder = _recorder()
        if recorder is not None:
            for kind, hook in HOOKS.items():
                recorder.probe.on(hook, before=lambda _, kind=kind: self._hook(kind))
            self._listens = True

    def _hook(self, kind: str) -> None:
        if (
            not self._faults
            or self._faults[0][1].before != kind
            or self._faults[0][1].at > self._step
        ):
            return
        if kind == "save" or _loading():
            self._strike()

    def _strike(self) -> None:
        """Note it, and have it carried out. Unanswered if nobody does."""
        number, fault = self._faults.pop(0)
        recorder = _recorder()
        if recorder is not None:
            recorder.trace.emit(
                "live.fault",
                phase=fault.phase,
                number=number,
                do=fault.do,
                still=fault.still,
                before=fault.before,
                running=self._running,
                loading=_loading(),
            )
            if recorder.scheduler is not None:
                recorder.scheduler.observer.outage = True
        assert self._desk is not None
        self._desk.ask(fault)


def _recorder() -> Any:
    """The probe's recorder of this process, None if nothing is watched."""
    from kvconform.live import probe

    return probe.recorder()


def _loading() -> int:
    """Loads that the engine has granted and does not rely on yet."""
    recorder = _recorder()
    return (
        0
        if recorder is None or recorder.scheduler is None
        else len(recorder.scheduler.loads.open_grants())
    )
