# SPDX-License-Identifier: Apache-2.0
"""The timeline as text."""

from __future__ import annotations

from typing import Any

from kvconform.html.lanes import PIECES
from kvconform.report import strip


def story(cells: list[list[Any]], requests: tuple[str, ...] = ("a", "b"), **more: list[Any]) -> dict[str, Any]:
    return {"requests": list(requests), "cells": cells, "states": [], "wrong": [], **more}


def cell(lane: int, step: int, **pieces: int) -> list[Any]:
    return [lane, step, 0, *[pieces.get(name, 0) for name in PIECES], 0, 0, []]


def test_what_a_step_was_about() -> None:
    lines = strip.render(
        story(
            [cell(0, 1, local=4, computed=5), cell(0, 3, placeholder=1), cell(1, 3, loaded=8, accepted=1, rejected=2)],
            states=[[0, 3, "PREEMPTED", ""], [1, 4, "FINISHED_STOPPED", ""]], wrong=[[1, 3, 9, 0, 1, "poison", "", -1, -1]],
        )
    )  # fmt: skip
    assert lines[0].split() == ["step", "1", "3", "4"]
    assert lines[1].split() == ["a", "h4", "5", "?1", "P"]
    assert lines[2].split() == ["b", "!L8+1x2", "F"]
    assert any("L" in line and "loaded" in line for line in lines[3:])


def test_no_line_is_longer_than_a_hundred_columns() -> None:
    steps = [cell(lane, step, local=12345, loaded=12345, computed=12345) for lane in range(2) for step in range(1000)]
    lines = strip.render(story(steps, ("a-request-with-a-long-name", "b")))
    assert max(map(len, lines)) <= strip.WIDTH
    assert any(line.startswith("... and ") for line in lines)


def test_a_run_without_requests_has_none() -> None:
    assert strip.render(story([], ())) == []
    assert strip.render(story([])) == []
