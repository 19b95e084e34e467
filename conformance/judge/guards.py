# SPDX-License-Identifier: Apache-2.0
"""Analysis of a requirement's guards: keys to find events by, and the hooks that it looks at.

The `where` of `precede` and `respond` is split, so that a trigger finds its partners by hash
instead of by scanning. `e.req == t.req and e.direction == 'send' and e.end >= t.end` becomes a key
over e (`e.req`), the same key over t (`t.req`), a filter over e (`e.direction == 'send'`), and a
rest that is evaluated per pair (`e.end >= t.end`).

Calls of hooks are two thirds of a trace, and most requirements are about one or two hooks. Hooks
are recognised in `e.hook == 'x'`, if it is evaluated before anything that could raise. Only events
that the guard would reject are skipped.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from types import CodeType
from typing import Any, TypeVar

from kvconform.contract.expression import Expression, bind_code, code_of
from kvconform.contract.requirement import Requirement

T = TypeVar("T")
CACHED = 4_096
"""Number of requirements after which a cache of `per_requirement` is cleared."""


def per_requirement(make: Callable[[Requirement], T]) -> Callable[[Requirement], T]:
    """Cache what `make` returns, by the identity of the requirement.

    Requirements are immutable, and too large to hash.
    """
    # The requirement is cached, too, so that no other one can have its id.
    cache: dict[int, tuple[Requirement, T]] = {}

    @functools.wraps(make)
    def cached(req: Requirement) -> T:
        found = cache.get(id(req))
        if found is None:
            if len(cache) >= CACHED:
                cache.clear()
            found = cache[id(req)] = req, make(req)
        return found[1]

    return cached


@dataclass(frozen=True, slots=True)
class Join:
    """The compiled parts of a guard over (e, t); None where there is nothing to check.

    Both keys exist or neither does. `of_run` is set if the guard reads constants of the run.
    """

    filter: CodeType | None
    key_e: CodeType | None
    key_t: CodeType | None
    rest: CodeType | None
    of_run: bool
    _bound: list[Any] = field(default_factory=list, repr=False, compare=False)

    def bind(self, cap: Mapping[str, Any], cfg: Mapping[str, Any]) -> BoundJoin:
        """Return the parts as functions.

        The same `cap` gives the same functions, unless the guard reads constants of the run.
        """
        if self.of_run:
            return self._bind(cap, cfg)
        if not self._bound or self._bound[0] is not cap:
            self._bound[:] = cap, self._bind(cap, cfg)
        return self._bound[1]  # type: ignore[no-any-return]

    def _bind(self, cap: Mapping[str, Any], cfg: Mapping[str, Any]) -> BoundJoin:
        def fix(code: CodeType | None) -> Callable[..., Any] | None:
            return None if code is None else bind_code(code, cap, cfg)

        key_e = fix(self.key_e)
        key_t = fix(self.key_t)
        return BoundJoin(
            filter=fix(self.filter),
            key_e=_nothing if key_e is None else lambda e: hashable(key_e(e)),
            key_t=_nothing if key_t is None else lambda t: hashable(key_t(None, t)),
            rest=fix(self.rest),
        )


@dataclass(frozen=True, slots=True)
class BoundJoin:
    """The parts of a guard as functions: `filter(e)`, `key_e(e)`, `key_t(t)`, `rest(e, t)`."""

    filter: Callable[..., Any] | None
    key_e: Callable[[Any], Hashable]
    key_t: Callable[[Any], Hashable]
    rest: Callable[..., Any] | None


def _nothing(_: Any) -> Hashable:
    return None


def split(where: Expression | None) -> Join:
    """Return the parts of a guard over (e, t). With no guard, everything matches."""
    if where is None:
        return Join(None, None, None, None, False)
    parts = _conjuncts(where.tree)
    filters: list[ast.expr] = []
    keys: list[tuple[ast.expr, ast.expr]] = []
    rest: list[ast.expr] = []
    for part in parts:
        pair = _equality(part)
        if pair is not None:
            keys.append(pair)
        elif _names(part) == {"e"} and cannot_raise(part):
            filters.append(part)
        else:
            rest.append(part)
    key_e = key_t = None
    if keys:
        key_e = code_of(ast.Tuple([e for e, _ in keys], ast.Load()))
        key_t = code_of(ast.Tuple([t for _, t in keys], ast.Load()))
    return Join(
        _all(filters),
        key_e,
        key_t,
        _all(rest),
        any("cfg" in _names(part) for part in parts),
    )


def _conjuncts(tree: ast.expr) -> list[ast.expr]:
    """Return the operands of a conjunction, or the expression itself."""
    if isinstance(tree, ast.BoolOp) and isinstance(tree.op, ast.And):
        return tree.values
    return [tree]


@per_requirement
def joins_of(req: Requirement) -> dict[str, Join]:
    """Return the guards that pair an event with a trigger, split for hashing.

    The keys are the roles `before`, `end` and `then`, also those without a guard.
    """
    return {role: split(req.expressions.get(role)) for role in ("before", "end", "then")}


def _all(parts: list[ast.expr]) -> CodeType | None:
    if not parts:
        return None
    return code_of(parts[0] if len(parts) == 1 else ast.BoolOp(ast.And(), parts))


def _equality(part: ast.expr) -> tuple[ast.expr, ast.expr] | None:
    """Return (side over e, side over t) of `e.x == t.y`, either way round, or None.

    Both sides must be plain fields, so that evaluating one early cannot raise.
    """
    if isinstance(part, ast.Compare) and len(part.ops) == 1 and isinstance(part.ops[0], ast.Eq):
        left, right = part.left, part.comparators[0]
        if _field(left) == "e" and _field(right) == "t":
            return left, right
        if _field(left) == "t" and _field(right) == "e":
            return right, left
    return None


def _field(node: ast.expr) -> str | None:
    """Return `e` or `t` if the node is one plain field of it, else None."""
    plain = (
        isinstance(node, ast.Subscript)
        and isinstance(node.value, ast.Name)
        and isinstance(node.slice, ast.Constant)
    )
    return node.value.id if plain and node.value.id in ("e", "t") else None  # type: ignore[attr-defined]


def _names(node: ast.expr) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)} & {"e", "t", "cap", "cfg"}


def cannot_raise(part: ast.expr) -> bool:
    """Return whether the part may be evaluated where `and` would have stopped before it.

    That holds for the truth of a field, and for the (in)equality of a field and a literal.
    """
    if isinstance(part, ast.UnaryOp) and isinstance(part.op, ast.Not):
        return cannot_raise(part.operand)
    if (
        isinstance(part, ast.Compare)
        and len(part.ops) == 1
        and isinstance(part.ops[0], (ast.Eq, ast.NotEq, ast.Is, ast.IsNot))
    ):
        return all(
            _field(side) is not None or isinstance(side, ast.Constant)
            for side in (part.left, part.comparators[0])
        )
    return _field(part) is not None


def hashable(value: Any) -> Hashable:
    """Return `value` if it can be hashed, else a substitute that is equal for equal values."""
    try:
        hash(value)
    except TypeError:
        return _freeze(value)
    return value


def _freeze(value: Any) -> Hashable:
    if isinstance(value, list):
        return ("list", *map(_freeze, value))
    if isinstance(value, tuple):
        return tuple(map(_freeze, value))
    if isinstance(value, dict):
        return ("dict", frozenset((key, _freeze(item)) for key, item in value.items()))
    if isinstance(value, (set, frozenset)):
        return ("set", frozenset(value))
    return value


@per_requirement
def check_of(req: Requirement) -> Expression:
    """Return the check of an `always` or `never` as a truth value; None where the guard is false.

    As one expression, it is one call per event.
    """
    check = req.expressions["check"]
    where = req.expressions.get("where")
    tree: ast.expr = ast.UnaryOp(ast.Not(), ast.UnaryOp(ast.Not(), check.tree))
    if where is not None:
        tree = ast.IfExp(where.tree, tree, ast.Constant(None))
    reads = (*(where.reads if where is not None else ()), *check.reads)
    return Expression(check.source, tree, reads, code_of(tree))


HOOKED = frozenset({"hook.called", "hook.returned"})
Role = tuple[str, frozenset[str] | None]
"""A kind of event that a requirement looks at, and the hooks that it must be about (None: any)."""


@dataclass(frozen=True)
class Pins:
    """The kinds of events and the hooks that a requirement looks at.

    `kinds` and `calls` (kind and hook) exercise the requirement: without any of these, it has
    nothing to say about a trace. `roles` has what each part of it looks at, by the part's name:
    `trigger`, `exercised`, `before`, `end`, `then`, `by`.
    """

    kinds: frozenset[str]
    calls: frozenset[tuple[str, str]]
    roles: dict[str, Role]

    def triggered(self, seen: frozenset[str], called: frozenset[tuple[str, str]]) -> bool:
        """Return whether a trace with these kinds, and (kind, hook), has one of the triggers."""
        return not (self.kinds.isdisjoint(seen) and self.calls.isdisjoint(called))


@per_requirement
def pins_of(req: Requirement) -> Pins:
    """Return the kinds and hooks that can concern the requirement, which is not a `relate`."""
    found = req.expressions
    assert req.event is not None
    roles = {"trigger": _role(req.event, found.get("where"))}
    if req.exercised is not None:
        roles["exercised"] = _role(req.exercised.event, found.get("exercised"))
    triggers = [*roles.values()]
    if req.precede is not None:
        roles["before"] = _role(req.precede.before.event, found.get("before"))
        if req.precede.end is not None:
            roles["end"] = _role(req.precede.end.event, found.get("end"))
    if req.respond is not None:
        roles["then"] = _role(req.respond.then.event, found.get("then"))
        roles["by"] = _role(req.respond.by.event, found.get("by"))
    return Pins(
        frozenset(kind for kind, only in triggers if only is None),
        frozenset((kind, hook) for kind, only in triggers for hook in only or ()),
        roles,
    )


def _role(kind: str, guard: Expression | None) -> Role:
    if kind not in HOOKED or guard is None:
        return kind, None
    for part in _conjuncts(guard.tree):
        if (hooks := _hooks(part)) is not None:
            return kind, hooks
        if not cannot_raise(part):
            break
    return kind, None


def _hooks(part: ast.expr) -> frozenset[str] | None:
    """Return the hooks of `e.hook == 'x'` or `e.hook in ('x', 'y')`, or None for other parts."""
    if (
        not isinstance(part, ast.Compare)
        or len(part.ops) != 1
        or ast.unparse(part.left) != "e['hook']"
    ):
        return None
    other = part.comparators[0]
    if isinstance(part.ops[0], ast.Eq):
        texts = [other]
    elif isinstance(part.ops[0], ast.In) and isinstance(other, (ast.Tuple, ast.List, ast.Set)):
        texts = other.elts
    else:
        return None
    names = [
        text.value
        for text in texts
        if isinstance(text, ast.Constant) and isinstance(text.value, str)
    ]
    return frozenset(names) if len(names) == len(texts) else None
