# SPDX-License-Identifier: Apache-2.0
"""A directory of snapshots: one folder per vLLM minor version, and `index.json` with digests.

Equal snapshots of several versions are one file. A file that differs from its digest, or that the
index does not list, is never overwritten or deleted.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from syrupy.extensions.single_file import SingleFileSnapshotExtension

from kvconform import files
from kvconform.contract.requirement import version_key
from kvconform.errors import UsageError
from kvconform.snapshots.compare import differences, tensor_differences

INDEX = "index.json"
FORMAT = 2
"""Format 1 had texts instead of JSON documents."""
NAME = r"^[a-z0-9.-]+/[a-z]+\.(json|safetensors)$"
FILE = r"^[0-9]+\.[0-9]+/[a-z0-9.-]+/[a-z]+\.(json|safetensors)$"


class SnapshotError(UsageError):
    """The directory of snapshots cannot be used; the message says why and what to do."""


class Entry(BaseModel):
    """Path of a snapshot, relative to the directory, and the SHA-256 of its bytes."""

    model_config = ConfigDict(extra="forbid")
    file: Annotated[str, Field(pattern=FILE)]
    digest: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Format(BaseModel):
    """The part of index.json that every format has."""

    format: int = FORMAT


class Index(BaseModel):
    """index.json. `versions`: minor version -> name -> entry.

    `about`: connector and settings that all snapshots of the directory were recorded with.
    """

    model_config = ConfigDict(extra="forbid")
    format: Annotated[int, Field(ge=FORMAT, le=FORMAT)] = FORMAT
    about: dict[str, Any] = {}
    versions: dict[
        Annotated[str, Field(pattern=r"^[0-9]+\.[0-9]+$")],
        dict[Annotated[str, Field(pattern=NAME)], Entry],
    ] = {}


def minor(version: str) -> str:
    """Return `0.32` for `0.32.1+cpu`. SnapshotError for a version that is no release."""
    key = version_key(version)
    if len(key) < 2 or not version[:1].isdigit():
        raise SnapshotError(
            f"the installed vLLM has version {version!r}, which is no release: snapshots are stored"
            " by release"
        )
    return f"{key[0]}.{key[1]}"


def digest(data: bytes) -> str:
    """Return the SHA-256 in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


