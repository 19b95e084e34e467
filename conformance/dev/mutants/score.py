# SPDX-License-Identifier: Apache-2.0
"""How many mutants the suite finds, by subject, module and operator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvconform.dev.mutants.judgement import Judgement
from kvconform.dev.mutants.mutation import Site
from kvconform.dev.mutants.result import Result

KILLS = ("requirement", "raise", "hang", "death", "start")
NON_TRIVIAL = ("requirement", "hang")
"""Kills for which the suite had to look. An exception, a dead process or a connector that does
not start would be noticed anyhow."""


@dataclass
class Score:
    """Counts of mutants.

    `killed` is by what killed them, `survived` by what people found out (`unjudged`: nothing yet).
    """

    killed: Counter[str] = field(default_factory=Counter)
    survived: Counter[str] = field(default_factory=Counter)
    undecided: int = 0

    def add(self, result: Result, judgement: Judgement | None) -> None:
        """Count a result."""
        if result.outcome == "killed":
            self.killed[result.means] += 1
        elif result.outcome == "undecided":
            self.undecided += 1
        else:
            self.survived[judgement.kind if judgement else "unjudged"] += 1

    @property
    def missed(self) -> int:
        """The survivors that the suite should have found, as far as is known."""
        return self.survived["open"] + self.survived["unjudged"]

    @property
    def found(self) -> int:
        """The kills that are not trivial."""
        return sum(self.killed[means] for means in NON_TRIVIAL)

    @property
    def share(self) -> float | None:
        """The non-trivial kills, as a share of themselves and the missed ones."""
        return _share(self.found, self.missed)

    @property
    def strict_share(self) -> float | None:
        """The same if what only a recommendation or a risk finds counts as missed."""
        return _share(self.found, self.missed + self.survived["recommendation"])

    def to_dict(self) -> dict[str, Any]:
        """Return the score as JSON data."""
        return {
            "killed": {means: self.killed[means] for means in KILLS if self.killed[means]},
            "survived": dict(sorted(self.survived.items())),
            "undecided": self.undecided,
            "score": _rounded(self.share),
            "strict": _rounded(self.strict_share),
        }


def _share(found: int, missed: int) -> float | None:
    return found / (found + missed) if found + missed else None


def _rounded(share: float | None) -> float | None:
    return None if share is None else round(share, 3)


def scores(
    results: Iterable[Result],
    judgements: Mapping[Site, Judgement],
    by: Callable[[Result], str],
) -> dict[str, Score]:
    """Return the score of each group of results, sorted by the group's name."""
    found: dict[str, Score] = {}
    for result in results:
        found.setdefault(by(result), Score()).add(result, judgements.get(result.site))
    return dict(sorted(found.items()))
