# SPDX-License-Identifier: Apache-2.0
"""Tests of what `kvconform watch` prints about a judgement."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from kvconform.watch.screen import Screen


@pytest.mark.parametrize("part", [True, False])
def test_what_was_found_is_printed_whole_and_so_is_how_much_was_judged(*, part: bool) -> None:
    out = io.StringIO()
    screen = Screen(Console(file=out, width=60), "mine:Conn")
    found = " ".join(f"word{number}" for number in range(40))
    report: Any = type("Report", (), {"word": "NOT CONFORMANT"})()
    screen.judged(report, None, {"load.position": {"a.case[run]": found}}, "folder", part=part)
    lines = out.getvalue().splitlines()
    assert found in " ".join(" ".join(lines).split())
    assert all(len(line) <= 60 for line in lines if "word" in line)
    assert ("NOT CONFORMANT in what was selected" in out.getvalue()) == part
