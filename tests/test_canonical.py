# SPDX-License-Identifier: Apache-2.0
"""The canonical text of values: the same for equal values, different for different ones, and never an address."""

from __future__ import annotations

import dataclasses
import datetime
import enum
import functools
import logging
import socket
import threading
import uuid
from collections import deque, namedtuple
from pathlib import Path
from typing import Any

import attrs
import msgspec
import numpy as np
import pydantic
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvconform.errors import UsageError
from kvconform.snapshots.canonical import EncodeError, lines
from kvconform.snapshots.normalise import Rules, built_in, validated

RULES = Rules(built_in(), "/somewhere/run-1")


def text(value: Any, rules: Rules = RULES) -> str:
    return "\n".join(lines("x", value, rules)).removeprefix("x: ")


@attrs.define
class Attrs:
    req: str


class Mangled:
    __slots__ = ("__own",)

    def __init__(self) -> None:
        self.__own = 7


class Open(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="allow")
    req: str


class Named(dict[str, int]):
    pass


def named() -> Named:
    found = Named(a=1)
    found.owner = "b"  # type: ignore[attr-defined]
    return found


@dataclasses.dataclass
class Record:
    req: str
    slots: tuple[int, ...] = ()


class Struct(msgspec.Struct):
    req: str
    end: int = 3


class Model(pydantic.BaseModel):
    req: str


class Plain:
    def __init__(self) -> None:
        self.b, self.a = 1, "x"


class Slotted:
    __slots__ = ("one",)

    def __init__(self) -> None:
        self.one = 1


class Colour(enum.Enum):
    RED = 1


Pair = namedtuple("Pair", "left right")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, "none"),
        (True, "true"),
        (3, "3"),
        (-1.5, "-1.5"),
        (float("inf"), "inf"),
        ("a\nb", '"a\\nb"'),
        ("3", '"3"'),
        (b"abc", "bytes[3] ba7816bf8f01cfea"),
        (Colour.RED, "Colour.RED"),
        ([1, 2], "[1, 2]"),
        ((1, 2), "tuple[1, 2]"),
        (deque([1]), "deque[1]"),
        ({10, 9, 1}, "set[1, 9, 10]"),
        (frozenset(), "set[]"),
        ({}, "map()"),
        ([], "[]"),
        ({"a": 1, 2: 3}, 'map\n  2: 3\n  "a": 1'),
        (Pair(1, 2), "Pair\n  left: 1\n  right: 2"),
        (Record("a", (1, 2)), 'Record\n  req: "a"\n  slots: tuple[1, 2]'),
        (Struct("a"), 'Struct\n  req: "a"\n  end: 3'),
        (Model(req="a"), 'Model\n  req: "a"'),
        (Plain(), 'Plain\n  a: "x"\n  b: 1'),
        (Slotted(), "Slotted\n  one: 1"),
        (torch.zeros(2, dtype=torch.bfloat16), "tensor bfloat16 [2] df3f619804a92fdb"),
        (np.zeros(2, dtype=np.int8), "array int8 [2] 96a296d224f285c6"),
        (np.int64(3), "int64 3"),
        (torch.float16, "torch.float16"),
        (Attrs("a"), 'Attrs\n  req: "a"'),
        (Mangled(), "Mangled\n  _Mangled__own: 7"),
        ({True, 2}, "set[2, true]"),
        (Open(req="a", more=1), 'Open\n  req: "a"\n  more: 1'),
        (named(), 'Named\n  "a": 1\n  .owner: "b"'),  # type: ignore[call-arg]
        (uuid.UUID(int=5), "{uuid}"),
        (datetime.datetime(2026, 1, 1), "{time}"),
        (datetime.timedelta(seconds=5), "5.0 s"),
        ("\ud800", '"\\ud800"'),
        ("a\u2028b", '"a\\u2028b"'),
        (Path("/somewhere/run-1/a"), 'path "{tmp}/a"'),
        (len, "builtins.len"),
        (range(3), "range(0, 3)"),
    ],
)
def test_values(value: Any, expected: str) -> None:
    assert text(value) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("at 0x7f3a12345678!", '"at {address}!"'),
        ("/somewhere/run-1/store", '"{tmp}/store"'),
        ("123e4567-e89b-12d3-a456-426614174000", '"{uuid}"'),
        (f"tcp://{socket.gethostname()}:5555", '"tcp://{host}:5555"'),
        (f"my{socket.gethostname()}.x", f'"my{socket.gethostname()}.x"'),
        (
            {"arrival_time": 12.5, "max_time": 3, "created_at": 1.5},
            'map\n  "arrival_time": {time}\n  "created_at": {time}\n  "max_time": 3',
        ),
        (
            {"ttl_seconds": 5.0, "version": "1.2.3.4"},
            'map\n  "ttl_seconds": 5.0\n  "version": "1.2.3.4"',
        ),
        ({"pid": 12, "rapid": 3}, 'map\n  "pid": {process}\n  "rapid": 3'),
        ({"side_channel_port": 5600}, 'map\n  "side_channel_port": {port}'),
    ],
)
def test_what_differs_from_run_to_run_is_left_out(value: Any, expected: str) -> None:
    assert text(value) == expected


