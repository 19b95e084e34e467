# SPDX-License-Identifier: Apache-2.0
"""The worker that judges workloads: the connector, its servers and a watchdog."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvconform.config.settings import Settings
from kvconform.config.target import Target
from kvconform.contract.loader import Spec, load_spec
from kvconform.execute.work import Place
from kvconform.explore.outcome import Outcome, outcome
from kvconform.explore.workload import Workload
from kvconform.judge.foreign import ForeignKV
from kvconform.process import watchdog
from kvconform.session.worker import START_LIMIT, settle_in

Job = tuple[Workload, Sequence[str] | None]
"""A workload, and the only requirements to judge, or None for all."""


@dataclass(frozen=True)
class Judging:
    """Work of `kvconform explore`: workloads on the connector that the settings describe."""

    settings: Settings

    @property
    def fresh(self) -> bool:
        """A variable may change what importing vLLM does; a forked process cannot use a GPU."""
        return bool(self.settings.env) or self.settings.device == "cuda"

    @property
    def folders(self) -> Sequence[str]:
        """The folders in which the connector's package is looked for."""
        return self.settings.pythonpath

    @property
    def packages(self) -> Sequence[str]:
        """The connector's package; none for a name that vLLM's factory knows."""
        module, named, _ = self.settings.connector.partition(":")
        return [module.partition(".")[0]] if named else []

    @property
    def gpus(self) -> int:
        """A GPU if the connector is judged on one."""
        return int(self.settings.device == "cuda")

    @contextmanager
    def worker(self, place: Place) -> Iterator[Callable[[Job], Outcome]]:
        """Start servers and watchdog, and construct the connector once."""
        folders = [place.here(folder) for folder in self.settings.pythonpath]
        settings = self.settings.model_copy(update={"pythonpath": folders})
        servers, settings = settle_in(
            settings, place.scratch, place.name, place.scratch, redirect=place.own
        )
        watchdog.start(settings.hook_timeout, place.note)
        try:
            servers.up()
            yield from _ready(settings, place.scratch / place.name)
        finally:
            watchdog.stop()
            servers.down()


def _ready(settings: Settings, tmp: Path) -> Iterator[Callable[[Job], Outcome]]:
    with watchdog.case("start", START_LIMIT):
        from kvconform.run import smoke

        target = smoke.target_of(settings)
        smoke.check(target, tmp, START_LIMIT, engine=settings.engine)
    spec = load_spec()
    limit = watchdog.case_limit(settings.hook_timeout)
    yield lambda job: judged(job, target, spec, tmp, limit)


def judged(job: Job, target: Target, spec: Spec, tmp: Path, limit: float) -> Outcome:
    """Run and judge a workload in this process, which ends if that takes longer than `limit`.

    Writes below `tmp` and cleans up. ForeignKV if the store is not empty: it would be found with
    other workloads, too.
    """
    workload, requirements = job
    try:
        with watchdog.case(workload.data["id"], limit):
            return outcome(workload, target, spec, tmp, requirements=requirements)
    except ForeignKV:
        raise
    # The workload is not a case, or the harness is at fault.
    except (Exception, SystemExit, watchdog.HookTimeout) as error:
        return Outcome(error=f"{type(error).__name__}: {error}".splitlines()[0])
