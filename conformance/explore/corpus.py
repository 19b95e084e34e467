# SPDX-License-Identifier: Apache-2.0
"""A corpus: the workloads that reached something new, and those that failed.

It lies in a database of Hypothesis (`kvconform.explore.places`), or in memory only. Campaigns of
several machines may use one at the same time: each sees what the others find. Later campaigns begin
with what it has, and CI replays it.

A key of the database has one kind of entry of one connector:

- `workloads`: a workload with the pairs that it was the first to reach.
- `failures`: the smallest known workload of a failure. A workload that does not fail any more is
  removed.
- `campaigns`: the number of a campaign, and a word that no other has.
"""

from __future__ import annotations

import json
import random
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from kvconform.errors import EnvironmentProblem, one_line
from kvconform.explore.dice import Dice
from kvconform.explore.mutate import mutated
from kvconform.explore.outcome import Failure, Outcome, Pair
from kvconform.explore.workload import Workload

if TYPE_CHECKING:
    from hypothesis.database import ExampleDatabase

T = TypeVar("T")

MUTATED = 2
"""One in MUTATED workloads is newly drawn; the others are mutations of workloads of the corpus."""
PAUSE = 10.0
"""Seconds between two looks at what other campaigns have found."""
SHARE = 20
"""A pause is at least SHARE times as long as the last look took."""
APART = 1_000_000
"""Difference of the seeds of two campaigns on one corpus."""

Key = tuple[str, str | None, bool]


@dataclass(frozen=True)
class _Known:
    """A failing workload of the database, and its entry."""

    workload: Workload
    shrunk: bool
    entry: bytes

    @property
    def rank(self) -> tuple[tuple[int, ...], bool, bytes]:
        """Order of the entries for one failure: the first is kept."""
        return self.workload.size, not self.shrunk, self.entry


