# SPDX-License-Identifier: Apache-2.0
"""Lint of spec/defects.yaml: every entry is a defect, and every MUST has one."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import ValidationError

from kvconform.defect import Defect
from kvconform.lint import Finding
from kvconform.lint_requirements import numbers
from kvconform.load import Spec


def check(spec: Spec) -> Iterator[Finding]:
    """Findings about the entries."""
    for name, raw in spec.defects.items():
        where = spec.places.get(f"defect:{name}", name)
        try:
            defect = Defect(**raw)
        except ValidationError as error:
            first = error.errors()[0]
            yield Finding(where, "L027", f"defect {name}: {'.'.join(map(str, first['loc']))}: {first['msg']}")
            continue
        for wanted in (*defect.fails, *defect.may):
            if wanted not in spec.requirements:
                yield Finding(where, "L026", f"defect {name} names the unknown requirement {wanted}")
        for case in defect.cases:
            if case not in spec.cases:
                yield Finding(where, "L027", f"defect {name} names the unknown case {case}")
        for code, message in numbers([], defect.bugs):
            yield Finding(where, code, f"defect {name}: {message}")


def unkilled(spec: Spec) -> Iterator[Finding]:
    """L028: requirements that no entry says it fails."""
    killed = {wanted for raw in spec.defects.values() for wanted in raw.get("fails", ())}
    for requirement in spec.requirements.values():
        if requirement.level.startswith("MUST") and requirement.id not in killed:
            where = spec.places.get(f"requirement:{requirement.id}", requirement.id)
            yield Finding(where, "L028", f"{requirement.id}: no defect violates it")
