# SPDX-License-Identifier: Apache-2.0
"""Copies of vLLM configurations that were made before: making one takes twenty milliseconds, which is longer than many a run."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Hashable
from enum import Enum
from typing import Any

from kvconform.refimpl import faulty

MOST = 256
"""Configurations that are kept."""
_kept: dict[Hashable, Any] = {}
_transfers: dict[Hashable, Any] = {}
_ATOMS = frozenset({str, int, float, bool, type(None), bytes, tuple})


def configuration(key: Hashable, transfer: Any, make: Callable[[], Any]) -> Any:
    """`make()`, or a copy of what it made for an equal `key`, with this kv_transfer_config. Nothing of it is shared with other copies
    that anybody can change in place: it may be kept, and changed, as if it were made anew. While a fault is planted in vLLM's own code,
    nothing is taken from what was made without it, nor kept."""
    if faulty.in_force():
        return make()
    if key not in _kept:
        made = make()
        while len(_kept) >= MOST:
            del _kept[next(iter(_kept))]
        _kept[key] = _copied(made, {})
        return made
    found = _copied(_kept[key], {})
    found.kv_transfer_config = transfer
    found.instance_id = str(time.time_ns())
    return found


def transfer(key: Hashable, extra: dict[str, Any], engine_id: str, make: Callable[[], Any]) -> Any:
    """As `configuration`, of a kv_transfer_config: what `make()` made for an equal `key`, with these options and this id."""
    if faulty.in_force():
        return make()
    if key not in _transfers:
        while len(_transfers) >= MOST:
            del _transfers[next(iter(_transfers))]
        _transfers[key] = make()
    found = copy.copy(_transfers[key])
    found.kv_connector_extra_config, found.engine_id = dict(extra), engine_id
    return found


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    """A copy that goes as deep as lists, dicts, sets and configurations do. An object that is there twice is there twice in the copy."""
    kind = type(value)
    if kind in _ATOMS or isinstance(value, (str, int, float, bytes, tuple, Enum)):
        return value
    if id(value) in memo:
        return memo[id(value)]
    if kind in (dict, list, set):
        found: Any = kind(value)
        memo[id(value)] = found
        if kind is dict:
            for name, each in value.items():
                found[name] = _copied(each, memo)
        elif kind is list:
            found[:] = [_copied(each, memo) for each in value]
        return found
    if isinstance(value, (dict, list, set)):  # a counter
        memo[id(value)] = found = copy.copy(value)
        return found
    if not kind.__module__.startswith(("vllm.config.", "vllm.transformers_utils.", "transformers.")) or not hasattr(value, "__dict__"):
        return value
    memo[id(value)] = found = object.__new__(kind)
    fields = dict(vars(value))
    for name, each in fields.items():
        if type(each) not in _ATOMS:
            fields[name] = _copied(each, memo)
    vars(found).update(fields)
    return found
