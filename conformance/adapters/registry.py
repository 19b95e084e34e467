# SPDX-License-Identifier: Apache-2.0
"""Adapters: small stand-ins that let a real connector run where what it needs is missing (docs/adapters.md).

Each is a module of this package with an `ADAPTER`; `lmcache_cpu.py` is the adapter `lmcache-cpu`. None is in force unless it is named, in
the settings (`adapters`) or with `--adapter`, and the report names those that were.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import pkgutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass

from kvconform import adapters as package
from kvconform.errors import UsageError, did_you_mean

ENVIRONMENT = "KVCONFORM_ADAPTERS"
"""Environment variable: the adapters, with commas between them, for processes that somebody else starts (vLLM's, in the live engine)."""


@dataclass(frozen=True)
class Adapter:
    """What stands in for what. Modules that define one import nothing but the standard library and kvconform until `install` is called.

    `install` changes this process for good and is called once in it, before the connector is imported. `around` is entered for each run of
    an engine: it takes back what an earlier run left in the process, where that would not survive the process in production.
    """

    title: str
    """What the report's header calls it: "CPU transfer class for LMCache"."""
    text: str
    """One sentence: what it changes."""
    package: str
    """The package without which it makes no sense."""
    install: Callable[[], None]
    around: Callable[[], AbstractContextManager[None]] = nullcontext


_installed: dict[str, Adapter] = {}


def names() -> list[str]:
    """All adapters, sorted."""
    return sorted(
        module.name.replace("_", "-")
        for module in pkgutil.iter_modules(package.__path__)
        if not module.name.startswith("_") and module.name != "registry"
    )


def named(name: str) -> Adapter:
    """The adapter of this name. UsageError in one sentence if there is none."""
    known = names()
    if name not in known:
        raise UsageError(
            f"there is no adapter {name!r}{did_you_mean(name, known) or '; kvconform list adapters has them'}"
        )
    adapter: Adapter = importlib.import_module(
        f"{package.__name__}.{name.replace('-', '_')}"
    ).ADAPTER
    return adapter


def titles(wanted: Iterable[str]) -> list[str]:
    """How a report names them."""
    return [f"{named(name).title} ({name})" for name in wanted]


def install(wanted: Iterable[str]) -> None:
    """Put them in force in this process, those that are not yet. UsageError if one does not exist or its package is missing."""
    for name in wanted:
        if name in _installed:
            continue
        adapter = named(name)
        if importlib.util.find_spec(adapter.package) is None:
            raise UsageError(
                f"adapter {name} stands in for parts of {adapter.package}, and there is no such package here: install it, or let nox do "
                "that, which installs what an entry of the catalogue needs: nox -s conformance -- --connector catalogue:NAME"
            )
        adapter.install()
        _installed[name] = adapter


def install_from_environment() -> None:
    """Put those in force that the environment names. For processes that vLLM starts."""
    install(name for name in os.environ.get(ENVIRONMENT, "").split(",") if name)


@contextmanager
def in_force(wanted: Iterable[str]) -> Iterator[None]:
    """Install them, and take back around the block what a process of its own would not keep."""
    wanted = list(wanted)
    install(wanted)
    with ExitStack() as stack:
        for name in wanted:
            stack.enter_context(_installed[name].around())
        yield
