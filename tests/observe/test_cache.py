# SPDX-License-Identifier: Apache-2.0
"""Tests of the observer of a cache: the sizes of its levels at the end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvconform.contract.trace import Trace
from kvconform.observe.cache import CacheObserver, bytes_in_files


class Inspector:
    """A cache of two levels, of which the lower one has a directory."""

    def __init__(self, folder: Path) -> None:
        self.bytes = [0, 7]
        self._folder = folder

    def cache(self) -> dict[str, Any]:
        return {"held": 0, "levels": []}

    def sizes(self) -> list[dict[str, Any]]:
        lower = {"name": "disk", "bytes": self.bytes[1], "path": str(self._folder)}
        return [{"name": "host", "bytes": self.bytes[0]}, lower]


def test_sizes_are_those_at_the_end_and_files_are_measured(tmp_path: Path) -> None:
    inspector = Inspector(tmp_path)
    trace = Trace()
    observer = CacheObserver(trace, inspector, {}, 16, lambda: 4096)
    inspector.bytes = [100, 90]
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "file").write_bytes(bytes(60))
    (tmp_path / "other").write_bytes(bytes(20))
    observer.measure(1.0)
    host, disk = [event for event in trace.events if event["kind"] == "cache.size"]
    assert (host["level"], host["bytes"], host["on_disk"], host["fresh"]) == (
        "host",
        100,
        None,
        True,
    )
    assert (disk["bytes"], disk["on_disk"], disk["fresh"]) == (90, 80, False)
    assert (disk["kv"], disk["block"]) == (4096, 16)


def test_sizes_that_threads_still_change_are_awaited(tmp_path: Path) -> None:
    looks = iter([(1, 9), (5, 5), (5, 5)])

    class Moving(Inspector):
        def sizes(self) -> list[dict[str, Any]]:
            self.bytes = [*next(looks)]
            return super().sizes()

    trace = Trace()
    inspector = Inspector(tmp_path)
    observer = CacheObserver(trace, inspector, {}, 16, lambda: 0)
    inspector.__class__ = Moving
    observer.measure(60.0)
    sizes = [event["bytes"] for event in trace.events if event["kind"] == "cache.size"]
    assert sizes == [5, 5] and not list(looks)


def test_a_file_that_is_removed_while_files_are_counted_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stays").write_bytes(bytes(20))
    found = [tmp_path / "gone", tmp_path / "stays"]
    monkeypatch.setattr(Path, "rglob", lambda self, pattern: iter(found))
    assert bytes_in_files(tmp_path) == 20


def test_a_cache_need_not_show_sizes(tmp_path: Path) -> None:
    trace = Trace()
    inspector: Any = Inspector(tmp_path)
    inspector.sizes = None
    observer = CacheObserver(trace, inspector, {}, 16, lambda: 0)
    observer.at_rest(0.0)
    observer.measure(1.0)
    assert [event["kind"] for event in trace.events] == ["cache.ended"]
