# SPDX-License-Identifier: Apache-2.0
"""Whether a connector exists, as far as sources tell without an import.

An import of vLLM takes seconds, so mistakes in a name are found before it.
"""

from __future__ import annotations

import ast
import difflib
import importlib.machinery
import importlib.util
import re
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import entry_points
from pathlib import Path

from kvconform.compat.factory import installed_names
from kvconform.compat.installed import may_provide
from kvconform.config.catalogue import PREFIX
from kvconform.errors import UsageError, did_you_mean, meant

_CONNECTOR = re.compile(r"(?:[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*:)?[A-Za-z_]\w*")
_SOURCES = 500
"""Most sources of a folder that are searched for a class."""
HARMLESS = sys.stdlib_module_names | {"numpy", "torch", "vllm"}
"""Packages after whose import the same packages can be imported as before it."""


def check_connector_name(connector: str, pythonpath: Sequence[str] = ()) -> None:
    """Raise UsageError if a connector's name is malformed or its top-level package is missing.

    Raised as well for what does not exist of `pythonpath`. Imports nothing.
    """
    absent = [place for place in pythonpath if not Path(place).exists()]
    if absent:
        raise UsageError(f"there is no directory {absent[0]}, which pythonpath names")
    if connector.startswith(PREFIX):
        raise UsageError(
            f"an entry of the catalogue is named on the command line (kvconform run {connector});"
            " a settings file names a class"
        )
    if _hint_at_file(connector) or not _CONNECTOR.fullmatch(connector):
        raise UsageError(
            f"{connector!r} does not name a connector: write package.module:Class, or a name that"
            f" vLLM knows{_hint_at_form(connector, pythonpath)}"
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
    if _is_found(package, pythonpath):
        return
    if pythonpath:
        folders = filter(Path.is_dir, map(Path, pythonpath))
        here = [each.stem for place in folders for each in place.iterdir()]
        close = did_you_mean(package, {each for each in here if each.isidentifier()}, 1)
        raise UsageError(
            f"there is no package {package!r} in {', '.join(pythonpath)} (pythonpath), "
            f"nor elsewhere on this Python's path{close}"
        )
    raise UsageError(
        f"there is no package {package!r} on this Python's path: "
        f"install it into {sys.prefix}, or give --pythonpath {_folder_of(package) or 'DIR'}"
    )


def _folder_of(package: str) -> Path | None:
    """Return the current folder, or one below it, that has such a module or package."""
    here = Path.cwd()
    if (here / f"{package}.py").is_file() or (here / package / "__init__.py").is_file():
        return here
    found = sorted([*here.glob(f"*/{package}.py"), *here.glob(f"*/{package}/__init__.py")])
    return here / found[0].relative_to(here).parts[0] if found else None


def _hint_at_form(connector: str, pythonpath: Sequence[str]) -> str:
    """Return how to write a connector's name that is malformed, or ""."""
    if hint := _hint_at_file(connector):
        return hint
    module, _, name = connector.rpartition(".")
    if not module or ":" in connector:
        return ""
    if name[:1].isupper():
        return f"; did you mean {module}:{name}?"
    return (
        _hint_at_classes(connector, pythonpath)
        or f"; if {connector} is the module, add its class: {connector}:MyConnector"
    )


def _hint_at_file(connector: str) -> str:
    """Return how to name a class that was given as file.py:Class, or "" if there is no file."""
    source, _, name = connector.partition(":")
    file = Path(source)
    if file.suffix != ".py" or not file.stem.isidentifier() or not file.is_file():
        return ""
    parts, folder = [file.stem], file.parent
    while (folder / "__init__.py").is_file() and folder.name.isidentifier():
        parts, folder = [folder.name, *parts], folder.parent
    inside = "" if str(folder) == "." else f" with --pythonpath {folder}"
    module = ".".join(parts)
    for each in [name] if name else _connectors_in(_parsed(file)):
        return f"; did you mean {module}:{each}{inside}?"
    return f"; add its class, as {module}:MyConnector{inside}"


def check_connector_exists(
    connector: str, pythonpath: Sequence[str] = (), *, stand_ins: bool = False
) -> None:
    """Raise UsageError if vLLM registers no such connector, or there is no such module or class.

    Its name is checked first, as `check_connector_name` does.
    So it is if the module imports a package that is missing, unless `stand_ins` may take its place.
    Imports nothing: sources are searched for the name. What cannot be known without an import is
    left to the workers.
    """
    check_connector_name(connector, pythonpath)
    if ":" in connector:
        sources = _check_class(connector, pythonpath)
        if not stand_ins:
            _check_imports(connector, sources, pythonpath)
    else:
        _check_registered(connector, pythonpath)


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
        close = _hint_at_classes(name, pythonpath) or _hint_at_places(name, pythonpath)
        close = close or did_you_mean(name, known) or f"; it knows {', '.join(known)}"
        raise UsageError(
            f"vLLM knows no connector named {name!r}: give it as package.module:Class{close}"
        )


def _check_class(symbol: str, pythonpath: Sequence[str]) -> list[Path]:
    """Raise UsageError if a module or its class does not exist, as far as sources say.

    `symbol` is `package.module:Class`, of a connector or a router. Returns the sources of the
    module and of its packages, outermost first, as far as they are known. Imports nothing.
    """
    module, _, name = symbol.partition(":")
    sources: list[Path] = []
    is_package = True
    for full, found in located(module, pythonpath):
        if found is None and full == module.partition(".")[0]:
            return []  # found by an import hook, which cannot be asked about what is below
        if found is None:
            why = "" if is_package else f" ({full.rpartition('.')[0]} is no package)"
            raise UsageError(f"there is no module {full!r}{why}, which {symbol!r} needs")
        is_package = found.submodule_search_locations is not None
        if (found.origin or "").endswith(".py"):
            sources.append(Path(found.origin or ""))
    if found is None or not (found.origin or "").endswith(".py"):
        return []
    source = sources[-1]
    try:
        tree = ast.parse(source.read_text(encoding="utf-8"))
    except SyntaxError as error:
        raise UsageError(f"{source}:{error.lineno}: {error.msg}, so {module} cannot run") from None
    except (OSError, ValueError):
        return []
    names = _names_in(tree)
    if names is not None and name not in names:
        connectors = _connectors_in(tree)
        close = did_you_mean(name, connectors) or did_you_mean(name, _classes_in(tree))
        raise UsageError(f"module {module} ({source}) has no class {name!r}{close}")
    return sources


def located(
    module: str, pythonpath: Sequence[str]
) -> Iterator[tuple[str, importlib.machinery.ModuleSpec | None]]:
    """Yield the packages of a module and the module, each with its spec, up to one that is missing.

    Imports nothing.
    """
    places = [*sys.path, *pythonpath]
    parts = module.split(".")
    for depth in range(1, len(parts) + 1):
        full = ".".join(parts[:depth])
        found = importlib.machinery.PathFinder.find_spec(full, places)
        yield full, found
        if found is None:
            return
        places = list(found.submodule_search_locations or ())


def _hint_at_classes(name: str, pythonpath: Sequence[str]) -> str:
    """Return `; did you mean name:Class?` with the connectors of a module, or "". Imports nothing.

    A package that defines none has those that it imports from its own modules.
    """
    *_, (_, found) = located(name, pythonpath)
    if found is None or not (found.origin or "").endswith(".py"):
        return ""
    return meant([f"{name}:{each}" for each in _connectors_in(_parsed(Path(found.origin or "")))])


def _hint_at_places(name: str, pythonpath: Sequence[str]) -> str:
    """Return `; did you mean module:Class?` with connectors of such a name below `pythonpath`.

    "" if there are none. Looks into modules and into those of packages, one level deep. Imports
    nothing.
    """
    found: dict[str, list[str]] = {}
    for place in {Path(place).resolve(): None for place in pythonpath}:
        for source in sorted([*place.glob("*.py"), *place.glob("*/*.py")])[:_SOURCES]:
            *packages, last = source.relative_to(place).with_suffix("").parts
            inside = all((place / each / "__init__.py").is_file() for each in packages)
            parts = packages if last == "__init__" else [*packages, last]
            if not inside or not parts or not all(map(str.isidentifier, parts)):
                continue
            for each in _connectors_in(_parsed(source)):
                found.setdefault(each, []).append(f"{'.'.join(parts)}:{each}")
    close = difflib.get_close_matches(name, found, 1, 0.8)
    # The shortest is how the package itself names it.
    return meant(sorted(found[close[0]], key=len)[:2]) if close else ""


def _parsed(source: Path) -> ast.Module:
    """Return the tree of a source; one without statements if it cannot be read or parsed."""
    try:
        return ast.parse(source.read_text(encoding="utf-8"))
    except (SyntaxError, OSError, ValueError):
        return ast.Module([], [])


def _connectors_in(tree: ast.Module) -> list[str]:
    """Return the connectors that a module defines, or else those that it imports."""
    classes = [
        node.name
        for node in tree.body
        if isinstance(node, ast.ClassDef)
        and any("Connector" in ast.unparse(base) for base in node.bases)
        and not any("Metadata" in ast.unparse(base) for base in node.bases)
    ]
    return classes or [
        alias.asname or alias.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("vllm.")
        for alias in node.names
        if (alias.asname or alias.name).endswith("Connector")
    ]


def _classes_in(tree: ast.Module) -> list[str]:
    """Return the classes that a module defines, and those that it seems to import from its own."""
    return [node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)] + [
        alias.asname or alias.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.level
        for alias in node.names
        if (alias.asname or alias.name)[:1].isupper()
    ]


