# SPDX-License-Identifier: Apache-2.0
"""Registry of adapters: look-up by name and installation (docs/adapters.md).

An adapter is a module of this package with an `ADAPTER`; `lmcache_cpu.py` is the adapter
`lmcache-cpu`. It takes effect only if it is named in the settings (`adapters`) or with `--adapter`,
and the report names the adapters that were in force.
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
"""Environment variable: comma-separated adapters, for processes that vLLM starts (live engine)."""


@dataclass(frozen=True)
class Adapter:
    """Description and functions of one adapter.

    Until `install` is called, a module that defines an adapter imports only the standard library
    and kvconform.
    """

    title: str
    """Its name in the report's header, such as "CPU transfer class for LMCache"."""
    text: str
    """What it changes, in one sentence."""
    package: str
    """The package that it adapts; without it, the adapter cannot be installed."""
    install: Callable[[], None]
    """Changes this process permanently; called once, before the connector is imported."""
    around: Callable[[], AbstractContextManager[None]] = nullcontext
    """Context of each run of an engine. It removes what a run leaves in the process and what in
    production would end with the process."""


_installed: dict[str, Adapter] = {}


def names() -> list[str]:
    """Return the names of all adapters, sorted."""
    return sorted(
        module.name.replace("_", "-")
        for module in pkgutil.iter_modules(package.__path__)
        if not module.name.startswith("_") and module.name != "registry"
    )


def named(name: str) -> Adapter:
    """Return the adapter with this name; UsageError if there is none."""
    known = names()
    if name not in known:
        hint = did_you_mean(name, known) or "; kvconform list adapters has them"
        raise UsageError(f"there is no adapter {name!r}{hint}")
    module = importlib.import_module(f"{package.__name__}.{name.replace('-', '_')}")
    adapter: Adapter = module.ADAPTER
    return adapter


def titles(wanted: Iterable[str]) -> list[str]:
    """Return the names of adapters as a report shows them."""
    return [f"{named(name).title} ({name})" for name in wanted]


def install(wanted: Iterable[str]) -> None:
    """Install adapters in this process, except those that already are.

    Raises UsageError if an adapter does not exist or its package is missing.
    """
    for name in wanted:
        if name in _installed:
            continue
        adapter = named(name)
        if importlib.util.find_spec(adapter.package) is None:
            raise UsageError(
                f"adapter {name} needs the package {adapter.package}, which is not installed: "
                "install it, or let nox install what an entry of the catalogue needs: "
                "nox -s conformance -- --connector catalogue:NAME"
            )
        adapter.install()
        _installed[name] = adapter


def install_from_environment() -> None:
    """Install the adapters that the environment names, in a process that vLLM starts."""
    install(name for name in os.environ.get(ENVIRONMENT, "").split(",") if name)


@contextmanager
def in_force(wanted: Iterable[str]) -> Iterator[None]:
    """Install adapters and enter their contexts for one run."""
    wanted = list(wanted)
    install(wanted)
    with ExitStack() as stack:
        for name in wanted:
            stack.enter_context(_installed[name].around())
        yield
