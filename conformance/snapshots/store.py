# SPDX-License-Identifier: Apache-2.0
"""A directory of snapshots: one folder per vLLM minor version, and `index.json`, which says what each version has, with digests.

A snapshot that a version shares with another lies in one of their folders only. Nothing is overwritten or deleted that is not as the
index says, or that nobody looked at.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvconform import files
from kvconform.contract.requirement import version_key
from kvconform.errors import UsageError

INDEX = "index.json"
NAME = r"^[a-z0-9.-]+/[a-z]+\.(txt|safetensors)$"
FILE = r"^[0-9]+\.[0-9]+/[a-z0-9.-]+/[a-z]+\.(txt|safetensors)$"


class SnapshotError(UsageError):
    """The directory of snapshots is not as it should be; the sentence says what to do."""


class Entry(BaseModel):
    """Where a snapshot lies, relative to the directory, and the SHA-256 of its bytes."""

    model_config = ConfigDict(extra="forbid")
    file: Annotated[str, Field(pattern=FILE)]
    digest: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Index(BaseModel):
    """index.json. `about`: what the snapshots are of; all of a directory are of the same. `versions`: minor version -> name -> entry."""

    model_config = ConfigDict(extra="forbid")
    format: Annotated[int, Field(ge=1, le=1)] = 1
    about: dict[str, Any] = {}
    versions: dict[
        Annotated[str, Field(pattern=r"^[0-9]+\.[0-9]+$")],
        dict[Annotated[str, Field(pattern=NAME)], Entry],
    ] = {}


def minor(version: str) -> str:
    """`0.32` of `0.32.1+cpu`. SnapshotError for what is no release."""
    key = version_key(version)
    if len(key) < 2 or not version[:1].isdigit():
        raise SnapshotError(
            f"the installed vLLM calls itself {version!r}, which is no release: snapshots are kept by release"
        )
    return f"{key[0]}.{key[1]}"


def digest(data: bytes) -> str:
    """SHA-256, hexadecimal."""
    return hashlib.sha256(data).hexdigest()


class Store:
    """The snapshots below `root` for one vLLM version. Reading changes nothing; `write` changes files and the index."""

    def __init__(self, root: Path, version: str) -> None:
        self.root, self.version = root, minor(version)
        self.index = self._read_index()

    def _read_index(self) -> Index:
        path = self.root / INDEX
        if not path.exists():
            if self.root.exists() and not self.root.is_dir():
                raise SnapshotError(f"{self.root} is a file, not a directory")
            if self.root.is_dir() and any(
                not entry.name.startswith(".git") for entry in self.root.iterdir()
            ):
                raise SnapshotError(
                    f"{self.root} is not empty and has no {INDEX}: it is no directory of snapshots (or its index was lost)"
                )
            return Index()
        try:
            return Index.model_validate_json(path.read_bytes())
        except ValidationError as error:
            problem = error.errors(include_url=False)[0]
            where = ".".join(map(str, problem["loc"]))
            raise SnapshotError(
                f"{path} is damaged ({where + ': ' if where else ''}{problem['msg']}): restore it, after a merge from one of the sides"
            ) from None
        except OSError as error:
            raise SnapshotError(f"{path} cannot be read: {error.strerror}") from None

    @property
    def compared_with(self) -> str | None:
        """The version whose snapshots count here: this one; else the nearest older, else the nearest newer one."""
        return next(iter(self._order()), None)

    def _order(self) -> list[str]:
        """The versions of the index, the nearest first: this one, older ones, newer ones."""
        here = version_key(self.version)
        known = sorted(self.index.versions, key=version_key)
        older = [v for v in reversed(known) if version_key(v) <= here]
        return older + [v for v in known if version_key(v) > here]

    def names(self) -> set[str]:
        """Names of this version's snapshots; of the nearest version's, where this one has none."""
        return set(self.index.versions.get(self.compared_with or "", {}))

    def read(self, name: str, *, exact: bool = False) -> bytes | None:
        """A snapshot's bytes, of this version or the nearest one that has it; None if none has. `exact`: of this version only.

        SnapshotError if the file is not what was written.
        """
        versions = [self.version] if exact else self._order()
        entry = next(
            (e for v in versions if (e := self.index.versions.get(v, {}).get(name)) is not None),
            None,
        )
        return None if entry is None else self._bytes(entry)

    def _bytes(self, entry: Entry) -> bytes:
        path = self.root / entry.file
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            raise SnapshotError(
                f"{path} is missing, though {INDEX} lists it: restore it, or delete the directory and update"
            ) from None
        except OSError as error:
            raise SnapshotError(f"{path} cannot be read: {error.strerror}") from None
        if digest(data) != entry.digest:
            raise SnapshotError(
                f"{path} is not what was written there ({len(data)} bytes, another digest than in {INDEX}): it was edited by hand, is"
                " truncated, or git changed its line ends (`* -text` in .gitattributes keeps them); restore it. It is not overwritten"
            )
        return data

    def set_about(self, about: dict[str, Any]) -> None:
        """Say what the snapshots are of. SnapshotError if the directory has those of something else."""
        for key in sorted(about):
            if self.index.about and self.index.about.get(key) != about[key]:
                have = self.index.about.get(key)
                raise SnapshotError(
                    f"{self.root} has snapshots of {key} {have!r}, not {about[key]!r}: use another --dir"
                )
        self.index.about = about

    def write(self, name: str, data: bytes) -> None:
        """Keep `data` as this version's snapshot; changes files and the index. What other versions have stays as it is."""
        mine = self.index.versions.setdefault(self.version, {})
        before, mark = mine.get(name), digest(data)
        if before is not None:
            self._bytes(before)  # is as it was written, or nothing is overwritten
        twin = next(
            (
                e
                for v in self.index.versions.values()
                if (e := v.get(name)) is not None and e.digest == mark
            ),
            None,
        )
        if twin is not None:
            self._bytes(twin)
            mine[name] = Entry(file=twin.file, digest=mark)
        else:
            mine[name] = Entry(file=self._place(name, data), digest=mark)
        if before is not None:
            self._drop(before)
        self._save()

    def _place(self, name: str, data: bytes) -> str:
        """Write a new file into this version's folder; returns its path. A file that other versions share moves to one of theirs."""
        file = f"{self.version}/{name}"
        path = self.root / file
        sharers = [
            v
            for v, entries in self.index.versions.items()
            if v != self.version and name in entries and entries[name].file == file
        ]
        if sharers:
            home = f"{min(sharers, key=version_key)}/{name}"
            _put(self.root / home, self._bytes(self.index.versions[sharers[0]][name]))
            for version in sharers:
                self.index.versions[version][name].file = home
        elif path.exists() and file not in self._listed():
            raise SnapshotError(f"{path} is in the way: {INDEX} does not list it")
        _put(path, data)
        return file

    def remove(self, names: set[str]) -> None:
        """Forget this version's snapshots of these names; changes files and the index."""
        mine = self.index.versions.get(self.version, {})
        for name in sorted(names & set(mine)):
            self._bytes(mine[name])  # is as it was written, or nothing is deleted
        for name in sorted(names & set(mine)):
            self._drop(mine.pop(name))
        self._save()

    def _drop(self, entry: Entry) -> None:
        """Delete a file if nothing refers to it any more."""
        if entry.file in self._listed():
            return
        path = self.root / entry.file
        path.unlink(missing_ok=True)
        for folder in (path.parent, path.parent.parent):
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()

    def _listed(self) -> set[str]:
        return {
            entry.file for entries in self.index.versions.values() for entry in entries.values()
        }

    def _save(self) -> None:
        versions = sorted(self.index.versions.items(), key=lambda item: version_key(item[0]))
        self.index.versions = {
            version: dict(sorted(entries.items())) for version, entries in versions
        }
        _put(self.root / INDEX, (self.index.model_dump_json(indent=1) + "\n").encode())


def _put(path: Path, data: bytes) -> None:
    """Write a file whole or not at all. SnapshotError if that cannot be."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        files.replace(path, data)
    except OSError as error:
        raise SnapshotError(f"{path} cannot be written: {error.strerror}") from None
