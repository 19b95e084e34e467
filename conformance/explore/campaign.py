# SPDX-License-Identifier: Apache-2.0
"""A campaign: runs workloads, groups failures by cause, and shrinks each to a case in a file.

A corpus is a folder with the workloads that reached something new. Later campaigns continue from
it, and CI replays it. `seeds.jsonl` has one workload per line with the pairs that it was the first
to reach; `state.json` has the number of workloads drawn.
"""

from __future__ import annotations

import json
import re
import shlex
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from kvconform.errors import UsageError, one_line
from kvconform.explore.dice import Dice
from kvconform.explore.mutate import mutated
from kvconform.explore.outcome import DIED, Failure, Outcome, Pair
from kvconform.explore.pool import Pool
from kvconform.explore.shrink import shrink
from kvconform.explore.workload import WIDTH, Workload, text_of

MUTATED = 2
"""One in MUTATED workloads is newly drawn; the others are mutations of workloads of the corpus."""


@contextmanager
def _readable(place: object) -> Iterator[None]:
    """Turn errors into a UsageError: the file or line `place` is damaged or of another version."""
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"the corpus {place} cannot be read ({one_line(error)}):"
            " mend the file, or name another --corpus"
        ) from None


class Corpus:
    """Workloads that reached something new, in memory and, if given, in `folder`.

    `pairs`: all pairs reached (see `kvconform.explore.outcome`). `drawn`: workloads drawn so far.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self.seeds: list[Workload] = []
        self.pairs: set[Pair] = set()
        self.drawn = 0
        if folder is not None and (folder / "seeds.jsonl").exists():
            self._read(folder / "seeds.jsonl")
        if folder is not None and (folder / "state.json").exists():
            with _readable(folder / "state.json"):
                self.drawn = int(
                    json.loads((folder / "state.json").read_text(encoding="utf-8"))["drawn"]
                )

    def _read(self, path: Path) -> None:
        with _readable(path):
            lines = path.read_text(encoding="utf-8").splitlines()
        for number, line in enumerate(lines, 1):
            with _readable(f"{path}, line {number}"):
                kept = json.loads(line)
                workload = Workload(kept["data"], kept["seed"])
                workload.variant()
                self.seeds.append(workload)
                self.pairs.update((what, axis) for what, axis in kept["first"])

    def add(self, workload: Workload, outcome: Outcome) -> int:
        """Add a workload that reached new pairs; return how many.

        A workload that failed adds its pairs only, because failures are written as cases.
        """
        new = set(outcome.pairs) - self.pairs
        if not new:
            return 0
        self.pairs |= new
        if outcome.failures or outcome.error:
            return len(new)
        self.seeds.append(workload)
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            with (self.folder / "seeds.jsonl").open("a", encoding="utf-8") as file:
                file.write(
                    json.dumps({"data": workload.data, "seed": workload.seed, "first": sorted(new)})
                    + "\n"
                )
        return len(new)

    def save(self) -> None:
        """Write the number of workloads drawn to the folder."""
        if self.folder is not None and self.folder.exists():
            (self.folder / "state.json").write_text(
                json.dumps({"drawn": self.drawn}) + "\n", encoding="utf-8"
            )

    def guided(
        self, fresh: Iterator[Workload], engines: list[str], schedulings: list[str]
    ) -> Iterator[Workload]:
        """Yield the fresh workloads that no earlier campaign drew, and mutations of the corpus.

        The first `drawn` fresh workloads are skipped.
        """
        for number, workload in enumerate(fresh):
            if number < self.drawn:
                continue
            self.drawn = number + 1
            yield workload
            for turn in range(MUTATED - 1 if self.seeds else 0):
                name = f"{workload.seed}/{number}/{turn}"
                dice = Dice(f"seed/{name}")
                # The latest workloads have the fewest mutations so far.
                choice = self.seeds[-20:] if dice.one_in(2) else self.seeds
                yield mutated(f"like/{name}", dice.pick(choice), engines, schedulings)


Key = tuple[str, str | None, bool]


@dataclass
class Found:
    """One cause of failure, and the first workload that showed it, which shrinking replaces.

    `count`: workloads with this failure. `tries`: runs spent on shrinking. `path`: the case's file.
    """

    failure: Failure
    workload: Workload
    count: int = 1
    tries: int = 0
    path: Path | None = None


@dataclass
class Campaign:
    """Results of all workloads of a campaign."""

    runs: int = 0
    unsupported: int = 0
    reached: Counter[str] = field(default_factory=Counter)
    guarantees: Counter[str] = field(default_factory=Counter)
    unmarked: Counter[str] = field(default_factory=Counter)
    found: dict[Key, Found] = field(default_factory=dict)
    capabilities: dict[str, Any] = field(default_factory=dict)
    errors: list[tuple[Workload, str]] = field(default_factory=list)
    seconds: float = 0.0
    corpus: Corpus = field(default_factory=Corpus)
    new: int = 0

    def add(self, workload: Workload, outcome: Outcome) -> None:
        """Add a workload's outcome."""
        self.runs += 1
        self.unsupported += outcome.unsupported
        self.capabilities = outcome.capabilities or self.capabilities
        self.reached.update(outcome.reached)
        self.new += self.corpus.add(workload, outcome)
        self.guarantees.update(outcome.broken_guarantees)
        self.unmarked.update(outcome.unmarked)
        if outcome.error is not None:
            self.errors.append((workload, outcome.error))
        for failure in root_causes(outcome.failures):
            if failure.key in self.found:
                self.found[failure.key].count += 1
            else:
                self.found[failure.key] = Found(failure, workload)


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
    *,
    minutes: float | None,
    progress: Callable[[Campaign], None],
    corpus: Corpus | None = None,
) -> Campaign:
    """Run the workloads and return the results; start no further one after `minutes`.

    Workloads that reach something new are added to `corpus`. `progress` is called after each one.
    """
    campaign = Campaign(corpus=corpus or Corpus())
    began = time.monotonic()
    limited = workloads if minutes is None else _until(workloads, began + 60 * minutes)
    for workload, outcome in pool.outcomes(limited):
        campaign.add(workload, outcome)
        campaign.seconds = time.monotonic() - began
        progress(campaign)
    return campaign