class Store:
    """The snapshots below `root` for one vLLM version. `write` and `remove` change the files."""

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
                    f"{self.root} is not empty and has no {INDEX}: it is no directory of snapshots,"
                    " or its index was lost"
                )
            return Index()
        try:
            data = path.read_bytes()
            if Format.model_validate_json(data).format == 1:
                raise SnapshotError(
                    f"{self.root} has snapshots in the text format of an older kvconform: delete"
                    " the directory and record them again with `kvconform snapshot update`"
                )
            return Index.model_validate_json(data)
        except ValidationError as error:
            problem = error.errors(include_url=False)[0]
            where = ".".join(map(str, problem["loc"]))
            raise SnapshotError(
                f"{path} is damaged ({where + ': ' if where else ''}{problem['msg']}): restore it;"
                " after a merge, take one of the two sides"
            ) from None
        except OSError as error:
            raise SnapshotError(f"{path} cannot be read: {error.strerror}") from None

    @property
    def compared_with(self) -> str | None:
        """The version to compare with: this one, else the nearest older, else the nearest newer."""
        return next(iter(self._order()), None)

    def _order(self) -> list[str]:
        """Return the versions of the index, nearest first: this one, older ones, newer ones."""
        here = version_key(self.version)
        known = sorted(self.index.versions, key=version_key)
        older = [v for v in reversed(known) if version_key(v) <= here]
        return older + [v for v in known if version_key(v) > here]

    def names(self) -> set[str]:
        """Return the names of this version's snapshots, or if it has none, the nearest one's."""
        return set(self.index.versions.get(self.compared_with or "", {}))

    def read(self, name: str, *, exact: bool = False) -> bytes | None:
        """Return a snapshot's bytes, of this version or the nearest one that has it, or None.

        `exact`: only of this version. SnapshotError if the file differs from its digest.
        """
        for version in [self.version] if exact else self._order():
            entry = self.index.versions.get(version, {}).get(name)
            if entry is not None:
                return self._bytes(entry)
        return None

    def _bytes(self, entry: Entry) -> bytes:
        path = self.root / entry.file
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            raise SnapshotError(
                f"{path} is missing, though {INDEX} lists it: restore it, or delete {self.root}"
                " and update"
            ) from None
        except OSError as error:
            raise SnapshotError(f"{path} cannot be read: {error.strerror}") from None
        if digest(data) != entry.digest:
            raise SnapshotError(
                f"{path} is not what was written there ({len(data)} bytes, another digest than in"
                f" {INDEX}): it was edited, is truncated, or git changed its line ends (`* -text`"
                " in .gitattributes keeps them); restore it. It is not overwritten"
            )
        return data

    def set_about(self, about: dict[str, Any]) -> None:
        """Set what the snapshots are of. SnapshotError if the directory has those of another."""
        for key in sorted(about):
            if self.index.about and self.index.about.get(key) != about[key]:
                have = self.index.about.get(key)
                raise SnapshotError(
                    f"{self.root} has snapshots of {key} {have!r}, not {about[key]!r}:"
                    " use another --dir"
                )
        self.index.about = about

    def write(self, name: str, data: bytes) -> None:
        """Store `data` as this version's snapshot. Those of other versions stay as they are."""
        mine = self.index.versions.setdefault(self.version, {})
        before, mark = mine.get(name), digest(data)
        if before is not None:
            self._bytes(before)  # raises if the file differs from its digest
        entries = [version[name] for version in self.index.versions.values() if name in version]
        twin = next((entry for entry in entries if entry.digest == mark), None)
        if twin is not None:
            self._bytes(twin)
            mine[name] = Entry(file=twin.file, digest=mark)
        else:
            mine[name] = Entry(file=self._place(name, data), digest=mark)
        if before is not None:
            self._drop(before)
        self._save()

    def _place(self, name: str, data: bytes) -> str:
        """Write a file into this version's folder and return its path relative to `root`.

        A file there that other versions share moves to the folder of one of them.
        """
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
        """Remove this version's snapshots of these names.

        SnapshotError, and nothing is removed, if a file differs from its digest.
        """
        mine = self.index.versions.get(self.version, {})
        for name in sorted(names & set(mine)):
            self._bytes(mine[name])  # raises before anything is deleted
        for name in sorted(names & set(mine)):
            self._drop(mine.pop(name))
        self._save()

    def _drop(self, entry: Entry) -> None:
        """Delete a file, and its empty folders, unless an entry of the index refers to it."""
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
    """Write a file atomically. SnapshotError if it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        files.replace(path, data)
    except OSError as error:
        raise SnapshotError(f"{path} cannot be written: {error.strerror}") from None


class StoreExtension(SingleFileSnapshotExtension):
    """Snapshots as bytes in the Store `current`, under the names of the assertions."""

    current: Store
    updating = False

    @classmethod
    def get_snapshot_name(cls, *, test_location: Any, index: Any = 0) -> str:
        """Return the name of the assertion."""
        return str(index)

    @classmethod
    def get_location(cls, *, test_location: Any, index: Any) -> str:
        """Return the path of this version's own file; the store may share another version's."""
        return str(cls.current.root / cls.current.version / str(index))

    @classmethod
    def dirname(cls, *, test_location: Any) -> str:
        """Return the directory of the store."""
        return str(cls.current.root)

    @classmethod
    def matches_test_location(cls, *, test_location: Any, snapshot_location: str) -> bool:
        """Return True: the store relates snapshots to tests."""
        return True

    def read_snapshot_data_from_location(
        self, *, snapshot_location: str, snapshot_name: str, session_id: str
    ) -> bytes | None:
        """Return the bytes to compare with.

        For an update they are only this version's own, so that each version gets an entry.
        """
        return self.current.read(snapshot_name, exact=self.updating)

    @classmethod
    def write_snapshot_collection(cls, *, snapshot_collection: Any, **_: Any) -> None:
        """Write the snapshot to the store."""
        snapshot = next(iter(snapshot_collection))
        cls.current.write(snapshot.name, snapshot.data)
        # syrupy creates these folders; they stay empty where another version has the file
        own = cls.current.root / cls.current.version
        for folder in (Path(snapshot_collection.location).parent, own):
            with contextlib.suppress(OSError):
                folder.rmdir()

    def diff_lines(self, serialized_data: Any, snapshot_data: Any) -> Any:
        """Return the differences as sentences."""
        return iter(explain(snapshot_data, serialized_data))


def explain(old: bytes, new: bytes) -> list[str]:
    """Return the differences between two files of a snapshot as sentences."""
    if old == new:
        return []
    try:
        before, after = json.loads(old), json.loads(new)
    except ValueError:
        return tensor_differences(old, new)
    found = [str(one) for one in differences(before, after)]
    return found or ["the files differ, but not in anything that is compared"]
