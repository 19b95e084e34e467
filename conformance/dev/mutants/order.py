# SPDX-License-Identifier: Apache-2.0
"""The order of a mutant's runs: those that killed its neighbours, then each case once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from kvconform.dev.mutants.mutation import Site


class Killers:
    """The runs that have killed mutants, by function and by module."""

    def __init__(self) -> None:
        self._functions: dict[tuple[str, str], Counter[str]] = {}
        self._modules: dict[str, Counter[str]] = {}
        self._all: Counter[str] = Counter()

    def add(self, site: Site, run: str) -> None:
        """Record that this run killed a mutant."""
        self._functions.setdefault((site.module, site.function), Counter())[run] += 1
        self._modules.setdefault(site.module, Counter())[run] += 1
        self._all[run] += 1

    def order(self, site: Site, runs: Iterable[str], seconds: Mapping[str, float]) -> list[str]:
        """Return the runs in their order: same function, same module, any other kill, the rest.

        Of the rest, the cheapest run of every case comes first, then the next one of every case:
        runs of one case kill much the same mutants.
        """
        seen: Counter[str] = Counter()
        turn: dict[str, int] = {}
        for run in sorted(runs, key=lambda run: seconds.get(run, 0.0)):
            case = run.partition("[")[0]
            turn[run] = seen[case]
            seen[case] += 1
        mine = self._functions.get((site.module, site.function), Counter())
        near = self._modules.get(site.module, Counter())

        def rank(run: str) -> tuple[float, ...]:
            cost = seconds.get(run, 0.0)
            return -mine[run], -near[run], -self._all[run], turn[run], cost

        return sorted(turn, key=rank)
