# SPDX-License-Identifier: Apache-2.0
"""Encodes any value that a connector hands over as JSON that is the same in every run.

kvconform.snapshots.value describes the form. A value without one is an EncodeError that names its
place; nothing falls back to `repr`.
"""

from __future__ import annotations

import dataclasses
import datetime
import enum
import hashlib
import math
import pathlib
import types
import uuid
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from kvconform.errors import UsageError
from kvconform.snapshots.normalise import Rules
from kvconform.snapshots.value import Value, text

DEEPEST = 24
"""Levels of nesting that a value may have."""


class EncodeError(UsageError):
    """A value has no canonical form; the sentence says where it is and what to do."""


def encode(value: object, rules: Rules, path: str = "value") -> Value:
    """Return the canonical form of a value. `path` is its place, for errors.

    EncodeError for a value without a canonical form.
    """
    return _Encoder(rules).node(value, path, "", 0)


class _Encoder:
    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self._above: list[int] = []  # identities of the containers around the current value

    def node(self, value: Any, path: str, name: str, depth: int) -> Value:
        """Return the form of a value. `name`: its field or key, for the rules; "" for elements."""
        instead = self.rules.value(name, value) if name else None
        if instead is not None:
            return {"atom": instead}
        if value is None or isinstance(value, bool):
            return value
        plain = self._plain(value, path)
        if plain is not None:
            return plain
        if id(value) in self._above:
            raise EncodeError(f"{path}: it contains itself; a snapshot cannot show that")
        if depth > DEEPEST:
            raise EncodeError(f"{path}: it is nested more than {DEEPEST} deep")
        self._above.append(id(value))
        try:
            return self._container(value, path, depth)
        finally:
            self._above.pop()

    def _plain(self, value: Any, path: str) -> Value:
        """Return the form of a value without parts; None for a container."""
        if isinstance(value, enum.Enum):
            return {"atom": f"{type(value).__name__}.{value.name}"}
        if isinstance(value, str):
            return self.rules.string(str(value))
        if isinstance(value, int):
            return int(value)
        if isinstance(value, float):
            return float(value) if math.isfinite(value) else {"atom": repr(float(value))}
        if isinstance(value, (bytes, bytearray, memoryview)):
            return {"data": f"bytes[{len(bytes(value))}] {_digest(bytes(value))}"}
        if isinstance(value, torch.Tensor):
            return {"data": _tensor(value, path)}
        if isinstance(value, np.ndarray):
            return {"data": _array(value, path)}
        if isinstance(value, np.generic):
            return {"atom": f"{value.dtype} {text(self.node(value.item(), path, '', 0))}"}
        if isinstance(value, (torch.dtype, torch.device, range, slice)):
            return {"atom": str(value)}
        if isinstance(value, pathlib.PurePath):
            return {"atom": f"path {text(self.rules.string(value.as_posix()))}"}
        if isinstance(value, uuid.UUID):
            return {"atom": "{uuid}"}
        if isinstance(value, (datetime.datetime, datetime.date, datetime.time)):
            return {"atom": "{time}"}
        if isinstance(value, datetime.timedelta):
            return {"atom": f"{value.total_seconds()!r} s"}
        if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)):
            if "<locals>" in value.__qualname__ or "<lambda>" in value.__qualname__:
                raise EncodeError(
                    f"{path}: {value.__qualname__} is a lambda or a local function:"
                    " its name does not identify it"
                )
            return {"atom": f"{value.__module__}.{value.__qualname__}"}
        return None

    def _container(self, value: Any, path: str, depth: int) -> Value:
        found: dict[str, Any] = {"class": type(value).__name__}
        named: list[tuple[str, Any]] | None = None
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            named = list(zip(value._fields, value, strict=True))
        elif isinstance(value, (list, tuple, deque)):
            found["items"] = [
                self.node(item, f"{path}[{i}]", "", depth + 1) for i, item in enumerate(value)
            ]
        elif isinstance(value, (set, frozenset)):
            items = [self.node(item, f"{path} (an element)", "", depth + 1) for item in value]
            found = {"class": "set", "items": sorted(items, key=_rank)}
        elif isinstance(value, Mapping):
            if type(value) in (dict, types.MappingProxyType):
                found["class"] = "map"
            found["pairs"] = self._pairs(value, path, depth)
        else:
            named = _fields(value)
            if named is None:
                raise EncodeError(
                    f"{path}: a {type(value).__module__}.{type(value).__qualname__} has no"
                    " canonical form; leave it out of what is handed over, or declare a rule for"
                    " its field (snapshot_rules in the settings)"
                )
        if isinstance(value, (list, tuple, set, frozenset, deque, dict)) and hasattr(
            value, "__dict__"
        ):
            named = [*(named or ()), *sorted(vars(value).items())]  # attributes of a derived class
        if named is not None:
            found["fields"] = {
                name: self.node(item, f"{path}.{name}", name, depth + 1) for name, item in named
            }
        return found["items"] if type(value) is list else found

    def _pairs(self, value: Mapping[Any, Any], path: str, depth: int) -> list[list[Value]]:
        found: dict[str, list[Value]] = {}
        for key, item in value.items():
            encoded = self._key(key, path)
            label = text(encoded)
            if label in found:
                raise EncodeError(
                    f"{path}: two keys read {label} once what differs from run to run is left out"
                )
            name = key if isinstance(key, str) else ""
            found[label] = [encoded, self.node(item, f"{path}[{label}]", name, depth + 1)]
        return sorted(found.values(), key=lambda pair: _rank(pair[0]))

    def _key(self, key: Any, path: str) -> Value:
        place = f"{path} (a key)"
        plain = key if key is None or isinstance(key, bool) else self._plain(key, place)
        if plain is not None or key is None:
            return plain
        if isinstance(key, (tuple, frozenset)) or dataclasses.is_dataclass(key):
            return self.node(key, place, "", 1)
        raise EncodeError(f"{place}: a key of type {type(key).__qualname__} has no canonical form")


