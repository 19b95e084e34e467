# SPDX-License-Identifier: Apache-2.0
"""Faults of an engine, put in for a while: `spec/defects.yaml` names them, `refimpl/defects/engine_*.py` has them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any
from unittest.mock import patch


@dataclass(frozen=True)
class Replacement:
    """`new(original, *args, **kwargs)` is called in the place of the function or method `owner.name`.

    With `create`, the owner has nothing of that name, and `original` does nothing.
    """

    owner: Any
    name: str
    new: Callable[..., Any]
    create: bool = False

    def bound(self) -> Callable[..., Any]:
        """What takes the original's place."""
        original = nothing if self.create else getattr(self.owner, self.name)

        @wraps(original)
        def replaced(*args: Any, **kwargs: Any) -> Any:
            return self.new(original, *args, **kwargs)

        return replaced


@dataclass
class Fault:
    """What is wrong (`text`) and what is replaced. Nothing is wrong until `active` is entered."""

    text: str
    replacements: list[Replacement] = field(default_factory=list)

    @contextmanager
    def active(self) -> Iterator[None]:
        """The fault is in force in this process; everything is as before when the block is left."""
        _active.append(self)
        try:
            with ExitStack() as stack:
                for each in self.replacements:
                    stack.enter_context(
                        patch.object(each.owner, each.name, each.bound(), create=each.create)
                    )
                yield
        finally:
            _active.remove(self)

    def and_(self, owner: Any, name: str) -> Callable[[Callable[..., Any]], Fault]:
        """Decorator: one more replacement for this fault."""
        return lambda new: Fault(self.text, [*self.replacements, Replacement(owner, name, new)])


_active: list[Fault] = []


def in_force() -> bool:
    """Whether a fault is active in this process: then an error in our own code is a consequence of it, and the engine's."""
    return bool(_active)


def fault(owner: Any, name: str, *, create: bool = False) -> Callable[[Callable[..., Any]], Fault]:
    """Decorator: the function, given the original and its arguments, takes the place of `owner.name`; its docstring says what is wrong.

    `create`: there is no `owner.name`, and that it is there is what is wrong.
    """
    return lambda new: Fault((new.__doc__ or "").strip(), [Replacement(owner, name, new, create)])


class Altered:
    """An object with some methods replaced: `hooks` maps a name to `new(original, *args, **kwargs)`. Everything else is the object's."""

    def __init__(self, original: Any, **hooks: Callable[..., Any]) -> None:
        self.__dict__["_original"], self.__dict__["_hooks"] = original, hooks

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.__dict__["_original"], name)
        new = self.__dict__["_hooks"].get(name)
        return found if new is None else partial(new, found)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__["_original"], name, value)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """What isinstance sees."""
        return type(self.__dict__["_original"])


@contextmanager
def connector_of(owner: Any, **hooks: Callable[..., Any]) -> Iterator[None]:
    """Within the block, `owner.connector` (if there is one) has these hooks replaced."""
    original = owner.connector
    if original is not None:
        owner.connector = Altered(original, **hooks)
    try:
        yield
    finally:
        owner.connector = original


def nothing(original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """In the place of a hook: it is not called."""
