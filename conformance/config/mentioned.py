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

BASES = (".kv_connector.v1.base", ".kv_connector.v1")
"""Ends of the names of the modules that have vLLM's base classes."""


def unmentioned(
    connector: str, options: Collection[str], pythonpath: Sequence[str] = ()
) -> list[str]:
    """Return a warning per option that no source of a connector of one's own mentions.

    Of connectors of vLLM and kvconform nothing is returned, nor of a class that is derived from
    another package's, except vLLM's base classes: that may read the options, too.
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
    if _derives_from_others(connector.rpartition(":")[2], top, trees):
        return []
    keys = _keys(trees)
    return [
        f"extra_config: no source of {top} mentions {option!r}{did_you_mean(option, keys, 1)}"
        for option in left
    ]


def _derives_from_others(name: str, own: str, trees: Sequence[ast.Module]) -> bool:
    """Return whether a class is derived, maybe indirectly, from one of another package than `own`.

    The standard library and vLLM's base classes do not count. A base whose origin the sources do
    not show may be another package's.
    """
    classes: dict[str, ast.ClassDef] = {}
    origins: dict[str, str] = {}
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.ClassDef):
            classes.setdefault(node.name, node)
        elif isinstance(node, ast.ImportFrom):
            module = own if node.level else node.module or own
            origins |= {alias.asname or alias.name: module for alias in node.names}
        elif isinstance(node, ast.Import):
            for alias in node.names:
                origins[(alias.asname or alias.name).partition(".")[0]] = alias.name
    waiting, seen = [name], set()
    while waiting:
        known = classes.get(waiting.pop())
        if known is None or known.name in seen:
            continue
        seen.add(known.name)
        for base in map(ast.unparse, known.bases):
            first, last = base.partition(".")[0], base.rpartition(".")[2].partition("[")[0]
            module = origins.get(first, own if last in classes else "")
            if module.partition(".")[0] == own:
                waiting.append(last)
            elif not _is_harmless(module):
                return True
    return False


def _is_harmless(module: str) -> bool:
    """Return whether a class of a module reads no options of connectors."""
    return module.partition(".")[0] in sys.stdlib_module_names or module.endswith(BASES)


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
