# SPDX-License-Identifier: Apache-2.0
"""Values in files, one each, that only their owner can read."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote, unquote

from kvconform.refimpl.cache.backend import StoreError

SUFFIX = ".kv"
PARTIAL = ".partial"
"""End of the name of a file that is being written. After a crash it stays, and is never read."""
EMPTY = "%"
"""Name of an empty part of a key; no other part is quoted like this."""


ATTEMPTS = 10
"""How often a file is written while other processes remove its directory."""


class FileBackend:
    """The file of key `a/b` is `<root>/a/b.kv`; directories have mode 0700, files 0600.

    ValueError for an empty path.
    """

    def __init__(self, root: str) -> None:
        if not root:
            raise ValueError("the path of a store is empty")
        # Paths are strings, not `Path`: every hook of the connector needs some.
        self._root = os.path.abspath(root)

    @property
    def root(self) -> str:
        """The directory that all files are in."""
        return self._root

    def exists(self, key: str) -> bool:
        return os.path.exists(self._path(key))

    def get(self, key: str) -> bytes | None:
        try:
            with open(self._path(key), "rb") as file:
                return file.read()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise StoreError(f"a file cannot be read: {error.strerror}") from error

    def set(self, key: str, value: bytes) -> None:
        path = self._path(key)
        for _ in range(ATTEMPTS):
            try:
                self._write(path, value)
                return
            except FileNotFoundError:
                continue  # `delete` has just removed the directory: it was empty
            except OSError as error:
                raise StoreError(f"a file cannot be written: {error.strerror}") from error
        raise StoreError("a file cannot be written: its directory is removed again and again")

    def _write(self, path: str, value: bytes) -> None:
        """Write a file atomically: a reader sees the old file or the new one.

        The ids of process and thread keep two writers of the same key apart.
        """
        self._make(os.path.dirname(path))
        partial = f"{path}.{os.getpid()}.{threading.get_ident()}{PARTIAL}"
        try:
            number = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
            with open(number, "wb") as file:
                file.write(value)
            os.replace(partial, path)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(partial)
            raise

    def _make(self, folder: str) -> None:
        """Make a directory and those above it that are missing, private to the owner."""
        try:
            os.mkdir(folder, 0o700)
        except FileExistsError:
            return
        except FileNotFoundError:
            self._make(os.path.dirname(folder))
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder, 0o700)

    def list(self, prefix: str = "") -> Iterator[str]:
        folder = prefix.rpartition("/")[0]
        top = "/".join([self._root, *map(_quoted, folder.split("/"))]) if folder else self._root
        for place, _, names in os.walk(top):
            parts = Path(place).relative_to(self._root).parts
            for name in names:
                if name.endswith(SUFFIX):
                    key = "/".join(map(_unquoted, (*parts, name.removesuffix(SUFFIX))))
                    if key.startswith(prefix):
                        yield key

    def delete(self, key: str) -> None:
        path = self._path(key)
        try:
            os.unlink(path)
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            raise StoreError(f"a file cannot be removed: {error.strerror}") from error
        folder = os.path.dirname(path)
        with contextlib.suppress(OSError):  # it is not empty
            while folder != self._root:
                os.rmdir(folder)
                folder = os.path.dirname(folder)

    def close(self) -> None:
        """Nothing stays open."""

    def _path(self, key: str) -> str:
        return "/".join([self._root, *map(_quoted, key.split("/"))]) + SUFFIX


def _quoted(part: str) -> str:
    """Return the name of a part of a key: a plain file name, never `..` or a path."""
    if part.isascii() and part.isalnum():  # most parts: to look at it first is ten times as fast
        return part
    quoted = quote(part, safe="")
    if part and not part.strip("."):
        return quoted.replace(".", "%2E")
    return quoted or EMPTY


def _unquoted(name: str) -> str:
    return "" if name == EMPTY else unquote(name)
