# SPDX-License-Identifier: Apache-2.0
"""Finds the connector classes of a repository in its source, without importing it."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvconform.errors import UsageError

ROOTS = re.compile(r"KVConnectorBase(_V1)?|\w*Connector(V1)?")
"""Names of vLLM's base classes of connectors, unlike KVConnectorMetadata or KVConnectorStats."""

VLLM = "vllm.distributed.kv_transfer"
"""vLLM's package with the base classes."""
NOT_OURS = {"build", "dist", "node_modules", "site-packages", "venv", "env", "__pycache__"}
ASIDE = {
    "test",
    "tests",
    "testing",
    "doc",
    "docs",
    "example",
    "examples",
    "benchmark",
    "benchmarks",
}
"""Folders whose connectors count only if there are no others."""

ASIDE_FILES = re.compile(r"conftest|test_\w*|\w*_test")
"""Names of modules whose connectors count only if there are no others."""
STAND_INS = {
    "mock",
    "mocked",
    "fake",
    "dummy",
    "stub",
    "test",
    "tests",
    "testing",
    "abstract",
    "base",
}
"""Words that mark a class name; such a class counts only if there are no others."""

TRANSFER_PARAMETERS = ("do_remote_decode", "do_remote_prefill")
"""Entries of kv_transfer_params by which vLLM's connectors hand over KV."""
WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
MOST_FILES = 20_000


@dataclass(frozen=True)
class Found:
    """A connector class.

    `root`: the folder of the repository that must be on the import path. `declares`: whether the
    class declares its capabilities.
    """

    name: str
    module: str
    file: Path
    line: int
    root: Path
    declares: bool

    @property
    def connector(self) -> str:
        """The connector's name for `kvconform run`."""
        return f"{self.module}:{self.name}"


@dataclass(frozen=True)
class _Class:
    node: ast.ClassDef
    file: Path
    bases: tuple[str, ...]
    from_vllm: bool


def find(repository: Path) -> Found:
    """Return the repository's connector. UsageError if there is none, or several candidates."""
    found = connectors(repository)
    if not found:
        raise UsageError(
            f"no class in {repository} derives from KVConnectorBase_V1: name it"
            " (kvconform init --connector mypkg.module:Class),"
            " or begin with one that passes (kvconform init --template NEW_DIR)"
        )
    if len(found) > 1:
        names = ", ".join(
            f"{one.connector} ({one.file.relative_to(repository)}:{one.line})" for one in found[:8]
        )
        raise UsageError(f"{len(found)} connectors were found: say which with --connector: {names}")
    return found[0]


def named(repository: Path, connector: str) -> Found | None:
    """Return the class `package.module:Class` of the repository; None if it is elsewhere."""
    module, _, name = connector.partition(":")
    ending = tuple(module.split("."))
    for file in files(repository):
        is_module = file.with_suffix("").parts[-len(ending) :] == ending
        in_package = file.parent.parts[-len(ending) :] == ending
        if is_module or in_package:
            for one in _classes(file):
                if one.node.name == name and (found := _found(one)).module == module:
                    return found
    return None


def connectors(repository: Path) -> list[Found]:
    """Return all candidates, sorted.

    A class that another candidate derives from is none. Classes of tests and stand-ins are
    candidates only if there are no others.
    """
    classes = [one for file in files(repository) for one in _classes(file)]
    ours = {one.node.name for one in classes if one.from_vllm}
    while True:
        more = {one.node.name for one in classes if not ours.isdisjoint(one.bases)} - ours
        if not more:
            break
        ours |= more
    meant = [
        one
        for one in classes
        if (one.from_vllm or not ours.isdisjoint(one.bases)) and not one.node.name.startswith("_")
    ]
    for keep in (
        lambda one: not _aside(one.file.relative_to(repository)),
        lambda one: STAND_INS.isdisjoint(_words(one.node.name)),
    ):
        meant = [one for one in meant if keep(one)] or meant
    # Only candidates' bases: a class that only a test derives from remains a candidate.
    derived_from = {base for one in meant for base in one.bases if base != one.node.name}
    meant = [one for one in meant if one.node.name not in derived_from]
    # Of two definitions in branches of one module, the first counts.
    found = {one.connector: one for one in map(_found, reversed(meant))}
    return [found[name] for name in sorted(found)]


def files(repository: Path) -> Iterator[Path]:
    """Yield the repository's Python files, sorted, without environments, builds and hidden folders.

    UsageError beyond MOST_FILES files.
    """
    count = 0
    for folder, below, names in os.walk(repository):
        below[:] = sorted(
            name
            for name in below
            if name not in NOT_OURS
            and not name.startswith(".")
            and not _is_venv(Path(folder, name))
        )
        for name in sorted(names):
            if name.endswith(".py"):
                count += 1
                if count > MOST_FILES:
                    raise UsageError(
                        f"{repository} has more than {MOST_FILES} Python files:"
                        " is it the connector's repository?"
                    )
                yield Path(folder, name)


