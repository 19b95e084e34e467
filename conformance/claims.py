# SPDX-License-Identifier: Apache-2.0
"""Capabilities that a connector claims, and whether a run has shown them: what was never exercised is not claimed with success."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvconform.aggregate import EXERCISED
from kvconform.capabilities import CAPABILITIES, has
from kvconform.load import Spec
from kvconform.verdict import Row

DECLARED = "declared"


def claimed(capabilities: Mapping[str, Any], sources: Mapping[str, str]) -> list[str]:
    """Names of the capabilities that the connector itself declares to have."""
    return [name for name in CAPABILITIES if sources.get(name, "").startswith(DECLARED) and has(capabilities.get(name))]


def void(capabilities: Mapping[str, Any], sources: Mapping[str, str], rows: Sequence[Row], spec: Spec, vllm: str = "999") -> list[str]:
    """Claims of which nothing was shown: every row of a requirement or a case that asks for the capability was skipped or not exercised.

    A capability that nothing asks for, in this vLLM version, cannot be shown, and is not void.
    """
    shown = {row.requirement for row in rows if row.verdict in EXERCISED}
    ran = {row.case for row in rows if row.verdict in EXERCISED}
    found = []
    for name in claimed(capabilities, sources):
        requirements = {
            req.id for req in spec.requirements.values() if req.kind == "requirement" and asks(req.capability_expr.source, name)
        }
        cases = {case.id for case in spec.cases.values() if asks(case.needs_expr.source, name) and case.in_force(vllm)}
        if (requirements or cases) and not requirements & shown and not cases & ran:
            found.append(name)
    return found


def asks(condition: str, name: str) -> bool:
    """Whether a capability condition asks for `name` (and not for its absence)."""
    uses = re.finditer(rf"(not\s+|!\s*)?(?:cap\.)?\b{re.escape(name)}\b", condition)
    return any(use.group(1) is None for use in uses)


def mismatches(sources: Mapping[str, str]) -> list[str]:
    """Sentences about declarations that what was seen contradicts, and about what could not be seen: sources of more than one word."""
    return [f"{name} is {source}" for name, source in sorted(sources.items()) if "," in source]


def unasked(capabilities: Mapping[str, Any], sources: Mapping[str, str]) -> list[str]:
    """Sentences about what is not asked of a connector because of something that its author may have overlooked."""
    if not capabilities:
        return []
    found = []
    loads = any(has(capabilities.get(name)) for name in ("store", "transfer", "synthesises_kv"))
    if sources.get("store") == "inferred" and not loads:
        found.append(
            "in plain runs it returned no KV, so nothing about loads is asked of it; if it should, declare `store = true` ([capabilities])"
        )
    if loads and not has(capabilities.get("fault_injection")):
        found.append("nothing about failed loads was judged: that needs a method kvconform_fail_load (docs/guide-connector-authors.md)")
    return found


def contradicted(declared: Any, seen: Any) -> str:
    """The source of a declared capability of which something else was seen."""
    return f"{DECLARED}, but seen to be {_plain(seen)} and not {_plain(declared)}"


def _plain(value: Any) -> str:
    return {True: "yes", False: "no"}.get(value, str(value)) if isinstance(value, bool) else str(value)


def reasons(names: Iterable[str]) -> list[str]:
    """What the verdict says about void claims."""
    listed = ", ".join(names)
    return [f"claimed and not shown, as none of their requirements and cases was exercised: {listed}"] if listed else []
