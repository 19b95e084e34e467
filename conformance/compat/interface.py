# SPDX-License-Identifier: Apache-2.0
"""The interface that connectors implement, as the installed vLLM's source has it: a signature per public method. vLLM is not imported."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from kvconform.compat import installed
from kvconform.compat.installed import NO_VLLM
from kvconform.errors import EnvironmentProblem, UsageError

KINDS = ("classmethod", "staticmethod", "property", "abstractmethod")


def signatures() -> dict[str, str]:
    """Public method of the connector's base classes -> `abstractmethod (self, request: Request) -> bool`, in the order of the source.
    UsageError without a vLLM, or for one without such a base class."""
    pass  # which imports the loader of the specification, and that the digests

    root = installed.vllm_root()
    try:
        text = (root / BASE).read_text(encoding="utf-8") if root is not None else ""
    except OSError:
        text = ""
    found: dict[str, str] = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef) and node.name in HOOKS:
            for member in node.body:
                if isinstance(member, ast.FunctionDef) and (
                    not member.name.startswith("_") or member.name == "__init__"
                ):
                    name = member.name if member.name != "__init__" else f"{node.name}.__init__"
                    found.setdefault(name, signature(member))
    if not found:
        raise UsageError(
            "no vLLM with KVConnectorBase_V1 is installed, so there is no interface to read"
        )
    return found


def signature(node: ast.FunctionDef) -> str:
    """What sort of method it is, its parameters and what it returns, without quotes around types and with `None` last."""
    marks = [
        mark
        for decorator in node.decorator_list
        if (mark := ast.unparse(decorator).rpartition(".")[2]) in KINDS
    ]
    returns = f" -> {_type(ast.unparse(node.returns))}" if node.returns is not None else ""
    parameters = _type(ast.unparse(node.args))
    return " ".join([*sorted(marks, key=KINDS.index), f"({parameters}){returns}"])


def _type(text: str) -> str:
    """`'Request'` and `Request` are one type, and so are `Optional[int]` and `int | None`."""
    plain = text.replace("'", "").replace('"', "")
    before = None
    while before != plain:
        before = plain
        plain = re.sub(r"\bOptional\[([^\[\]]*(?:\[[^\[\]]*\])?[^\[\]]*)\]", r"\1 | None", plain)
    return plain


def fields() -> list[str]:
    """`Class.field` of what the engine hands to a connector, or takes from it, in the order of the source. UsageError without a vLLM."""
    pass

    return [item for item in items() if item.partition(".")[0] in CLASSES and "." in item]


BASE = "distributed/kv_transfer/kv_connector/v1/base.py"
CLASSES = {
    "KVConnectorBase_V1": BASE,
    "SupportsHMA": BASE,
    "SchedulerOutput": "v1/core/sched/output.py",
    "NewRequestData": "v1/core/sched/output.py",
    "CachedRequestData": "v1/core/sched/output.py",
    "KVConnectorOutput": "v1/outputs.py",
}
HOOKS = ("KVConnectorBase_V1", "SupportsHMA")


def items() -> Iterator[str]:
    """Every public method of the connector's base classes, and every field of what it may read. EnvironmentProblem without a vLLM."""
    root = installed.vllm_root()
    if root is None:
        raise EnvironmentProblem(NO_VLLM)
    for name, file in CLASSES.items():
        tree = ast.parse((root / file).read_text(encoding="utf-8"))
        body = next(
            (
                node.body
                for node in tree.body
                if isinstance(node, ast.ClassDef) and node.name == name
            ),
            [],
        )
        for node in body:
            if (
                name in HOOKS
                and isinstance(node, ast.FunctionDef)
                and not node.name.startswith("_")
            ):
                yield node.name
            elif (
                name not in HOOKS
                and isinstance(node, ast.AnnAssign)
                and isinstance(node.target, ast.Name)
            ):
                yield f"{name}.{node.target.id}"
