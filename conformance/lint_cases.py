# SPDX-License-Identifier: Apache-2.0
"""Lint of cases, profiles, waivers and capabilities."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator
from datetime import date, timedelta

from kvconform.capabilities import CAPABILITIES
from kvconform.expr import compile_capability, compile_expr
from kvconform.lint import CASE_LINES, Finding
from kvconform.lint_requirements import numbers
from kvconform.load import Spec
from kvconform.profile import select

SOON = 30
"""Days before its end from which a waiver is warned of."""


def check(spec: Spec) -> Iterator[Finding]:
    """All findings that are not about requirements."""
    yield from _cases(spec)
    yield from _profiles(spec)
    yield from _waivers(spec)
    yield from _capabilities(spec)


def _cases(spec: Spec) -> Iterator[Finding]:
    for case in spec.cases.values():
        where = spec.places.get(f"case:{case.id}", case.id)
        file = where.rsplit(":", 1)[0]
        wanted = f"spec/cases/{case.area}/{case.id}.yaml"
        if file not in (wanted, f"spec/cases/regressions/{case.id}.yaml", case.id):  # the latter folder: what exploration found
            yield Finding(where, "L002", f"{case.id}: the file should be {wanted}")
        lines = spec.line_counts.get(file, 0)
        if lines > CASE_LINES:
            yield Finding(where, "L014", f"{case.id}: {lines} lines, at most {CASE_LINES} are allowed")
        for code, message in numbers(case.rules, case.bugs):
            yield Finding(where, code, f"{case.id}: {message}")


def _profiles(spec: Spec) -> Iterator[Finding]:
    for profile in spec.profiles.values():
        where = spec.places.get(f"profile:{profile.id}", profile.id)
        unknown = [name for name in profile.includes if name not in spec.profiles]
        if unknown:
            yield Finding(where, "L021", f"profile {profile.id} includes {', '.join(unknown)}, which does not exist")
            continue
        requirements, cases = select(spec.profiles, profile.id, spec.requirements.values(), spec.cases.values())
        for what, found, all_of in (("requirement", requirements, spec.requirements), ("case", cases, spec.cases)):
            if all_of and not found:
                yield Finding(where, "L021", f"profile {profile.id} selects no {what}")
        ids = [*spec.requirements, *spec.cases]
        for glob in (*profile.requirements, *profile.cases, *profile.exclude):
            if ids and not fnmatch.filter(ids, glob):
                yield Finding(where, "L021", f"profile {profile.id}: {glob!r} matches nothing")


def _waivers(spec: Spec) -> Iterator[Finding]:
    guarantees = [req.id for req in spec.requirements.values() if req.kind == "guarantee"]
    for number, waiver in enumerate(spec.waivers):
        where, name = spec.places.get(f"waiver#{number}", "spec/waivers.yaml:1"), f"waiver of {waiver.requirement}"
        if not fnmatch.filter(guarantees, waiver.requirement):
            yield Finding(where, "L022", f"{name}: there is no such guarantee")
        if not fnmatch.filter(spec.cases, waiver.case):
            yield Finding(where, "L022", f"{name}: there is no case {waiver.case}")
        today = date.today()
        if waiver.expired(today):
            yield Finding(where, "L032", f"{name} expired on {waiver.expires}: look whether vLLM still does that, and renew or remove it")
        elif waiver.expired(today + timedelta(days=SOON)):
            yield Finding(where, "L032", f"{name} expires on {waiver.expires}", warning=True)


def _capabilities(spec: Spec) -> Iterator[Finding]:
    if not spec.requirements or not spec.cases:
        return
    used: set[str] = set()
    expressions = [req.capability_expr for req in spec.requirements.values()] + [case.needs_expr for case in spec.cases.values()]
    expressions += [compile_capability(profile.capability) for profile in spec.profiles.values()]
    for req in spec.requirements.values():
        expressions.extend(req.expressions.values())
    for case in spec.cases.values():
        guards = [e.when for e in (*case.expect, *case.provokes)]
        guards += [step.arg.when for step in case.steps if step.op == "expect"]
        expressions.extend(compile_expr(guard, {}) for guard in guards if guard is not None)
    for expression in expressions:
        used |= {name for base, name in expression.reads if base == "cap"}
    for name in CAPABILITIES.keys() - used - _READ_BY_THE_SUITE:
        yield Finding("conformance/capabilities.py:1", "L020", f"no requirement and no case reads capability {name}")


_READ_BY_THE_SUITE = {"roles", "chunk_tokens", "saves", "lossy"}
"""Capabilities that the driver and the oracle read rather than a requirement."""
