# SPDX-License-Identifier: Apache-2.0
"""Tests that drawn, varied and shrunk workloads reuse an id only after the engine released it."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from kvconform.explore.dice import Dice
from kvconform.explore.draw import drawn
from kvconform.explore.mutate import (
    grammars_come,
    ids_are_free,
    images_fit,
    is_legal,
    mutated,
    numbers_are_free,
    sessions_go_on,
    sources_have_run,
)
from kvconform.explore.scenes import engines_in_turn
from kvconform.explore.shrink import shrink
from kvconform.explore.workload import Data, Workload, make

BOTH, MODES = ["reference", "vllm"], ["sync", "async"]
FIRST: Data = {"add": {"req": "a", "prompt": 8, "max_tokens": 9}}
AGAIN: Data = {"add": {"req": "b", "prompt": {"same": "a"}, "max_tokens": 4, "id": "a"}}
ASKED: list[Data] = [{"lookup-only": "a"}, {"abort": "a"}]
GIVEN_UP: list[Data] = [{"step": 2}, {"land": 2}, {"abort": "a"}]


def data_of(*steps: Data, **axes: Any) -> Data:
    return make(
        "t.t",
        "t",
        [*steps, {"run": {}}],
        engine="reference",
        **{"scheduling": "async", "depth": 2, **axes},
    )


@pytest.mark.parametrize(
    ("data", "free"),
    [
        (data_of(FIRST, *GIVEN_UP, AGAIN), True),
        (data_of(FIRST, {"run": {}}, AGAIN), True),
        (data_of(FIRST, *GIVEN_UP[:2], AGAIN), False),
        (data_of(FIRST, *GIVEN_UP[::2], AGAIN), False),
        (data_of(FIRST, *GIVEN_UP, AGAIN, depth=3), False),
        (data_of(FIRST, {"step": 2}, {"land": 1}, {"abort": "a"}, AGAIN, scheduling="sync"), True),
        (data_of({"add": {**FIRST["add"], "max_tokens": 2}}, *GIVEN_UP, AGAIN), False),
        (data_of({"add": {**FIRST["add"], "drafts": [2]}}, *GIVEN_UP, AGAIN), False),
        (data_of(FIRST, *ASKED, AGAIN), True),
        (data_of(FIRST, ASKED[0], {"step": 1}, ASKED[1], AGAIN), False),
        (data_of(FIRST, *GIVEN_UP, {"add": {"req": "b", "prompt": 8, "max_tokens": 4}}), True),
    ],
)
def test_when_an_id_is_free(data: Data, free: bool) -> None:
    assert ids_are_free(data) is free


def test_what_is_drawn_and_varied_takes_ids_that_are_free() -> None:
    at_once = moved = 0
    for number, workload in enumerate(drawn(BOTH, MODES, None, first_seed=3, count=700)):
        steps = workload.data["steps"]
        assert is_legal(workload.data), workload.data
        if any("id" in step.get("add", {}) for step in steps):
            assert all(
                ids_are_free(mutated(f"t/{number}/{each}", workload, BOTH, MODES).data)
                for each in range(8)
            )
        at_once += any(
            "abort" in one and "id" in two.get("add", {}) for one, two in pairwise(steps)
        )
        images = {
            step["add"]["req"]: step["add"]["mm"][0]
            for step in steps
            if "mm" in step.get("add", {})
        }
        moved += any(
            "same" in prompt
            and name in images
            and images.get(prompt["same"], {}).get("id", images[name]["id"]) != images[name]["id"]
            for name, prompt in (
                (step["add"]["req"], step["add"]["prompt"]) for step in steps if "add" in step
            )
            if isinstance(prompt, dict)
        )
    assert at_once > 10 and moved > 3, (
        "an id is taken at once, and an image stands behind another's placeholders"
    )


def test_shrinking_leaves_an_id_free() -> None:
    def both(workload: Workload) -> bool:
        return ["id" in step["add"] for step in workload.data["steps"] if "add" in step] == [
            False,
            True,
        ]

    small, _ = shrink(Workload(data_of(FIRST, *GIVEN_UP, AGAIN)), both)
    assert ids_are_free(small.data) and len(small.data["steps"]) > 2


def test_two_adapters_of_one_number_need_a_restart_between_them() -> None:
    """In twelve hundred draws some do, all of these legal; without the restart none is."""
    both = 0
    for workload in drawn(BOTH, MODES, None, first_seed=5, count=1200):
        assert numbers_are_free(workload.data)
        steps = workload.data["steps"]
        adapters = [step["add"].get("lora") for step in steps if "add" in step]
        if "l12" in adapters and "l21" in adapters:
            both += 1
            assert not is_legal(
                {**workload.data, "steps": [step for step in steps if "restart" not in step]}
            )
    assert both > 5


WAITS: Data = {"add": {"req": "a", "prompt": 8, "max_tokens": 2, "structured": True}}


@pytest.mark.parametrize(
    ("steps", "comes"),
    [
        ([WAITS, {"step": 1}, {"grammar": "a"}, {"run": {}}], True),
        ([WAITS, {"abort": "a"}, {"run": {}}], True),
        ([WAITS, {"run": {}}, {"grammar": "a"}], False),
        ([WAITS, {"abort": "a"}, {"grammar": "a"}], False),
        ([WAITS, {"step": 1}], False),
    ],
)
def test_a_request_waits_for_a_grammar_that_comes(steps: list[Data], comes: bool) -> None:
    assert grammars_come({"steps": steps}) is comes


def test_a_restart_of_a_scene_can_be_changed_alone() -> None:
    """Only one restart of a case can be in another process, and a workload changes the first."""
    steps = engines_in_turn(Dice("0"), 4).steps
    restarts = [step for step in steps if "restart" in step]
    assert len(restarts) == 3
    assert len({id(step) for step in restarts}) == 3


@pytest.mark.parametrize(
    ("between", "legal"),
    [
        ([{"run": {}}], True),
        ([{"step": 1}, {"run": {}}, {"drop-local": {}}], True),
        ([{"step": 9}], False),
        ([{"run": {"max": 2}}], False),
    ],
)
def test_a_reload_is_promised_of_a_request_that_has_run_to_its_end(
    between: list[Data], legal: bool
) -> None:
    again: Data = {"add": {"req": "b", "prompt": {"same": "a"}, "reloads": "a"}}
    assert sources_have_run(data_of(FIRST, *between, again)) is legal


@pytest.mark.parametrize(
    ("prompt", "legal"),
    [
        (9, True),
        (8, False),
        ({"same": "a"}, False),
        ({"of": "a", "then": 1}, True),
        ({"of": "a", "tokens": 7, "then": 1}, False),
        ({"of": "a", "outputs": True, "tokens": 9}, False),  # of the output, nothing is certain
        ({"parts": [{"new": 4}, {"of": "a", "from": 4, "tokens": 4}], "then": 1}, True),
        ({"parts": [{"new": 4}, {"of": "a", "from": 5, "tokens": 4}], "then": 1}, False),
    ],
)
def test_images_lie_within_their_prompts(prompt: int | Data, legal: bool) -> None:
    image = {"at": 5, "length": 4, "id": "cat"}
    add: Data = {"add": {"req": "b", "prompt": prompt, "mm": [image]}}
    assert images_fit(data_of(FIRST, add)) is legal


@pytest.mark.parametrize(
    ("steps", "legal"),
    [
        ([{"continue": {"req": "s", "then": 3}}, {"continue": {"req": "s", "then": 0}}], True),
        ([{"continue": {"req": "s", "then": 3}}], False),
        ([], False),
        ([{"abort": "s"}, {"continue": {"req": "s", "then": 0}}], False),
    ],
)
def test_sessions_end_and_are_not_aborted(steps: list[Data], legal: bool) -> None:
    add: Data = {"add": {"req": "s", "prompt": 8, "session": True}}
    assert sessions_go_on(data_of(add, *steps)) is legal
