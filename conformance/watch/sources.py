# SPDX-License-Identifier: Apache-2.0
"""Where a connector's source lies, and when it changes. The connector is not imported."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import watchfiles

from kvconform.config.settings import Settings
from kvconform.errors import UsageError

HOSTS = ("vllm", "kvconform")
"""Packages that are much more than the connector in them."""
REGISTERED = Path("distributed/kv_transfer/kv_connector/v1")
"""Where vLLM has the connectors that are registered by name."""
ENDINGS = (".py", ".so", ".json", ".toml", ".yaml", ".yml")
QUIET_MS = 20
"""Milliseconds without a further change after which changes are reported."""
LOOK_MS = 1000
"""Milliseconds between two looks whether the watched folder itself is another one."""


@dataclass(frozen=True)
class Source:
    """The folder with a connector's source, and whether folders in it belong to it."""

    folder: Path
    deep: bool

    def files(self) -> Iterator[Path]:
        """Yield the Python files."""
        yield from self.folder.rglob("*.py") if self.deep else self.folder.glob("*.py")


def source_of(settings: Settings) -> Source:
    """Return where the connector's source lies. UsageError if there is none to watch."""
    module, _, _ = settings.connector.rpartition(":")
    top, *rest = (module or "vllm").split(".")
    spec = importlib.machinery.PathFinder.find_spec(top, [*sys.path, *settings.pythonpath])
    if spec is None:
        spec = importlib.util.find_spec(top)  # editable installations have finders of their own
    folders = list(spec.submodule_search_locations or []) if spec is not None else []
    if folders and not module:
        return Source(Path(folders[0]) / REGISTERED, deep=True)
    if folders and top in HOSTS:
        return Source(Path(folders[0]).joinpath(*rest[:-1]), deep=False)
    if folders:
        return Source(Path(folders[0]).resolve(), deep=True)
    if spec is not None and spec.origin is not None and spec.origin.endswith(".py"):
        return Source(Path(spec.origin).resolve().parent, deep=False)
    raise UsageError(f"there is no source of {settings.connector} to watch")


class Changes:
    """Watches a connector's source in a thread of its own; a context manager of the main thread.

    What is written into `reports`, the directory of the reports, is no change of the source.
    `fileno` is readable while there are changes that were not taken, and after a signal: one that
    arrives just before `select` begins would otherwise not end it. A folder that is deleted is
    waited for, and one that takes its place is a change.
    """

    def __init__(self, source: Source, reports: str | Path) -> None:
        self._source = source
        self._reports = Path(reports).resolve()
        self._over = threading.Event()
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Changes:
        self._woken_before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        signal.set_wakeup_fd(self._woken_before)
        self._over.set()
        self._thread.join(2)

    def fileno(self) -> int:
        """Return the descriptor that is readable while there are changes."""
        return self._reader

    def take(self) -> None:
        """Forget the changes so far."""
        os.read(self._reader, 65536)

    def _watch(self) -> None:
        known = _identity(self._source.folder)
        while not self._over.is_set():
            now = _identity(self._source.folder)
            if now is None:
                if known is not None:
                    self._tell()
                known = None
                time.sleep(0.1)
                continue
            if now != known:
                self._tell()
            known = now
            try:
                self._watch_folder(now)
            except OSError:
                time.sleep(0.1)  # the folder is gone, or will be

    def _watch_folder(self, identity: tuple[int, int]) -> None:
        """Report changes until this folder is no longer the one at its path."""
        folder = self._source.folder
        for changes in watchfiles.watch(
            folder,
            watch_filter=self._counts,
            step=QUIET_MS,
            debounce=10 * QUIET_MS,
            rust_timeout=LOOK_MS,
            yield_on_timeout=True,
            stop_event=self._over,
            recursive=self._source.deep,
            raise_interrupt=False,
        ):
            if changes:
                self._tell()
            if _identity(folder) != identity:
                return

    def _counts(self, _: watchfiles.Change, path: str) -> bool:
        if not path.endswith(ENDINGS) or "__pycache__" in path:
            return False
        return not Path(path).resolve().is_relative_to(self._reports)

    def _tell(self) -> None:
        os.write(self._writer, b"!")


def _identity(folder: Path) -> tuple[int, int] | None:
    try:
        found = folder.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def texts_of(source: Source) -> dict[str, Sequence[str]]:
    """Return the lines of each Python file of the source, by path."""
    found: dict[str, Sequence[str]] = {}
    for path in source.files():
        try:
            found[str(path)] = path.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            continue  # it was deleted meanwhile
    return found
