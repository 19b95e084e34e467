# SPDX-License-Identifier: Apache-2.0
"""Tests of the canonical form of values: equal for equal values only, never with an address."""

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
from kvconform.snapshots.canonical import EncodeError, encode
from kvconform.snapshots.normalise import Rules, built_in, validated
from kvconform.snapshots.value import Value, identity, is_leaf, shape, text

RULES = Rules(built_in(), "/somewhere/run-1")


def form(value: Any, rules: Rules = RULES) -> Value:
    return encode(value, rules, "x")


def record(name: str, **fields: Value) -> Value:
    return {"class": name, "fields": fields}


def sequence(name: str, *items: Value) -> Value:
    return {"class": name, "items": list(items)}


def mapping(*pairs: tuple[Value, Value]) -> Value:
    return {"class": "map", "pairs": [list(pair) for pair in pairs]}


def atom(text: str) -> Value:
    return {"atom": text}


def data(text: str) -> Value:
    return {"data": text}


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
        (None, None),
        (True, True),
        (3, 3),
        (-1.5, -1.5),
        (float("inf"), atom("inf")),
        ("a\nb", "a\nb"),
        (b"abc", data("bytes[3] ba7816bf8f01cfea")),
        (Colour.RED, atom("Colour.RED")),
        ([1, 2], [1, 2]),
        ((1, 2), sequence("tuple", 1, 2)),
        (deque([1]), sequence("deque", 1)),
        ({10, 9, 1}, sequence("set", 1, 9, 10)),
        (frozenset(), sequence("set")),
        ({True, 2}, sequence("set", 2, True)),
        ({}, mapping()),
        ([], []),
        ({"a": 1, 2: 3}, mapping((2, 3), ("a", 1))),
        ({("a", 1): 2}, mapping((sequence("tuple", "a", 1), 2))),
        (Pair(1, 2), record("Pair", left=1, right=2)),
        (Record("a", (1, 2)), record("Record", req="a", slots=sequence("tuple", 1, 2))),
        (Struct("a"), record("Struct", req="a", end=3)),
        (Model(req="a"), record("Model", req="a")),
        (Plain(), record("Plain", a="x", b=1)),
        (Slotted(), record("Slotted", one=1)),
        (torch.zeros(2, dtype=torch.bfloat16), data("tensor bfloat16 [2] df3f619804a92fdb")),
        (np.zeros(2, dtype=np.int8), data("array int8 [2] 96a296d224f285c6")),
        (np.int64(3), atom("int64 3")),
        (np.bool_(True), atom("bool true")),
        (torch.float16, atom("torch.float16")),
        (Attrs("a"), record("Attrs", req="a")),
        (Mangled(), record("Mangled", _Mangled__own=7)),
        (Open(req="a", more=1), record("Open", req="a", more=1)),  # type: ignore[call-arg]
        (named(), {"class": "Named", "pairs": [["a", 1]], "fields": {"owner": "b"}}),
        (uuid.UUID(int=5), atom("{uuid}")),
        (datetime.datetime(2026, 1, 1), atom("{time}")),
        (datetime.timedelta(seconds=5), atom("5.0 s")),
        (Path("/somewhere/run-1/a"), atom('path "{tmp}/a"')),
        (len, atom("builtins.len")),
        (range(3), atom("range(0, 3)")),
    ],
)
def test_values(value: Any, expected: Value) -> None:
    assert form(value) == expected


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "none"),
        (True, "true"),
        (-1.5, "-1.5"),
        ("3", '"3"'),
        ("a\nb", '"a\\nb"'),
        ("\ud800", '"\\ud800"'),
        ("a\u2028b", '"a\\u2028b"'),
        ([1, "a"], '[1, "a"]'),
        ((), "tuple[]"),
        ({}, "map()"),
        ({1: 2, "a": (3,)}, 'map(1 2, "a" tuple[3])'),
        (Record("a", (1, 2)), 'Record(req "a", slots tuple[1, 2])'),
        (named(), 'Named("a" 1, owner "b")'),
        (b"abc", "bytes[3] ba7816bf8f01cfea"),
    ],
)
def test_a_value_has_a_text_on_one_line(value: Any, shown: str) -> None:
    assert text(form(value)) == shown


def test_a_value_is_compared_as_a_whole_unless_it_has_parts_with_names_or_parts() -> None:
    assert all(map(is_leaf, map(form, (1, "a", [], {}, (1, 2), {1, 2}, b"a", [b"a"]))))
    assert not any(map(is_leaf, map(form, ([[1]], {1: 2}, Record("a"), ({},), named()))))


def test_values_of_one_shape_differ_in_particulars_only() -> None:
    def shapes(*values: Any) -> int:
        return len({shape(form(value)) for value in values})

    assert shapes(1, 23, 4000) == 1
    assert shapes("a", "d1") == 1
    assert shapes("5dd2b467db68a5ee", "2e43a5fc766f285f") == 1
    assert shapes((), (1,), (1, 2)) == 1
    assert shapes(1, "a", None, True, (1,), [1], "STORAGE") == 7
    assert shapes(Record("a", (1,)), Record("b", (1, 2))) == 1


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("at 0x7f3a12345678!", "at {address}!"),
        ("/somewhere/run-1/store", "{tmp}/store"),
        ("123e4567-e89b-12d3-a456-426614174000", "{uuid}"),
        (f"tcp://{socket.gethostname()}:5555", "tcp://{host}:5555"),
        (f"my{socket.gethostname()}.x", f"my{socket.gethostname()}.x"),
        (
            {"arrival_time": 12.5, "max_time": 3, "created_at": 1.5},
            mapping(
                ("arrival_time", atom("{time}")), ("created_at", atom("{time}")), ("max_time", 3)
            ),
        ),
        (
            {"ttl_seconds": 5.0, "version": "1.2.3.4"},
            mapping(("ttl_seconds", 5.0), ("version", "1.2.3.4")),
        ),
        ({"pid": 12, "rapid": 3}, mapping(("pid", atom("{process}")), ("rapid", 3))),
        ({"side_channel_port": 5600}, mapping(("side_channel_port", atom("{port}")))),
    ],
)
def test_what_differs_from_run_to_run_is_left_out(value: Any, expected: Value) -> None:
    assert form(value) == expected


def test_a_connector_may_declare_rules_of_its_own() -> None:
    own = validated(
        [{"id": "session", "text": "random", "field": "session", "becomes": "{session}"}], "here"
    )
    for value in ("r4nd0m", ["r1", "r2"], None, threading.Lock()):
        assert form({"session": value}, Rules(own)) == mapping(("session", atom("{session}")))


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
        ({"f": lambda: 1}, r'x\["f"\]: <lambda> is a lambda or a local function'),
        (_cycle(), r"x\[0\]: it contains itself"),
        ({"a": iter([1])}, r"list_iterator has no canonical form"),
        (functools.partial(print, 1), "functools.partial has no canonical form"),
        (ValueError("x"), "ValueError has no canonical form"),
        (logging.Logger("x"), "Logger has no canonical form"),
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
        form(value)


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
def test_two_values_have_one_form_only_if_they_are_the_same(a: Any, b: Any) -> None:
    assert (identity(form(a)) == identity(form(b))) == same(a, b)


@given(st.sets(st.integers() | st.text("abc")))
def test_the_order_of_a_set_does_not_show(items: set[Any]) -> None:
    assert form(items) == form(set(sorted(items, key=repr)))
