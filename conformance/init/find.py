# SPDX-License-Identifier: Apache-2.0
"""The connector classes of a repository, found in its source: nothing of it is imported."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvconform.errors import UsageError

ROOTS = re.compile(r"KVConnectorBase(_V1)?|\w*Connector(V1)?")
"""Names of vLLM's classes that a connector derives from; KVConnectorMetadata, KVConnectorStats and the like are none."""

VLLM = "vllm.distributed.kv_transfer"
NOT_OURS = {"build", "dist", "node_modules", "site-packages", "venv", "env", "__pycache__"}
ASIDE = {"test", "tests", "doc", "docs", "example", "examples", "benchmark", "benchmarks"}
"""Folders whose connectors count only where there is no other."""

STAND_IN = re.compile(r"(?i)mock|fake|dummy|stub|test|abstract|base")
MOST_FILES = 20_000


@dataclass(frozen=True)
class Found:
    """A connector class. `root`: the folder that has to be on the import path, below the repository."""

    name: str
    module: str
    file: Path
    line: int
    root: Path
    declares: bool

    @property
    def connector(self) -> str:
        """As `kvconform run` wants it."""
        return f"{self.module}:{self.name}"


@dataclass(frozen=True)
class _Class:
    node: ast.ClassDef
    file: Path
    bases: tuple[str, ...]
    from_vllm: bool


def find(repository: Path) -> Found:
    """The repository's connector. UsageError if there is none, or more than one that could be meant."""
    found = connectors(repository)
    if not found:
        raise UsageError(
            f"no class in {repository} derives from KVConnectorBase_V1: name it (kvconform init --connector mypkg.module:Class), "
            "or begin with one that passes (kvconform init --template NEW_DIR)"
        )
    if len(found) > 1:
        names = ", ".join(f"{one.connector} ({one.file.relative_to(repository)}:{one.line})" for one in found[:8])
        raise UsageError(f"{len(found)} connectors were found: say which with --connector: {names}")
    return found[0]


def connectors(repository: Path) -> list[Found]:
    """All classes that may be meant, sorted: those that no other derives from, and no stand-ins if there are others."""
    classes = [one for file in files(repository) for one in _classes(file)]
    ours = {one.node.name for one in classes if one.from_vllm}
    while True:
        more = {one.node.name for one in classes if not ours.isdisjoint(one.bases)} - ours
        if not more:
            break
        ours |= more
    derived_from = {base for one in classes if one.node.name in ours for base in one.bases if base != one.node.name}
    leaves = [one for one in classes if one.node.name not in derived_from and not one.node.name.startswith("_")]
    leaves = [one for one in leaves if one.from_vllm or not ours.isdisjoint(one.bases)]
    for keep in (lambda one: ASIDE.isdisjoint(one.file.relative_to(repository).parts), lambda one: not STAND_IN.search(one.node.name)):
        leaves = [one for one in leaves if keep(one)] or leaves
    return sorted((_found(one) for one in leaves), key=lambda one: one.connector)


def files(repository: Path) -> Iterator[Path]:
    """The repository's Python files, in order; not those of environments, builds, and hidden folders."""
    count = 0
    for folder, below, names in os.walk(repository):
        below[:] = sorted(name for name in below if name not in NOT_OURS and not name.startswith(".") and not _is_venv(Path(folder, name)))
        for name in sorted(names):
            if name.endswith(".py"):
                count += 1
                if count > MOST_FILES:
                    raise UsageError(f"{repository} has more than {MOST_FILES} Python files: is it the connector's repository?")
                yield Path(folder, name)


def options(found: Found) -> dict[str, object]:
    """Names of the options that the connector's module, or those beside it, take from kv_connector_extra_config, and their defaults (None:
    none, or not a constant)."""
    names: dict[str, object] = {}
    for file in sorted(found.file.parent.glob("*.py")):
        for node in ast.walk(_tree(file)):
            match node:
                case ast.Call(func=ast.Attribute(attr="get_from_extra_config"), args=[ast.Constant(value=str(name)), *rest]):
                    names.setdefault(name, _constant(rest))
                case ast.Call(func=ast.Attribute(value=where, attr="get"), args=[ast.Constant(value=str(name)), *rest]):
                    if "extra_config" in ast.unparse(where):
                        names.setdefault(name, _constant(rest))
                case ast.Subscript(value=where, slice=ast.Constant(value=str(name))) if "extra_config" in ast.unparse(where):
                    names.setdefault(name, None)
    return names


def _classes(file: Path) -> Iterator[_Class]:
    tree = _tree(file)
    imported = {
        name.asname or name.name: name.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(VLLM)
        for name in node.names
    }
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            bases = tuple(ast.unparse(base) for base in node.bases)
            last = tuple(base.rpartition(".")[2] for base in bases)
            outer = any(
                ROOTS.fullmatch(imported.get(base, "")) or (base.startswith(f"{VLLM}.") and ROOTS.fullmatch(name))
                for base, name in zip(bases, last, strict=True)
            )
            yield _Class(node, file, last, outer)


def _found(one: _Class) -> Found:
    root, parts = one.file.parent, [one.file.stem] if one.file.stem != "__init__" else []
    while (root / "__init__.py").is_file():
        parts.insert(0, root.name)
        root = root.parent
    declares = any(
        (isinstance(node, ast.Assign) and any(ast.unparse(target) == "kvconform_capabilities" for target in node.targets))
        or (isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "kvconform_capabilities")
        or (isinstance(node, ast.FunctionDef) and node.name == "kvconform_capabilities")
        for node in one.node.body
    )
    return Found(one.node.name, ".".join(parts), one.file, one.node.lineno, root, declares)


def _tree(file: Path) -> ast.Module:
    """Empty for a file that is no Python of this interpreter's: it is none of our business."""
    try:
        return ast.parse(file.read_bytes())
    except (SyntaxError, ValueError, OSError):
        return ast.Module(body=[], type_ignores=[])


def _constant(arguments: Sequence[ast.expr]) -> object:
    return arguments[0].value if arguments and isinstance(arguments[0], ast.Constant) else None


def _is_venv(folder: Path) -> bool:
    return (folder / "pyvenv.cfg").is_file()
