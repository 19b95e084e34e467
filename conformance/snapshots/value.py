# SPDX-License-Identifier: Apache-2.0
"""The JSON form of values in snapshots, which kvconform.snapshots.canonical makes.

| JSON | stands for |
|---|---|
| `null`, `true`, `3`, `1.5`, `"a"` | None, bool, int, finite float, str |
| `[1, 2]` | list |
| `{"class": "tuple", "items": [1, 2]}` | any other sequence, or a set (sorted) |
| `{"class": "map", "pairs": [["a", 1]]}` | mapping (sorted by key) |
| `{"class": "Save", "fields": {"req": "a"}}` | object with fields |
| `{"atom": "Colour.RED"}` | other value without parts: enum, type, path, placeholder of a rule |
| `{"data": "bytes[3] ba7816bf8f01cfea"}` | bytes, tensor or array: size and digest |

A container whose class adds attributes has `items` or `pairs`, and `fields`.
"""

from __future__ import annotations

import json
import re
from typing import Any, TypeAlias

Value: TypeAlias = "bool | int | float | str | list[Value] | dict[str, Any] | None"


def identity(value: object) -> str:
    """Return a text that only equal values share; 1, 1.0 and True are different values."""
    return json.dumps(value, sort_keys=True)


def head(value: Value) -> str:
    """Return the class of a container."""
    return value["class"] if isinstance(value, dict) else "list"


def items(value: Value) -> list[Value] | None:
    """Return the elements of a sequence or set; None for other values."""
    if isinstance(value, dict):
        return value.get("items")
    return value if isinstance(value, list) else None


def parts(value: Value) -> list[tuple[str | int, Value]]:
    """Return the parts of a value with their positions, keys (as text) or field names."""
    found: list[tuple[str | int, Value]] = [*enumerate(items(value) or [])]
    if isinstance(value, dict):
        found += [(text(key), part) for key, part in value.get("pairs", [])]
        found += value.get("fields", {}).items()
    return found


def is_plain(value: Value) -> bool:
    """Return whether a value is no container."""
    return not isinstance(value, list) and not (isinstance(value, dict) and "class" in value)


def is_leaf(value: Value) -> bool:
    """Return whether a value is compared as a whole: it has no parts, or only plain elements."""
    return all(isinstance(name, int) and is_plain(part) for name, part in parts(value))


def text(value: Value) -> str:
    """Return a value as a person reads it, on one line: `tuple[1, 2]`, `Save(req "a", start 0)`."""
    match value:
        case None:
            return "none"
        case bool():
            return str(value).lower()
        case int() | float():
            return repr(value)
        case str():
            plain = json.dumps(value, ensure_ascii=False)
            return plain if plain.isprintable() else json.dumps(value)
        case {"atom": shown} | {"data": shown}:
            return str(shown)
    elements = items(value)
    shown = "" if isinstance(value, list) else head(value)
    if elements is not None:
        shown += f"[{', '.join(map(text, elements))}]"
    if isinstance(value, dict) and ("pairs" in value or "fields" in value):
        named = [f"{name} {text(part)}" for name, part in parts(value) if isinstance(name, str)]
        shown += f"({', '.join(named)})"
    return shown


def shape(value: Value) -> str:
    """Return the text of a value without particulars.

    These are numbers, elements of lists, digests, and names such as `a` and `d1`.
    """
    if items(value) is not None:
        return f"{head(value)}[]"
    if is_plain(value):
        return re.sub(r"\b[0-9a-f]{12,}\b|\b[a-z]\d*\b|\d+", "*", text(value))
    return f"{head(value)}({', '.join(f'{name} {shape(part)}' for name, part in parts(value))})"
