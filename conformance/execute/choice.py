# SPDX-License-Identifier: Apache-2.0
"""The option `--executor`: where pieces run, and the executor for it."""

from __future__ import annotations

import re
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from kvconform.errors import UsageError, did_you_mean
from kvconform.execute.crew import Crew, Here, Processes
from kvconform.execute.executor import Executor
from kvconform.execute.work import Work
from kvconform.files import scratch_root
from kvconform.process.scratch import temporary

P = TypeVar("P")
R = TypeVar("R")

KINDS = ("processes", "here", "ray")
CLUSTER = re.compile(r"ray://\S+|[\w.-]+:\d+|\[[\da-f:]+\]:\d+")
"""An address of a Ray cluster."""


@dataclass(frozen=True)
class Choice:
    """Where pieces run: in `processes` of this machine, `here` in this process, or on `ray`.

    `address`: of the Ray cluster; None: that of RAY_ADDRESS, or a cluster of this machine.
    """

    kind: str = KINDS[0]
    address: str | None = None

    def workers(self, given: int | None, usual: int) -> int | None:
        """Return the number of workers: `given`, or else `usual` for processes of this machine.

        None: as many as the executor has room for.
        """
        return given or (usual if self.kind == "processes" else None)


LOCAL = Choice()


def add_options(parser: ArgumentParser, usual: str = "one per CPU") -> None:
    """Add --executor and --jobs. `usual`: the number of workers without --jobs, in words."""
    parser.add_argument(
        "--executor",
        metavar="WHERE",
        help="processes, here, or a Ray cluster (docs/scale.md; default: processes)",
    )
    parser.add_argument("--jobs", type=_count, metavar="N", help=f"workers (default: {usual})")


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"{text} is no number of workers: 1 or more")
    return int(text)


def parse(text: str | None) -> Choice:
    """Return the choice that a text stands for; None: local processes. UsageError otherwise."""
    if text is None:
        return LOCAL
    if text in KINDS:
        return Choice(text)
    if CLUSTER.fullmatch(text):
        return Choice("ray", text)
    close = did_you_mean(text, KINDS)
    raise UsageError(
        f"there is no executor {text!r}; there are {', '.join(KINDS)}, and the address of a Ray"
        f" cluster (ray://HOST:10001 or HOST:6379){close}"
    )


def crew_of(
    choice: Choice, work: Work[Any, Any], kind: str, scratch: Path, count: int | None
) -> Crew:
    """Return the crew for a choice. `kind`: a word for what it does. `count`: of workers.

    `scratch`: folder for temporary files of this machine. UsageError if Ray is missing.
    """
    if choice.kind == "ray":
        from kvconform.execute.ray_crew import OnRay

        return OnRay(work, kind, choice.address, count)
    return Here(work, scratch) if choice.kind == "here" else Processes(work, scratch)


@contextmanager
def executor(
    choice: Choice, work: Work[P, R], kind: str, count: int | None, end: float | None = None
) -> Iterator[Executor[P, R]]:
    """Enter an executor with a temporary folder, whose name contains `kind`.

    `count` and `end`: as for Executor.
    """
    with (
        temporary(kind, scratch_root()) as scratch,
        Executor[P, R](crew_of(choice, work, kind, scratch, count), count, end) as found,
    ):
        yield found
