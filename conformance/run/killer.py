# SPDX-License-Identifier: Apache-2.0
"""Ends a process in the midst of a save, as a kill does that comes from outside.

What a connector does in its saving hooks is counted in calls of functions, C functions included. A
step before shows how many there are, and what its files look like at each of them: where one has
other bytes than in the end, a kill leaves half of it. The kill comes in the middle of these places,
of those where the size is right already if there are any, or else after a share of the calls. So it
comes at the same place in every run. A save on a thread of the connector is not interrupted.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

from kvconform.observe.call import Call
from kvconform.observe.probe import Probe

SAVING = ("save_kv_layer", "wait_for_save")
"""Hooks in which a connector saves."""
Files: TypeAlias = dict[Path, tuple[int, bytes]]
"""Size and digest of files."""
MOST = 4000
"""Calls of a step at which the files are looked at."""


class Killer:
    """Counts the calls that saving hooks make, and calls `kill` in the midst of a save.

    `kill` must not return. `folder`: where the connector's files are. `share`: of the calls in the
    last step that saved much, until `arm`, if no file was seen half-written there.
    """

    def __init__(self, probe: Probe, folder: Path, share: float, kill: Callable[[], None]) -> None:
        self._folder = folder
        self._share = share
        self._kill = kill
        self._calls = 0
        self._seen: list[Files] = []
        self._place = 0
        self._most = 0
        self._at: int | None = None
        probe.on("bind_connector_metadata", before=self._begin)
        for hook in SAVING:
            probe.on(hook, before=self._start, after=self._stop)

    def arm(self) -> None:
        """Kill in the next save that makes enough calls; never, if there was no save before."""
        self._settle()
        self._at = self._place or None

    def _begin(self, _: Call) -> None:
        self._settle()
        self._calls = 0
        self._seen = []

    def _start(self, _: Call) -> None:
        sys.setprofile(self._count)

    def _stop(self, _: Call) -> None:
        sys.setprofile(None)

    def _settle(self) -> None:
        """Choose the place of the kill by the step that has ended, unless it saved little."""
        self._most = max(self._most, self._calls)
        if not self._calls or 2 * self._calls < self._most:
            return
        after = self._files()
        half = [
            (number, any(after[file][0] == found[0] for file, found in differing.items()))
            for number, files in enumerate(self._seen, 1)
            if (differing := {f: files[f] for f in files if after.get(f, files[f]) != files[f]})
        ]
        places = [number for number, is_full in half if is_full] or [number for number, _ in half]
        share = max(1, int(self._calls * self._share))
        self._place = places[len(places) // 2] if places else share

    def _count(self, frame: Any, event: str, arg: Any) -> None:
        if event not in ("call", "c_call"):
            return
        self._calls += 1
        if self._at is None:
            if len(self._seen) < MOST:
                sys.setprofile(None)
                self._seen.append(self._files())
                sys.setprofile(self._count)
        elif self._calls >= self._at:
            sys.setprofile(None)
            self._kill()

    def _files(self) -> Files:
        """Return what is in the connector's files."""
        found: Files = {}
        for file in self._folder.rglob("*"):
            try:
                if file.is_file():
                    data = file.read_bytes()
                    found[file] = len(data), hashlib.blake2b(data, digest_size=8).digest()
            except OSError:  # gone meanwhile
                continue
        return found