def _until(workloads: Iterable[Workload], end: float) -> Iterator[Workload]:
    for workload in workloads:
        if time.monotonic() > end:
            return
        yield workload


def reduce(
    pool: Pool, campaign: Campaign, folder: Path, again: str, *, tries: int, limit: int
) -> None:
    """Shrink the most frequent failures and write them as cases to `folder`.

    `again`: the command that runs a case. `tries`: runs to spend on each. `limit`: failures to
    shrink.
    """
    for found in sorted(campaign.found.values(), key=lambda each: -each.count)[:limit]:
        found.workload, found.tries = shrink(
            found.workload, partial(_still_fails, pool, found), tries
        )
        _keep(found, folder, again)


def _still_fails(pool: Pool, found: Found, workload: Workload) -> bool:
    """Return whether the workload has the failure `found`, whose message it then updates."""
    key = found.failure.key
    [(_, outcome)] = list(pool.outcomes([workload], None if key[0] == DIED else [key[0]]))
    same = [failure for failure in outcome.failures if failure.key == key]
    found.failure = same[0] if same else found.failure
    return bool(same)


def _keep(found: Found, folder: Path, again: str) -> None:
    failure, workload = found.failure, found.workload
    requirement, detail, risk = failure.key
    key = "-".join(part for part in (requirement, detail, risk and "risk") if part)
    name = re.sub(r"[^a-z0-9]+", "-", key.lower()).strip("-")
    data = {
        **workload.data,
        "id": f"found.{name}",
        "text": f"Found by exploration, and shrunk: fails {failure.requirement}.",
    }
    where = f"step {failure.step}" + (f", request {failure.req}" if failure.req else "")
    path = folder / f"{name}.yaml"
    said = textwrap.fill(
        f"{failure.requirement} ({where}): {' '.join(failure.message.split())}", WIDTH
    )
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(
        text_of(data, f"{said}\n{again} --case {shlex.quote(str(path))} --seed {workload.seed}"),
        encoding="utf-8",
    )
    found.path = path


def first(workloads: Iterable[Workload], count: int) -> Iterator[Workload]:
    """Yield at most `count` workloads."""
    return islice(workloads, count)
