# SPDX-License-Identifier: Apache-2.0
"""What operators ask about the surroundings of a node: its parents, its function, its role."""

from __future__ import annotations

import ast
import re

from kvconform.dev.mutants.text import Text

Function = ast.FunctionDef | ast.AsyncFunctionDef

FORGETS = re.compile(
    r"preempt|abort|finish|reset|forget|drop|free|release|clear|shutdown|evict|discard|close|cancel"
)
"""Names of functions that give state up."""
WAITS = {"wait", "join", "synchronize", "result", "acquire", "flush", "fsync", "wait_event"}
"""Names of methods that wait for something."""
LOGS = re.compile(r"^_?log(ger|ging)?$", re.IGNORECASE)


class Scope:
    """The parents of all nodes of a module."""

    def __init__(self, tree: ast.Module) -> None:
        self._parents = {
            child: parent for parent in ast.walk(tree) for child in ast.iter_child_nodes(parent)
        }

    def parent(self, node: ast.AST) -> ast.AST | None:
        """Return the node that contains this one."""
        return self._parents.get(node)

    def functions(self, node: ast.AST) -> list[Function | ast.ClassDef]:
        """Return the functions and classes around a node, the innermost first."""
        found: list[Function | ast.ClassDef] = []
        parent = self.parent(node)
        while parent is not None:
            if isinstance(parent, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                found.append(parent)
            parent = self.parent(parent)
        return found

    def function(self, node: ast.AST) -> Function | None:
        """Return the innermost function around a node; None in a class or at module level."""
        around = self.functions(node)
        inner = around[0] if around else None
        return inner if isinstance(inner, (ast.FunctionDef, ast.AsyncFunctionDef)) else None

    def qualified_name(self, node: ast.AST) -> str:
        """Return the names of the functions and classes around a node, with dots."""
        names = [each.name for each in self.functions(node)]
        return ".".join(reversed(names))

    def statement(self, node: ast.AST) -> ast.stmt | None:
        """Return the innermost statement that contains a node, or is the node."""
        found: ast.AST | None = node
        while found is not None and not isinstance(found, ast.stmt):
            found = self.parent(found)
        return found

    def is_target(self, node: ast.expr) -> bool:
        """Return whether the expression is assigned to."""
        return isinstance(getattr(node, "ctx", None), (ast.Store, ast.Del))

    def is_text(self, node: ast.BinOp) -> bool:
        """Return whether one side is a text, so that + joins."""
        return any(
            isinstance(side, ast.JoinedStr)
            or (isinstance(side, ast.Constant) and isinstance(side.value, (str, bytes)))
            for side in (node.left, node.right)
        )

    def is_log(self, node: ast.stmt) -> bool:
        """Return whether the statement is a docstring, or only logs."""
        if not isinstance(node, ast.Expr):
            return False
        call = node.value
        if isinstance(call, ast.Constant):
            return True
        if not isinstance(call, ast.Call):
            return False
        receiver = call.func.value if isinstance(call.func, ast.Attribute) else call.func
        return isinstance(receiver, ast.Name) and bool(LOGS.match(receiver.id))

    def is_reassignment(self, node: ast.Assign | ast.AnnAssign) -> bool:
        """Return whether the names that are assigned to have had a value before."""
        function = self.function(node)
        if function is None or node.value is None:
            return False
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target in targets:
            if isinstance(target, (ast.Attribute, ast.Subscript)):
                if function.name == "__init__":
                    return False
            elif isinstance(target, ast.Name):
                if not self._had_value(function, target, node):
                    return False
            else:
                return False
        return True

    def _had_value(self, function: Function, target: ast.Name, node: ast.stmt) -> bool:
        arguments = function.args
        names = {each.arg for each in (*arguments.args, *arguments.kwonlyargs)}
        earlier = (
            each
            for each in ast.walk(function)
            if isinstance(each, ast.Name)
            and isinstance(each.ctx, ast.Store)
            and each.id == target.id
            and each.lineno < node.lineno
        )
        return target.id in names or next(earlier, None) is not None

    def is_early(self, node: ast.Return) -> bool:
        """Return whether code follows after a `return` that is not taken."""
        function = self.function(node)
        return function is not None and node is not function.body[-1]

    def domain_drop(self, node: ast.stmt, text: Text) -> str | None:
        """Return the operator of the domain that drops this statement, or None."""
        function = self.function(node)
        if function is None or self.is_log(node):
            return None
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            called = node.value.func
            if isinstance(called, ast.Attribute) and called.attr in WAITS:
                return "drop-wait"
        forgets = FORGETS.search(function.name) is not None
        changes_state = isinstance(node, (ast.Expr, ast.AugAssign, ast.Delete)) or (
            isinstance(node, ast.Assign)
            and all(isinstance(each, (ast.Attribute, ast.Subscript)) for each in node.targets)
        )
        return "keep-state" if forgets and changes_state else None
