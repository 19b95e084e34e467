# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for packages that a pack leaves out: their names can be imported, and not used.

vLLM imports these packages with its own modules, and the cases do not use them. `launch` writes a
package of two lines for each, and only where the target lacks the real one.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import inspect
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any


class StandInUsed(RuntimeError):
    """Something was called that the pack has only by name; the message is a sentence."""


class _Name(type):
    """Type of every name in a stand-in: a class that can be inherited from and annotated with."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return named(f"{cls.__module__}.{cls.__qualname__}", name)

    def __getitem__(cls, _: Any) -> Any:
        return cls

    def __call__(cls, *_: Any, **__: Any) -> Any:
        # Bodies of modules and classes may make constants and decorate; functions may not.
        if not sys._getframe(1).f_code.co_flags & inspect.CO_OPTIMIZED:
            return cls
        whole = f"{cls.__module__}.{cls.__qualname__}"
        raise StandInUsed(f"{whole} was called, and the pack has only the name of it")


def named(owner: str, name: str) -> type:
    """Return the stand-in for `name` of the module or class `owner`."""
    schema: Any = classmethod(_any)  # for fields of pydantic's models
    return _Name(
        name,
        (),
        {"__module__": owner, "__qualname__": name, "__get_pydantic_core_schema__": schema},
    )


def _any(cls: type, *_: Any) -> Any:
    from pydantic_core import core_schema

    return core_schema.any_schema()


class _Module(ModuleType):
    """A module that has every name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return named(self.__name__, name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every module below the stand-ins."""

    def __init__(self) -> None:
        self.roots: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """See MetaPathFinder."""
        root, _, rest = fullname.partition(".")
        if not rest or root not in self.roots:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """See Loader."""
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """See Loader."""


_FINDER = _Finder()


def install(root: str) -> None:
    """Make the imported module `root` a stand-in, and all modules below it."""
    if _FINDER not in sys.meta_path:
        sys.meta_path.append(_FINDER)
    _FINDER.roots.add(root)
    sys.modules[root].__class__ = _Module


def used(error: BaseException) -> StandInUsed | None:
    """Return the use of a stand-in that led to `error`, if one did."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, StandInUsed):
            return seen
        seen = seen.__cause__ or seen.__context__
    return None
