# SPDX-License-Identifier: Apache-2.0
"""The syrupy extension: keeps snapshots in a Store instead of beside the test, whatever a test or its parameters are called."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from syrupy.extensions.single_file import SingleFileSnapshotExtension

from kvconform.snapshots.compare import differences, tensor_differences
from kvconform.snapshots.store import Store


class StoreExtension(SingleFileSnapshotExtension):
    """Bytes, in the Store that is `current`. The name of an assertion (`snapshot(name=...)`) is the snapshot's name in the store."""

    current: Store
    updating = False

    @classmethod
    def get_snapshot_name(cls, *, test_location: Any, index: Any = 0) -> str:
        return str(index)

    @classmethod
    def get_location(cls, *, test_location: Any, index: Any) -> str:
        """Where this version's own file would be; it may share one of another version."""
        return str(cls.current.root / cls.current.version / str(index))

    @classmethod
    def dirname(cls, *, test_location: Any) -> str:
        return str(cls.current.root)

    @classmethod
    def matches_test_location(cls, *, test_location: Any, snapshot_location: str) -> bool:
        return True  # the store knows what is whose

    def read_snapshot_data_from_location(
        self, *, snapshot_location: str, snapshot_name: str, session_id: str
    ) -> bytes | None:
        """The bytes that count here; for an update only this version's own, so that each version gets an entry."""
        return self.current.read(snapshot_name, exact=self.updating)

    @classmethod
    def write_snapshot_collection(cls, *, snapshot_collection: Any, **_: Any) -> None:
        """Give the store the bytes; changes files."""
        snapshot = next(iter(snapshot_collection))
        cls.current.write(snapshot.name, snapshot.data)
        for folder in (
            Path(snapshot_collection.location).parent,
            cls.current.root / cls.current.version,
        ):
            with contextlib.suppress(
                OSError
            ):  # syrupy makes it; it stays empty where another version has the file
                folder.rmdir()

    def diff_lines(self, serialized_data: Any, snapshot_data: Any) -> Any:
        """Sentences instead of lines."""
        return iter(explain(snapshot_data, serialized_data))


def explain(old: bytes, new: bytes) -> list[str]:
    """What differs between two snapshots' bytes, in sentences."""
    if old == new:
        return []
    try:
        before, after = old.decode(), new.decode()
    except UnicodeDecodeError:
        return tensor_differences(old, new)
    return (
        differences(before, after)
        if before.startswith("kvconform snapshot")
        else tensor_differences(old, new)
    )
