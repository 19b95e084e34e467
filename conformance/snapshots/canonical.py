# SPDX-License-Identifier: Apache-2.0
"""Any value that a connector hands over, as text that a person can review in a diff and that is the same in every run.

What has no canonical form is an EncodeError that names where it is; nothing ever falls back to `repr`.
"""

from __future__ import annotations

import dataclasses
import datetime
import enum
import hashlib
import json
import math
import pathlib
import types
import uuid
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from kvconform.errors import UsageError
from kvconform.snapshots.normalise import Rules

DEEPEST = 24
WIDTH = 120
INDENT = "  "


class EncodeError(UsageError):
    """A value has no canonical form; the sentence says where it is and what to do."""


@dataclass
class Branch:
    """A value with parts: `head` is the name of its type, `parts` are (label, node). `short`: shown on one line if all parts are text."""

    head: str
    parts: list[tuple[str, Node]] = field(default_factory=list)
    short: bool = False


Node = str | Branch


def lines(label: str, value: Any, rules: Rules) -> list[str]:
    """`label: ...` and, indented below it, what `value` is made of. EncodeError for what has no canonical form. Reads only."""
    return _render(label, encode(value, rules, label), 0)


def encode(value: Any, rules: Rules, path: str = "value") -> Node:
    """The canonical tree of a value. `path` is where it is, for errors."""
    return _Encoder(rules).node(value, path, "", 0)


def _render(label: str, node: Node, depth: int) -> list[str]:
    start = INDENT * depth + f"{label}: "
    if isinstance(node, str):
        return [start + node]
    if node.short and all(isinstance(part, str) for _, part in node.parts):
        inside = ", ".join(part if isinstance(part, str) else "" for _, part in node.parts)
        text = f"{node.head}[{inside}]"
        if len(start) + len(text) <= WIDTH or len(node.parts) < 2:
            return [start + text]
        return [start + node.head + "[", *_wrapped(node.parts, depth + 1), INDENT * depth + "]"]
    if not node.parts:
        return [start + node.head + ("[]" if node.short else "()")]
    out = [(start + node.head).rstrip()]
    for name, part in node.parts:
        out += _render(name, part, depth + 1)
    return out


def _wrapped(parts: Sequence[tuple[str, Node]], depth: int) -> list[str]:
    out, line = [], INDENT * depth
    for _, part in parts:
        assert isinstance(part, str)
        if len(line) + len(part) + 2 > WIDTH and line.strip():
            out.append(line.rstrip())
            line = INDENT * depth
        line += part + ", "
    return [*out, line.rstrip().removesuffix(",")]


class _Encoder:
    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self._above: list[int] = []

    def node(self, value: Any, path: str, name: str, depth: int) -> Node:
        """`name`: of the field or key whose value this is; rules go by it."""
        instead = self.rules.value(name, value) if name else None
        if instead is not None:
            return instead
        plain = self._plain(value, path)
        if plain is not None:
            return plain
        if id(value) in self._above:
            raise EncodeError(f"{path}: it contains itself; a snapshot cannot show that")
        if depth > DEEPEST:
            raise EncodeError(f"{path}: it is nested more than {DEEPEST} deep")
        self._above.append(id(value))
        try:
            branch = self._parts(value, path, depth)
            if isinstance(value, (list, tuple, set, frozenset, deque, dict)) and getattr(
                value, "__dict__", None
            ):
                own = sorted(vars(value).items())  # of a class that is derived from a container
                branch.short = False
                branch.parts += [
                    (f".{name}", self.node(item, f"{path}.{name}", name, depth + 1))
                    for name, item in own
                ]
            return branch
        finally:
            self._above.pop()

    def _plain(self, value: Any, path: str) -> str | None:
        """Values without parts; None for others."""
        if value is None or isinstance(value, bool):
            return {None: "none", True: "true", False: "false"}[value]
        if isinstance(value, enum.Enum):
            return f"{type(value).__name__}.{value.name}"
        if isinstance(value, str):
            return _quoted(self.rules.string(str(value)))
        if isinstance(value, int):
            return str(int(value))
        if isinstance(value, float):
            return (
                repr(float(value))
                if math.isfinite(value)
                else {math.inf: "inf", -math.inf: "-inf"}.get(value, "nan")
            )
        if isinstance(value, (bytes, bytearray, memoryview)):
            return f"bytes[{len(bytes(value))}] {_digest(bytes(value))}"
        if isinstance(value, torch.Tensor):
            return _tensor(value, path)
        if isinstance(value, np.ndarray):
            return _array(value, path)
        if isinstance(value, np.generic):
            return f"{value.dtype} {self._plain(value.item(), path)}"
        if isinstance(value, (torch.dtype, torch.device, range, slice)):
            return str(value)
        if isinstance(value, pathlib.PurePath):
            return "path " + _quoted(self.rules.string(value.as_posix()))
        if isinstance(value, uuid.UUID):
            return "{uuid}"
        if isinstance(value, (datetime.datetime, datetime.date, datetime.time)):
            return "{time}"
        if isinstance(value, datetime.timedelta):
            return f"{value.total_seconds()!r} s"
        if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)):
            if "<locals>" in value.__qualname__ or "<lambda>" in value.__qualname__:
                raise EncodeError(
                    f"{path}: {value.__qualname__} is a function made on the way, which has no name that means anything"
                )
            return f"{value.__module__}.{value.__qualname__}"
        return None

    def _parts(self, value: Any, path: str, depth: int) -> Branch:
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return self._named(
                type(value).__name__, zip(value._fields, value, strict=True), path, depth
            )
        if isinstance(value, (list, tuple, deque)):
            head = "" if type(value) is list else type(value).__name__
            parts = [
                (f"[{i}]", self.node(item, f"{path}[{i}]", "", depth + 1))
                for i, item in enumerate(value)
            ]
            return Branch(head, parts, short=True)
        if isinstance(value, (set, frozenset)):
            nodes = [self.node(item, f"{path} (an element)", "", depth + 1) for item in value]
            ordered = sorted(nodes, key=lambda node: "\n".join(_render("", node, 0)))
            if all(type(item) is int for item in value):
                ordered = [str(int(item)) for item in sorted(value)]
            return Branch("set", [(f"[{i}]", node) for i, node in enumerate(ordered)], short=True)
        if isinstance(value, Mapping):
            return self._mapping(value, path, depth)
        fields = _fields(value)
        if fields is None:
            raise EncodeError(
                f"{path}: a {type(value).__module__}.{type(value).__qualname__} has no canonical form; leave it out of what is handed over,"
                " or declare a rule for its field (snapshot_rules in the settings)"
            )
        return self._named(type(value).__name__, fields, path, depth)

    def _named(self, head: str, fields: Any, path: str, depth: int) -> Branch:
        return Branch(
            head,
            [(name, self.node(item, f"{path}.{name}", name, depth + 1)) for name, item in fields],
        )

    def _mapping(self, value: Mapping[Any, Any], path: str, depth: int) -> Branch:
        parts: dict[str, Node] = {}
        for key, item in value.items():
            label = self._key(key, path)
            if label in parts:
                raise EncodeError(
                    f"{path}: two keys read {label} once what differs from run to run is left out"
                )
            name = key if isinstance(key, str) else ""
            parts[label] = self.node(item, f"{path}[{label}]", name, depth + 1)
        order = sorted(
            parts,
            key=lambda label: (0, int(label), "") if label.lstrip("-").isdigit() else (1, 0, label),
        )
        head = "map" if type(value) in (dict, types.MappingProxyType) else type(value).__name__
        return Branch(head, [(label, parts[label]) for label in order])

    def _key(self, key: Any, path: str) -> str:
        """Text of a key: its type can be told from it, so 1 and "1" differ."""
        plain = self._plain(key, f"{path} (a key)")
        if plain is not None:
            return plain
        if isinstance(key, (tuple, frozenset)) or dataclasses.is_dataclass(key):
            return " ".join(
                " ".join(_render("", self.node(key, f"{path} (a key)", "", 1), 0)).split()
            ).removeprefix(": ")
        raise EncodeError(f"{path}: a key of type {type(key).__qualname__} has no canonical form")


