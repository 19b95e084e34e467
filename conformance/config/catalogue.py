# SPDX-License-Identifier: Apache-2.0
"""The catalogue: configurations of real connectors by name.

`catalogue:offloading` stands for the settings in `connectors/offloading.toml`.
"""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.metadata
import importlib.util
import re
import sys
import tomllib
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvconform import connectors
from kvconform.compat.factory import installed_names
from kvconform.errors import UsageError, did_you_mean

PREFIX = "catalogue:"
ROOT = Path(connectors.__path__[0])


class Named(BaseModel):
    """An entry of the catalogue.

    `text` is a sentence about it, `requires` is what pip must install besides vLLM. The other
    fields are settings (kvconform.config.settings.Settings).
    """

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)

    text: str = Field(min_length=1)
    requires: list[str] = Field(default=[], description="pip requirements")
    connector: str = Field(min_length=1)
    family: str = Field(
        default="",
        description="entries whose results are reported together; "
        "default: the name up to its first dash",
    )

    def group(self, name: str) -> str:
        """Return the family of the entry, whose name is `name`."""
        return self.family or name.partition("-")[0]

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the entry."""
        return {**(self.model_extra or {}), "connector": self.connector}


def names(root: Path = ROOT) -> list[str]:
    """Return the names of the entries, sorted."""
    return sorted(path.stem for path in root.glob("*.toml"))


def named(name: str, root: Path = ROOT) -> Named:
    """Return the entry `name`, given with or without `catalogue:`.

    UsageError in one sentence if there is none, or it is malformed.
    """
    name = name.removeprefix(PREFIX)
    if name not in names(root):
        close = did_you_mean(name, names(root)) or "; kvconform list connectors shows all"
        raise UsageError(f"the catalogue has no connector {name!r}{close}")
    path = root / f"{name}.toml"
    try:
        return Named.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except (tomllib.TOMLDecodeError, ValidationError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UsageError(f"{path.name} of the catalogue is broken: {reason}") from None


_CONNECTOR = re.compile(r"(?:[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*:)?[A-Za-z_]\w*")


def versions(requires: Sequence[str]) -> dict[str, str | None]:
    """Map the packages that pip requirements name to the installed versions, or None."""
    found: dict[str, str | None] = {}
    for item in requires:
        name = re.match(r"[A-Za-z0-9][A-Za-z0-9._-]*", item.strip())
        if name is None:  # an option of pip
            continue
        try:
            found[name[0]] = importlib.metadata.version(name[0])
        except importlib.metadata.PackageNotFoundError:
            found[name[0]] = None
    return found


def absent(requires: Sequence[str]) -> list[str]:
    """Return the packages that pip requirements name and that are not installed."""
    return [name for name, version in versions(requires).items() if version is None]


def lacking(entry: str | None) -> list[str]:
    """Return a warning if packages that an entry of the catalogue requires are not installed.

    It is no error, because the connector may work with others. None for `entry`: no warning.
    """
    requires = named(entry).requires if entry is not None else []
    missing = absent(requires)
    if not missing:
        return []
    are = "is" if len(missing) == 1 else "are"
    install = f"pip install {' '.join(requires)}"
    nox = f"nox -s conformance -- --connector {entry}"
    return [
        f"{', '.join(missing)} {are} not installed here: {install}; {nox} does that automatically"
    ]


def check_connector_name(connector: str, pythonpath: Sequence[str] = ()) -> None:
    """Raise UsageError if a connector's name is malformed or its top-level package is missing.

    Imports nothing.
    """
    if not _CONNECTOR.fullmatch(connector):
        module, _, name = connector.rpartition(".")
        looks_like_a_class = name[:1].isupper()
        if not module or ":" in connector:
            hint = ""
        elif looks_like_a_class:
            hint = f"; did you mean {module}:{name}?"
        else:
            hint = _hint_at_classes(connector, pythonpath)
            hint = hint or f"; if {connector} is the module, add its class: {connector}:MyConnector"
        raise UsageError(
            f"{connector!r} does not name a connector: "
            f"write package.module:Class, or a name that vLLM knows{hint}"
        )
    if ":" in connector:
        _check_package(connector, pythonpath)


def check_router(router: str | None, pythonpath: Sequence[str] = ()) -> None:
    """Raise UsageError if the package, module or class of the setting `router` does not exist.

    Imports nothing, as `check_connector_exists`.
    """
    if router is not None:
        _check_package(router, pythonpath)
        _check_class(router, pythonpath)


def _check_package(symbol: str, pythonpath: Sequence[str]) -> None:
    """Raise UsageError if the top-level package of `package.module:Class` is missing."""
    package = symbol.partition(":")[0].partition(".")[0]
    if importlib.util.find_spec(package) is not None:
        return
    if importlib.machinery.PathFinder.find_spec(package, list(pythonpath)) is not None:
        return
    absent = [folder for folder in pythonpath if not Path(folder).is_dir()]
    if absent:
        raise UsageError(
            f"there is no directory {absent[0]} (--pythonpath), "
            f"and no package {package!r} anywhere else on this Python's path"
        )
    if pythonpath:
        raise UsageError(
            f"there is no package {package!r} in {', '.join(pythonpath)} (--pythonpath), "
            "nor elsewhere on this Python's path"
        )
    raise UsageError(
        f"there is no package {package!r} on this Python's path: "
        f"install it into {sys.prefix}, or give --pythonpath DIR"
    )


def check_connector_exists(connector: str, pythonpath: Sequence[str] = ()) -> None:
    """Raise UsageError if vLLM registers no such connector, or there is no such module or class.

    Imports nothing: sources are searched for the name. What cannot be known without an import is
    left to the workers.
    """
    if ":" in connector:
        _check_class(connector, pythonpath)
    else:
        _check_registered(connector, pythonpath)


def _hint_at_classes(name: str, pythonpath: Sequence[str]) -> str:
    """Return `; did you mean name:Class?` with the connectors of a module, or "". Imports nothing.

    A package that defines none has those that it imports from its own modules.
    """
    places: Sequence[str] | None = [*sys.path, *pythonpath]
    found = None
    for depth in range(1, name.count(".") + 2):
        full = ".".join(name.split(".")[:depth])
        found = importlib.machinery.PathFinder.find_spec(full, places)
        if found is None:
            return ""
        places = list(found.submodule_search_locations or ())
    if found is None or not (found.origin or "").endswith(".py"):
        return ""
    try:
        tree = ast.parse(Path(found.origin or "").read_text(encoding="utf-8"))
    except (SyntaxError, OSError, ValueError):
        return ""
    classes = [
        node.name
        for node in tree.body
        if isinstance(node, ast.ClassDef)
        and any("Connector" in ast.unparse(base) for base in node.bases)
        and not any("Metadata" in ast.unparse(base) for base in node.bases)
    ]
    if not classes:
        classes = [
            alias.asname or alias.name
            for node in tree.body
            if isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("vllm.")
            for alias in node.names
            if (alias.asname or alias.name).endswith("Connector")
        ]
    return f"; did you mean {' or '.join(f'{name}:{each}' for each in classes)}?" if classes else ""


def _check_registered(name: str, pythonpath: Sequence[str] = ()) -> None:
    """Raise UsageError if the installed vLLM's factory registers no connector of this name.

    Plugins of vLLM may register others, so nothing is known where some are installed.
    """
    plugins = [
        each
        for each in entry_points(group="vllm.general_plugins")
        if not each.value.startswith(("vllm.", "kvconform."))
    ]
    if plugins:
        return
    try:
        known = installed_names()
    except (OSError, SyntaxError):
        return
    if known and name not in known:
        close = _hint_at_classes(name, pythonpath) or did_you_mean(name, known)
        close = close or f"; it knows {', '.join(known)}"
        raise UsageError(
            f"vLLM knows no connector named {name!r}: give it as package.module:Class{close}"
        )


def _check_class(symbol: str, pythonpath: Sequence[str]) -> None:
    """Raise UsageError if a module or its class does not exist, as far as sources say.

    `symbol` is `package.module:Class`, of a connector or a router. Imports nothing.
    """
    module, _, name = symbol.partition(":")
    path: list[str] | None = None
    parts = module.split(".")
    found = None
    for depth in range(1, len(parts) + 1):
        full = ".".join(parts[:depth])
        places = [*sys.path, *pythonpath] if path is None else path
        found = importlib.machinery.PathFinder.find_spec(full, places)
        if found is None and depth == 1:
            return  # found by an import hook, which cannot be asked about what is below
        if found is None:
            raise UsageError(f"there is no module {full!r}, which {symbol!r} needs")
        path = list(found.submodule_search_locations or ())
    if found is None or not (found.origin or "").endswith(".py"):
        return
    source = Path(found.origin or "")
    try:
        tree = ast.parse(source.read_text(encoding="utf-8"))
    except SyntaxError as error:
        raise UsageError(f"{source}:{error.lineno}: {error.msg}, so {module} cannot run") from None
    except (OSError, ValueError):
        return
    names = _names_in(tree)
    if names is not None and name not in names:
        close = did_you_mean(name, names)
        raise UsageError(f"module {module} ({source}) has no class {name!r}{close}")


def _names_in(tree: ast.Module) -> set[str] | None:
    """Return all names that a module may have; None if its source does not tell."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and node.id in ("globals", "setattr", "exec", "vars"):
            return None
    return None if found & {"*", "__getattr__"} else found
