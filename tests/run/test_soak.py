# SPDX-License-Identifier: Apache-2.0
"""Tests of `soak`: what became less in identical rounds is told from what varies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvconform.contract.steps import STEPS, Soak, Step, repeated
from kvconform.contract.trace import Trace
from kvconform.engine.engine import Engine
from kvconform.run import soak as module
from kvconform.run.census import Census

ROUNDS = 5


class Driver:
    """Counts rounds. Each uses `used` entries, which come back in steps without work."""

    used = 0

    def __init__(self, tmp: Path, uses: int) -> None:
        self.uses = uses
        self.trace = Trace()
        self.tmp = tmp
        self.round = 0
        self.named_engines: Mapping[str, Engine] = {"": SimpleNamespace()}  # type: ignore[dict-item]

    def execute_steps(self, steps: Sequence[Step]) -> None:
        self.round += 1
        self.used = self.uses

    def settle(self, steps: int) -> None:
        self.used = 0


def shrunk(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    holder: str,
    free: Sequence[int],
    first: int = 200,
    uses: int = 0,
) -> list[list[int]]:
    """Return the numbers that are reported if `free` entries are left after each round."""
    driver = Driver(tmp_path, uses)

    def censuses(_: Driver) -> dict[str, Census]:
        left = free[driver.round - 1] if driver.round else first
        return {holder: Counter(free=left - driver.used)} if left else {holder: Counter()}

    monkeypatch.setattr(module, "_censuses", censuses)
    module.soak(driver, [], Soak(rounds=ROUNDS))
    return [e["numbers"] for e in driver.trace.events if e["kind"] == "soak.shrunk"]


def test_a_pool_that_each_round_takes_from_becomes_less(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    free = list(range(100, 85, -1))
    assert shrunk(monkeypatch, tmp_path, "worker half", free) == [[96, 91, 86]]


def test_a_pool_may_be_used_up_by_several_entries_now_and_then(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    free = [100, 90, 90, 90, 90, 90, 80, 80, 80, 80, 70, 70, 70, 70, 70]
    assert shrunk(monkeypatch, tmp_path, "worker half", free) == [[90, 80, 70]]


def test_what_is_in_use_in_between_comes_back(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    free = list(range(100, 85, -1))
    assert shrunk(monkeypatch, tmp_path, "worker half", free, uses=9) == [[96, 91, 86]]


@pytest.mark.parametrize(
    ("first", "free", "numbers"),
    [
        (24, [22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0, 0, 0, 0], [[14, 4, 0]]),
        (16, [14, 12, 10, 8, 6, 4, 2, 0, 0, 0, 0, 0, 0, 0, 0], [[6, 0, 0]]),
        (6, [6, 6, 6, 6, 6, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0], []),  # what was left of the case's start
        (9, [0] * 15, []),
    ],
)
def test_a_pool_that_has_nothing_left_was_used_up_by_the_rounds(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    first: int,
    free: list[int],
    numbers: list[list[int]],
) -> None:
    assert shrunk(monkeypatch, tmp_path, "worker half", free, first) == numbers


def test_a_heap_that_grows_between_two_clearances_does_not_become_less(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    heap = [92, 94, 96, 98, 100, 60, 62, 64, 66, 68, 70, 72, 30, 32, 34]
    assert shrunk(monkeypatch, tmp_path, "worker half", heap) == []


def test_a_process_may_get_rid_of_things(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert shrunk(monkeypatch, tmp_path, "process", list(range(100, 85, -1))) == []


@pytest.mark.parametrize(
    ("prompt", "fresh"),
    [
        (13, 13),
        ({"same": "a"}, {"same": "a_3"}),
        ({"of": "a", "then": 4}, {"of": "a_3", "then": 4}),
        (
            {"parts": [{"of": "a", "from": 2, "tokens": 4}, {"new": 3}]},
            {"parts": [{"of": "a_3", "from": 2, "tokens": 4}, {"new": 3}]},
        ),
    ],
)
def test_a_round_has_the_prompts_of_the_case_or_others_that_agree_as_they_do(
    prompt: Any, fresh: Any
) -> None:
    def add(req: str, prompt: Any) -> Step:
        return STEPS["add"].model_validate({"add": {"req": req, "prompt": prompt}})

    assert repeated(add("b", prompt), 3) == add("b_3", {"same": "b"})
    assert repeated(add("b", prompt), 3, fresh=True) == add("b_3", fresh)


class Grants:
    """A driver that grants so many tokens to each repetition of a prompt."""

    def __init__(self, tmp: Path, *grants: int) -> None:
        self.trace = Trace()
        self.tmp = tmp
        self.grants = iter(grants)
        self.rests = False
        self.named_engines: Mapping[str, Engine] = {}

    def execute_steps(self, steps: Sequence[Step]) -> None:
        add = next((step.arg for step in steps if step.op == "add"), None)
        if add is not None and not isinstance(add.prompt, int):
            self.trace.emit("alloc", req=add.req, external=next(self.grants))

    def settle(self, steps: int) -> None:
        """Nothing is under way."""


@pytest.mark.parametrize(
    ("grants", "served"),
    [
        ((16, 16), (16, 16)),
        ((0, 0, 16, 0, 16), (16, 16)),  # it stores in the background
        ((16, 0, 8, 0), (16, 8)),
        ((0, 0, 0), (0, 0)),  # nothing is to be lost
    ],
)
def test_what_comes_back_of_a_new_prompt_has_time_to_be_stored(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    grants: tuple[int, ...],
    served: tuple[int, int],
) -> None:
    monkeypatch.setattr(module, "REST", 0)
    driver = Grants(tmp_path, *grants)
    module.soak(driver, [], Soak(rounds=1, fresh=True))
    told = [(e["first"], e["last"]) for e in driver.trace.events if e["kind"] == "soak.served"]
    assert told == [served]
    assert next(driver.grants, None) is None, "it was repeated as often as it should be"


@pytest.mark.parametrize(
    ("returned", "emptied"), [(True, True), (False, False), (None, False), ("raised", False)]
)
def test_the_last_prompt_comes_after_a_reset_that_was_not_refused(
    tmp_path: Path, returned: Any, emptied: bool
) -> None:
    class Resets(Grants):
        def execute_steps(self, steps: Sequence[Step]) -> None:
            super().execute_steps(steps)
            if any(step.op == "reset" for step in steps):
                self.trace.emit("cache.reset", phase="asked", returned=None)
                if returned != "raised":
                    self.trace.emit("cache.reset", phase="done", returned=returned)

    driver = Resets(tmp_path, 16, 16)
    reset = STEPS["reset"].model_validate({"reset": {"connector": True}})
    module.soak(driver, [reset], Soak(rounds=1, fresh=True))
    assert [e["emptied"] for e in driver.trace.events if e["kind"] == "soak.served"] == [emptied]


def test_what_a_thread_ends_during_a_census_is_counted_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`end.bounded` was wrongly reported of a connector with timers, on a busy machine."""
    held = iter([5])
    at_work = [True]

    def censuses(_: Driver) -> dict[str, Census]:
        at_work[0] = False
        return {"worker half": Counter(held=next(held, 0))}

    monkeypatch.setattr(module, "_censuses", censuses)
    monkeypatch.setattr(module.alive, "works_aside", lambda: at_work[0])
    monkeypatch.setattr(module, "PAUSE", 0)
    assert module._settled(Driver(tmp_path, 0)) == {"worker half": Counter(held=0)}
