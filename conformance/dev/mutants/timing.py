# SPDX-License-Identifier: Apache-2.0
"""Decorators that mutants put on hooks which report something: never, late, twice, early."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

Hook = Callable[..., Any]
NAME = "_kvconform_withheld"
"""Attribute of a mutant in which a decorator keeps a value, by hook."""


def _nothing_like(value: Any) -> Any:
    """Return the value of the same form that reports nothing."""
    if isinstance(value, tuple):
        return tuple(None for _ in value)
    return type(value)() if isinstance(value, (set, frozenset, list, dict)) else None


def _copy_of(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_copy_of(each) for each in value)
    return type(value)(value) if isinstance(value, (set, frozenset, list, dict)) else value


def _reports(hook: Hook, half: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Call the hook of `half`; return copies of what it returned the last time, and now."""
    value = _copy_of(_listed(hook(half, *args, **kwargs)))
    withheld = half.__dict__.setdefault(NAME, {})
    before = withheld.get(hook.__name__, _nothing_like(value))
    withheld[hook.__name__] = value
    return before, value


def never(hook: Hook) -> Hook:
    """Call the hook, and report nothing."""

    @wraps(hook)
    def changed(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _nothing_like(_listed(hook(self, *args, **kwargs)))

    return changed


def late(hook: Hook) -> Hook:
    """Report with each call what the one before would have reported."""

    @wraps(hook)
    def changed(self: Any, *args: Any, **kwargs: Any) -> Any:
        before, _ = _reports(hook, self, args, kwargs)
        return before

    return changed


def twice(hook: Hook) -> Hook:
    """Report with each call also what the one before has reported."""

    @wraps(hook)
    def changed(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _joined(*_reports(hook, self, args, kwargs))

    return changed


def early(hook: Hook) -> Hook:
    """Report the end of the sending of every request as soon as the engine says it is finished."""

    @wraps(hook)
    def changed(self: Any, finished: set[str], *args: Any, **kwargs: Any) -> Any:
        sent, received = hook(self, finished, *args, **kwargs)
        return {*(sent or ()), *finished} or None, received

    return changed


def _listed(value: Any) -> Any:
    """Return a generator's values as a list; any other value as it is."""
    return list(value) if hasattr(value, "__next__") else value


def _joined(before: Any, value: Any) -> Any:
    if isinstance(value, tuple) and isinstance(before, tuple) and len(before) == len(value):
        return tuple(_joined(one, other) for one, other in zip(before, value, strict=True))
    if not before or not value:
        return value or before
    if isinstance(value, (set, frozenset)):
        return value | before
    return [*before, *value] if isinstance(value, list) else value
