# SPDX-License-Identifier: Apache-2.0
"""Tests of the directory of snapshots.

Versions share equal files, and edited files are not overwritten.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from kvconform.snapshots.store import SnapshotError, Store, minor

NAME = "chunked.abort/metadata.json"


def files(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


def kept(root: Path, version: str, data: bytes) -> Store:
    store = Store(root, version)
    store.write(NAME, data)
    return store


def test_what_is_written_is_read(tmp_path: Path) -> None:
    kept(tmp_path, "0.32.0", b"one")
    assert Store(tmp_path, "0.32.1+cpu").read(NAME) == b"one"
    assert Store(tmp_path, "0.32.0").read("chunked.abort/stored.json") is None


def test_equal_snapshots_of_two_versions_are_one_file(tmp_path: Path) -> None:
    kept(tmp_path, "0.32.0", b"one")
    kept(tmp_path, "0.31.0", b"one")
    assert files(tmp_path) == [f"0.32/{NAME}", "index.json"]


def test_a_version_that_changes_leaves_the_others_theirs(tmp_path: Path) -> None:
    for version in ("0.32.0", "0.31.0", "0.33.0"):
        kept(tmp_path, version, b"one")
    kept(tmp_path, "0.32.0", b"two")
    assert [Store(tmp_path, v).read(NAME) for v in ("0.31", "0.32", "0.33")] == [
        b"one",
        b"two",
        b"one",
    ]
    assert files(tmp_path) == [f"0.31/{NAME}", f"0.32/{NAME}", "index.json"]
    kept(tmp_path, "0.32.0", b"one")
    assert files(tmp_path) == [f"0.31/{NAME}", "index.json"]


def test_another_version_is_compared_with_the_nearest(tmp_path: Path) -> None:
    kept(tmp_path, "0.26.0", b"old")
    kept(tmp_path, "0.31.0", b"new")
    assert [Store(tmp_path, v).compared_with for v in ("0.33.0", "0.28.0", "0.20.0")] == [
        "0.31",
        "0.26",
        "0.26",
    ]
    assert Store(tmp_path, "0.33.0").read(NAME, exact=True) is None
    assert Store(tmp_path / "none", "0.33.0").compared_with is None


@pytest.mark.parametrize("damage", [b"on", b"One", b""])
def test_a_changed_file_is_an_error_and_is_not_overwritten(tmp_path: Path, damage: bytes) -> None:
    kept(tmp_path, "0.32.0", b"one")
    (tmp_path / "0.32" / NAME).write_bytes(damage)
    store = Store(tmp_path, "0.32.0")
    with pytest.raises(SnapshotError, match="is not what was written there"):
        store.read(NAME)
    with pytest.raises(SnapshotError, match="is not overwritten"):
        store.write(NAME, b"two")
    assert (tmp_path / "0.32" / NAME).read_bytes() == damage


def test_a_damaged_file_of_another_version_is_not_shared(tmp_path: Path) -> None:
    kept(tmp_path, "0.32.0", b"one")
    (tmp_path / "0.32" / NAME).write_bytes(b"two")
    with pytest.raises(SnapshotError, match="is not what was written there"):
        Store(tmp_path, "0.31.0").write(NAME, b"one")


def test_a_damaged_file_is_not_deleted(tmp_path: Path) -> None:
    store = kept(tmp_path, "0.32.0", b"one")
    (tmp_path / "0.32" / NAME).write_bytes(b"two")
    with pytest.raises(SnapshotError, match="is not what was written there"):
        store.remove({NAME})
    assert (tmp_path / "0.32" / NAME).read_bytes() == b"two"


def test_a_version_that_has_some_snapshots_takes_the_others_from_the_nearest(
    tmp_path: Path,
) -> None:
    other = "chunked.abort/stored.json"
    kept(tmp_path, "0.32.0", b"one").write(other, b"old")
    store = kept(tmp_path, "0.33.0", b"two")
    assert (store.read(NAME), store.read(other), store.read(other, exact=True)) == (
        b"two",
        b"old",
        None,
    )


def test_a_place_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(SnapshotError, match="is a file, not a directory"):
        Store(tmp_path / "file", "0.32.0")
    with pytest.raises(SnapshotError, match="cannot be written: Not a directory"):
        Store(tmp_path / "file" / "below", "0.32.0").write(NAME, b"x")
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / ".gitkeep").touch()
    assert Store(tmp_path / "new", "0.32.0").names() == set()


def test_a_file_that_is_not_listed_is_not_overwritten(tmp_path: Path) -> None:
    kept(tmp_path, "0.32.0", b"one")
    stray = tmp_path / "0.32" / "chunked.abort" / "stored.json"
    stray.write_bytes(b"mine")
    with pytest.raises(SnapshotError, match="is in the way"):
        Store(tmp_path, "0.32.0").write("chunked.abort/stored.json", b"two")
    assert stray.read_bytes() == b"mine"


def test_a_file_that_is_gone_is_an_error(tmp_path: Path) -> None:
    kept(tmp_path, "0.32.0", b"one")
    (tmp_path / "0.32" / NAME).unlink()
    with pytest.raises(SnapshotError, match="is missing, though index.json lists it"):
        Store(tmp_path, "0.32.0").read(NAME)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        '{"format": 3}',
        '{"versions": {"0.32": {"../x.json": {"file": "a", "digest": "b"}}}}',
    ],
)
def test_a_damaged_index_is_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "index.json").write_text(text)
    with pytest.raises(SnapshotError, match=r"index\.json is damaged"):
        Store(tmp_path, "0.32.0")


def test_a_directory_of_an_older_format_is_refused(tmp_path: Path) -> None:
    entry = '{"a.b/stored.txt": {"file": "0.32/a.b/stored.txt", "digest": "x"}}'
    (tmp_path / "index.json").write_text(f'{{"format": 1, "versions": {{"0.32": {entry}}}}}')
    with pytest.raises(SnapshotError, match="record them again with `kvconform snapshot update`"):
        Store(tmp_path, "0.32.0")


def test_a_directory_of_other_things_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("x")
    with pytest.raises(SnapshotError, match="is no directory of snapshots"):
        Store(tmp_path, "0.32.0")


def test_snapshots_of_another_connector_are_refused(tmp_path: Path) -> None:
    store = kept(tmp_path, "0.32.0", b"one")
    store.set_about({"connector": "a:B"})
    store.write(NAME, b"two")
    with pytest.raises(SnapshotError, match="has snapshots of connector 'a:B', not 'c:D'"):
        Store(tmp_path, "0.32.0").set_about({"connector": "c:D"})


def test_what_is_removed_is_gone_unless_another_version_has_it(tmp_path: Path) -> None:
    kept(tmp_path, "0.31.0", b"one")
    kept(tmp_path, "0.32.0", b"one").remove({NAME})
    assert Store(tmp_path, "0.31.0").read(NAME) == b"one"
    assert Store(tmp_path, "0.32.0").names() == set()
    Store(tmp_path, "0.31.0").remove({NAME})
    assert files(tmp_path) == ["index.json"]


def test_only_releases_have_snapshots() -> None:
    assert minor("0.32.0+cpu") == "0.32"
    with pytest.raises(SnapshotError, match="which is no release"):
        minor("unknown")
