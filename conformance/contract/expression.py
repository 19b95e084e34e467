# SPDX-License-Identifier: Apache-2.0
"""The check language: a whitelisted subset of Python expressions, compiled once, evaluated often.

`e` is the event, `t` the trigger that a pattern captured, `cap` the connector's capabilities, `cfg`
the run's constants. `e.tokens` compiles to `e["tokens"]`. Fields are checked against the event's
kind at compile time, so that a typo is an error of the specification and not a check that always
passes. Attributes, methods and names outside the lists here cannot be reached.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import CodeType
from typing import Any

from kvconform.contract.capabilities import CAPABILITIES, has
from kvconform.contract.events import COMMON_FIELDS, EVENTS
from kvconform.errors import did_you_mean

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "len": len,
    "min": min,
    "max": max,
    "abs": abs,
    "any": any,
    "all": all,
    "sum": sum,
    "sorted": sorted,
    "set": set,
}

_NODES: tuple[type[ast.AST], ...] = (
    ast.Expression,
    ast.BoolOp,
    ast.And,
    ast.Or,
    ast.UnaryOp,
    ast.Not,
    ast.USub,
    ast.BinOp,
    ast.Add,
    ast.Sub,
    ast.Mult,
    ast.FloorDiv,
    ast.Div,
    ast.Mod,
    ast.BitAnd,
    ast.BitOr,
    ast.Compare,
    ast.Eq,
    ast.NotEq,
    ast.Lt,
    ast.LtE,
    ast.Gt,
    ast.GtE,
    ast.In,
    ast.NotIn,
    ast.Is,
    ast.IsNot,
    ast.IfExp,
    ast.Constant,
    ast.Tuple,
    ast.List,
    ast.Set,
    ast.Subscript,
    ast.Slice,
    ast.ListComp,
    ast.SetComp,
    ast.GeneratorExp,
    ast.comprehension,
    ast.Call,
    ast.Attribute,
    ast.Name,
    ast.Load,
    ast.Store,
)

_KEYWORD_FIELD = re.compile(r"\b([et])\.(from)\b(?!_)")
"""Fields that are Python keywords: `e.from` is parsed as `e.from_`."""

_BASES = ("e", "t", "cap", "cfg")
_OF_RUN = object()
"""Marks an expression that reads a constant of the run: runs cannot share its bound function."""


class ExprError(ValueError):
    """An expression that is not allowed, with the reason, the text and the column (from 0)."""

    def __init__(self, message: str, source: str, column: int = 0) -> None:
        super().__init__(f"{message} (column {column + 1} of `{source}`)")
        self.reason = message
        self.source = source
        self.column = column


@dataclass(frozen=True, slots=True)
class Expression:
    """A compiled expression.

    `tree` is the rewritten syntax tree. `reads` lists the fields it reads, as (`e`|`t`|`cap`|`cfg`,
    field), in order of appearance.
    """

    source: str
    tree: ast.expr = field(repr=False, compare=False)
    reads: tuple[tuple[str, str], ...]
    code: CodeType = field(repr=False, compare=False)
    _bound: list[Any] = field(default_factory=list, repr=False, compare=False)

    @property
    def constant(self) -> bool:
        """Whether nothing of the run is read, so that the value is always the same."""
        return not self.reads

    @property
    def wanted(self) -> frozenset[str]:
        """The capabilities that a condition requires, without those whose absence it requires."""
        return frozenset(_wanted(self.tree))

    def bind(
        self, cap: Mapping[str, Any] | None = None, cfg: Mapping[str, Any] | None = None
    ) -> Callable[..., Any]:
        """Return a function (e, t=None) -> value with this run's constants fixed.

        It raises whatever the expression raises. The same `cap` gives the same function, unless the
        expression reads a constant of the run.
        """
        bound = self._bound
        if not bound:
            reads_constants = any(base == "cfg" for base, _ in self.reads)
            bound[:] = _OF_RUN if reads_constants else None, None
        if bound[0] is _OF_RUN:
            return bind_code(self.code, cap, cfg)
        if bound[0] is not cap or bound[1] is None:
            bound[:] = cap, bind_code(self.code, cap, cfg)
        return bound[1]  # type: ignore[no-any-return]

    def values(self, e: Mapping[str, Any] | None, t: Mapping[str, Any] | None = None) -> str:
        """Return the values read from `e` and `t`, for messages: `e.tokens=-4, t.req='a'`."""
        events = {"e": e, "t": t}
        parts: list[str] = []
        for base, name in dict.fromkeys(self.reads):
            event = events.get(base)
            if event is not None and name in event:
                text = repr(event[name])
                parts.append(f"{base}.{name}={text if len(text) <= 80 else text[:77] + '...'}")
        return ", ".join(parts)

    def culprit(
        self, wanted: bool, cap: Mapping[str, Any], cfg: Mapping[str, Any], e: Mapping[str, Any]
    ) -> tuple[str, str]:
        """Return (text, values) of the part that decided.

        It is the first false conjunct if `wanted` is true, else the first true alternative.
        """
        tree = self.tree
        if isinstance(tree, ast.BoolOp) and isinstance(tree.op, ast.And if wanted else ast.Or):
            for part in tree.values:
                if bool(bind_code(code_of(part), cap, cfg)(e)) is not wanted:
                    text = _FIELD.sub(r"\1.\2", ast.unparse(part))
                    reads = tuple(
                        read for read in self.reads if re.search(rf"\b{read[0]}\.{read[1]}\b", text)
                    )
                    return text, Expression(text, part, reads, self.code).values(e)
        return self.source, self.values(e)


def _wanted(tree: ast.AST) -> Iterator[str]:
    """Yield the capabilities that a rewritten tree reads outside of a `not`."""
    match tree:
        case ast.UnaryOp(op=ast.Not()):
            return
        case ast.Subscript(value=ast.Name(id="cap"), slice=ast.Constant(value=str(name))):
            yield name
    for node in ast.iter_child_nodes(tree):
        yield from _wanted(node)


_FIELD = re.compile(r"\b(e|t|cap|cfg)\['(\w+)'\]")
"""A field in a rewritten tree."""


def code_of(tree: ast.expr) -> CodeType:
    """Compile a checked and rewritten tree into the code of `lambda e, t=None: tree`."""
    arguments = ast.arguments(
        [], [ast.arg("e"), ast.arg("t")], None, [], [], None, [ast.Constant(None)]
    )
    return compile(
        ast.fix_missing_locations(ast.Expression(ast.Lambda(arguments, tree))),
        "<requirement>",
        "eval",
    )


def bind_code(
    code: CodeType, cap: Mapping[str, Any] | None, cfg: Mapping[str, Any] | None
) -> Callable[..., Any]:
    """Return the function of `code_of`, with this run's constants. Costs a microsecond."""
    scope = {"__builtins__": {}, "cap": cap or {}, "cfg": cfg or {}, "has": has, **FUNCTIONS}
    function: Callable[..., Any] = eval(code, scope)  # the tree passed the whitelist of _Compiler
    return function


