# SPDX-License-Identifier: Apache-2.0
"""The interface that connectors implement, read from the installed vLLM's source.

vLLM is not imported.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from kvconform.compat import installed
from kvconform.compat.installed import NO_VLLM
from kvconform.errors import EnvironmentProblem, UsageError

BASE = "distributed/kv_transfer/kv_connector/v1/base.py"
CLASSES = {
    "KVConnectorBase_V1": BASE,
    "SupportsHMA": BASE,
    "SchedulerOutput": "v1/core/sched/output.py",
    "NewRequestData": "v1/core/sched/output.py",
    "CachedRequestData": "v1/core/sched/output.py",
    "KVConnectorOutput": "v1/outputs.py",
}
"""The connector's base classes and the data it exchanges with the engine: file below vllm/."""

HOOKS = ("KVConnectorBase_V1", "SupportsHMA")
"""The classes whose public methods are the hooks; of the others the fields count."""

KINDS = ("classmethod", "staticmethod", "property", "abstractmethod")


def signatures() -> dict[str, str]:
    """Map each hook to its signature, in the order of the source.

    A signature reads `abstractmethod (self, request: Request) -> bool`. UsageError if vLLM is not
    installed or has no such base class.
    """
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
    """Return a method's kind, parameters and return type; types without quotes, `None` last."""
    marks = [
        mark
        for decorator in node.decorator_list
        if (mark := ast.unparse(decorator).rpartition(".")[2]) in KINDS
    ]
    returns = f" -> {_type(ast.unparse(node.returns))}" if node.returns is not None else ""
    parameters = _type(ast.unparse(node.args))
    return " ".join([*sorted(marks, key=KINDS.index), f"({parameters}){returns}"])


def _type(text: str) -> str:
    """Write `'Request'` as `Request`, and `Optional[int]` as `int | None`."""
    plain = text.replace("'", "").replace('"', "")
    before = None
    while before != plain:
        before = plain
        plain = re.sub(r"\bOptional\[([^\[\]]*(?:\[[^\[\]]*\])?[^\[\]]*)\]", r"\1 | None", plain)
    return plain


def fields() -> list[str]:
    """Return `Class.field` for all data between engine and connector, in the order of the source.

    EnvironmentProblem without a vLLM.
    """
    return [item for item in items() if item.partition(".")[0] in CLASSES and "." in item]


def items() -> Iterator[str]:
    """Yield every hook's name, and `Class.field` for the data between engine and connector.

    EnvironmentProblem without a vLLM.
    """
    root = installed.vllm_root()
    if root is None:
        raise EnvironmentProblem(NO_VLLM)
    for name, file in CLASSES.items():
        tree = ast.parse((root / file).read_text(encoding="utf-8"))
        classes = (node for node in tree.body if isinstance(node, ast.ClassDef))
        body = next((node.body for node in classes if node.name == name), [])
        for node in body:
            if name in HOOKS:
                if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                    yield node.name
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                yield f"{name}.{node.target.id}"