def options(found: Found) -> dict[str, object]:
    """Map the options that the connector reads from kv_connector_extra_config to their defaults.

    All modules in the connector's folder are read. A default is None if there is none, or if it is
    not a constant.
    """
    names: dict[str, object] = {}
    for file in sorted(found.file.parent.glob("*.py")):
        nodes = list(ast.walk(_tree(file)))
        dicts = {
            ast.unparse(target)
            for node in nodes
            if isinstance(node, ast.Assign)
            and not isinstance(node.value, ast.Subscript)
            and _is_extra(node.value)
            for target in node.targets
        }
        for node in nodes:
            match node:
                case ast.Call(
                    func=ast.Attribute(attr="get_from_extra_config"),
                    args=[ast.Constant(value=str(name)), *rest],
                ):
                    names.setdefault(name, _constant(rest))
                case ast.Call(
                    func=ast.Attribute(value=where, attr="get"),
                    args=[ast.Constant(value=str(name)), *rest],
                ):
                    if _is_extra(where) or ast.unparse(where) in dicts:
                        names.setdefault(name, _constant(rest))
                case ast.Subscript(value=where, slice=ast.Constant(value=str(name))):
                    if _is_extra(where) or ast.unparse(where) in dicts:
                        names.setdefault(name, None)
    return names


def hands_over(found: Found) -> bool:
    """Return whether a module in the connector's folder names a request's transfer parameters."""
    return any(
        isinstance(node, ast.Constant) and node.value in TRANSFER_PARAMETERS
        for file in found.file.parent.glob("*.py")
        for node in ast.walk(_tree(file))
    )


def _classes(file: Path) -> Iterator[_Class]:
    tree = _tree(file)
    names = _imported(tree)
    for node in _statements(tree.body):
        if isinstance(node, ast.ClassDef):
            bases = []
            for base in node.bases:
                plain = base.value if isinstance(base, ast.Subscript) else base
                head, dot, rest = ast.unparse(plain).partition(".")
                bases.append(names.get(head, head) + dot + rest)
            last = tuple(base.rpartition(".")[2] for base in bases)
            outer = any(
                base.startswith(f"{VLLM}.") and ROOTS.fullmatch(name)
                for base, name in zip(bases, last, strict=True)
            )
            yield _Class(node, file, last, outer)


def _imported(tree: ast.Module) -> dict[str, str]:
    """Map imported names of a module to the full names that they stand for."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            names |= {
                name.asname or name.name: f"{'.' * node.level}{node.module or ''}.{name.name}"
                for name in node.names
            }
        elif isinstance(node, ast.Import):
            names |= {name.asname: name.name for name in node.names if name.asname}
    return names


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a module, including those within `if`, `try` and `with`."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try | ast.TryStar | ast.With):
            handlers = [part for handler in getattr(node, "handlers", ()) for part in handler.body]
            yield from _statements(
                [
                    *node.body,
                    *handlers,
                    *getattr(node, "orelse", ()),
                    *getattr(node, "finalbody", ()),
                ]
            )


def _aside(file: Path) -> bool:
    return not ASIDE.isdisjoint(file.parts) or ASIDE_FILES.fullmatch(file.stem) is not None


def _words(name: str) -> set[str]:
    """Split a class name into words: `DatabaseKVConnector` into database, kv, connector."""
    return {word.lower() for word in WORDS.findall(name)}


def _found(one: _Class) -> Found:
    root = one.file.parent
    parts = [one.file.stem] if one.file.stem != "__init__" else []
    while (root / "__init__.py").is_file():
        parts.insert(0, root.name)
        root = root.parent
    declares = any("kvconform_capabilities" in _defined(node) for node in one.node.body)
    return Found(one.node.name, ".".join(parts), one.file, one.node.lineno, root, declares)


def _defined(node: ast.stmt) -> list[str]:
    """Return the names that a statement of a class body assigns or defines as a function."""
    match node:
        case ast.Assign(targets=targets):
            return [ast.unparse(target) for target in targets]
        case ast.AnnAssign(target=target):
            return [ast.unparse(target)]
        case ast.FunctionDef(name=name):
            return [name]
    return []


def _tree(file: Path) -> ast.Module:
    """Parse a file; an empty module if this interpreter cannot parse it."""
    try:
        return ast.parse(file.read_bytes())
    except (SyntaxError, ValueError, OSError):
        return ast.Module(body=[], type_ignores=[])


def _is_extra(value: ast.expr) -> bool:
    """Return whether an expression is the dict of options, possibly followed by `or {}`.

    A value taken out of the dict is not.
    """
    if isinstance(value, ast.BoolOp):
        return _is_extra(value.values[0])
    return isinstance(value, ast.Attribute | ast.Name) and "extra_config" in ast.unparse(value)


def _constant(arguments: Sequence[ast.expr]) -> object:
    return arguments[0].value if arguments and isinstance(arguments[0], ast.Constant) else None


def _is_venv(folder: Path) -> bool:
    return (folder / "pyvenv.cfg").is_file()