def compile_expr(source: str, scope: Mapping[str, str | None]) -> Expression:
    """Compile `source`. Raises ExprError.

    `scope` maps the event names in scope (`e`, `t`) to their kind, or to None for any kind. `cap`
    and `cfg` are always in scope.
    """
    text = _KEYWORD_FIELD.sub(r"\1.\2_", " ".join(source.split()))
    return _compile(text, source, scope, bare_capabilities=False)


def compile_capability(source: str | Iterable[str]) -> Expression:
    """Compile a capability condition. Raises ExprError.

    It is `core`, names with `!` for not (`store and !lossy`), an expression over `cap`, or a list
    of these.
    """
    if isinstance(source, str):
        text = source
    else:
        text = " and ".join(f"({part})" for part in source) or "core"
    plain = re.sub(r"!(?!=)\s*", "not ", " ".join(text.split()))
    return _capability(plain, text)


@lru_cache(maxsize=1024)
def _capability(plain: str, text: str) -> Expression:
    return _compile(plain, text, {}, bare_capabilities=True)


def _compile(
    text: str, source: str, scope: Mapping[str, str | None], *, bare_capabilities: bool
) -> Expression:
    if not text:
        raise ExprError("the expression is empty", source)
    try:
        parsed = ast.parse(text, mode="eval")
    except SyntaxError as error:
        raise ExprError(
            f"not a Python expression: {error.msg}", text, max((error.offset or 1) - 1, 0)
        ) from None
    compiler = _Compiler(text, scope, bare_capabilities)
    tree = compiler.visit(parsed.body)
    return Expression(text, tree, tuple(compiler.reads), code_of(tree))


