# SPDX-License-Identifier: Apache-2.0
"""Digests of engine and connector objects, to see that somebody changed one. Equality is never used: metadata may hold tensors."""

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
    """The names of a dataclass's fields; None if it is none, or is pictured as something else."""
    if issubclass(kind, _OTHERS) or hasattr(kind, "detach") or not dataclasses.is_dataclass(kind):
        return None
    return tuple(field.name for field in dataclasses.fields(kind))


def canonical(value: Any, depth: int = 0, seen: dict[int, tuple[int, Any]] | None = None) -> Any:
    """A hashable, order-stable picture of `value`: containers, dataclasses, tensors and arrays by bytes, other objects by their fields.

    `seen`: objects that have their place in the picture already, numbered (and kept alive, as they are known by id); a second time the
    number stands for them.
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
    if isinstance(value, (list, dict, set, deque)) or hasattr(
        value, "__dict__"
    ):  # what can lead back to itself
        if id(value) in seen:
            return ("again", seen[id(value)][0])
        seen[id(value)] = len(seen), value
    if (names := _fields(kind)) is not None:  # type: ignore[arg-type]
        return (
            kind.__name__,
            tuple((name, canonical(getattr(value, name, None), depth + 1, seen)) for name in names),
        )
    if isinstance(value, (list, tuple, deque)):
        return (type(value).__name__, tuple(canonical(v, depth + 1, seen) for v in value))
    if isinstance(value, (set, frozenset)):
        return ("set", tuple(sorted(repr(canonical(v, depth + 1, seen)) for v in value)))
    if isinstance(value, dict):
        return (
            "dict",
            tuple(
                (canonical(k, depth + 1, seen), canonical(v, depth + 1, seen))
                for k, v in value.items()
            ),
        )
    if hasattr(value, "detach") and hasattr(value, "numpy"):
        flat = value.detach().cpu().contiguous().view(-1)
        data = (
            flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
        )  # as bytes: numpy has no bfloat16
        return ("tensor", str(value.dtype), tuple(value.shape), data)
    if isinstance(value, np.ndarray):
        return (
            "array",
            str(value.dtype),
            value.shape,
            canonical(value.tolist(), depth + 1, seen)
            if value.dtype.hasobject
            else value.tobytes(),
        )
    if isinstance(value, (bytearray, memoryview, np.generic)):
        return (
            type(value).__name__,
            bytes(value) if not isinstance(value, np.generic) else value.item(),
        )
    if callable(value):
        return type(value).__qualname__
    slots = sorted({slot for cls in type(value).__mro__ for slot in _slots(cls)})
    fields = {
        **{slot: getattr(value, slot, None) for slot in slots},
        **getattr(value, "__dict__", {}),
    }
    return (
        (type(value).__name__, canonical(fields, depth + 1, seen))
        if fields
        else type(value).__qualname__
    )


def _slots(cls: type) -> tuple[str, ...]:
    names = vars(cls).get("__slots__", ())
    return tuple(
        n
        for n in ((names,) if isinstance(names, str) else names)
        if n not in ("__weakref__", "__dict__")
    )


def digest(value: Any, private: Iterable[str] = ()) -> str:
    """12 hex digits of the canonical picture of `value`, whatever `private` (texts that are the run's own) may be. Reads only."""
    text = repr(canonical(value))
    for each in private:
        text = text.replace(each, "{run}")
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def pickle_round_trip(value: Any) -> tuple[Any, str | None]:
    """(copy, None) if `value` survives pickling, else (None, one-line reason)."""
    try:
        return pickle.loads(pickle.dumps(value, protocol=5)), None
    except Exception as error:  # whatever a connector's __reduce__ may raise is the finding
        return None, f"{type(error).__name__}: {error}".splitlines()[0][:200]


def scheduler_output_digest(output: Any) -> str:
    """Digest of the parts of a SchedulerOutput that a connector must leave alone while it builds its metadata.

    `new_block_ids_to_zero` is left out (a documented exception: vllm/distributed/kv_transfer/kv_connector/v1/base.py,
    `build_connector_meta`), so are the connector's own slot and the step-scoped block state.
    """
    cached = output.scheduled_cached_reqs
    picture = (
        [
            (
                n.req_id,
                n.prompt_token_ids,
                n.block_ids,
                n.num_computed_tokens,
                getattr(n, "prefill_token_ids", None),
            )
            for n in output.scheduled_new_reqs
        ],
        cached.req_ids,
        sorted(getattr(cached, "resumed_req_ids", ()) or ()),
        getattr(cached, "new_token_ids", None),
        sorted(getattr(cached, "all_token_ids", {}).items()),
        cached.new_block_ids,
        cached.num_computed_tokens,
        cached.num_output_tokens,
        output.num_scheduled_tokens,
        output.total_num_scheduled_tokens,
        output.scheduled_spec_decode_tokens,
        sorted(output.finished_req_ids),
        sorted(getattr(output, "preempted_req_ids", None) or ()),
    )
    return hashlib.sha256(repr(picture).encode()).hexdigest()[:12]
