# SPDX-License-Identifier: Apache-2.0
"""Which hooks a requirement looks at: calls of hooks are two thirds of a trace, and most requirements are about one or two hooks.

Found in the guards: `e.hook == 'x'` that is evaluated before anything that could raise. What is skipped is what the guard turns away.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass

from kvconform.expr import Expression
from kvconform.join import cannot_raise
from kvconform.requirement import Requirement

HOOKED = frozenset({"hook.called", "hook.returned"})
Role = tuple[str, frozenset[str] | None]
"""An event kind that is looked at, and the hooks outside of which nothing comes of it (None: any)."""
MOST = 4_096
_kept: dict[int, tuple[Requirement, Pins]] = {}


@dataclass(frozen=True)
class Pins:
    """`kinds` and `calls` (kind and hook): what puts the requirement to the test; without any of these it has nothing to say. `hooks`: by
    kind, of all its roles."""

    kinds: frozenset[str]
    calls: frozenset[tuple[str, str]]
    hooks: dict[str, frozenset[str] | None]

    def triggered(self, seen: frozenset[str], called: frozenset[tuple[str, str]]) -> bool:
        """Whether one of its triggers is among the kinds, and the (kind, hook), of a trace."""
        return not (self.kinds.isdisjoint(seen) and self.calls.isdisjoint(called))


def pins_of(req: Requirement) -> Pins:
    """Worked out once per requirement (not for `relate`)."""
    known = _kept.get(id(req))
    if known is None:
        if len(_kept) >= MOST:
            _kept.clear()
        known = _kept[id(req)] = req, _pins(req)  # the requirement is kept, too: nothing else can have its id
    return known[1]


def _pins(req: Requirement) -> Pins:
    found = req.expressions
    assert req.event is not None
    triggers = [_role(req.event, found.get("where"))]
    if req.exercised is not None:
        triggers.append(_role(req.exercised.event, found.get("exercised")))
    others: list[Role] = []
    if req.precede is not None:
        others.append(_role(req.precede.before.event, found.get("before")))
        others += [_role(req.precede.end.event, found.get("end"))] if req.precede.end is not None else []
    if req.respond is not None:
        others += [_role(req.respond.then.event, found.get("then")), _role(req.respond.by.event, found.get("by"))]
    hooks: dict[str, frozenset[str] | None] = {}
    for kind, only in (*triggers, *others):
        before = hooks.get(kind, frozenset())
        hooks[kind] = None if only is None or before is None else before | only
    return Pins(
        frozenset(kind for kind, only in triggers if only is None),
        frozenset((kind, hook) for kind, only in triggers for hook in only or ()),
        hooks,
    )


def _role(kind: str, guard: Expression | None) -> Role:
    if kind not in HOOKED or guard is None:
        return kind, None
    tree = guard.tree
    for part in tree.values if isinstance(tree, ast.BoolOp) and isinstance(tree.op, ast.And) else [tree]:
        if (hooks := _hooks(part)) is not None:
            return kind, hooks
        if not cannot_raise(part):
            break
    return kind, None


def _hooks(part: ast.expr) -> frozenset[str] | None:
    """The hooks of `e.hook == 'x'` or `e.hook in ('x', 'y')`."""
    if not isinstance(part, ast.Compare) or len(part.ops) != 1 or ast.unparse(part.left) != "e['hook']":
        return None
    other = part.comparators[0]
    if isinstance(part.ops[0], ast.Eq):
        texts = [other]
    elif isinstance(part.ops[0], ast.In) and isinstance(other, (ast.Tuple, ast.List, ast.Set)):
        texts = other.elts
    else:
        return None
    names = [text.value for text in texts if isinstance(text, ast.Constant) and isinstance(text.value, str)]
    return frozenset(names) if len(names) == len(texts) else None
