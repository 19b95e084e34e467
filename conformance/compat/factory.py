# SPDX-License-Identifier: Apache-2.0
"""Names of the connectors that vLLM registers, read from its source without importing it."""

from __future__ import annotations

import ast

from kvconform.compat import installed

FACTORY = "distributed/kv_transfer/kv_connector/factory.py"
REGISTER = "register_connector"


def names_in(factory: str) -> list[str]:
    """Return the names that the text of vLLM's factory.py registers, sorted."""
    calls = (node for node in ast.walk(ast.parse(factory)) if isinstance(node, ast.Call))
    return sorted(
        first.value
        for call in calls
        if isinstance(call.func, ast.Attribute) and call.func.attr == REGISTER and call.args
        if isinstance(first := call.args[0], ast.Constant) and isinstance(first.value, str)
    )


def installed_names() -> list[str]:
    """Return the names that the installed vLLM registers; none if it is not installed."""
    root = installed.vllm_root()
    if root is None or not (root / FACTORY).is_file():
        return []
    return names_in((root / FACTORY).read_text(encoding="utf-8"))
