# SPDX-License-Identifier: Apache-2.0
"""A campaign: runs workloads, groups failures by cause, and shrinks each to a case in a file.

A failure is written when it is found, and again whenever its workload has become smaller, so that
an interrupted campaign leaves every failure with a case.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from kvconform.explore.corpus import Corpus, Key
from kvconform.explore.outcome import DIED, Failure, Outcome
from kvconform.explore.pool import Pool
from kvconform.explore.shrink import shrink
from kvconform.explore.workload import Workload

SHRINKING = 0.25
"""Share of a time limit that is left for shrinking, if something has failed."""


@dataclass
class Found:
    """One cause of failure, and the first workload that showed it, which shrinking replaces.

    `count`: workloads with this failure. `tries`: runs spent on shrinking. `shrunk`: shrinking has
    come to its end. `path`: the case's file.
    """

    failure: Failure
    workload: Workload
    count: int = 1
    tries: int = 0
    shrunk: bool = False
    path: Path | None = None


@dataclass
class Campaign:
    """Results of all workloads of a campaign.

    `guarantees`: how many workloads broke each guarantee of the engine. `unknown`: those of them
    that no known bug explains.
    """

    runs: int = 0
    unsupported: int = 0
    reached: Counter[str] = field(default_factory=Counter)
    guarantees: Counter[str] = field(default_factory=Counter)
    unknown: dict[str, Found] = field(default_factory=dict)
    found: dict[Key, Found] = field(default_factory=dict)
    capabilities: dict[str, Any] = field(default_factory=dict)
    errors: list[tuple[Workload, str]] = field(default_factory=list)
    seconds: float = 0.0
    corpus: Corpus = field(default_factory=Corpus)
    new: int = 0

    def add(self, workload: Workload, outcome: Outcome) -> list[Found]:
        """Add a workload's outcome; return the failures that no earlier one had."""
        self.runs += 1
        self.unsupported += outcome.unsupported
        self.capabilities = outcome.capabilities or self.capabilities
        self.reached.update(outcome.reached)
        self.new += self.corpus.add(workload, outcome)
        self.guarantees.update(outcome.broken_guarantees)
        for each in outcome.unknown:
            if each.requirement in self.unknown:
                self.unknown[each.requirement].count += 1
            else:
                self.unknown[each.requirement] = Found(each, workload)
        if outcome.error is not None:
            self.errors.append((workload, outcome.error))
        new: list[Found] = []
        for failure in root_causes(outcome.failures):
            if failure.key in self.found:
                self.found[failure.key].count += 1
            else:
                shrunk = self.corpus.is_shrunk(failure, workload)
                self.found[failure.key] = Found(failure, workload, shrunk=shrunk)
                new.append(self.found[failure.key])
        return new

    @property
    def judged(self) -> int:
        """Number of workloads that were judged: run, supported by the connector, no error."""
        return self.runs - self.unsupported - len(self.errors)

    def by_frequency(self) -> list[Found]:
        """Return the failures, the most frequent first."""
        return sorted(self.found.values(), key=lambda each: -each.count)


def root_causes(failures: list[Failure]) -> list[Failure]:
    """Return the crashes among a run's failures, or all failures if there was no crash.

    A crash explains the other failures of its run.
    """
    crashes = [
        failure
        for failure in failures
        if failure.requirement in ("hook.no-raise", "hook.returns", DIED)
    ]
    return crashes or failures


def explore(
    pool: Pool,
    workloads: Iterable[Workload],
    campaign: Campaign,
    *,
    seconds: float | None,
    found: Callable[[Found], None],
    unknown: Callable[[Found], None],
    progress: Callable[[Campaign], None],
) -> None:
    """Run the workloads and add their results to the campaign.

    No further one is started after `seconds`, or before that if there is something to shrink.
    `found` gets each new failure at once, `unknown` each new guarantee that was broken and that no
    known bug explains. `progress` is called after each workload.
    """
    began = time.monotonic()
    limited = workloads if seconds is None else _until(workloads, campaign, began, seconds)
    for workload, outcome in pool.outcomes(limited):
        before = set(campaign.unknown)
        for new in campaign.add(workload, outcome):
            found(new)
        for name in campaign.unknown.keys() - before:
            unknown(campaign.unknown[name])
        campaign.seconds = time.monotonic() - began
        progress(campaign)


def _until(
    workloads: Iterable[Workload], campaign: Campaign, began: float, seconds: float
) -> Iterator[Workload]:
    """Yield workloads until the time is over; leave SHRINKING of it if something was found."""
    for workload in workloads:
        share = 1 - SHRINKING if campaign.found or campaign.unknown else 1
        if time.monotonic() - began > share * seconds:
            return
        yield workload


def reduce(
    pool: Pool, campaign: Campaign, keep: Callable[[Found], None], *, tries: int, limit: int
) -> None:
    """Shrink the most frequent failures until they are small, or the pool's time is over.

    Then the broken guarantees that nothing explains. `keep` gets each whenever its workload has
    become smaller. `tries`: runs to spend on each. `limit`: failures to shrink.
    """
    for found in [*campaign.by_frequency()[:limit], *campaign.unknown.values()]:
        _shrink(pool, found, keep, tries)


def _shrink(pool: Pool, found: Found, keep: Callable[[Found], None], tries: int) -> None:
    """Shrink one failure; it stays `shrunk` = False if the time was over before the end."""

    def fails(workload: Workload) -> bool:
        """Return whether the smaller workload has the same failure, and replace the larger."""
        failure = None if pool.over else _same(pool, found.failure, workload)
        if failure is not None:
            found.failure, found.workload = failure, workload
            keep(found)
        return failure is not None

    if pool.over or tries == 0 or found.shrunk:
        return
    _, found.tries = shrink(found.workload, fails, tries)
    found.shrunk = not pool.over
    keep(found)


def _same(pool: Pool, failure: Failure, workload: Workload) -> Failure | None:
    """Return the failure with the same key that the workload has, or None."""
    key = failure.key
    requirements = None if key[0] == DIED else [key[0]]
    for _, outcome in pool.outcomes([workload], requirements):
        for each in (*outcome.failures, *outcome.unknown):
            if each.key == key:
                return each
    return None


def first(workloads: Iterable[Workload], count: int) -> Iterator[Workload]:
    """Yield at most `count` workloads."""
    return islice(workloads, count)
