# SPDX-License-Identifier: Apache-2.0
"""A description of the work for workers: how a worker is built, and how it runs a piece."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

P = TypeVar("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Place:
    """Where a worker runs.

    - `scratch`: folder for temporary files, on the worker's machine; workers share it.
    - `name`: of the worker, unique in `scratch`.
    - `own`: whether the process is the worker's alone; False: it is the process of the caller.
    - `copies`: folders of the caller's machine, and their copies on the worker's.
    """

    scratch: Path
    name: str
    own: bool = True
    copies: tuple[tuple[str, str], ...] = ()

    @property
    def note(self) -> Path:
        """File for the note of the watchdog (kvconform.process.watchdog)."""
        return self.scratch / f"{self.name}.note"

    @property
    def log(self) -> Path:
        """File for what the worker prints, if it redirects its output."""
        return self.scratch / f"{self.name}.log"

    def here(self, folder: str) -> str:
        """Return the copy of a folder on the worker's machine; the folder itself without one."""
        return dict(self.copies).get(folder, folder)


P_contra = TypeVar("P_contra", contravariant=True)
R_co = TypeVar("R_co", covariant=True)


class Work(Protocol[P_contra, R_co]):
    """Picklable description of workers that are all alike.

    A worker is built once per process, and runs one piece after another.
    """

    @property
    def fresh(self) -> bool:
        """Whether a worker needs a new interpreter instead of one forked after importing vLLM."""

    @property
    def folders(self) -> Sequence[str]:
        """Folders, absolute, that workers import from in addition to the installed packages."""

    @property
    def packages(self) -> Sequence[str]:
        """Installed top-level packages that other machines may lack, such as the connector's."""

    @property
    def gpus(self) -> int:
        """GPUs that a worker needs for itself."""

    def worker(self, place: Place) -> AbstractContextManager[Callable[[P_contra], R_co]]:
        """Build a worker in this process; the context's value runs a piece.

        KvconformError if no worker can be built.
        """


@dataclass(frozen=True)
class Calls(Generic[P, R]):
    """Work that calls a function of a module for each piece. The module may cache for all pieces.

    `folders`: as for `Work`; they precede the installed packages.
    """

    function: Callable[[P], R]
    folders: tuple[str, ...] = ()
    fresh: bool = False
    packages: tuple[str, ...] = ()
    gpus: int = 0

    @contextmanager
    def worker(self, place: Place) -> Iterator[Callable[[P], R]]:
        """Put the folders on the import path; the context's value is the function."""
        folders = [place.here(folder) for folder in self.folders]
        sys.path[:] = folders + [each for each in sys.path if each not in folders]
        yield self.function
