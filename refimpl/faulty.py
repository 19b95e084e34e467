# SPDX-License-Identifier: Apache-2.0
"""Planted engine faults: which methods of an engine are changed, and how, while a fault is active.

A target is named "package.module:Class.method", or "package.module:function", where the module is
the one that calls the function. A change is a function `change(original, *args, **kwargs)` that is
called in place of the original, which is a target or a hook of the connector. For example:

    LAND = Target("kvconform.refimpl.scheduler:land")
    lands_twice = LAND.replaced_by(twice)
    reports_nothing = LAND.during(update_connector_output=skipped)

`replaced_by`, `before` and `after` also serve as decorators of the function that they get.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from pkgutil import resolve_name
from typing import Any
from unittest.mock import patch

Change = Callable[..., Any]


@dataclass(frozen=True)
class Target:
    """A method or function of an engine, by name.

    With `missing`, it does not exist, and the original that a change gets does nothing.
    """

    name: str
    missing: bool = False

    def resolve(self) -> tuple[Any, str]:
        """Return the class or module that has the target (imported), and the attribute's name.

        ImportError or AttributeError if there is no such class or module.
        """
        module, _, path = self.name.partition(":")
        owner, _, attribute = path.rpartition(".")
        return resolve_name(f"{module}:{owner}"), attribute

    def replaced_by(self, change: Change) -> Fault:
        """Return the fault in which `change` is called in place of the target."""
        return Fault(((self, change),))

    def before(self, function: Callable[..., object]) -> Fault:
        """Return the fault in which `function` is called first, with the target's arguments."""

        def change(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            function(*args, **kwargs)
            return original(*args, **kwargs)

        return self.replaced_by(change)

    def after(self, function: Callable[..., object]) -> Fault:
        """Return the fault in which `function` is called after the target.

        It gets what the target returned, which it may change in place, and the arguments.
        """

        def change(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            found = original(*args, **kwargs)
            function(found, *args, **kwargs)
            return found

        return self.replaced_by(change)

    def during(self, *, when: Callable[..., object] | None = None, **hooks: Change) -> Fault:
        """Return the fault in which hooks of the connector are changed while the target runs.

        The target's first argument has the connector as its attribute `connector`. `hooks` maps
        names of hooks to changes. `when` gets the target's arguments: if it returns false, the
        hooks stay as they are in this call.
        """

        def change(original: Callable[..., Any], owner: Any, *args: Any, **kwargs: Any) -> Any:
            if when is not None and not when(owner, *args, **kwargs):
                return original(owner, *args, **kwargs)
            with connector_of(owner, **hooks):
                return original(owner, *args, **kwargs)

        return self.replaced_by(change)


@dataclass(frozen=True)
class Fault:
    """Changes of an engine, in force while `active` is entered. `+` combines faults."""

    changes: tuple[tuple[Target, Change], ...]

    def __add__(self, other: Fault) -> Fault:
        return Fault(self.changes + other.changes)

    def active(self) -> Activation:
        """Return a context manager in whose block this process has the changes."""
        return Activation(self)


class Activation:
    """The time for which a fault is in force: from `__enter__` to `__exit__`, never less.

    The module holds it meanwhile, so that a forgotten reference ends no fault. One that is dropped
    without having been entered warns, because its fault was never in force.
    """

    def __init__(self, fault: Fault) -> None:
        self._fault = fault
        self._stack: ExitStack | None = None

    def __enter__(self) -> None:
        if self._stack is not None:
            raise RuntimeError("this fault has been in force: call active() again")
        with ExitStack() as stack:
            for target, change in self._fault.changes:
                stack.enter_context(_changed(target, change))
            self._stack = stack.pop_all()
        _active.append(self)

    def __exit__(self, *_: object) -> None:
        assert self._stack is not None
        _active.remove(self)
        self._stack.close()

    def __del__(self) -> None:
        if self._stack is None:
            changed = ", ".join(target.name for target, _ in self._fault.changes)
            warnings.warn(
                f"the fault of {changed} was never in force: write `with fault.active():`",
                RuntimeWarning,
                stacklevel=2,
            )


def _changed(target: Target, change: Change) -> AbstractContextManager[Any]:
    """Return a context manager that puts `change` in the place of the target."""
    owner, name = target.resolve()
    original = skipped if target.missing else getattr(owner, name)

    @wraps(original)
    def changed(*args: Any, **kwargs: Any) -> Any:
        return change(original, *args, **kwargs)

    return patch.object(owner, name, changed, create=target.missing)


_active: list[Activation] = []
"""Activations that have been entered and not left."""


def in_force() -> bool:
    """Whether a fault is active in this process.

    An error in our own code is then a consequence of the fault, and therefore the engine's.
    """
    return bool(_active)


# -- changes


def skipped(original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Do not call the original."""


def twice(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call the original twice; return what the second call returns."""
    original(*args, **kwargs)
    return original(*args, **kwargs)


def returns(value: Any) -> Change:
    """Return the change that returns `value`, and does not call the original."""
    return lambda original, *args, **kwargs: value


def with_arguments(change: Callable[..., tuple[Any, ...]]) -> Change:
    """Return the change that calls the original with `change` of its arguments."""
    return lambda original, *args, **kwargs: original(*change(*args, **kwargs))


def with_keywords(**changed: Any) -> Change:
    """Return the change that calls the original with these keyword arguments."""
    return lambda original, *args, **kwargs: original(*args, **{**kwargs, **changed})


# -- hooks of a connector


class Altered:
    """An object with some methods changed: `hooks` maps their names to changes.

    All other attributes are those of the object.
    """

    def __init__(self, original: Any, **hooks: Change) -> None:
        self.__dict__["_original"] = original
        self.__dict__["_hooks"] = hooks

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.__dict__["_original"], name)
        change = self.__dict__["_hooks"].get(name)
        return found if change is None else partial(change, found)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__["_original"], name, value)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """Return the class of the object, so that isinstance sees no difference."""
        return type(self.__dict__["_original"])


@contextmanager
def connector_of(owner: Any, **hooks: Change) -> Iterator[None]:
    """Change hooks of `owner.connector` within the block, if there is a connector."""
    original = owner.connector
    if original is not None:
        owner.connector = Altered(original, **hooks)
    try:
        yield
    finally:
        owner.connector = original
