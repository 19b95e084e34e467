# SPDX-License-Identifier: Apache-2.0
"""All mutations of a module.

Left out are docstrings, annotations, names of types, imports, assertions, decorators, code for type
checking only, hooks that a connector has for this suite, and changes that Python does not compile
or that make the same program as an earlier one.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Callable, Iterator

from kvconform.dev.mutants import domain, field
from kvconform.dev.mutants.field import Found
from kvconform.dev.mutants.mutation import Edit, Mutation, Site
from kvconform.dev.mutants.scope import Scope
from kvconform.dev.mutants.text import Text

Operator = Callable[[ast.AST, Text, Scope], Found]
TYPE_NAME = re.compile(r"_?[A-Z][a-z]")
"""Beginning of names that stand for types."""

OPERATORS: tuple[Operator, ...] = (
    domain.state,
    domain.components,
    domain.tables,
    domain.loops,
    domain.reports,
    domain.order,
    field.comparisons,
    field.conditions,
    field.connectives,
    field.numbers,
    field.arguments,
    field.collections,
    field.statements,
)


def mutations_of(source: bytes, module: str) -> list[Mutation]:
    """Return the mutations of a module, in the order of its lines. SyntaxError if it has any."""
    tree = ast.parse(source)
    text = Text(source)
    scope = Scope(tree)
    programs = _Programs(text, scope)
    numbers: Counter[Site] = Counter()
    found: list[Mutation] = []
    for node in _walk(tree):
        for operator in OPERATORS:
            for name, edit in operator(node, text, scope):
                if not programs.is_new(node, edit):
                    continue
                mutation = _mutation(node, name, edit, module, text, scope)
                first = mutation.site
                site = Site(module, first.function, name, first.line, numbers[first])
                numbers[first] += 1
                found.append(Mutation(site, edit, mutation.lines, source))
    return found


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that may be mutated, in the order of the source."""
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("decorator_list", "annotation", "returns", "type_comment", "bases"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not _is_left_out(child):
                yield from _walk(child)


def _is_left_out(node: ast.AST) -> bool:
    if isinstance(node, (ast.Import, ast.ImportFrom, ast.Assert, ast.JoinedStr)):
        return True
    if isinstance(node, ast.Assign) and isinstance(node.value, (ast.Subscript, ast.BinOp)):
        names = [each.id for each in node.targets if isinstance(each, ast.Name)]
        return bool(names) and all(TYPE_NAME.match(name) for name in names)
    if isinstance(node, ast.If):
        return "TYPE_CHECKING" in ast.dump(node.test)
    if isinstance(node, ast.FunctionDef) and node.name.startswith("kvconform_"):
        return True  # what a connector has for this suite only
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _mutation(
    node: ast.AST, name: str, edit: Edit, module: str, text: Text, scope: Scope
) -> Mutation:
    inner = node if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) else None
    function = scope.qualified_name(node)
    if inner is not None:
        function = f"{function}.{inner.name}" if function else inner.name
    site = Site(module, function, name, text.line(edit.start))
    return Mutation(site, edit, _lines(node, edit, text, scope), text.source)


def _lines(node: ast.AST, edit: Edit, text: Text, scope: Scope) -> tuple[int, int] | None:
    """Return the lines of which one runs before the change can matter; None if that is unknown."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        body = node.body[0], node.body[-1]
        return body[0].lineno, body[1].end_lineno or body[1].lineno
    if scope.function(node) is None:
        return None
    first = text.source.count(b"\n", 0, edit.start) + 1
    last = text.source.count(b"\n", 0, edit.end) + 1
    statement = scope.statement(node)
    if statement is not None and not hasattr(statement, "body"):
        # A statement of several lines: the interpreter reports any of them.
        first = min(first, statement.lineno)
        last = max(last, statement.end_lineno or last)
    return first, last


class _Programs:
    """The programs made so far, by the innermost function that was changed."""

    def __init__(self, text: Text, scope: Scope) -> None:
        self._text = text
        self._scope = scope
        self._seen: dict[tuple[int, int], set[str]] = {}

    def is_new(self, node: ast.AST, edit: Edit) -> bool:
        """Return whether Python compiles the edited program, and no other edit made the same."""
        function = node if isinstance(node, ast.FunctionDef) else self._scope.function(node)
        source = self._text.source
        first, last = 0, len(source)
        if function is not None:
            first = source.rfind(b"\n", 0, self._text.start(function)) + 1
            last = self._text.end(function)
        if (first, last) not in self._seen:
            self._seen[first, last] = {_program(source[first:last].decode()) or ""}
        before, after = source[first : edit.start], source[edit.end : last]
        program = _program(before.decode() + edit.text + after.decode())
        if program is None or program in self._seen[first, last]:
            return False
        self._seen[first, last].add(program)
        return True


def _program(source: str) -> str | None:
    """Return a text that is equal for equal programs; None if Python does not compile it."""
    if source[:1] == " ":
        source = f"if True:\n{source}"
    try:
        tree = ast.parse(source)
        compile(tree, "<mutant>", "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return None
    return ast.dump(tree)
