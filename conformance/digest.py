# SPDX-License-Identifier: Apache-2.0
"""Digests of engine and connector objects, to see that somebody changed one. Equality is never used: metadata may hold tensors."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import pickle
from typing import Any


def canonical(value: Any, depth: int = 0) -> Any:
    """A hashable, order-stable picture of `value`: containers, dataclasses, tensors by bytes, other objects by type and `__dict__`."""
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        return value
    if depth > 12:
        return "..."
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, tuple(canonical(v, depth + 1) for v in value))
    if isinstance(value, (set, frozenset)):
        return ("set", tuple(sorted(repr(canonical(v, depth + 1)) for v in value)))
    if isinstance(value, dict):
        return ("dict", tuple((canonical(k, depth + 1), canonical(v, depth + 1)) for k, v in value.items()))
    if hasattr(value, "detach") and hasattr(value, "numpy"):
        array = value.detach().cpu()
        return ("tensor", str(array.dtype), tuple(array.shape), array.contiguous().view(-1).numpy().tobytes() if array.numel() else b"")
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return (
            type(value).__name__,
            tuple((f.name, canonical(getattr(value, f.name, None), depth + 1)) for f in dataclasses.fields(value)),
        )
    if hasattr(value, "__dict__") and not callable(value):
        return (type(value).__name__, canonical(vars(value), depth + 1))
    if hasattr(value, "__slots__"):
        return (
            type(value).__name__,
            tuple((s, canonical(getattr(value, s, None), depth + 1)) for s in value.__slots__ if s != "__weakref__"),
        )
    return type(value).__qualname__


def digest(value: Any) -> str:
    """12 hex digits of the canonical picture of `value`. Reads only."""
    return hashlib.sha256(repr(canonical(value)).encode()).hexdigest()[:12]


def pickle_round_trip(value: Any) -> tuple[Any, str | None]:
    """(copy, None) if `value` survives pickling, else (None, one-line reason)."""
    try:
        buffer = io.BytesIO()
        pickle.Pickler(buffer, protocol=5).dump(value)
        return pickle.loads(buffer.getvalue()), None
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
            (n.req_id, n.prompt_token_ids, n.block_ids, n.num_computed_tokens, getattr(n, "prefill_token_ids", None))
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
