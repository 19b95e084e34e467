# SPDX-License-Identifier: Apache-2.0
"""Operators that mutation testing has for every program: conditions, numbers, statements."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from kvconform.dev.mutants.mutation import Edit
from kvconform.dev.mutants.scope import Scope
from kvconform.dev.mutants.text import Text

Found = Iterator[tuple[str, Edit]]
"""Names of operators, and the edits that they make at one node."""

BOUNDARIES = {ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">")}
EQUALITIES = {ast.Eq: ("==", "!="), ast.NotEq: ("!=", "==")}
MEMBERSHIPS = {ast.Is: ("is", "is not"), ast.In: ("in", "not in")}
NEGATED = {ast.IsNot: ("not", ""), ast.NotIn: ("not", "")}
ARITHMETIC = {ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.FloorDiv: ("//", "*")}
KEEPS_ORDER = {
    *("isinstance", "getattr", "hasattr", "setattr", "zip", "print", "cast"),
    *("max", "min", "gcd", "lcm"),
}
"""Functions whose arguments are not swapped.

That would be an error of types only, or no change.
"""
COLLECTING = {"list": "[]", "tuple": "()", "set": "set()", "dict": "{}", "frozenset": "frozenset()"}


def comparisons(node: ast.AST, text: Text, scope: Scope) -> Found:
    """Move boundaries (< and <=), and negate equality, identity and membership."""
    if not isinstance(node, ast.Compare):
        return
    sides = [node.left, *node.comparators]
    for number, operator in enumerate(node.ops):
        for name, table in (
            ("boundary", BOUNDARIES),
            ("equality", EQUALITIES),
            ("equality", MEMBERSHIPS),
            ("equality", NEGATED),
        ):
            change = table.get(type(operator))  # type: ignore[attr-defined]
            if change is None:
                continue
            edit = text.between(sides[number], sides[number + 1], *change)
            if edit is not None:
                yield name, edit


def conditions(node: ast.AST, text: Text, scope: Scope) -> Found:
    """Negate the conditions of statements, expressions and comprehensions."""
    tests: list[ast.expr] = []
    if isinstance(node, (ast.If, ast.While, ast.IfExp)):
        tests = [node.test]
    elif isinstance(node, ast.comprehension):
        tests = node.ifs
    for test in tests:
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            yield "negate", text.replaced(test, f"({text.of(test.operand)})")
        elif not _is_equality(test):
            yield "negate", text.replaced(test, f"(not ({text.of(test)}))")


def _is_equality(test: ast.expr) -> bool:
    """Return whether `comparisons` negates the test already."""
    return (
        isinstance(test, ast.Compare)
        and len(test.ops) == 1
        and not isinstance(test.ops[0], tuple(BOUNDARIES))
    )


def connectives(node: ast.AST, text: Text, scope: Scope) -> Found:
    """Put `and` in the place of `or`, and the other way round."""
    if not isinstance(node, ast.BoolOp):
        return
    old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
    for left, right in zip(node.values, node.values[1:], strict=False):
        edit = text.between(left, right, old, new)
        if edit is not None:
            yield "and-or", edit


def numbers(node: ast.AST, text: Text, scope: Scope) -> Found:
    """Add one to integers and bounds, or subtract it; exchange + and -."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        yield "one-more", text.replaced(node, str(node.value + 1))
        yield "one-less", text.replaced(node, f"({node.value - 1})")
    if isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
        edit = text.between(node.left, node.right, *ARITHMETIC[type(node.op)])
        if edit is not None and not scope.is_text(node):
            yield "arithmetic", edit
    bounds: list[ast.expr | None] = []
    if isinstance(node, ast.Slice):
        bounds = [node.lower, node.upper]
    elif isinstance(node, ast.Call) and _name(node.func) in ("range", "min", "max"):
        bounds = [
            each for each in node.args if not isinstance(each, (ast.Starred, ast.GeneratorExp))
        ]
        if len(bounds) == 1 and _name(node.func) != "range":
            bounds = []  # the argument is a collection
    for bound in bounds:
        if bound is not None and not isinstance(bound, (ast.Constant, ast.UnaryOp)):
            yield "one-more", text.replaced(bound, f"({text.of(bound)} + 1)")
            yield "one-less", text.replaced(bound, f"({text.of(bound)} - 1)")


def arguments(node: ast.AST, text: Text, scope: Scope) -> Found:
    """Swap neighbouring arguments of a call."""
    if not isinstance(node, ast.Call) or _name(node.func) in KEEPS_ORDER:
        return
    for one, other in zip(node.args, node.args[1:], strict=False):
        if isinstance(one, ast.Starred) or isinstance(other, ast.Starred):
            continue
        if text.of(one) != text.of(other):
            yield "swap-arguments", text.swapped(one, other)


def collections(node: ast.AST, text: Text, scope: Scope) -> Found:
    """Empty the collections that the code builds."""
    if isinstance(node, (ast.List, ast.ListComp)) and not scope.is_target(node):
        if not isinstance(node, ast.List) or node.elts:
            yield "empty", text.replaced(node, "[]")
    elif isinstance(node, (ast.Set, ast.SetComp)):
        yield "empty", text.replaced(node, "set()")
    elif isinstance(node, ast.DictComp) or (isinstance(node, ast.Dict) and node.values):
        yield "empty", text.replaced(node, "{}")
    elif isinstance(node, ast.Call) and node.args and _name(node.func) in COLLECTING:
        yield "empty", text.replaced(node, COLLECTING[_name(node.func)])


def statements(node: ast.AST, text: Text, scope: Scope) -> Found:
    """Drop a statement.

    Left alone are: the first assignment of a local name or of an attribute in a constructor, which
    would be a NameError or an AttributeError; logging; the last `return` of a function; and those
    that have an operator of the domain.
    """
    if not isinstance(node, ast.stmt) or scope.domain_drop(node, text) is not None:
        return
    if isinstance(node, (ast.Expr, ast.AugAssign, ast.Delete, ast.Raise, ast.Continue, ast.Break)):
        droppable = not scope.is_log(node)
    elif isinstance(node, (ast.Assign, ast.AnnAssign)):
        droppable = scope.is_reassignment(node)
    else:
        droppable = isinstance(node, ast.Return) and scope.is_early(node)
    if droppable:
        yield "drop-statement", text.replaced(node, "pass")


def _name(function: ast.expr) -> str:
    return function.id if isinstance(function, ast.Name) else ""
