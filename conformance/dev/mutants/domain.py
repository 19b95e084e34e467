# SPDX-License-Identifier: Apache-2.0
"""Operators for the mistakes of KV connectors: keys, grants, layers, ranks, state, reports."""

from __future__ import annotations

import ast
import re
from itertools import pairwise

from kvconform.dev.mutants.field import Found
from kvconform.dev.mutants.mutation import Edit
from kvconform.dev.mutants.scope import Scope
from kvconform.dev.mutants.text import Text

HASHES = re.compile(r"digest|hash|sha\d|blake|key", re.IGNORECASE)
"""Names of functions that make keys: each of their arguments is a component."""
LOCK = re.compile(r"lock|mutex|condition|\b_?cv\b", re.IGNORECASE)
SEQUENCES = {"list", "tuple", "sorted"}
REPORTS = {
    "get_finished",
    "get_block_ids_with_load_errors",
    "take_events",
    "build_connector_worker_meta",
}
"""Hooks whose value reports something once."""
TIMING = '@__import__("kvconform.dev.mutants.timing", fromlist=["*"])'


def components(node: ast.AST, text: Text, scope: Scope) -> Found:
    """Drop a component of a key, a plan or a table: of a tuple, a display, a hash's arguments."""
    if isinstance(node, ast.Tuple):
        parent = scope.parent(node)
        unpacked = scope.is_target(node) or isinstance(parent, (ast.Return, ast.Assign, ast.Yield))
        if len(node.elts) > 1 and not unpacked and not _is_iterated(parent, node):
            # A pair becomes a tuple of one, not its only element.
            for index in range(len(node.elts)):
                rest = [text.of(each) for each in node.elts]
                del rest[index]
                listed = ", ".join(rest) + ("," if len(rest) == 1 else "")
                yield "drop-component", text.replaced(node, f"({listed})")
    elif isinstance(node, (ast.List, ast.Set)) and not scope.is_target(node):
        for index in range(len(node.elts) if len(node.elts) > 1 else 0):
            yield "drop-component", text.without(node.elts, index)
    elif isinstance(node, ast.Call) and len(node.args) > 1 and HASHES.search(_called(node)):
        for index in range(len(node.args)):
            yield "drop-component", text.without(node.args, index)


def _is_iterated(parent: ast.AST | None, node: ast.AST) -> bool:
    """Return whether the tuple is what a loop goes over, which `loops` shortens."""
    return isinstance(parent, (ast.For, ast.comprehension)) and parent.iter is node


def tables(node: ast.AST, text: Text, scope: Scope) -> Found:
    """Take the first or the last element off a table that the code builds."""
    made = isinstance(node, ast.ListComp) or (
        isinstance(node, ast.Call) and _called(node) in SEQUENCES and len(node.args) == 1
    )
    if made and isinstance(node, ast.expr):
        yield "shorten", text.replaced(node, f"{text.of(node)}[1:]")
        yield "shorten", text.replaced(node, f"{text.of(node)}[:-1]")


def loops(node: ast.AST, text: Text, scope: Scope) -> Found:
    """Skip the first or the last layer, head, rank, group, request, ... of a loop."""
    if not isinstance(node, (ast.For, ast.comprehension)):
        return
    over = text.of(node.iter)
    if isinstance(node.iter, ast.Call) and _called(node.iter) == "count":
        return  # it has no end
    yield "skip", text.replaced(node.iter, f"list({over})[1:]")
    yield "skip", text.replaced(node.iter, f"list({over})[:-1]")


def state(node: ast.AST, text: Text, scope: Scope) -> Found:
    """Keep state that a preemption, an abort or a reset should end; drop a wait, or a lock."""
    if isinstance(node, ast.stmt):
        name = scope.domain_drop(node, text)
        if name is not None and not isinstance(node, ast.AnnAssign):
            yield name, text.replaced(node, "pass")
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "pop"
        and len(node.args) == 2
    ):
        receiver = text.of(node.func.value)
        listed = ", ".join(text.of(each) for each in node.args)
        yield "keep-state", text.replaced(node, f"{receiver}.get({listed})")
    if isinstance(node, ast.With) and len(node.items) == 1 and node.items[0].optional_vars is None:
        taken = node.items[0].context_expr
        if LOCK.search(text.of(taken)):
            nothing = '__import__("contextlib").nullcontext()'
            yield "drop-lock", text.replaced(taken, nothing)


def reports(node: ast.AST, text: Text, scope: Scope) -> Found:
    """Report never, late, twice; `get_finished` also early."""
    if not isinstance(node, ast.FunctionDef) or node.name not in REPORTS:
        return
    names = ["never", "late", "twice"] + ["early"] * (node.name == "get_finished")
    start = text.start(node)
    indent = " " * node.col_offset
    for name in names:
        yield f"report-{name}", Edit(start, start, f"{TIMING}.{name}\n{indent}")


def order(node: ast.AST, text: Text, scope: Scope) -> Found:
    """Swap neighbouring statements of which one changes what the other one reads or changes."""
    for field in ("body", "orelse", "finalbody"):
        block = getattr(node, field, None)
        if not isinstance(block, list) or scope.function(block[0] if block else node) is None:
            continue
        for one, other in pairwise(block):
            if _depend(one, other) and not (scope.is_log(one) or scope.is_log(other)):
                yield "swap-statements", text.swapped(one, other)


SIMPLE = (ast.Assign, ast.AugAssign, ast.Expr, ast.Delete)


def _depend(one: ast.stmt, other: ast.stmt) -> bool:
    """Return whether one statement changes state, which the other one uses.

    A local name that only the first one defines does not count: without it, the other one raises.
    """
    if not isinstance(one, SIMPLE) or not isinstance(other, SIMPLE):
        return False
    if _locals(one) & _names(other):
        return False
    return bool(_changed(one) & _used(other) or _used(one) & _changed(other))


def _locals(node: ast.stmt) -> set[str]:
    if not isinstance(node, ast.Assign):
        return set()
    names = (each for target in node.targets for each in ast.walk(target))
    return {
        each.id for each in names if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
    }


def _names(node: ast.stmt) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def _changed(node: ast.stmt) -> set[str]:
    """Return the attributes that are assigned to, or whose methods are called, and local names."""
    found = set()
    for each in ast.walk(node):
        if isinstance(each, (ast.Attribute, ast.Name)) and not isinstance(each.ctx, ast.Load):
            found.add(each.attr if isinstance(each, ast.Attribute) else each.id)
        elif isinstance(each, ast.Call) and isinstance(each.func, ast.Attribute):
            receiver = each.func.value
            if isinstance(receiver, ast.Attribute):
                found.add(receiver.attr)
        elif (
            isinstance(each, ast.Subscript)
            and isinstance(each.value, ast.Attribute)
            and not isinstance(each.ctx, ast.Load)
        ):
            found.add(each.value.attr)
    return found


def _used(node: ast.stmt) -> set[str]:
    found = _names(node)
    found |= {each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute)}
    return found - {"self"}


def _called(node: ast.Call) -> str:
    if isinstance(node.func, ast.Attribute):
        return node.func.attr
    return node.func.id if isinstance(node.func, ast.Name) else ""
