# SPDX-License-Identifier: Apache-2.0
"""Corpora for tests, in this process or another one."""

from __future__ import annotations

from kvconform.explore.corpus import Corpus
from kvconform.explore.draw import drawn
from kvconform.explore.outcome import Outcome
from kvconform.explore.places import database
from kvconform.explore.workload import Workload

BOTH = ["reference", "vllm"]
MODES = ["sync", "async"]


def some(count: int, seed: int = 1) -> list[Workload]:
    """Return random workloads."""
    return list(drawn(BOTH, MODES, None, first_seed=seed, count=count))


def opened(place: object) -> Corpus:
    """Begin a campaign on the corpus of a place."""
    found = Corpus(database([str(place)]), "x")
    found.begin()
    return found


def campaign(place: str) -> None:
    """Make a campaign of twelve workloads, each of which reaches something new."""
    corpus = opened(place)
    for number, workload in enumerate(some(12, seed=corpus.campaign)):
        corpus.add(workload, Outcome(pairs=[(f"campaign {corpus.campaign}", str(number))]))
    corpus.end()
    assert corpus.lost is None
