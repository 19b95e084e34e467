# SPDX-License-Identifier: Apache-2.0
"""The mutants of a run: chosen at random, shared between machines, and continued later."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvconform.config.settings import Shard
from kvconform.dev.mutants import original as recorded
from kvconform.dev.mutants import result as results
from kvconform.dev.mutants.mutation import Mutation, Site, digest
from kvconform.dev.mutants.original import Original
from kvconform.dev.mutants.result import Result
from kvconform.dev.mutants.sites import mutations_of
from kvconform.dev.mutants.subject import subject
from kvconform.errors import EnvironmentProblem
from kvconform.execute.choice import Choice as Where
from kvconform.execute.choice import executor
from kvconform.execute.work import Place

if TYPE_CHECKING:
    from kvconform.dev.mutants.server import Server  # imports torch


@dataclass(frozen=True)
class Choice:
    """Which mutants to judge.

    - `sample`: how many of all, at random; None: all. A larger sample contains a smaller one.
    - `shard`: the part of the sample. `seconds`: start no further one after this time.
    - `only`: texts of which a site must contain one.
    - `again`: judge those again that are recorded as survivors, and no others.
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

    `again`: those that survived, and no others.
    """
    if again:
        survivors = {each.site for each in done if each.outcome == "survived"}
        return [each for each in mutations if each.site in survivors]
    known = {(each.site, each.digest) for each in done}
    return [each for each in mutations if (each.site, digest(each.source)) not in known]


def kills(mutations: Iterable[Mutation], done: Iterable[Result]) -> dict[Mutation, Result]:
    """Return the mutants that a run of a case has killed, and their results.

    The rest of their module may have changed since.
    """
    known = {each.site: each for each in done if each.killed_by_a_case}
    return {each: known[each.site] for each in mutations if each.site in known}


ORIGINAL = "original"


@dataclass(frozen=True)
class Judging:
    """Description of workers that judge the mutants of a subject (kvconform.execute.work.Work).

    A piece is a Mutation; its result is a Result. That of the piece ORIGINAL is the Original.

    - `root`: the repository. `explore`, `cases`, `limit`: as for Server.
    - `again`: make only the run of `killers` with each mutant, and the others of its case.
    - `original`: None: each worker examines it when it starts.
    - `killers`: sites whose mutants were killed, and the runs that killed them.
    """

    subject: str
    root: str
    explore: float
    cases: tuple[str, ...] = ()
    limit: float | None = None
    again: bool = False
    original: Original | None = None
    killers: tuple[tuple[Site, str], ...] = ()
    fresh: bool = False
    packages: tuple[str, ...] = ()
    gpus: int = 0

    @property
    def folders(self) -> tuple[str, ...]:
        """The repository: the settings of some subjects lie there."""
        return (self.root,)

    @contextmanager
    def worker(self, place: Place) -> Iterator[Callable[[Mutation | str], Result | Original]]:
        """Start a Server in this process."""
        with self.server(Path(place.here(self.root))) as server:
            server.start(self.original)
            if not server.original.seconds:
                why = (*server.original.errors, "none of its runs exists any more")[0]
                raise EnvironmentProblem(f"{self.subject}: the original does not run: {why}")
            for site, run in self.killers:
                server.killers.add(site, run)
            yield lambda piece: server.original if isinstance(piece, str) else server.judge(piece)

    def server(self, root: Path) -> Server:
        """Make a Server that is not started: it knows the sources."""
        from kvconform.compat.installed import check_vllm
        from kvconform.contract.loader import load_spec
        from kvconform.dev.mutants.server import Server

        vllm, _ = check_vllm()
        return Server(
            subject(self.subject),
            load_spec(),
            vllm,
            root,
            explore=self.explore,
            cases=self.cases,
            limit=self.limit,
            recorded=dict(self.killers) if self.again else None,
        )


def original_of(judging: Judging, server: Server, cache: Path, where: Where) -> Original:
    """Return the subject's original from the file `cache`, or examine it and write the file.

    KvconformError if it does not run.
    """
    known = recorded.read(cache, server.key)
    if known is not None:
        return known
    with executor(where, judging, "mutants", 1) as workers:
        ((_, found),) = workers.run([ORIGINAL])
    if not isinstance(found, Original):
        raise EnvironmentProblem(f"{judging.subject}: the original ended its process {found}")
    found.save(cache)
    return found


def judge(
    judging: Judging,
    mutations: Sequence[Mutation],
    choice: Choice,
    path: Path,
    where: Where,
    jobs: int | None,
) -> Iterator[Result]:
    """Judge the mutants that have no result in `path` yet; record and yield each result.

    `jobs`: workers; None: as many as the executor has room for.
    """
    done = [each for each in results.read(path) if each.subject == judging.subject]
    killed = (each for each in done if each.killed_by_a_case)
    judging = replace(judging, killers=tuple((each.site, each.run) for each in killed))
    coming = _in_time(left(mutations, done, again=choice.again), choice)
    with executor(where, judging, "mutants", jobs) as workers:
        for _, result in workers.run(coming):
            if isinstance(result, Result):  # a worker that died has not judged its mutant
                results.append(path, result)
                yield result


def judge_kills(
    judging: Judging,
    known: Mapping[Mutation, Result],
    choice: Choice,
    path: Path,
    where: Where,
    jobs: int | None,
) -> Iterator[tuple[Result, Result]]:
    """Judge recorded kills again, each by the run that killed it, then the others of its case.

    Yields what is recorded, and the result. A kill that is confirmed is recorded with the day, the
    source and the suite of this one. EnvironmentProblem if the original does not run.
    """
    before = {each.site: each for each in known.values()}
    killers = tuple((site, each.run) for site, each in before.items())
    judging = replace(judging, original=None, explore=0.0, again=True, killers=killers)
    with executor(where, judging, "mutants", jobs) as workers:
        for _, result in workers.run(_in_time(known, choice)):
            if not isinstance(result, Result):  # a worker that died has not judged its mutant
                continue
            then = before[result.site]
            if result.killed_by_a_case:
                results.append(path, _confirmed(then, result))
            elif result.outcome == "killed":  # it does not start any more
                results.append(path, result)
            yield then, result


def _confirmed(then: Result, now: Result) -> Result:
    """Return a recorded kill with what is known of it now. How many runs it took stays."""
    found = replace(then, suite=now.suite, digest=now.digest, date=now.date)
    if now.run == then.run:
        return found
    return replace(found, run=now.run, means=now.means, requirements=now.requirements)


def _in_time(mutations: Iterable[Mutation], choice: Choice) -> Iterator[Mutation]:
    """Yield mutants until the time of the choice is over."""
    began = time.monotonic()
    return itertools.takewhile(
        lambda _: choice.seconds is None or time.monotonic() - began <= choice.seconds, mutations
    )