def _names_in(tree: ast.Module) -> set[str] | None:
    """Return all names of a module that may be those of a class; None if its source does not tell.

    Neither a module nor a plain function is a class.
    """
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) or (
            isinstance(node, ast.FunctionDef) and (node.decorator_list or node.name[:2] == "__")
        ):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Name) and node.id in ("globals", "setattr", "exec", "vars"):
            return None
    return None if found & {"*", "__getattr__"} else found


def _check_imports(connector: str, sources: Sequence[Path], pythonpath: Sequence[str]) -> None:
    """Raise UsageError if the import of a connector's module must fail for a missing package.

    `sources`: those of its packages and of the module, in the order of their execution. Only the
    imports at their beginning are looked at: what follows may change what can be imported.
    """
    for source in sources:
        try:
            body = ast.parse(source.read_text(encoding="utf-8")).body
        except (SyntaxError, OSError, ValueError):
            return
        for node in body:
            packages = _only_imports(node)
            if packages is None:
                return
            for package in packages:
                if not _is_found(package, pythonpath) and not may_provide(package):
                    module = connector.partition(":")[0]
                    raise UsageError(
                        f"Module {module} of connector {connector} cannot be imported: "
                        f"ModuleNotFoundError: No module named {package!r} "
                        f"({source.name}:{node.lineno})."
                    )
                if package not in HARMLESS:
                    return


def imported(node: ast.AST) -> list[str]:
    """Return the top-level packages that a node of a source names in an import."""
    if isinstance(node, ast.Import):
        return [alias.name.partition(".")[0] for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        return [node.module.partition(".")[0]]
    return []


def _only_imports(node: ast.stmt) -> list[str] | None:
    """Return the top-level packages that a statement imports; None if it may do anything else."""
    if isinstance(node, ast.Import) or (isinstance(node, ast.ImportFrom) and not node.level):
        return imported(node)
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return []
    if isinstance(node, ast.If) and not node.orelse:
        for_types = ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
        return [] if for_types else None
    return None


def _is_found(package: str, pythonpath: Sequence[str]) -> bool:
    """Return whether a top-level package can be found. Imports nothing."""
    try:
        if importlib.util.find_spec(package) is not None:
            return True
    except ValueError:  # it is imported, and has no spec
        return True
    return importlib.machinery.PathFinder.find_spec(package, list(pythonpath)) is not None
