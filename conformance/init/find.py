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
"""Folders whose connectors count only where there is no other."""

ASIDE_FILES = re.compile(r"conftest|test_\w*|\w*_test")
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
"""Words of a name whose class counts only where there is no other."""

WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
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
        names = ", ".join(
            f"{one.connector} ({one.file.relative_to(repository)}:{one.line})" for one in found[:8]
        )
        raise UsageError(f"{len(found)} connectors were found: say which with --connector: {names}")
    return found[0]


def named(repository: Path, connector: str) -> Found | None:
    """The class of a name (`package.module:Class`) in the repository; None if it is elsewhere."""
    module, _, name = connector.partition(":")
    ending = Path(*module.split("."))
    for file in files(repository):
        if (
            file.with_suffix("").parts[-len(ending.parts) :] == ending.parts
            or file.parent.parts[-len(ending.parts) :] == ending.parts
        ):
            for one in _classes(file):
                if one.node.name == name and (found := _found(one)).module == module:
                    return found
    return None


def connectors(repository: Path) -> list[Found]:
    """All classes that may be meant, sorted: those that no other one derives from, and no tests' and stand-ins if there are others."""
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
    derived_from = {
        base for one in meant for base in one.bases if base != one.node.name
    }  # not: what a test derives from
    meant = [one for one in meant if one.node.name not in derived_from]
    found = {
        one.connector: one for one in map(_found, reversed(meant))
    }  # of two in branches of one module the first
    return [found[name] for name in sorted(found)]


def files(repository: Path) -> Iterator[Path]:
    """The repository's Python files, in order; not those of environments, builds, and hidden folders."""
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
                        f"{repository} has more than {MOST_FILES} Python files: is it the connector's repository?"
                    )
                yield Path(folder, name)


def options(found: Found) -> dict[str, object]:
    """Names of the options that the connector's module, or those beside it, take from kv_connector_extra_config, and their defaults (None:
    none, or not a constant)."""
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


def _classes(file: Path) -> Iterator[_Class]:
    tree = _tree(file)
    names = _imported(tree)
    for node in _statements(tree.body):
        if isinstance(node, ast.ClassDef):
            bases = []
            for base in node.bases:
                head, dot, rest = ast.unparse(
                    base.value if isinstance(base, ast.Subscript) else base
                ).partition(".")
                bases.append(names.get(head, head) + dot + rest)
            last = tuple(base.rpartition(".")[2] for base in bases)
            outer = any(
                base.startswith(f"{VLLM}.") and ROOTS.fullmatch(name)
                for base, name in zip(bases, last, strict=True)
            )
            yield _Class(node, file, last, outer)


def _imported(tree: ast.Module) -> dict[str, str]:
    """What names of a module stand for, in full where the import says it."""
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
    """Those of a module, also within its `if`, `try` and `with`."""
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
    """`DatabaseKVConnector`: database, kv, connector."""
    return {word.lower() for word in WORDS.findall(name)}


def _found(one: _Class) -> Found:
    root, parts = one.file.parent, [one.file.stem] if one.file.stem != "__init__" else []
    while (root / "__init__.py").is_file():
        parts.insert(0, root.name)
        root = root.parent
    declares = any(
        (
            isinstance(node, ast.Assign)
            and any(ast.unparse(target) == "kvconform_capabilities" for target in node.targets)
        )
        or (
            isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "kvconform_capabilities"
        )
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


def _is_extra(value: ast.expr) -> bool:
    """Whether an expression is the dict of options, or `... or {}` of it; not what is taken out of it."""
    if isinstance(value, ast.BoolOp):
        return _is_extra(value.values[0])
    return isinstance(value, ast.Attribute | ast.Name) and "extra_config" in ast.unparse(value)


def _constant(arguments: Sequence[ast.expr]) -> object:
    return arguments[0].value if arguments and isinstance(arguments[0], ast.Constant) else None


def _is_venv(folder: Path) -> bool:
    return (folder / "pyvenv.cfg").is_file()
