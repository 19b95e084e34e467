# SPDX-License-Identifier: Apache-2.0
"""Adapter `llvmlite-names`: vLLM's model runner on the CPU in a process that has imported numba.

Where there is no Triton, vLLM's CPU platform goes through all loaded modules and asks what they hold for names such as `__dict__`.
llvmlite's stand-in for its library takes every name for a symbol and answers with a function, and vLLM ends. LMCache imports numba.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvconform.adapters.registry import Adapter


def install() -> None:
    """Changes how llvmlite's library answers for names with two underscores at both ends: no symbol is called so."""
    from llvmlite.binding import ffi

    wrapper: Any = type(ffi.lib)
    wrapper.__getattr__ = _plain(wrapper.__getattr__)


def _plain(getattr_of: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    def plain(self: Any, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return getattr_of(self, name)

    return plain


ADAPTER = Adapter(
    title="Plain names for llvmlite",
    text="llvmlite's library has no attributes with double underscores, which vLLM asks all modules for on the CPU.",
    package="llvmlite",
    install=install,
)
