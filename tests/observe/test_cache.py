# SPDX-License-Identifier: Apache-2.0
"""Tests of the observer of a cache: the sizes of its levels at the end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvconform.contract.trace import Trace
from kvconform.observe.cache import CacheObserver


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
    observer.measure()
    host, disk = [event for event in trace.events if event["kind"] == "cache.size"]
    assert (host["level"], host["bytes"], host["on_disk"], host["fresh"]) == (
        "host",
        100,
        None,
        True,
    )
    assert (disk["bytes"], disk["on_disk"], disk["fresh"]) == (90, 80, False)
    assert (disk["kv"], disk["block"]) == (4096, 16)


def test_a_cache_need_not_show_sizes(tmp_path: Path) -> None:
    trace = Trace()
    inspector: Any = Inspector(tmp_path)
    inspector.sizes = None
    observer = CacheObserver(trace, inspector, {}, 16, lambda: 0)
    observer.at_rest(0.0)
    observer.measure()
    assert [event["kind"] for event in trace.events] == ["cache.ended"]
