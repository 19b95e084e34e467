# SPDX-License-Identifier: Apache-2.0
"""Counts what the halves of a connector hold, to see whether it changes from round to round.

A census has a number for each place that is reachable from a half, such as `_tables{}[]`: the sum
of the lengths of what is there. The process has a census, too: it counts threads, file descriptors,
files of the run, futures, tensors, and objects of the connector's own classes.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import gc
import logging
import os
import threading
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import BuiltinFunctionType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

Census = Counter[str]
"""Numbers by place."""

DEEPEST = 12
"""Length of a place, in attributes and elements; what lies deeper counts to its last one."""
_ENDS = (type, ModuleType, FrameType, BuiltinFunctionType, logging.Logger, threading.local)
"""Objects that lead out of a connector, or have nothing to count."""
_LISTS = (list, tuple, set, frozenset, deque)
_PLAIN = (str, bytes, bytearray, memoryview, torch.Tensor)
_HARNESS = "kvconform."
_OURS = ("kvconform.refimpl.",)
"""Packages of connectors within the harness."""


def held_by(half: Any, outside: Iterable[Any]) -> Census:
    """Count what is reachable from one half of a connector, but not through objects `outside`."""
    found: Census = Counter()
    seen = {id(each) for each in outside}
    queue: deque[tuple[Any, tuple[str, ...]]] = deque([(half, ())])
    alive = []  # so that no id is used again
    while queue:
        thing, place = queue.popleft()
        if id(thing) in seen or _leads_out(thing):
            continue
        seen.add(id(thing))
        alive.append(thing)
        if size := _size(thing):
            found["".join(place).lstrip(".")] += size
        if not isinstance(thing, _PLAIN):
            queue.extend((part, _joined(place, name)) for name, part in _parts(thing))
    return found


def _leads_out(thing: Any) -> bool:
    if thing is None or isinstance(thing, (int, float, complex, *_ENDS)):
        return True
    module = thing.__module__ if isinstance(thing, FunctionType) else type(thing).__module__
    module = f"{module}."
    return module.startswith((_HARNESS, "vllm.config.")) and not module.startswith(_OURS)


def _size(thing: Any) -> int:
    if isinstance(thing, torch.Tensor):
        return int(thing.nbytes)
    if isinstance(thing, memoryview):
        return thing.nbytes
    return len(thing) if isinstance(thing, (dict, *_LISTS, str, bytes, bytearray)) else 0


def _parts(thing: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a thing consists of, with the name of each part."""
    if isinstance(thing, dict):
        for key, value in list(thing.items()):
            yield "{}", key
            yield "{}", value
    elif isinstance(thing, _LISTS):
        yield from (("[]", part) for part in list(thing))
    elif isinstance(thing, FunctionType):
        yield from (("()", cell) for cell in thing.__closure__ or ())
    elif isinstance(thing, MethodType):
        yield "()", thing.__self__
    elif isinstance(thing, partial):
        yield from (("()", part) for part in (thing.func, thing.args, thing.keywords))
    else:
        # Of a type written in C, only what it shows: sqlite3 prunes its list of cursors rarely.
        yield from ((f".{name}", value) for name, value in _attributes(thing))


def _attributes(thing: Any) -> Iterator[tuple[str, Any]]:
    """Yield the instance's attributes, without calling code of its class."""
    with contextlib.suppress(AttributeError):
        yield from list(object.__getattribute__(thing, "__dict__").items())
    for kind in type(thing).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in [slots] if isinstance(slots, str) else slots:
            with contextlib.suppress(AttributeError):
                yield name, object.__getattribute__(thing, name)


def _joined(place: tuple[str, ...], name: str) -> tuple[str, ...]:
    """Return the place of a part; a chain of equal links, or a long way, is one place."""
    if len(place) == DEEPEST or (place and place[-1] == name):
        return place
    return (*place, name)


def held_by_process(package: str, folder: Path) -> Census:
    """Count what a connector may hold elsewhere: in its modules, the process and the file system.

    `package`: of the connector's class. `folder`: the directory of the run.
    """
    found: Census = Counter()
    found["threads"] = threading.active_count()
    descriptors = Path("/proc/self/fd")
    found["file descriptors"] = len(os.listdir(descriptors)) if descriptors.exists() else 0
    found["files"] = sum(len(names) for _, _, names in os.walk(folder))
    for thing in gc.get_objects():
        kind = type(thing)
        if issubclass(kind, torch.Tensor):
            found["tensors"] += 1
        elif issubclass(kind, (concurrent.futures.Future, asyncio.Future)):
            found["futures"] += 1
        elif f"{kind.__module__}.".startswith(f"{package}."):
            found[f"objects of {kind.__qualname__}"] += 1
    return found


def grown(censuses: list[Census], rounds: int) -> list[tuple[str, list[int]]]:
    """Return the places that grew by at least one per round in each interval, with their numbers.

    Places near the holder come first, and of these the fastest.
    """
    places = ((place, [census[place] for census in censuses]) for place in censuses[-1])
    return _in_order(
        (place, numbers)
        for place, numbers in places
        if all(after - before >= rounds for before, after in pairwise(numbers))
    )


def shrunk(
    censuses: list[Census], rounds: int, first: Census | None = None
) -> list[tuple[str, list[int]]]:
    """Return the places that shrank by at least one per round in each interval, as `grown` does.

    Also those that have nothing left: they shrank so at first, from `first`, the census before the
    rounds, and then until they were empty.
    """
    places = ((place, [census[place] for census in censuses]) for place in censuses[0])
    return _in_order(
        (place, numbers)
        for place, numbers in places
        if all(before - after >= rounds for before, after in pairwise(numbers))
        or (first is not None and _is_used_up([first[place], *numbers], rounds))
    )


def _is_used_up(numbers: list[int], rounds: int) -> bool:
    falls = all(after < before or before == 0 for before, after in pairwise(numbers))
    return falls and numbers[0] - numbers[1] >= rounds and numbers[1] > 0 == numbers[-1]


def _in_order(places: Iterable[tuple[str, list[int]]]) -> list[tuple[str, list[int]]]:
    return sorted(
        places, key=lambda found: (_depth(found[0]), -abs(found[1][0] - found[1][-1]), found[0])
    )


def _depth(place: str) -> int:
    return sum(map(place.count, ".[{("))
