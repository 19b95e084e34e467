# SPDX-License-Identifier: Apache-2.0
"""The mutants of a run: chosen at random, shared between machines, and continued later."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvconform.config.settings import Shard
from kvconform.dev.mutants import result as results
from kvconform.dev.mutants.mutation import Mutation, digest
from kvconform.dev.mutants.result import Result
from kvconform.dev.mutants.sites import mutations_of

if TYPE_CHECKING:
    from kvconform.dev.mutants.server import Server  # imports torch


@dataclass(frozen=True)
class Choice:
    """Which mutants to judge.

    - `sample`: how many of all, at random; None: all. A larger sample contains a smaller one.
    - `shard`: the part of the sample. `seconds`: start no further one after this time.
    - `only`: texts of which a site must contain one.
    - `again`: judge those again that are recorded as survivors.
    """

    sample: int | None = None
    seed: int = 0
    shard: Shard | None = None
    seconds: float | None = None
    only: tuple[str, ...] = ()
    again: bool = False


def chosen(mutations: Sequence[Mutation], choice: Choice) -> list[Mutation]:
    """Return the mutants of a sample and shard, in random order."""
    wanted = [
        each
        for each in mutations
        if not choice.only or any(text in str(each.site) for text in choice.only)
    ]
    ranked = sorted(wanted, key=lambda each: each.site.rank(choice.seed))[: choice.sample]
    if choice.shard is None:
        return ranked
    return ranked[choice.shard.number - 1 :: choice.shard.count]


def all_of(server: Server) -> list[Mutation]:
    """Return all mutants of a subject."""
    return [
        mutation
        for module in server.subject.modules
        for mutation in mutations_of(server.source(module), module)
    ]


def left(mutations: Iterable[Mutation], done: Iterable[Result], *, again: bool) -> list[Mutation]:
    """Return the mutants that have no result for the same source.

    `again`: also those that survived.
    """
    known = {
        (each.site, each.digest) for each in done if not (again and each.outcome == "survived")
    }
    return [each for each in mutations if (each.site, digest(each.source)) not in known]


def judge(
    server: Server, choice: Choice, path: Path, progress: Callable[[Result], None]
) -> Iterator[Result]:
    """Judge the chosen mutants that have no result yet; yield and record each result."""
    done = [each for each in results.read(path) if each.subject == server.subject.id]
    for each in done:
        if each.outcome == "killed" and each.run and not each.explored:
            server.killers.add(each.site, each.run)
    began = time.monotonic()
    for mutation in left(chosen(all_of(server), choice), done, again=choice.again):
        if choice.seconds is not None and time.monotonic() - began > choice.seconds:
            return
        result = server.judge(mutation)
        results.append(path, result)
        progress(result)
        yield result
