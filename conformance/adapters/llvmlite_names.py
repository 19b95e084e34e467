# SPDX-License-Identifier: Apache-2.0
"""Adapter `llvmlite-names`: vLLM's model runner on the CPU in a process that has imported numba.

Without Triton, vLLM's CPU platform looks through the attributes of all loaded modules, and asks the
values for names such as `__dict__`. llvmlite's wrapper of its library takes every name for a symbol
and returns a function, and vLLM fails. LMCache imports numba, which imports llvmlite.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvconform.adapters.registry import Adapter


def install() -> None:
    """Make llvmlite's library raise AttributeError for `__names__`; no symbol has such a name."""
    from llvmlite.binding import ffi

    wrapper: Any = type(ffi.lib)
    wrapper.__getattr__ = _plain(wrapper.__getattr__)


def _plain(getattr_of: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    """Return the library's `__getattr__` without names that have two underscores at both ends."""

    def plain(self: Any, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return getattr_of(self, name)

    return plain


ADAPTER = Adapter(
    title="Plain names for llvmlite",
    text="Makes llvmlite's library deny names like `__dict__`, which vLLM looks for on the CPU.",
    package="llvmlite",
    install=install,
)
