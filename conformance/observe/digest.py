# SPDX-License-Identifier: Apache-2.0
"""Digests of engine and connector objects, which show that an object was changed.

Equality is never used: metadata may hold tensors.
"""

from __future__ import annotations

import dataclasses
import hashlib
import pickle
from collections import deque
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import numpy as np
import torch

_PLAIN = frozenset({type(None), bool, int, float, str, bytes})
_OTHERS = (
    int,
    float,
    str,
    bytes,
    list,
    tuple,
    deque,
    set,
    frozenset,
    dict,
    np.ndarray,
    np.generic,
    bytearray,
    memoryview,
)


@lru_cache(maxsize=256)
def _fields(kind: Any) -> tuple[str, ...] | None:
    """Return the field names of a dataclass, or None if `canonical` must not use its fields."""
    if issubclass(kind, _OTHERS) or hasattr(kind, "detach") or not dataclasses.is_dataclass(kind):
        return None
    return tuple(field.name for field in dataclasses.fields(kind))


def canonical(value: Any, depth: int = 0, seen: dict[int, tuple[int, Any]] | None = None) -> Any:
    """Return a hashable picture of `value` that does not depend on the order of sets.

    It shows tensors and arrays by their bytes, containers by their items, and other objects by
    their fields. `seen` numbers the objects that are in the picture already, by id, and keeps them
    alive. When such an object occurs again, its number stands for it.
    """
    kind = type(value)
    if kind in _PLAIN:
        return value
    if depth > 12:
        return value if isinstance(value, (int, float, str, bytes)) else "..."
    seen = {} if seen is None else seen
    if kind is tuple:
        if _PLAIN.issuperset(map(type, value)):
            return ("tuple", value)
        return ("tuple", tuple(canonical(v, depth + 1, seen) for v in value))
    if isinstance(value, (int, float, str, bytes)):
        return value
    may_contain_itself = isinstance(value, (list, dict, set, deque)) or hasattr(value, "__dict__")
    if may_contain_itself:
        if id(value) in seen:
            return ("again", seen[id(value)][0])
        seen[id(value)] = len(seen), value
    if (names := _fields(kind)) is not None:  # type: ignore[arg-type]
        pairs = ((name, canonical(getattr(value, name, None), depth + 1, seen)) for name in names)
        return (kind.__name__, tuple(pairs))
    if isinstance(value, (list, tuple, deque)):
        return (type(value).__name__, tuple(canonical(v, depth + 1, seen) for v in value))
    if isinstance(value, (set, frozenset)):
        return ("set", tuple(sorted(repr(canonical(v, depth + 1, seen)) for v in value)))
    if isinstance(value, dict):
        items = (
            (canonical(k, depth + 1, seen), canonical(v, depth + 1, seen)) for k, v in value.items()
        )
        return ("dict", tuple(items))
    if hasattr(value, "detach") and hasattr(value, "numpy"):
        flat = value.detach().cpu().contiguous().view(-1)
        # Viewed as bytes, because numpy has no bfloat16.
        data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
        return ("tensor", str(value.dtype), tuple(value.shape), data)
    if isinstance(value, np.ndarray):
        holds_objects = value.dtype.hasobject
        data = canonical(value.tolist(), depth + 1, seen) if holds_objects else value.tobytes()
        return ("array", str(value.dtype), value.shape, data)
    if isinstance(value, np.generic):
        return (type(value).__name__, value.item())
    if isinstance(value, (bytearray, memoryview)):
        return (type(value).__name__, bytes(value))
    if callable(value):
        return type(value).__qualname__
    slots = sorted({slot for cls in type(value).__mro__ for slot in _slots(cls)})
    fields = {
        **{slot: getattr(value, slot, None) for slot in slots},
        **getattr(value, "__dict__", {}),
    }
    if not fields:
        return type(value).__qualname__
    return (type(value).__name__, canonical(fields, depth + 1, seen))


def _slots(cls: type) -> tuple[str, ...]:
    names = vars(cls).get("__slots__", ())
    if isinstance(names, str):
        names = (names,)
    return tuple(name for name in names if name not in ("__weakref__", "__dict__"))


def digest(value: Any, private: Iterable[str] = ()) -> str:
    """Return 12 hex digits of the canonical picture of `value`. Reads only.

    They do not depend on `private`, texts that differ from run to run.
    """
    text = repr(canonical(value))
    for each in private:
        text = text.replace(each, "{run}")
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def pickle_round_trip(value: Any) -> tuple[Any, str | None]:
    """Return (copy, None) if `value` survives pickling, else (None, one-line reason)."""
    try:
        return pickle.loads(pickle.dumps(value, protocol=5)), None
    except Exception as error:  # whatever a connector's __reduce__ may raise is the finding
        return None, f"{type(error).__name__}: {error}".splitlines()[0][:200]


FILLED_IN = frozenset(
    {
        "kv_connector_metadata",
        "kv_connector_block_state",
        "new_block_ids_to_zero",
        "has_sync_kv_loads",
    }
)
"""Fields of a SchedulerOutput that may change while metadata is built.

They are the connector's own slot, the block state of the step, the list of which a connector may
take blocks (`build_connector_meta` in vllm/distributed/kv_transfer/kv_connector/v1/base.py), and
the flag with which it may ask for start_load_kv before the forward pass.
"""


def scheduler_output_picture(output: Any) -> Any:
    """Return what a connector must not change in a SchedulerOutput, to be compared with `==`.

    That is all but FILLED_IN. Objects that are neither containers nor parts of a SchedulerOutput,
    such as sampling parameters and adapters, are compared by identity.
    """
    kind: Any = type(output)
    names = [name for name in _fields(kind) or () if name not in FILLED_IN]
    return [_picture(getattr(output, name), kind.__module__) for name in names]


def _picture(value: Any, home: str) -> Any:
    """Return a part of it; `home` is the module that defines the classes of a SchedulerOutput."""
    kind: Any = type(value)
    if kind in _PLAIN:
        return value
    if isinstance(value, (list, tuple)):
        return [each if type(each) in _PLAIN else _picture(each, home) for each in value]
    if isinstance(value, dict):
        return [(key, _picture(each, home)) for key, each in value.items()]
    if isinstance(value, (set, frozenset)):
        return set(value)
    if kind.__module__ == home and (names := _fields(kind)):
        return [_picture(getattr(value, name), home) for name in names]
    return id(value)