class Corpus:
    """A corpus in memory, and in a database, if one is given. `name`: of the connector.

    - `seeds`: workloads that reached something new. `pairs`: all pairs reached (see
      `kvconform.explore.outcome`).
    - `campaign`: number of this campaign, once it has begun; the first is 0.
    - `received`: entries that other campaigns have saved since this one began.
    - `unreadable`: why an entry of the database was left out, or None. `lost`: why entries of this
      campaign are not in the database, or None.

    EnvironmentProblem if the database cannot be read.
    """

    def __init__(self, database: ExampleDatabase | None = None, name: str = "") -> None:
        self.seeds: list[Workload] = []
        self.pairs: set[Pair] = set()
        self.campaign = 0
        self.received = 0
        self.unreadable: str | None = None
        self.lost: str | None = None
        self._database = database
        self._name = name
        self._read: set[bytes] = set()
        self._failures: dict[Key, _Known] = {}
        self._replay: list[Workload] = []
        self._added = 0
        self._unsaved: list[tuple[str, bytes, bytes]] = []
        self._next_look = 0.0
        self._look()

    def begin(self) -> None:
        """Take a number for this campaign that no other has.

        EnvironmentProblem if the database cannot be written.
        """
        if self._database is None:
            return
        word = uuid.uuid4().hex
        others = self._campaigns(word)
        while True:
            self.campaign = max(others, default=-1) + 1
            entry = json.dumps([self.campaign, word]).encode()
            self._save("campaigns", entry)
            if self._unsaved or entry not in self._fetch("campaigns"):
                why = self.lost or "what was saved is not there"
                raise EnvironmentProblem(f"the corpus cannot be written: {why}")
            others = self._campaigns(word)
            if self.campaign not in others:
                break
            # Another one has begun at the same time. Both give way.
            time.sleep(random.uniform(0.01, 0.1))
        self.received = 0

    def _campaigns(self, word: str) -> set[int]:
        """Return the numbers of the campaigns, without the one of this word."""
        found: set[int] = set()
        for entry in self._fetch("campaigns"):
            with suppress(ValueError, TypeError):  # in the middle of being written
                number, other = json.loads(entry)
                if other != word:
                    found.add(int(number))
        return found

    @property
    def failing(self) -> int:
        """Number of failures in the database."""
        return len(self._failures)

    def add(self, workload: Workload, outcome: Outcome) -> int:
        """Add a workload that reached new pairs; return how many.

        A workload that failed adds its pairs only; `fail` saves it. One that is known to fail and
        did not is removed.
        """
        self._mend(workload, outcome)
        new = set(outcome.pairs) - self.pairs
        if not new:
            return 0
        self.pairs |= new
        if outcome.failures or outcome.error:
            return len(new)
        self.seeds.append(workload)
        self._added += 1
        self._save(
            "workloads",
            _entry(workload, first=sorted(new), found=[self.campaign, self._added]),
        )
        return len(new)

    def fail(self, failure: Failure, workload: Workload, *, shrunk: bool) -> None:
        """Save a failing workload, unless a smaller one is known for this failure."""
        entry = _entry(workload, failure=list(failure.key), shrunk=shrunk)
        known = self._failures.get(failure.key)
        new = _Known(workload, shrunk, entry)
        if known is not None and known.rank <= new.rank:
            return
        self._failures[failure.key] = new
        self._save("failures", entry)
        if known is not None:
            self._delete("failures", known.entry)

    def is_shrunk(self, failure: Failure, workload: Workload) -> bool:
        """Return whether a campaign has shrunk this failure to this workload."""
        known = self._failures.get(failure.key)
        return known is not None and known.shrunk and known.workload == workload

    def _mend(self, workload: Workload, outcome: Outcome) -> None:
        """Remove the failures of a workload that has been judged and does not have them."""
        if outcome.unsupported or outcome.error is not None:
            return
        failed = {failure.key for failure in outcome.failures}
        for key, known in [*self._failures.items()]:
            if known.workload == workload and key not in failed:
                del self._failures[key]
                self._delete("failures", known.entry)

    def guided(
        self, fresh: Iterator[Workload], engines: list[str], schedulings: list[str]
    ) -> Iterator[Workload]:
        """Yield what failed before, the corpus, and the fresh workloads with mutations in between.

        What other campaigns save meanwhile takes part: failures run here, too, and workloads are
        mutated.
        """
        yield from self._waiting()
        yield from self.seeds[:]
        for number, workload in enumerate(fresh):
            self.look()
            yield from self._waiting()
            yield workload
            for turn in range(MUTATED - 1 if self.seeds else 0):
                name = f"{workload.seed}/{number}/{turn}"
                dice = Dice(f"seed/{name}")
                # The latest workloads have the fewest mutations so far.
                choice = self.seeds[-20:] if dice.one_in(2) else self.seeds
                yield mutated(f"like/{name}", dice.pick(choice), engines, schedulings)

    def _waiting(self) -> Iterator[Workload]:
        while self._replay:
            yield self._replay.pop(0)

    def look(self) -> None:
        """Save what could not be saved before, and take what others have saved, now and then."""
        if time.monotonic() >= self._next_look:
            self.end()
            try:
                self._look()
            except EnvironmentProblem:  # a later look may succeed
                self._next_look = time.monotonic() + PAUSE

    def end(self) -> None:
        """Save what could not be saved before; then `lost` says whether something is lost."""
        unsaved, self._unsaved, self.lost = self._unsaved, [], None
        for what, key, entry in unsaved:
            self._write(what, key, entry)

    def _look(self) -> None:
        began = time.monotonic()
        for (_, pairs), entry, workload in sorted(self._new("workloads", _found), key=_when):
            self._read.add(entry)
            self.seeds.append(workload)
            self.pairs |= pairs
            self.received += 1
        for (key, shrunk), entry, workload in self._new("failures", _failed):
            self._read.add(entry)
            self._learn(key, _Known(workload, shrunk, entry))
        took = time.monotonic() - began
        self._next_look = time.monotonic() + max(PAUSE, SHARE * took)

    def _learn(self, key: Key, new: _Known) -> None:
        """Take a failure that another campaign has saved. Of two workloads, the smaller stays."""
        known = self._failures.get(key)
        if known is not None and known.rank <= new.rank:
            if known.entry != new.entry:
                self._delete("failures", new.entry)
            return
        if known is None:
            self.received += 1
            self._replay.append(new.workload)
        else:
            self._delete("failures", known.entry)
            self._replay = [
                new.workload if each == known.workload else each for each in self._replay
            ]
        self._failures[key] = new

    def _new(
        self, kind: str, read: Callable[[dict[str, Any]], T]
    ) -> list[tuple[T, bytes, Workload]]:
        """Return (what `read` returns for it, entry, workload) of the entries not read before.

        An entry that cannot be read is left out. It may be in the middle of being written.
        """
        found = []
        for entry in self._fetch(kind):
            if entry in self._read:
                continue
            try:
                data = json.loads(entry)
                workload = Workload(data["data"], data["seed"])
                workload.variant()
                found.append((read(data), entry, workload))
            except (ValueError, KeyError, TypeError) as error:
                self.unreadable = one_line(error)
        return found

    def _fetch(self, kind: str) -> list[bytes]:
        if self._database is None:
            return []
        try:
            return list(self._database.fetch(self._key(kind)))
        except Exception as error:  # of the system or a database's client
            raise EnvironmentProblem(f"the corpus cannot be read: {one_line(error)}") from None

    def _save(self, kind: str, entry: bytes) -> None:
        self._read.add(entry)
        self._write("save", self._key(kind), entry)

    def _delete(self, kind: str, entry: bytes) -> None:
        self._write("delete", self._key(kind), entry)

    def _write(self, what: str, key: bytes, entry: bytes) -> None:
        """Save or delete an entry; if that fails, `end` tries it again."""
        if self._database is None:
            return
        if self._unsaved:  # it cannot be reached now, which may take long to find out
            self._unsaved.append((what, key, entry))
            return
        try:
            if what == "save":
                self._database.save(key, entry)
            else:
                self._database.delete(key, entry)
        except Exception as error:  # of the system or a database's client
            self._unsaved.append((what, key, entry))
            self.lost = one_line(error)

    def _key(self, kind: str) -> bytes:
        return f"explore/{self._name}/{kind}".encode()


def _entry(workload: Workload, **more: object) -> bytes:
    data = {"data": workload.data, "seed": workload.seed, **more}
    return json.dumps(data).encode()


def _found(data: dict[str, Any]) -> tuple[tuple[int, int], set[Pair]]:
    """Return when a workload was found, as (campaign, number), and its new pairs."""
    campaign, number = data["found"]
    return (int(campaign), int(number)), {(what, axis) for what, axis in data["first"]}


def _when(
    each: tuple[tuple[tuple[int, int], set[Pair]], bytes, Workload],
) -> tuple[tuple[int, int], bytes]:
    (when, _), entry, _ = each
    return when, entry


def _failed(data: dict[str, Any]) -> tuple[Key, bool]:
    """Return the key of a failure, and whether its workload was shrunk to the end."""
    requirement, found, risk = data["failure"]
    return (requirement, found, risk), bool(data["shrunk"])
