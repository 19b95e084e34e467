# SPDX-License-Identifier: Apache-2.0
"""Mutate correct connectors, and print what the suite does not find: `nox -s mutants`.

A mutant takes seconds if it is killed, and about a minute if it survives. Results are added to
docs/mutants/SUBJECT.jsonl; a later run continues there. `--pages` writes docs/mutants.md from them.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from kvconform.config.limits import in_seconds
from kvconform.config.settings import parse
from kvconform.dev.mutants import page
from kvconform.dev.mutants.campaign import (
    Choice,
    Judging,
    all_of,
    chosen,
    judge,
    judge_kills,
    original_of,
)
from kvconform.dev.mutants.campaign import kills as recorded_kills
from kvconform.dev.mutants.result import Result, read
from kvconform.dev.mutants.subject import lacks, subject, subjects
from kvconform.errors import KvconformError, UsageError
from kvconform.execute import choice as executors

ROOT = Path.cwd()


def shown(result: Result) -> str:
    """Return a result as lines for a terminal."""
    found = f"{result.outcome:9} {result.seconds:6.1f} s  {result.site}"
    if result.outcome == "killed":
        by = ", ".join(result.requirements[:3]) or result.note
        return f"{found}\n{'':20} {result.means}: {by} in {result.run or 'the start'}"
    lines = [f"{'':20} {line}" for line in (result.note, *result.diff) if line]
    counts = f"{'':20} {result.runs} runs, {result.reached} reach the line"
    if result.left:
        counts += f", {result.left} left out by the limit"
    return "\n".join([found, counts, *lines])


def main(
    name: Annotated[
        list[str] | None, typer.Option("--subject", help="only these subjects; default: all")
    ] = None,
    sample: Annotated[
        int | None, typer.Option(min=1, help="so many mutants of each subject, at random")
    ] = None,
    seed: Annotated[int, typer.Option(help="of the sample")] = 0,
    shard: Annotated[
        str | None, typer.Option(help="i/n: the i-th of n parts of the sample")
    ] = None,
    minutes: Annotated[
        float | None, typer.Option(help="start no further mutant of a subject after this time")
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(help="the same in seconds, instead of --minutes")
    ] = None,
    explore: Annotated[
        float, typer.Option(help="seconds of random workloads for a mutant that no case kills")
    ] = 20.0,
    limit: Annotated[
        float | None,
        typer.Option(help="seconds of a mutant's cases, after which no further one begins"),
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="only mutants whose site contains one of these texts")
    ] = None,
    case: Annotated[
        list[str] | None, typer.Option("--case", "-k", help="only these cases, areas or globs")
    ] = None,
    again: Annotated[
        bool, typer.Option(help="judge recorded survivors again, and nothing else")
    ] = False,
    kills: Annotated[
        bool,
        typer.Option(
            help="judge recorded kills again, each by its run; exit 1 unless each is confirmed"
        ),
    ] = False,
    results: Annotated[Path, typer.Option(help="folder of the results")] = page.RESULTS,
    cache: Annotated[Path, typer.Option(help="folder for what the originals do")] = Path(
        "build/mutants"
    ),
    jobs: Annotated[int | None, typer.Option(min=1, help="workers; default: one per CPU")] = None,
    where: Annotated[
        str | None,
        typer.Option("--executor", help="processes, here, or a Ray cluster (docs/scale.md)"),
    ] = None,
    listed: Annotated[bool, typer.Option("--list", help="list the mutants, and run none")] = False,
    pages: Annotated[bool, typer.Option(help="write docs/mutants.md, and run none")] = False,
    check: Annotated[
        bool, typer.Option(help="with --pages: only report whether the pages are stale")
    ] = False,
) -> None:
    """Judge mutants of correct connectors."""
    try:
        if pages:
            sys.exit(page.main(ROOT, check=check))
        most = in_seconds(minutes, seconds)
        part = parse(shard) if shard else None
        choice = Choice(sample, seed, part, most, tuple(only or ()), again)
        if kills and (again or case):
            raise UsageError(
                "--kills makes the runs that are recorded: it takes no --again or --case"
            )
        lost = 0
        for each in [subject(one) for one in name] if name else subjects().values():
            problem = lacks(each, ROOT)
            if problem is not None:
                print(f"{each.id}: UNSUPPORTED: {problem}", flush=True)
                continue
            judging = Judging(each.id, str(ROOT), explore, tuple(case or ()), limit)
            if kills:
                lost += _judge_kills(
                    judging, choice, results, executors.parse(where), jobs, listed=listed
                )
                continue
            _run(judging, choice, results, cache, executors.parse(where), jobs, listed=listed)
    except (KvconformError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    sys.exit(1 if lost else 0)


def _judge_kills(
    judging: Judging,
    choice: Choice,
    folder: Path,
    where: executors.Choice,
    jobs: int | None,
    *,
    listed: bool,
) -> int:
    """Judge recorded kills again; print those that are not confirmed, and return their number."""
    name = judging.subject
    path = folder / f"{name}.jsonl"
    with judging.server(ROOT) as server:
        known = recorded_kills(all_of(server), read(path))
    mine = {each: known[each] for each in chosen(list(known), choice)}
    if choice.only and not mine:
        raise UsageError(f"{name}: no recorded kill has one of these texts in its site")
    print(f"{name}: {len(mine)} of {len(known)} recorded kills", flush=True)
    if listed:
        print(*(f"{each.site}\n{'':20} {result.run}" for each, result in mine.items()), sep="\n")
    if listed or not mine:
        return 0
    judged = confirmed = 0
    for before, now in judge_kills(judging, mine, choice, path, where, jobs):
        judged += 1
        confirmed += now.outcome == "killed"
        if now.outcome != "killed":
            word = "undecided" if now.outcome == "undecided" else "no longer killed"
            print(f"{word} by {before.run}:", shown(now), sep="\n", flush=True)
    missing = 0 if choice.seconds is not None else len(mine) - judged
    if missing:
        print(f"{name}: {missing} not judged, as the worker's process ended", flush=True)
    print(f"{name}: {confirmed} confirmed", flush=True)
    return judged - confirmed + missing


def _run(
    judging: Judging,
    choice: Choice,
    folder: Path,
    cache: Path,
    where: executors.Choice,
    jobs: int | None,
    *,
    listed: bool,
) -> None:
    name = judging.subject
    with judging.server(ROOT) as server:
        mutations = all_of(server)
        mine = chosen(mutations, choice)
        print(f"{name}: {len(mine)} of {len(mutations)} mutants", flush=True)
        if listed:
            for each in mine:
                print("", each.site, *each.diff(), sep="\n")
            return
        original = original_of(judging, server, cache / f"{name}.json", where)
    seconds = sum(original.seconds.values())
    print(
        f"{name}: the original fails {len(original.failed)} in {len(original.seconds)} runs"
        f" ({seconds:.0f} s), {len(original.skipped)} runs judge nothing",
        *original.failed,
        *original.errors,
        sep="\n  ",
        flush=True,
    )
    judging = replace(judging, original=original)
    for result in judge(judging, mine, choice, folder / f"{name}.jsonl", where, jobs):
        print(shown(result), flush=True)


if __name__ == "__main__":
    typer.run(main)
