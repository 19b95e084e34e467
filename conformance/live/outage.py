# SPDX-License-Identifier: Apache-2.0
"""Faults of a connector's servers or files: when they strike, and how they are carried out.

The child, which runs the engine, requests a fault when its moment has come; the parent, which
started the servers, carries it out. They communicate through a directory: the child writes
`<n>.ask` and waits; the parent, which looks every quarter of a second, writes `<n>.done`. So a
fault strikes between two steps or at a place within a step, and does not depend on the clock.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvconform.contract.scenario import Fault, numbered
from kvconform.errors import KvconformError
from kvconform.files import replace
from kvconform.live.job import Play
from kvconform.process.damaged import damage_files
from kvconform.process.servers import Servers

if TYPE_CHECKING:
    from kvconform.live.probe import Recorder
    from kvconform.observe.call import Call

LIMIT = 180.0
"""Seconds that the parent may take: a server that is restarted has to become ready."""
POLL = 0.02
"""Seconds between two looks of the child for the parent's reply."""
ANSWERS = 0.5
"""Seconds in which a server that goes on answers what it owes, before the next fault strikes."""


class Unanswered(Exception):
    """The parent did not carry a fault out."""


class Desk:
    """The child's end of the directory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.count = 0

    def ask(self, fault: Fault, limit: float = LIMIT) -> int:
        """Request a fault, and wait until it is carried out; return how many files it damaged.

        If the server first stands still, wait only for the beginning of that. Raises Unanswered if
        the parent does not reply within `limit` seconds, or could not do it.
        """
        self.count += 1
        replace(self.folder / f"{self.count}.ask", fault.model_dump_json())
        answer = self.folder / f"{self.count}.done"
        until = time.monotonic() + limit
        while not answer.is_file():
            if time.monotonic() > until:
                raise Unanswered(f"fault {fault.do!r} was not carried out within {limit:g} s")
            time.sleep(POLL)
        said = json.loads(answer.read_text(encoding="utf-8"))
        if said["problem"]:
            raise Unanswered(said["problem"])
        return int(said["files"])


class Attendant:
    """The parent's end: carries out the faults requested in `folder`.

    They are faults of all of `servers`, or of the files below `store`. The parent has to call
    `look` regularly.
    """

    def __init__(self, folder: Path, servers: Sequence[Servers], store: Path) -> None:
        self.folder = folder
        self.servers = list(servers)
        self.store = store
        self.problems: list[str] = []
        self._served = 0
        self._later: tuple[float, Fault] | None = None

    def look(self) -> None:
        """Carry out the fault that is requested, and the rest of an earlier one if it is due.

        Problems are added to `problems`, and reported to the child if it still waits.
        """
        if self._later is not None and time.monotonic() >= self._later[0]:
            self._complete()
        asked = self.folder / f"{self._served + 1}.ask"
        if not asked.is_file():
            return
        # The engine may reach the next fault while the server still stands still for this one.
        while self._later is not None:
            self._complete(wait=True)
            time.sleep(ANSWERS)
        fault = Fault.model_validate_json(asked.read_text(encoding="utf-8"))
        self._served += 1
        before = len(self.problems)
        files = 0
        if fault.files is not None:
            files = self._damage(fault.files)
        elif fault.still:
            self._each(lambda servers, name: servers.freeze(name))
            self._later = time.monotonic() + fault.still, fault
        else:
            self._do(fault)
        problem = "; ".join(self.problems[before:]) or None
        said = {"problem": problem, "files": files}
        replace(self.folder / f"{self._served}.done", json.dumps(said))

    def _damage(self, how: str) -> int:
        """Damage files, and values on servers; return their number."""
        counts = [damage_files(self.store, how)]
        self._each(lambda servers, name: counts.append(servers.all[name].damage(how)))
        return sum(counts)

    def close(self) -> None:
        """Let every server that stands still go on, at the end of the run."""
        self._later = None
        self._each(lambda servers, name: servers.thaw(name))

    def _complete(self, wait: bool = False) -> None:
        """Carry out the fault whose standstill is over; with `wait`, wait for that first."""
        assert self._later is not None
        when, fault = self._later
        if wait:
            time.sleep(max(0.0, when - time.monotonic()))
        self._later = None
        self._do(fault)

    def _do(self, fault: Fault) -> None:
        """Do to all servers what the fault says, apart from its standstill."""
        # A server that is to clear its store has to run to receive the request.
        if fault.do in ("pause", "clear"):
            self._each(lambda servers, name: servers.thaw(name))
        if fault.do == "kill":
            self._each(lambda servers, name: servers.kill(name))
        elif fault.do == "restart":
            self._each(lambda servers, name: servers.restart(name))
        elif fault.do == "clear":
            self._each(lambda servers, name: servers.all[name].lose())

    def _each(self, deed: Callable[[Servers, str], Any]) -> None:
        """Do something to every server, and note its problems."""
        for servers in self.servers:
            for name in servers.all:
                try:
                    deed(servers, name)
                except KvconformError as error:
                    self.problems.append(error.message)


def seconds(faults: Sequence[Fault], servers: Sequence[Servers]) -> float:
    """Return how much longer a run may take for these faults.

    Counts standstills, and the time that restarted servers take to become ready.
    """
    ready = sum(server.spec.timeout for each in servers for server in each.all.values())
    return sum(fault.still + (ready if fault.do == "restart" else 5.0) for fault in faults)


HOOKS = {"load": "start_load_kv", "save": "wait_for_save"}
"""The hook before which a fault with this `before` strikes."""


class Striking:
    """The faults of the phase that is being played, in their order. Without a `desk`, none."""

    def __init__(self, desk: str | None) -> None:
        self._desk = Desk(Path(desk)) if desk is not None else None
        self._faults: list[tuple[int, Fault]] = []
        self._step = 0
        self._running = 0
        self._listens = False

    def phase(self, play: Play) -> None:
        """Begin a phase. Faults left over from the phase before never strike."""
        self._faults = numbered(play.faults) if self._desk is not None else []
        if self._faults and not self._listens:
            self._listen()

    def step(self, step: int, running: int) -> bool:
        """Begin a step of the phase, from 0; return whether faults struck before it.

        `running`: the number of requests that run.
        """
        self._step = step
        self._running = running
        struck = False
        while self._faults and self._faults[0][1].before is None and self._faults[0][1].at <= step:
            self._strike()
            struck = True
        return struck

    def _listen(self) -> None:
        """Have `_hook` called before the hooks in HOOKS from now on."""
        recorder = _recorder()
        if recorder is not None:
            for kind, hook in HOOKS.items():
                recorder.probe.on(hook, before=partial(self._hook, kind))
            self._listens = True

    def _hook(self, kind: str, _call: Call) -> None:
        """Let the next fault strike if it is due before the hook that is about to be called."""
        if not self._faults:
            return
        fault = self._faults[0][1]
        due = fault.before == kind and fault.at <= self._step
        if due and (kind == "save" or _loading()):
            self._strike()

    def _strike(self) -> None:
        """Record the next fault as an event, and have it carried out. Unanswered if it is not."""
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
        count = self._desk.ask(fault)
        if fault.files is not None and recorder is not None:
            recorder.trace.damaged = recorder.trace.damaged or bool(count)
            recorder.trace.emit("store.damaged", what=fault.files, count=count)


def _recorder() -> Recorder | None:
    """Return the probe's recorder of this process; None if the process is not watched."""
    # Not at the top: the probe imports vLLM and torch, which the parent does without.
    from kvconform.live import probe

    return probe.recorder()


def _loading() -> int:
    """Return the number of loads that the engine has granted and does not rely on yet."""
    recorder = _recorder()
    if recorder is None or recorder.scheduler is None:
        return 0
    return len(recorder.scheduler.loads.open_grants())