_NO_RECORDS = (
    "builtins",
    "functools",
    "threading",
    "_thread",
    "socket",
    "_io",
    "ctypes",
    "weakref",
    "asyncio",
    "random",
    "logging",
)


def _fields(value: Any) -> list[tuple[str, Any]] | None:
    """(name, value) of the fields of an object, in the order in which its class names them, then of what else it has been given; None for
    what is no record of fields."""
    cls = type(value)
    if isinstance(value, (types.ModuleType, BaseException)) or any(
        base.__module__ in _NO_RECORDS for base in cls.__mro__[:-1]
    ):
        return None
    if dataclasses.is_dataclass(value):
        names = [f.name for f in dataclasses.fields(value)]
    elif hasattr(cls, "__struct_fields__"):  # msgspec
        names = list(cls.__struct_fields__)
    elif hasattr(cls, "__attrs_attrs__"):
        names = [attribute.name for attribute in cls.__attrs_attrs__]
    elif hasattr(cls, "model_fields"):  # pydantic
        names = list(cls.model_fields)
    else:
        names = [name for base in reversed(cls.__mro__) for name in _slots(base)]
        if not names and not hasattr(value, "__dict__"):
            return None
    more = {
        **(getattr(value, "__pydantic_private__", None) or {}),
        **(getattr(value, "__pydantic_extra__", None) or {}),
    }
    named = [(name, getattr(value, name)) for name in dict.fromkeys(names) if hasattr(value, name)]
    rest = {**getattr(value, "__dict__", {}), **more}
    return named + [(name, rest[name]) for name in sorted(rest) if name not in names]


def _slots(cls: type) -> list[str]:
    """The names under which a class's own slots are found: those with two underscores in front are mangled."""
    names = vars(cls).get("__slots__", ())
    own = [
        n
        for n in ((names,) if isinstance(names, str) else names)
        if n not in ("__weakref__", "__dict__")
    ]
    return [
        f"_{cls.__name__.lstrip('_')}{n}" if n.startswith("__") and not n.endswith("__") else n
        for n in own
    ]


def _quoted(text: str) -> str:
    """A text on one line, whatever is in it: what is no plain character is escaped, as are halves of pairs that cannot be written."""
    plain = json.dumps(text, ensure_ascii=False)
    return plain if plain.isprintable() else json.dumps(text)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _tensor(value: torch.Tensor, path: str) -> str:
    if value.is_meta or value.is_sparse:
        raise EncodeError(
            f"{path}: a tensor without bytes of its own (meta or sparse) has no canonical form"
        )
    flat = value.detach().cpu().contiguous().reshape(-1)
    data = (
        flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    )  # as bytes: numpy has no bfloat16
    return f"tensor {str(value.dtype).removeprefix('torch.')} {list(value.shape)} {_digest(data)}"


def _array(value: np.ndarray, path: str) -> str:
    if value.dtype.hasobject:
        raise EncodeError(f"{path}: an array of Python objects has no canonical form")
    return (
        f"array {value.dtype} {list(value.shape)} {_digest(np.ascontiguousarray(value).tobytes())}"
    )