def test_a_connector_may_declare_rules_of_its_own() -> None:
    own = validated(
        [{"id": "session", "text": "random", "field": "session", "becomes": "{session}"}], "here"
    )
    for value in ("r4nd0m", ["r1", "r2"], None, threading.Lock()):
        assert text({"session": value}, Rules(own)) == 'map\n  "session": {session}'


@pytest.mark.parametrize(
    ("rule", "sentence"),
    [
        ({"id": "a", "text": "b", "becomes": "c"}, "here: rule 1: has either"),
        (
            {"id": "a", "text": "b", "pattern": "(", "becomes": "c"},
            "rule 1: pattern: is no regular expression",
        ),
        (
            {"id": "a", "text": "b", "pattern": "x", "becomes": "c", "typ": 1},
            "rule 1: typ: Extra inputs",
        ),
    ],
)
def test_a_wrong_rule_is_an_error(rule: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        validated([rule], "here")


def _cycle() -> list[Any]:
    own: list[Any] = []
    own.append(own)
    return own


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ([threading.Lock()], r"x\[0\]: a _thread.lock has no canonical form"),
        ({"f": lambda: 1}, r'x\["f"\]: <lambda> is a function made on the way'),
        (_cycle(), r"x\[0\]: it contains itself"),
        ({"a": iter([1])}, r"list_iterator has no canonical form"),
        (functools.partial(print, 1), "functools.partial has no canonical form"),
        (ValueError("x"), "ValueError has no canonical form"),
        (logging.getLogger("x"), "Logger has no canonical form"),
        (functools.reduce(lambda below, _: [below], range(40), 1), "nested more than 24 deep"),
        (np.array([object()]), "an array of Python objects"),
        (torch.empty(2, device="meta"), "a tensor without bytes"),
        ({"0x7f3a12345678": 1, "0x7f3a12345679": 2}, r'two keys read "\{address\}"'),
        (Record("a", [threading.Event()]), r"x\.slots\[0\]"),  # type: ignore[arg-type]
    ],
)
def test_what_has_no_canonical_form_is_an_error_that_names_the_place(
    value: Any, sentence: str
) -> None:
    with pytest.raises(EncodeError, match=sentence):
        text(value)


scalars = (
    st.none()
    | st.booleans()
    | st.integers(-99, 99)
    | st.text("ab1", max_size=3)
    | st.binary(max_size=2)
)
values = st.recursive(
    scalars,
    lambda v: st.lists(v, max_size=3) | st.dictionaries(scalars, v, max_size=3) | st.tuples(v, v),
    max_leaves=8,
)


def same(a: Any, b: Any) -> bool:
    """Equal, and of the same types all the way down: True is not 1 here."""
    if type(a) is not type(b):
        return False
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        keyed = {(type(k), k): v for k, v in b.items()}
        return len(a) == len(b) and all(
            (type(k), k) in keyed and same(v, keyed[type(k), k]) for k, v in a.items()
        )
    return bool(a == b)


@given(values, values)
def test_two_values_have_one_text_only_if_they_are_the_same(a: Any, b: Any) -> None:
    assert (text(a) == text(b)) == same(a, b)


@given(st.sets(st.integers() | st.text("abc")))
def test_the_order_of_a_set_does_not_show(items: set[Any]) -> None:
    assert text(items) == text(set(sorted(items, key=repr)))
