# SPDX-License-Identifier: Apache-2.0
"""The workers of a campaign: outcomes of workloads, and failures of those that end a process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from kvconform.config.settings import Settings
from kvconform.execute.answers import Death
from kvconform.execute.choice import LOCAL, Choice, crew_of
from kvconform.execute.executor import Executor
from kvconform.explore.judging import Job, Judging
from kvconform.explore.outcome import DIED, Failure, Outcome
from kvconform.explore.workload import Workload

LAG = 64
"""Workloads of a guided campaign between a draw and the latest outcome that it depends on."""
AT_MOST = 16
"""Workers for which LAG workloads are enough; it grows with more of them."""


class Pool:
    """`count` workers; a context manager that ends them and what they started.

    - `count`: None: as many as the executor has room for.
    - `end`: the time, by time.monotonic, at which workloads that still run are given up.
    - `guided`: later workloads depend on earlier outcomes. They are then drawn LAG workloads ahead,
      so that they are the same with any number of workers up to AT_MOST.
    - `where`: the executor. `scratch`: folder for temporary files on this machine.
    """

    def __init__(
        self,
        settings: Settings,
        scratch: Path,
        count: int | None,
        end: float | None = None,
        where: Choice = LOCAL,
        *,
        guided: bool = False,
    ) -> None:
        self.end = end
        self._guided = guided
        crew = crew_of(where, Judging(settings), "explore", scratch, count)
        self._executor: Executor[Job, Outcome] = Executor(crew, count, end)

    def __enter__(self) -> Pool:
        self._executor.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._executor.__exit__(*exception)

    @property
    def deaths(self) -> int:
        """Worker processes that ended during a workload and were replaced."""
        return self._executor.deaths

    @property
    def over(self) -> bool:
        """Whether the time is over."""
        return self._executor.over

    def outcomes(
        self, workloads: Iterable[Workload], requirements: list[str] | None = None
    ) -> Iterator[tuple[Workload, Outcome]]:
        """Yield every workload with its outcome, in order, whatever the number of workers.

        When the time is over, workloads that still run have no outcome, and none is started. Raises
        the error with which a worker failed to start, ForeignKV, and EnvironmentProblem after too
        many deaths.
        """
        jobs = ((workload, requirements) for workload in workloads)
        lag = max(LAG, LAG * self._executor.count // AT_MOST) if self._guided else None
        for (workload, _), found in self._executor.run(jobs, lag):
            yield workload, died(found) if isinstance(found, Death) else found


def died(death: Death) -> Outcome:
    """Return the outcome of a workload during which its process ended, by a crash or a hang."""
    note = death.note
    hook = note.hook if note is not None else None
    how = (
        f"did not return within {note.limit:g} s"
        if note is not None and note.hung
        else f"ended the process (exit code {death.code})"
    )
    found = Failure(
        DIED,
        f"{hook or 'something outside of a hook'} {how}",
        hook=hook,
        step=note.step if note is not None else None,
    )
    return Outcome(failures=[found], reached=[])