class _Compiler(ast.NodeTransformer):
    """Checks every node against the whitelist and rewrites `e.x` to `e["x"]`.

    The only names besides the bases are the variables of comprehensions.
    """

    def __init__(self, text: str, scope: Mapping[str, str | None], bare_capabilities: bool) -> None:
        self.text = text
        self.scope = scope
        self.bare_capabilities = bare_capabilities
        self.local: list[str] = []
        self.reads: list[tuple[str, str]] = []

    def fail(self, message: str, node: ast.AST) -> ExprError:
        return ExprError(message, self.text, getattr(node, "col_offset", 0))

    def visit(self, node: ast.AST) -> Any:
        if not isinstance(node, _NODES):
            raise self.fail(f"{type(node).__name__} is not allowed in a requirement", node)
        return super().visit(node)

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if not isinstance(node.value, (str, int, float, bool, type(None))):
            raise self.fail(f"a literal {type(node.value).__name__} is not allowed", node)
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        base = node.value
        if not isinstance(base, ast.Name) or base.id not in _BASES or base.id in self.local:
            raise self.fail(f"attribute .{node.attr}: only e, t, cap and cfg have fields", node)
        name = node.attr.rstrip("_") if node.attr.endswith("_") else node.attr
        if name.startswith("_"):
            raise self.fail(
                f"attribute .{node.attr}: names that begin with an underscore are not allowed", node
            )
        self.check_field(base.id, name, node)
        self.reads.append((base.id, name))
        return ast.Subscript(ast.Name(base.id, ast.Load()), ast.Constant(name), ast.Load())

    def check_field(self, base: str, name: str, node: ast.AST) -> None:
        if base in ("e", "t"):
            if base not in self.scope:
                raise self.fail(f"`{base}` has no meaning here", node)
            kind = self.scope[base]
            known: set[str] = set(COMMON_FIELDS)
            for each in EVENTS.values() if kind is None else [EVENTS[kind]]:
                known |= each.fields.keys()
            owner = f"event {kind}"
        elif base == "cap":
            known = set(CAPABILITIES)
            owner = "the list of capabilities"
        else:
            known = set(EVENTS["run.start"].fields)
            owner = "cfg (the fields of run.start)"
        if name not in known:
            close = did_you_mean(name, known, 1, quoted=True)
            raise self.fail(f"{owner} has no field {name!r}{close}", node)

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if node.id in self.local:
            return node
        if self.bare_capabilities:
            if node.id == "core":
                return ast.copy_location(ast.Constant(True), node)
            if node.id in CAPABILITIES:
                self.reads.append(("cap", node.id))
                value = ast.Subscript(
                    ast.Name("cap", ast.Load()), ast.Constant(node.id), ast.Load()
                )
                return ast.copy_location(ast.Call(ast.Name("has", ast.Load()), [value], []), node)
        if node.id in ("true", "false", "null", "none"):
            raise self.fail(f"`{node.id}` is not Python: write True, False or None", node)
        if node.id in _BASES:
            raise self.fail(f"`{node.id}` can only be used with a field, as `{node.id}.name`", node)
        close = did_you_mean(node.id, CAPABILITIES, 1) if self.bare_capabilities else ""
        raise self.fail(f"unknown name `{node.id}`{close}", node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if not isinstance(node.func, ast.Name) or node.func.id not in FUNCTIONS:
            name = ast.unparse(node.func)
            raise self.fail(f"call of `{name}`: only {', '.join(FUNCTIONS)} may be called", node)
        for keyword in node.keywords:
            if keyword.arg != "default" or node.func.id not in ("min", "max"):
                raise self.fail(
                    "keyword arguments are not allowed, except `default` of min and max", node
                )
            keyword.value = self.visit(keyword.value)
        node.args = [self.visit(argument) for argument in node.args]
        return node

    def visit_comprehension_node(self, node: Any) -> ast.AST:
        depth = len(self.local)
        for generator in node.generators:
            if generator.is_async:
                raise self.fail("async is not allowed", node)
            generator.iter = self.visit(generator.iter)
            self.bind_target(generator.target)
            generator.ifs = [self.visit(condition) for condition in generator.ifs]
        node.elt = self.visit(node.elt)
        del self.local[depth:]
        return node

    visit_ListComp = visit_comprehension_node
    visit_SetComp = visit_comprehension_node
    visit_GeneratorExp = visit_comprehension_node

    def bind_target(self, target: ast.expr) -> None:
        if isinstance(target, ast.Tuple):
            for element in target.elts:
                self.bind_target(element)
        elif (
            isinstance(target, ast.Name)
            and not target.id.startswith("_")
            and target.id not in (*_BASES, *FUNCTIONS)
        ):
            self.local.append(target.id)
        else:
            raise self.fail(
                f"`{ast.unparse(target)}` cannot be the variable of a comprehension", target
            )
