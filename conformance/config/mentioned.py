# SPDX-License-Identifier: Apache-2.0
"""Options of a connector that its sources do not mention: they are probably misspelt.

A connector ignores an option that it does not know, so nothing else tells. The sources are read,
and nothing is imported. The connector gets a plain dict: one that notes what is read would not be
what vLLM hands over.
"""

from __future__ import annotations

import ast
import importlib.machinery
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from kvconform.errors import did_you_mean


def unmentioned(
    connector: str, options: Iterable[str], pythonpath: Sequence[str] = ()
) -> list[str]:
    """Return a warning per option that no source of a connector of one's own mentions.

    Of connectors of vLLM and kvconform nothing is returned: they may hand their options on.
    """
    top = connector.partition(":")[0].partition(".")[0]
    if ":" not in connector or top in ("vllm", "kvconform"):
        return []
    found = importlib.machinery.PathFinder.find_spec(top, [*sys.path, *pythonpath])
    if found is None or not (found.origin or "").endswith(".py"):
        return []
    origin = Path(found.origin or "")
    is_package = found.submodule_search_locations is not None
    texts = list(_texts(origin.parent if is_package else origin))
    warnings = []
    for option in options:
        names = {option, option.rpartition(".")[2]}
        if any(re.search(rf"\b{re.escape(name)}\b", text) for name in names for text in texts):
            continue
        close = did_you_mean(option, _keys(texts), 1)
        warnings.append(f"extra_config: no source of {top} mentions {option!r}{close}")
    return warnings


def _texts(place: Path) -> Iterator[str]:
    """Yield the sources of a package or module, and of those beside a module that it imports."""
    todo, known = [place], {place}
    while todo:
        each = todo.pop()
        for file in each.rglob("*.py") if each.is_dir() else [each]:
            try:
                text = file.read_text(encoding="utf-8")
                tree = ast.parse(text)
            except (OSError, SyntaxError, ValueError):
                continue
            yield text
            if place.is_dir():
                continue
            for name in _imported(tree):
                for beside in (place.parent / name, place.parent / f"{name}.py"):
                    if beside.exists() and beside not in known:
                        known.add(beside)
                        todo.append(beside)


def _imported(tree: ast.Module) -> Iterator[str]:
    """Yield the top-level packages that a source imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def _keys(texts: Iterable[str]) -> list[str]:
    """Return the constants by which sources read dicts: `x["key"]` and `x.get("key")`."""
    found: dict[str, None] = {}
    for node in (node for text in texts for node in ast.walk(ast.parse(text))):
        read: ast.expr | None = None
        if isinstance(node, ast.Subscript):
            read = node.slice
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            is_read = node.func.attr in ("get", "pop", "get_from_extra_config")
            read = node.args[0] if is_read else None
        if isinstance(read, ast.Constant) and isinstance(read.value, str):
            found[read.value] = None
    return list(found)
