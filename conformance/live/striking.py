# SPDX-License-Identifier: Apache-2.0
"""Faults of back ends, in the process of the engine: finds their moment, asks for them, and writes down that they struck."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvconform.live.fault import Fault, numbered
from kvconform.live.job import Play
from kvconform.live.outage import Desk

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
        if not self._faults or self._faults[0][1].before != kind or self._faults[0][1].at > self._step:
            return
        if kind == "save" or _loading():
            self._strike()

    def _strike(self) -> None:
        """Note it, and have it carried out. Unanswered if nobody does."""
        number, fault = self._faults.pop(0)
        recorder = _recorder()
        if recorder is not None:
            recorder.trace.emit(
                "live.fault", phase=fault.phase, number=number, do=fault.do, still=fault.still, before=fault.before, running=self._running,
                loading=_loading(),
            )  # fmt: skip
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
    return 0 if recorder is None or recorder.scheduler is None else len(recorder.scheduler.oracle.open_grants())
