# SPDX-License-Identifier: Apache-2.0
"""Check that exploration finds the planted defects without their cases.

`python -m kvconform.dev.explore_defects [ids] --seconds 20` runs random workloads on each defect.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from kvconform.config.limits import in_seconds
from kvconform.contract.loader import Spec
from kvconform.dev.defect import Defect
from kvconform.dev.defects import known_defects, served, specification, target_of
from kvconform.errors import KvconformError, UsageError
from kvconform.execute.answers import Death
from kvconform.execute.choice import Choice, add_options, executor, parse
from kvconform.execute.work import Calls
from kvconform.explore.workload import Workload
from kvconform.files import scratch_root
from kvconform.process.forking import forked_after_import

if TYPE_CHECKING:
    from kvconform.explore.outcome import Outcome

LIMIT = 300.0
"""Seconds of processor time for a defect, unless the command line says otherwise."""
SHRINK = 150
SHRINK_SECONDS = 60.0
"""Limits of the reduction of a failing workload: number of runs, and seconds."""


@dataclass(frozen=True)
class Turn:
    """A piece of work: a search for a defect. The fields are the arguments of `search`."""

    defect: str
    seconds: float
    seed: int
    shrink: bool


@dataclass
class Search:
    """Outcome of the search for one defect.

    `found` is the requirement that found it: one that the defect is listed to fail, or a
    consequence. `others` are requirements that failed before; they do not find the defect.
    `left_out` says why the defect was not searched for. `seconds` are processor time; `requests`
    and `steps` are the size of the failing workload, and `case` is its JSON.
    """

    defect: str
    found: str | None = None
    seconds: float = 0.0
    workloads: int = 0
    others: list[str] = field(default_factory=list)
    requests: int = 0
    steps: int = 0
    left_out: str | None = None
    case: str | None = None


def left_out(defect: Defect) -> str | None:
    """Return why exploration cannot be expected to find a defect, or None."""
    if defect.live:
        return "needs the complete vLLM"
    if defect.own_process:
        return "may end the process that it runs in"
    if defect.servers:
        return "needs a server"
    if defect.fails == ["case.expected"]:
        return "only its case says what is wrong"
    broken = [specification().requirements[name] for name in defect.fails]
    if all(each.area == "api" or each.event in ("api", "engine.api") for each in broken):
        return "is wrong in the class or in vLLM itself: inspection finds it, without a workload"
    return None


def search(name: str, seconds: float, seed: int, shrink: bool) -> Search:
    """Run random workloads until one fails because of the defect, then reduce that one.

    `seconds` limits the processor time of the search, without imports and reduction: processor
    time does not depend on the load of the machine.
    """
    from kvconform.process import watchdog

    defect = known_defects()[name]
    spec = specification()
    found = Search(name, left_out=left_out(defect))
    if found.left_out is not None:
        return found
    with tempfile.TemporaryDirectory(prefix="kvconform-", dir=scratch_root()) as tmp:
        watchdog.start(defect.hook_timeout)
        try:
            _search(defect, spec, found, seconds, seed, shrink, Path(tmp))
        finally:
            watchdog.stop()
    return found


def _search(
    defect: Defect, spec: Spec, found: Search, seconds: float, seed: int, shrink: bool, tmp: Path
) -> None:
    from kvconform.explore.outcome import outcome
    from kvconform.explore.shrink import shrink as smaller
    from kvconform.run.calibration import target_profile

    with ExitStack() as stack:
        options = stack.enter_context(served(defect, tmp))
        targets = {size: target_of(defect, size, options) for size in (4, 16)}
        fault = defect.fault()
        for target in targets.values() if fault is not None else ():
            # Fills the cache: the profile must come from an engine without the fault.
            target_profile(target, tmp)
        stack.enter_context(fault.active() if fault is not None else nullcontext())

        def run(workload: Workload, only: list[str] | None = None) -> Outcome:
            target = targets[workload.data["config"].get("block_size", 4)]
            return outcome(workload, target, spec, tmp / "run", requirements=only, strict=True)

        requirement: str | None = None
        began = time.process_time()
        for workload in _workloads(defect, seed):
            if time.process_time() - began > seconds:
                break
            found.workloads += 1
            names = _names(run(workload))
            requirement = next((name for name in names if _listed(defect, spec, name)), None)
            if requirement is not None:
                break
            found.others = sorted({*found.others, *names})
        found.seconds = round(time.process_time() - began, 1)
        if requirement is not None:
            found.found = requirement
            if shrink:
                until = time.monotonic() + SHRINK_SECONDS

                def fails(each: Workload) -> bool:
                    if time.monotonic() >= until:
                        return False
                    return requirement in _names(run(each, [requirement or ""]))

                workload, _ = smaller(workload, fails, SHRINK)
            found.requests, found.steps, *_ = workload.size
            found.case = json.dumps(workload.data)


def _workloads(defect: Defect, seed: int) -> Iterator[Workload]:
    from kvconform.contract.case import SLOW
    from kvconform.explore.draw import drawn

    engines: list[str] = [engine for engine in defect.engines if engine != "live"]
    return drawn(
        engines,
        ["sync", "async"],
        list(SLOW) if defect.emulate_cuda else None,
        first_seed=seed,
        count=1_000_000,
    )


def _names(found: Outcome) -> list[str]:
    errors = ["harness"] if found.error else []
    return [failure.requirement for failure in found.failures] + found.broken_guarantees + errors


def _listed(defect: Defect, spec: Spec, requirement: str) -> bool:
    """Return whether the defect is listed to fail a requirement, or that is a consequence.

    A fault of vLLM's own is neither.
    """
    known = spec.requirements.get(requirement)
    return requirement in (*defect.fails, *defect.may) or (known is not None and known.consequence)


def _print(done: Search) -> None:
    if done.left_out:
        text = f"left out: {done.left_out}"
    elif done.found is None:
        text = f"NOT FOUND in {done.workloads} workloads, {done.seconds:.0f} s"
    else:
        size = f"{done.requests} requests, {done.steps} steps"
        text = f"{done.seconds:.1f} s, {done.workloads} workloads, by {done.found}: {size}"
    if done.others:
        text += f"; other failures: {', '.join(done.others)}"
    print(f"{done.defect:<40}{text}", flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Print a line per defect, and a summary.

    Returns 0 if at least 95 % of those searched for were found, 1 if not, 2 for an unknown defect.
    """
    parser = argparse.ArgumentParser(prog="kvconform.dev.explore_defects", description=__doc__)
    parser.add_argument("ids", nargs="*", help="defects (default: all)")
    parser.add_argument(
        "--seconds",
        type=float,
        help="processor time for the search of one defect (default: 300)",
    )
    parser.add_argument("--minutes", type=float, help="the same in minutes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=int, default=1, metavar="N", help="one defect in N")
    add_options(parser, "1")
    parser.add_argument(
        "--no-shrink", action="store_true", help="do not reduce the failing workloads"
    )
    parser.add_argument("--out", type=Path, help="file for the results, a line of JSON each")
    given = parser.parse_args(arguments)
    try:
        limit = in_seconds(given.minutes, given.seconds) or LIMIT
        where = parse(given.executor)
    except UsageError as error:
        parser.error(error.message)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")
    names = given.ids or list(known_defects())[:: given.every]
    if unknown := sorted(set(names) - set(known_defects())):
        print(f"there is no defect {unknown[0]!r}", file=sys.stderr)
        return 2
    results: list[Search] = []
    turns = [Turn(name, limit, given.seed, not given.no_shrink) for name in names]
    try:
        for each in _results(turns, where, where.workers(given.jobs, 1)):
            results.append(each)
            _print(each)
            if given.out is not None:
                with given.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(each)) + "\n")
    except KvconformError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return error.code
    return summarise(results)


