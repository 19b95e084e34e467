# SPDX-License-Identifier: Apache-2.0
"""Lint of spec/defects.yaml: every entry is a defect, and every MUST has one."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

from pydantic import ValidationError

from kvconform import sources
from kvconform.closest import did_you_mean
from kvconform.defect import Defect
from kvconform.lint import Finding
from kvconform.lint_requirements import numbers
from kvconform.load import Spec, words


def check(spec: Spec) -> Iterator[Finding]:
    """Findings about the entries."""
    for name, raw in spec.defects.items():
        where = spec.places.get(f"defect:{name}", name)
        try:
            defect = Defect(**raw)
        except ValidationError as error:
            first = error.errors()[0]
            yield Finding(
                where, "L027", f"defect {name}: {': '.join(words(Defect, first['loc'], first['type'], first['msg'])).lstrip(': ')}"
            )
            continue
        for symbol in filter(None, (defect.connector, defect.engine_fault)):
            if problem := _nowhere(symbol):
                yield Finding(where, "L027", f"defect {name}: {problem}")
        for wanted in (*defect.fails, *defect.may):
            if wanted not in spec.requirements:
                yield Finding(where, "L026", f"defect {name} names the unknown requirement {wanted}")
        for case in defect.cases:
            if case not in spec.cases and case not in spec.scenarios:
                yield Finding(where, "L027", f"defect {name} names the unknown case {case}")
        for code, message in numbers([], defect.bugs):
            yield Finding(where, code, f"defect {name}: {message}")


def _nowhere(symbol: str) -> str | None:
    """A sentence if module or name of `package.module:name` does not exist. The module is read and not imported: it may need vLLM."""
    module, _, name = symbol.partition(":")
    try:
        found = importlib.util.find_spec(module)
    except ImportError:
        found = None
    if found is None or found.origin is None:
        return f"there is no module {module}"
    names = sources.names(Path(found.origin))
    return None if name in names else f"{module} has no {name}{did_you_mean(name, (each for each in names if '.' not in each))}"


def unkilled(spec: Spec) -> Iterator[Finding]:
    """L028: requirements that no entry says it fails."""
    killed = {wanted for raw in spec.defects.values() for wanted in raw.get("fails", ())}
    for requirement in spec.requirements.values():
        if requirement.id not in killed:
            where = spec.places.get(f"requirement:{requirement.id}", requirement.id)
            yield Finding(where, "L028", f"{requirement.id} ({requirement.level}): no defect violates it")
