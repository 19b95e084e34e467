# SPDX-License-Identifier: Apache-2.0
"""Search for false alarms: random workloads on correct connectors.

Every failure is an error of the suite or of one of these connectors. In every second batch, a
variant declares what it was seen to save, and so is held to that.
`python -m kvconform.dev.explore_correct --state FILE` runs the reference connector and all variants
(kvconform.refimpl.variants.registry) in turn, each time with other workloads. With the same FILE,
the next call continues where this one stopped. `--small` draws workloads of two or three short
requests, which are ten times as fast. With `--guided`, every second workload is a mutation of one
of its batch that reached something new.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import math
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict

from kvconform.config.limits import in_seconds
from kvconform.config.target import Target
from kvconform.dev.defects import specification
from kvconform.errors import KvconformError, UsageError
from kvconform.execute.answers import Death
from kvconform.execute.choice import Choice, add_options, executor, parse
from kvconform.execute.work import Calls
from kvconform.explore.draw import drawn
from kvconform.explore.workload import Workload, text_of
from kvconform.files import scratch_root
from kvconform.session.gateways import reseeded_server

if TYPE_CHECKING:
    from kvconform.explore.corpus import Corpus  # imports vLLM

HANGS = 30.0
"""Seconds after which a hook counts as one that never returns."""
ENGINES = ["reference", "vllm"]
FAILING = (
    "foresees-failures",
    "stops-at-failure",
    "stops-at-failure-async",
    "stumbles",
    "unreliable",
)
"""Variants whose loads fail on purpose, which promise nothing."""
LIMIT = 3600.0
"""Seconds after which running batches are given up, unless the command line says otherwise."""


class Batch(BaseModel):
    """Outcome of some workloads on one variant.

    `failures` has tuples (id of the case, its YAML, requirement, message), also of guarantees that
    the engine broke and no known bug explains; `guarantees` maps the guarantees that it broke to
    how often it did.
    """

    model_config = ConfigDict(extra="forbid")

    variant: str
    workloads: int = 0
    unsupported: int = 0
    failures: list[tuple[str, str, str, str]] = []
    guarantees: dict[str, int] = {}


class State(BaseModel):
    """Progress of a campaign: the batches so far, and their outcome."""

    model_config = ConfigDict(extra="forbid")

    batches: int = 0
    workloads: int = 0
    unsupported: int = 0
    failures: int = 0
    guarantees: dict[str, int] = {}
    seconds: float = 0.0

    def add(self, batch: Batch) -> None:
        """Add the outcome of a batch."""
        self.batches += 1
        self.workloads += batch.workloads
        self.unsupported += batch.unsupported
        self.failures += len(batch.failures)
        self.guarantees = dict(Counter(self.guarantees) + Counter(batch.guarantees))


def batches(names: list[str], first: int, seed: int = 0) -> Iterator[tuple[str, int]]:
    """Yield (variant, seed) without end: all variants with `seed`, then with the next.

    `first` is the number of pairs to skip.
    """
    for number in itertools.count(first):
        yield names[number % len(names)], seed + number // len(names)


@dataclass(frozen=True)
class Turn:
    """A piece of work: `count` workloads on a variant. `number`: of the batch.

    `simple`: small ones. `guided`: mutations of others in between.
    """

    number: int
    variant: str
    seed: int
    count: int
    simple: bool
    guided: bool


def declaring(target: Target, tmp: Path) -> Target:
    """Return the target with what it is seen to save among its declared capabilities.

    Unchanged if it saves nothing, or promises nothing, as one whose loads fail on purpose.
    """
    from kvconform.run.calibration import profile_of

    caps = profile_of(target, tmp).caps
    if not caps["store"] or caps["saves"] == "none" or caps["best_effort"]:
        return target
    seen = {"store": True, "saves": caps["saves"]}
    return replace(target, capabilities={**seen, **target.capabilities})


def run(turn: Turn) -> Batch:
    """Run and judge workloads on a variant, in this process.

    Recommendations count, except the one that the variant does not follow on purpose.
    """
    from kvconform.dev.sweep import target_of
    from kvconform.explore.corpus import Corpus
    from kvconform.explore.outcome import outcome
    from kvconform.process import watchdog
    from kvconform.refimpl.variants.registry import NOT_RECOMMENDED

    name = turn.variant
    found = Batch(variant=name)
    guarantees: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="kvconform-", dir=scratch_root()) as tmp:
        watchdog.start(HANGS)
        try:
            target = target_of(name)
            if turn.seed % 2 and name not in FAILING:
                target = declaring(target, Path(tmp) / "profile")
            corpus = Corpus()
            for workload in _workloads(turn, corpus):
                done = outcome(workload, target, specification(), Path(tmp) / "run", strict=True)
                if turn.guided:
                    corpus.add(workload, done)
                found.workloads += 1
                found.unsupported += done.unsupported
                guarantees.update(done.broken_guarantees)
                bad = [
                    (each.requirement, each.message)
                    for each in done.failures
                    if each.requirement != NOT_RECOMMENDED.get(name)
                ]
                bad += [(each.requirement, each.message) for each in done.unknown]
                if done.error:
                    bad.append(("harness", done.error))
                text = text_of(workload.data, f"{name}, seed {workload.seed}")
                found.failures += [(str(workload.data["id"]), text, *each) for each in bad]
        finally:
            watchdog.stop()
    found.guarantees = dict(guarantees)
    return found


def _workloads(turn: Turn, corpus: Corpus) -> Iterator[Workload]:
    """Return the workloads of a batch. `corpus` gets their outcomes."""
    modes = ["sync", "async"]
    fresh = drawn(ENGINES, modes, None, first_seed=turn.seed, count=turn.count, simple=turn.simple)
    return islice(corpus.guided(fresh, ENGINES, modes), turn.count) if turn.guided else fresh


def main(arguments: list[str] | None = None) -> int:
    """Print every failure, and a line per minute.

    Returns 0 if nothing failed, 1 if something did, 2 for an unknown variant.
    """
    from kvconform.refimpl.variants.registry import VARIANTS

    parser = argparse.ArgumentParser(prog="kvconform.dev.explore_correct", description=__doc__)
    parser.add_argument("names", nargs="*", help="variants (default: all)")
    parser.add_argument(
        "--workloads",
        type=int,
        default=100_000,
        help="number of workloads, with those of earlier runs (default: 100000)",
    )
    parser.add_argument("--minutes", type=float, help="time limit (default: 60)")
    parser.add_argument("--seconds", type=float, help="the same in seconds")
    parser.add_argument(
        "--batch", type=int, default=25, help="workloads on one variant at a time (default: 25)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the first batches (default: 0)")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--guided", action="store_true")
    add_options(parser)
    parser.add_argument("--state", type=Path, help="file that stores the progress")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("kvconform-found"),
        help="directory for the cases of failures",
    )
    given = parser.parse_args(arguments)
    try:
        limit = in_seconds(given.minutes, given.seconds) or LIMIT
        where = parse(given.executor)
    except UsageError as error:
        parser.error(error.message)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")
    if unknown := sorted(set(given.names) - set(VARIANTS)):
        known = ", ".join(VARIANTS)
        print(f"there is no variant {unknown[0]!r}; there are {known}", file=sys.stderr)
        return 2
    state = State()
    if given.state is not None and given.state.exists():
        state = State.model_validate_json(given.state.read_text())
    began = time.monotonic()
    last_line = 0.0
    before = state.seconds
    missing = max(0, math.ceil((given.workloads - state.workloads) / given.batch))
    coming = islice(batches(given.names or list(VARIANTS), state.batches, given.seed), missing)
    turns = (
        Turn(number, name, seed, given.batch, given.small, given.guided)
        for number, (name, seed) in enumerate(coming)
    )
    try:
        for batch in _results(turns, where, given.jobs, began + limit):
            state.add(batch)
            _keep(batch, given.out)
            state.seconds = before + time.monotonic() - began
            if given.state is not None:
                given.state.write_text(state.model_dump_json())
            if time.monotonic() - last_line > 60:
                last_line = time.monotonic()
                print(_line(state), flush=True)
    except KvconformError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return error.code
    print(_line(state), flush=True)
    return int(bool(state.failures))


def _results(turns: Iterable[Turn], where: Choice, jobs: int | None, end: float) -> Iterator[Batch]:
    """Yield the outcomes of the batches, in their order, until one was given up at the `end`."""
    with (
        reseeded_server(os.environ, late=True),
        executor(where, Calls(run), "correct", jobs, end) as workers,
    ):
        for number, (turn, batch) in enumerate(workers.run(turns)):
            if turn.number != number:
                return  # a later run makes the batches in between
            yield _died(turn, batch) if isinstance(batch, Death) else batch


def _died(turn: Turn, death: Death) -> Batch:
    """Return the outcome of a batch whose process ended."""
    said = f"seed {turn.seed} ended the process {death}"
    failure = ("process", f"# {turn}\n", "process.died", said)
    return Batch(variant=turn.variant, workloads=turn.count, failures=[failure])


def _line(state: State) -> str:
    broken = [f"{name} {count}" for name, count in sorted(state.guarantees.items())]
    judged = state.workloads - state.unsupported
    return (
        f"{state.workloads} workloads ({judged} judged), {state.failures} failures; "
        f"{state.seconds:.0f} s; guarantees broken: {', '.join(broken) or 'none'}"
    )


def _keep(batch: Batch, folder: Path) -> None:
    """Print the failures of a batch, and write their cases."""
    for case, text, requirement, message in batch.failures:
        print(f"{batch.variant}: {requirement}: {message[:300]}", flush=True)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{batch.variant}-{requirement}-{case}.yaml").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    # Workers find its functions and classes by the name of the module, which is not `__main__`.
    sys.exit(importlib.import_module("kvconform.dev.explore_correct").main())