def _results(turns: list[Turn], where: Choice, jobs: int | None) -> Iterator[Search]:
    """Search for each defect, and yield the outcomes in order."""
    with executor(where, Calls(apart), "search", jobs) as workers:
        for turn, found in workers.run(turns):
            yield _died(turn) if isinstance(found, Death) else found


def apart(turn: Turn) -> Search:
    """Search in a process of its own. If it dies, `process.died` is among the failures.

    Threads that one connector leaves behind must not affect the worker's next search.
    """
    context = forked_after_import()
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(theirs, turn))
    process.start()
    theirs.close()
    try:
        found: Search = ours.recv()
    except EOFError:
        found = _died(turn)
    process.join()
    return found


def _answer(pipe: Connection, turn: Turn) -> None:
    pipe.send(search(turn.defect, turn.seconds, turn.seed, turn.shrink))


def _died(turn: Turn) -> Search:
    return Search(turn.defect, others=["process.died"])


def summarise(results: list[Search]) -> int:
    """Print totals and medians; return 0 if at least 95 % were found, else 1."""
    sought = [each for each in results if each.left_out is None]
    caught = [each for each in sought if each.found is not None]
    print(f"\n{len(caught)} of {len(sought)} found; {len(results) - len(sought)} left out")
    if caught:
        seconds = median(each.seconds for each in caught)
        requests = median(each.requests for each in caught)
        steps = median(each.steps for each in caught)
        print(f"median: {seconds:.1f} s, {requests:g} requests, {steps:g} steps")
    return 0 if len(caught) >= 0.95 * len(sought) else 1


if __name__ == "__main__":
    # Workers find its functions and classes by the name of the module, which is not `__main__`.
    sys.exit(importlib.import_module("kvconform.dev.explore_defects").main())
