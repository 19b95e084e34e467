# SPDX-License-Identifier: Apache-2.0
"""Tests of the progress that a run shows: what is done, what fails, and roughly what is left."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from kvconform.report import progress
from kvconform.report.progress import Progress


@pytest.mark.parametrize("terminal", [False, True])
def test_the_time_that_is_left(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(progress, "EVERY", 50.0)
    out = io.StringIO()
    monkeypatch.setattr(out, "isatty", lambda: terminal)
    monkeypatch.setenv("TERM", "xterm")
    colours = None if terminal else "truecolor"  # may be wanted in a file, too
    console = Console(file=out, force_terminal=True, width=120, color_system=colours)
    shown = Progress(console, 40)
    shown.start()
    for clock[0] in (5.0, 14.0, 65.0):
        shown.done("some.case[a]", [])
    if shown._bar is not None:
        shown._bar.refresh()
    shown.stop()
    # Two thirds of a minute for each run from the first result on, which was at 5 seconds.
    left = "about 13 minutes left"
    assert out.getvalue().count(left) >= 1
    if not terminal:
        assert out.getvalue().splitlines() == [
            "running 40 runs ...",
            f"3 of 40 runs made, no failures so far, {left}",
        ]


def test_less_than_a_minute_is_not_rounded_up_to_one(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    shown = Progress(Console(file=io.StringIO()), 4)
    for clock[0] in (1.0, 40.0):
        shown.done("some.case[a]", [])
    clock[0] = 61.0
    assert shown._left() == ["about 1 minute left"]
    shown.done("some.case[b]", [])
    assert shown._left() == ["less than a minute left"]


def test_nothing_is_estimated_of_little(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    shown = Progress(Console(file=io.StringIO()), 2)
    for clock[0] in (1.0, 10.0):
        assert shown._left() == []
        shown.done("some.case[a]", [])
    clock[0] = 100.0
    assert shown._left() == [], "all is done"
