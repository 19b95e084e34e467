# SPDX-License-Identifier: Apache-2.0
"""The workloads that reached something new, kept in a folder: campaigns go on from there, and CI replays them.

`seeds.jsonl` has a workload per line with what it was the first to reach, `state.json` how far the drawing has come.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvconform.errors import UsageError, one_line
from kvconform.explore.dice import Dice
from kvconform.explore.mutate import mutated
from kvconform.explore.outcome import Outcome
from kvconform.explore.workload import Workload

MUTATED = 2
"""One in so many workloads is drawn anew; the others are like one of the corpus."""


@contextmanager
def _readable(place: object) -> Iterator[None]:
    """UsageError for a file, or a line of it, that is damaged or of another version."""
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"the corpus {place} cannot be read ({one_line(error)}): mend the file, or name another --corpus") from None


class Corpus:
    """In memory, and in `folder` if there is one. `pairs` is all that was reached."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self.seeds: list[Workload] = []
        self.pairs: set[str] = set()
        self.drawn = 0
        if folder is not None and (folder / "seeds.jsonl").exists():
            self._read(folder / "seeds.jsonl")
        if folder is not None and (folder / "state.json").exists():
            with _readable(folder / "state.json"):
                self.drawn = int(json.loads((folder / "state.json").read_text(encoding="utf-8"))["drawn"])

    def _read(self, path: Path) -> None:
        with _readable(path):
            lines = path.read_text(encoding="utf-8").splitlines()
        for number, line in enumerate(lines, 1):
            with _readable(f"{path}, line {number}"):
                kept = json.loads(line)
                workload = Workload(kept["data"], kept["seed"])
                workload.variant()
                self.seeds.append(workload)
                self.pairs.update(kept["first"])

    def add(self, workload: Workload, outcome: Outcome) -> int:
        """Take in what came of a workload; how many pairs it was the first to reach. What failed is kept elsewhere."""
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
                file.write(json.dumps({"data": workload.data, "seed": workload.seed, "first": sorted(new)}) + "\n")
        return len(new)

    def save(self) -> None:
        """Note how far the drawing has come."""
        if self.folder is not None and self.folder.exists():
            (self.folder / "state.json").write_text(json.dumps({"drawn": self.drawn}) + "\n", encoding="utf-8")

    def guided(self, fresh: Iterator[Workload], engines: list[str], schedulings: list[str]) -> Iterator[Workload]:
        """The fresh workloads behind those that were drawn in earlier runs, and in between workloads like those of the corpus."""
        for number, workload in enumerate(fresh):
            if number < self.drawn:
                continue
            self.drawn = number + 1
            yield workload
            for turn in range(MUTATED - 1 if self.seeds else 0):
                name = f"{workload.seed}/{number}/{turn}"
                dice = Dice(f"seed/{name}")
                # what was found last has been looked around least
                recent = self.seeds[-20:] if dice.one_in(2) else self.seeds
                yield mutated(f"like/{name}", dice.pick(recent), engines, schedulings)
