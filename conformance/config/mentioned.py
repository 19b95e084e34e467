# SPDX-License-Identifier: Apache-2.0
"""Options of a connector that its sources do not mention: they are probably misspelt.

A connector ignores an option that it does not know, so nothing else tells. The sources are read,
and nothing is imported. The connector gets a plain dict: one that notes what is read would not be
what vLLM hands over.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path

from kvconform.config.exists import imported, located
from kvconform.errors import did_you_mean

BASE = ".kv_connector.v1.base"
"""End of the name of the module with vLLM's base class."""


def unmentioned(
    connector: str, options: Collection[str], pythonpath: Sequence[str] = ()
) -> list[str]:
    """Return a warning per option that no source of a connector of one's own mentions.

    Of connectors of vLLM and kvconform nothing is returned, nor of one with classes that are
    derived from those of another package, except vLLM's base: they may read the options, too.
    """
    top = connector.partition(":")[0].partition(".")[0]
    if not options or ":" not in connector or top in ("vllm", "kvconform"):
        return []
    ((_, found),) = located(top, pythonpath)
    if found is None or not (found.origin or "").endswith(".py"):
        return []
    origin = Path(found.origin or "")
    is_package = found.submodule_search_locations is not None
    left = list(options)
    trees = []
    for text, tree in _sources(origin.parent if is_package else origin):
        left = [option for option in left if not _mentions(text, option)]
        if not left:
            return []
        trees.append(tree)
    if any(_derives_from_others(tree, top) for tree in trees):
        return []
    keys = _keys(trees)
    return [
        f"extra_config: no source of {top} mentions {option!r}{did_you_mean(option, keys, 1)}"
        for option in left
    ]


def _derives_from_others(tree: ast.Module, own: str) -> bool:
    """Return whether a source has a class whose base is imported from a package but `own`.

    The standard library, torch, and the module of vLLM's base class do not count.
    """
    imports: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            imports |= {alias.asname or alias.name: node.module for alias in node.names}
        elif isinstance(node, ast.Import):
            imports |= {
                (alias.asname or alias.name).partition(".")[0]: alias.name for alias in node.names
            }
    bases = (
        base for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for base in node.bases
    )
    modules = {imports.get(ast.unparse(base).partition(".")[0], own) for base in bases}
    return any(
        module.partition(".")[0] not in {own, "torch", *sys.stdlib_module_names}
        and not module.endswith(BASE)
        for module in modules
    )


def _mentions(text: str, option: str) -> bool:
    """Return whether a source has an option as a word, perhaps without its prefix."""
    names = {option, option.rpartition(".")[2]}
    return any(re.search(rf"\b{re.escape(name)}\b", text) for name in names)


def _sources(place: Path) -> Iterator[tuple[str, ast.Module]]:
    """Yield each source of a package, or of a module and the modules in its folder that it imports.

    The modules that those import are among them. A source has its text and its tree.
    """
    waiting, known = [place], {place}
    while waiting:
        each = waiting.pop()
        for file in each.rglob("*.py") if each.is_dir() else [each]:
            try:
                text = file.read_text(encoding="utf-8")
                tree = ast.parse(text)
            except (OSError, SyntaxError, ValueError):
                continue
            yield text, tree
            if place.is_dir():
                continue
            for name in (name for node in ast.walk(tree) for name in imported(node)):
                for neighbour in (place.parent / name, place.parent / f"{name}.py"):
                    if neighbour.exists() and neighbour not in known:
                        known.add(neighbour)
                        waiting.append(neighbour)


def _keys(trees: Iterable[ast.Module]) -> list[str]:
    """Return the constants by which sources read dicts: `x["key"]` and `x.get("key")`."""
    found: dict[str, None] = {}
    for node in (node for tree in trees for node in ast.walk(tree)):
        read: ast.expr | None = None
        if isinstance(node, ast.Subscript):
            read = node.slice
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            is_read = node.func.attr in ("get", "pop", "get_from_extra_config")
            read = node.args[0] if is_read else None
        if isinstance(read, ast.Constant) and isinstance(read.value, str):
            found[read.value] = None
    return list(found)
