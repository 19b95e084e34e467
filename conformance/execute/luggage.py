# SPDX-License-Identifier: Apache-2.0
"""What travels to the nodes of a cluster in a zip file: kvconform and the connector's source.

The file has the same bytes for the same sources, so that a cluster stores it once.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import kvconform
from kvconform.errors import UsageError

SKIPPED = frozenset(
    {".git", ".hg", ".svn", ".nox", ".tox", ".venv", "venv", "node_modules", "__pycache__"}
    | {".mypy_cache", ".pytest_cache", ".ruff_cache", ".eggs", "kvconform-found"}
    | {"kvconform-report", "kvconform-corpus"}
)
"""Names of folders that do not travel; environments (`pyvenv.cfg`) do not either."""
MOST = 256 * 2**20
"""Bytes of sources that travel, at most."""
FOLDERS = "kvconform-folders"
"""Folder of the zip file with copies of import folders, by number."""
INSTALLED = frozenset({"kvconform", "vllm", "torch"})
"""Packages that never travel with a connector."""


def pack(path: Path, folders: Sequence[str], packages: Sequence[str]) -> int:
    """Write the zip file; return the number of bytes of its contents.

    `folders`: import folders, of which copies travel. `packages`: top-level packages that travel
    from where they are installed, unless they are in a folder. UsageError if that is too much.
    """
    total = 0
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for source, inside in _contents(folders, packages):
            total += source.stat().st_size
            if total > MOST:
                raise UsageError(
                    f"the connector's source has more than {MOST // 2**20} MB:"
                    " --pythonpath must name a folder with its package alone, or the package must"
                    " be installed on all nodes"
                )
            entry = zipfile.ZipInfo(inside)  # without the time of the file
            entry.external_attr = (0o755 if os.access(source, os.X_OK) else 0o644) << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, source.read_bytes())
    return total


def _contents(folders: Sequence[str], packages: Sequence[str]) -> Iterator[tuple[Path, str]]:
    """Yield files with their names in the zip file."""
    yield from _below(Path(kvconform.__path__[0]), "kvconform")
    for number, folder in enumerate(folders):
        yield from _below(Path(folder), f"{FOLDERS}/{number}")
    for package in packages:
        if package not in INSTALLED and not _in_a_folder(package, folders):
            yield from _installed(package)


def _in_a_folder(package: str, folders: Sequence[str]) -> bool:
    return any(
        (Path(folder) / package).is_dir() or (Path(folder) / f"{package}.py").is_file()
        for folder in folders
    )


def _installed(package: str) -> Iterator[tuple[Path, str]]:
    """Yield the files of a package, wherever it is imported from; none for one that is missing."""
    if package in sys.stdlib_module_names:
        return
    try:
        found = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        found = None
    if found is None:
        return
    for place in found.submodule_search_locations or ():
        yield from _below(Path(place), package)
    if found.submodule_search_locations is None and found.origin:
        yield Path(found.origin), Path(found.origin).name


def _below(top: Path, inside: str) -> Iterator[tuple[Path, str]]:
    """Yield the files below a folder, in order; links are followed, once each."""
    seen: set[str] = set()
    for place, names, files in os.walk(top, followlinks=True):
        real = os.path.realpath(place)
        if real in seen or (place != str(top) and "pyvenv.cfg" in files):
            names.clear()
            continue
        seen.add(real)
        names[:] = sorted(name for name in names if name not in SKIPPED)
        for name in sorted(files):
            source = Path(place) / name
            if source.is_file() and not name.endswith(".pyc"):
                yield source, f"{inside}/{source.relative_to(top).as_posix()}"


def copies(folders: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Return the folders with their copies, on a machine that has unpacked the zip file."""
    root = Path(kvconform.__path__[0]).parent
    return tuple(
        (folder, str(root / FOLDERS / str(number))) for number, folder in enumerate(folders)
    )