def _rank(value: Value) -> tuple[int, int, str]:
    """Return a sort key for keys of mappings and elements of sets: integers first, then by text."""
    if isinstance(value, int) and not isinstance(value, bool):
        return 0, value, ""
    return 1, 0, text(value)


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
"""Modules whose classes are not shown by their attributes."""


def _fields(value: Any) -> list[tuple[str, Any]] | None:
    """Return the fields of an object with their names; None if they do not show what it is.

    Fields that the class declares come first, in its order; then other attributes, sorted.
    """
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
    rest = {
        **getattr(value, "__dict__", {}),
        **(getattr(value, "__pydantic_private__", None) or {}),
        **(getattr(value, "__pydantic_extra__", None) or {}),
    }
    declared = [
        (name, getattr(value, name)) for name in dict.fromkeys(names) if hasattr(value, name)
    ]
    return declared + [(name, rest[name]) for name in sorted(rest) if name not in names]


def _slots(cls: type) -> list[str]:
    """Return the attribute names of a class's own slots; private names are mangled."""
    slots = vars(cls).get("__slots__", ())
    found = []
    for name in (slots,) if isinstance(slots, str) else slots:
        private = name.startswith("__") and not name.endswith("__")
        if name not in ("__weakref__", "__dict__"):
            found.append(f"_{cls.__name__.lstrip('_')}{name}" if private else name)
    return found


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _tensor(value: torch.Tensor, path: str) -> str:
    if value.is_meta or value.is_sparse:
        raise EncodeError(
            f"{path}: a tensor without bytes of its own (meta or sparse) has no canonical form"
        )
    flat = value.detach().cpu().contiguous().reshape(-1)
    # numpy has no bfloat16, so the elements are viewed as bytes
    data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return f"tensor {str(value.dtype).removeprefix('torch.')} {list(value.shape)} {_digest(data)}"


def _array(value: np.ndarray, path: str) -> str:
    if value.dtype.hasobject:
        raise EncodeError(f"{path}: an array of Python objects has no canonical form")
    return (
        f"array {value.dtype} {list(value.shape)} {_digest(np.ascontiguousarray(value).tobytes())}"
    )
