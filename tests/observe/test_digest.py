# SPDX-License-Identifier: Apache-2.0
"""Tests of digests: they change exactly when the object does, whatever metadata consists of."""

from __future__ import annotations

import copy
import dataclasses
import os
import pickle
import subprocess
import sys
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

from kvconform.observe.digest import (
    FILLED_IN,
    digest,
    pickle_round_trip,
    scheduler_output_picture,
)


class Color(Enum):
    RED = 1
    BLUE = 2


class Slotted:
    __slots__ = ("left",)


class MoreSlots(Slotted):
    __slots__ = "right"


class SlotsAndDict(Slotted):
    def __init__(self) -> None:
        self.left, self.other = 1, 2


@dataclass
class Nested:
    inner: Any = None
    items: list[Any] = field(default_factory=list)


def slotted(left: int, right: int) -> MoreSlots:
    made = MoreSlots()
    made.left, made.right = left, right
    return made


def tensor(dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor([1, 2, 3]).to(dtype)


CHANGES: list[tuple[str, Callable[[], Any], Callable[[Any], Any]]] = [
    ("list", lambda: [1, [2]], lambda v: v[1].append(3)),
    ("dict", lambda: {"a": [1]}, lambda v: v["a"].clear()),
    ("dict order", lambda: {"a": 1, "b": 2}, lambda v: v.update(a=v.pop("a"))),
    ("ordered dict", lambda: OrderedDict(a=1), lambda v: v.update(b=2)),
    ("set", lambda: {1, 2}, lambda v: v.discard(1)),
    ("deque", lambda: deque([1, 2]), lambda v: v.popleft()),
    ("bytearray", lambda: bytearray(b"ab"), lambda v: v.reverse()),
    ("dataclass", lambda: Nested(Nested(1), [2]), lambda v: setattr(v.inner, "inner", 2)),
    ("object", lambda: SimpleNamespace(a=Nested()), lambda v: v.a.items.append(1)),
    ("slots", lambda: slotted(1, 2), lambda v: setattr(v, "right", 3)),
    ("inherited slots", lambda: slotted(1, 2), lambda v: setattr(v, "left", 3)),
    ("slots beside a dict", SlotsAndDict, lambda v: setattr(v, "left", 3)),
    ("enum", lambda: [Color.RED], lambda v: v.__setitem__(0, Color.BLUE)),
    ("array", lambda: np.arange(4), lambda v: v.__setitem__(0, 9)),
    ("array in object", lambda: {"a": np.arange(4)}, lambda v: v["a"].__setitem__(0, 9)),
    ("object array", lambda: np.array([[1], None], dtype=object), lambda v: v[0].append(2)),
    ("scalar array", lambda: [np.float32(1)], lambda v: v.__setitem__(0, np.float32(2))),
    *(
        (f"tensor {t}", lambda t=t: tensor(t), lambda v: v.__setitem__(0, 3))
        for t in (torch.float32, torch.bfloat16, torch.int64)
    ),
    ("tensor bool", lambda: tensor(torch.bool), lambda v: v.__setitem__(0, False)),
    ("scalar tensor", lambda: torch.tensor(1.5), lambda v: v.fill_(2)),
    ("transposed tensor", lambda: torch.arange(6).view(2, 3).T, lambda v: v.__setitem__((0, 1), 9)),
    (
        "tensor with gradient",
        lambda: Nested(torch.ones(2, requires_grad=True)),
        lambda v: v.inner.data.zero_(),
    ),
]


@pytest.mark.parametrize(
    ("make", "change"), [case[1:] for case in CHANGES], ids=[case[0] for case in CHANGES]
)
def test_a_change_is_seen_and_a_copy_is_the_same(
    make: Callable[[], Any], change: Callable[[Any], Any]
) -> None:
    value = make()
    before = digest(value)
    assert digest(make()) == before
    if not (isinstance(value, Nested) and isinstance(value.inner, torch.Tensor)):
        assert digest(copy.deepcopy(value)) == before == digest(pickle.loads(pickle.dumps(value)))
    change(value)
    assert digest(value) != before


def test_reading_changes_nothing_and_odd_objects_are_no_obstacle() -> None:
    cyclic: list[Any] = [1]
    cyclic.append(cyclic)
    value = [threading.Lock(), lambda: 1, Nested, cyclic, float("nan"), 1j]
    assert digest(value) == digest(value)
    assert digest([threading.Lock()]) == digest([threading.Lock()])


def test_shape_and_type_count() -> None:
    one = torch.arange(4)
    made = [
        digest(v)
        for v in (
            one,
            one.view(2, 2),
            one.int(),
            one.numpy(),
            [0, 1, 2, 3],
            (0, 1, 2, 3),
            {0, 1, 2, 3},
        )
    ]
    assert len(set(made)) == len(made)


def test_a_digest_does_not_depend_on_the_hash_seed() -> None:
    text = "{'x': {'a', 'b', 'c', 'd', 'e', 'f'}, 'y': frozenset({1, 'z'})}"
    code = f"from kvconform.observe.digest import digest; print(digest({text}))"
    environment = {**os.environ, "PYTHONHASHSEED": "77"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == digest(
        {"x": {"a", "b", "c", "d", "e", "f"}, "y": frozenset({1, "z"})}
    )


def test_pickling_says_why_not() -> None:
    copied, reason = pickle_round_trip(Nested(1, [np.arange(2)]))
    assert reason is None and copied.inner == 1
    for bad, text in (
        (Nested(threading.Lock()), "lock"),
        (Nested(lambda: 1), "lambda"),
        (Raises(), "ValueError: no"),
    ):
        copied, reason = pickle_round_trip(bad)
        assert copied is None and reason is not None and text in reason and "\n" not in reason


class Raises:
    def __reduce__(self) -> Any:
        raise ValueError("no\nway")


def output() -> SchedulerOutput:
    """Return a SchedulerOutput with something in every field of it and of its parts."""
    new = NewRequestData("a", [1], ["image"], object(), None, ([1],), 0, None)  # type: ignore
    cached = CachedRequestData(["b"], {"b"}, [[4]], {"b": [1, 2]}, [([2],)], [4], [1])
    made = SchedulerOutput([new], cached, {"a": 1}, 2, {"b": [3]}, {"a": [0]}, {"z"}, ["hash"])
    made.new_block_ids_to_zero = [1]
    return made


def changed(value: Any) -> Any:
    """Change a value in place if it is a container, else return another one."""
    if isinstance(value, list):
        value.append(99)
    elif isinstance(value, dict):
        value["other"] = [99]
    elif isinstance(value, set):
        value.add("other")
    elif isinstance(value, int):
        return value + 1
    else:
        return object()
    return value


PARTS: dict[str, Callable[[SchedulerOutput], Any]] = {
    "step": lambda made: made,
    "new": lambda made: made.scheduled_new_reqs[0],
    "cached": lambda made: made.scheduled_cached_reqs,
}


@pytest.mark.parametrize(
    ("part", "field"),
    [(name, each.name) for name, of in PARTS.items() for each in dataclasses.fields(of(output()))],
)
def test_a_changed_scheduler_output_is_seen(part: str, field: str) -> None:
    """Every field of the installed vLLM, without those that a connector may change."""
    value = output()
    before = scheduler_output_picture(value)
    assert scheduler_output_picture(value) == before
    at = PARTS[part](value)
    setattr(at, field, changed(getattr(at, field)))
    assert (scheduler_output_picture(value) == before) == (field in FILLED_IN)


def test_lists_within_lists_are_seen() -> None:
    value = output()
    before = scheduler_output_picture(value)
    value.scheduled_new_reqs[0].block_ids[0].append(7)
    assert scheduler_output_picture(value) != before


def test_what_is_computed_on_demand_is_no_change() -> None:
    value = output()
    before = scheduler_output_picture(value)
    assert value.scheduled_cached_reqs.is_context_phase("b") is False
    assert scheduler_output_picture(value) == before


def test_a_tangle_of_objects_takes_no_time_and_has_one_digest() -> None:
    """A logger leads to all others, and each of them back to it."""
    import logging

    for number in range(40):
        logging.getLogger(f"kvconform.tangle.{number}")
    assert digest(logging.getLogger("kvconform.tangle.1")) == digest(
        logging.getLogger("kvconform.tangle.1")
    )


def test_an_object_that_is_there_twice_is_not_the_same_as_two() -> None:
    shared: list[int] = [1]
    assert digest([shared, shared]) == digest([shared, shared])
    assert digest([shared, [2]]) != digest([shared, shared])
