# SPDX-License-Identifier: Apache-2.0
"""Lint: what is wrong with the specification although it loads. Rules are numbered and never renumbered (there
is no L016 any more); `RULES` says what each is.

What cannot be loaded at all (unknown keys, steps, events, fields; duplicate keys and ids; broken expressions) is reported by
kvconform.contract.loader as `file:line: sentence`; `L001` carries those sentences here, so that one command shows everything.


Lint of cases, profiles, waivers and capabilities.

Lint of spec/defects.yaml: every entry is a defect, and every MUST has one.

The rules of the contract: the numbered list that requirements, guarantees and cases say they cover, and what is left out of it.

A rule binds the connector (an obligation), the engine (a guarantee), or nobody: a hazard is what an engine may do unannounced, a note is
what an older vLLM did. `spec/waivers.yaml` says why a rule is covered by nothing.


Lint of the rules of the contract: each is covered or waived, and none is both.
"""

from __future__ import annotations

import fnmatch
import importlib.util
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import date, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from kvconform.compat import installed
from kvconform.contract.capabilities import CAPABILITIES
from kvconform.contract.expression import compile_capability, compile_expr
from kvconform.contract.loader import Spec, SpecError, load_spec, words
from kvconform.contract.profile import select
from kvconform.dev.defect import Defect
from kvconform.dev.lint_requirements import Finding, numbers
from kvconform.errors import did_you_mean

RULES: dict[str, str] = {
    "L001": "the file does not load",
    "L002": "a case's file is not spec/cases/<area>/<id>.yaml",
    "L003": "the text does not hold exactly one RFC 2119 keyword",
    "L004": "the keyword of the text is not the level",
    "L005": "no case exercises the requirement",
    "L006": "the check cannot fail",
    "L007": "no bad example",
    "L008": "a bad example is accepted",
    "L009": "no good example",
    "L010": "a good example is rejected",
    "L011": "an example names an unknown event or field",
    "L012": "an example lacks what the check reads",
    "L013": "no good example triggers the check",
    "L014": "a case is longer than 40 lines",
    "L015": "unknown bug id",
    "L017": "rule number outside R001-R230",
    "L018": "no source",
    "L019": "the source's symbol does not exist in the installed vLLM",
    "L020": "a capability that nothing reads",
    "L021": "a profile selects nothing or includes an unknown one",
    "L022": "a waiver that names nothing",
    "L023": "since is not before until",
    "L024": "the same rule, text or check twice",
    "L025": "no reason given (why)",
    "L026": "a defect names an unknown requirement",
    "L027": "an entry of defects.yaml is no defect",
    "L028": "a requirement that no defect violates",
    "L029": "a rule of the contract that nothing covers and no waiver names, or that is covered and waived",
    "L030": "a source that spec/sources.yaml has no digest of, or a digest that nothing cites",
    "L031": "something in `touches` that vLLM does not have",
    "L032": "a waiver that has expired, or soon will (a warning)",
}

CASE_LINES = 40


def lint(
    spec: Spec, exercised: Mapping[str, object] | None = None, *, strict: bool = False
) -> list[Finding]:
    """All findings, sorted by place. `exercised`: how often each requirement was exercised in a full run; without it L005 is not judged.

    `strict`: L028 too.
    """
    from kvconform.dev import lint_requirements

    checks: list[Callable[[Spec], Iterable[Finding]]] = [
        lint_requirements.check,
        check_cases,
        check_defects,
    ]
    checks += [check_rules]
    checks += [unkilled] if strict else []
    found = [finding for check in checks for finding in check(spec)]
    if exercised is not None:
        found.extend(not_exercised(spec, exercised))
    return sorted(set(found))


def lint_root(
    root: Path | None = None, exercised: Mapping[str, object] | None = None, *, strict: bool = False
) -> list[Finding]:
    """Load and lint the specification under `root` (default: the built-in one); what does not load is L001."""
    try:
        spec = load_spec(root)
    except SpecError as error:
        found = []
        for problem in error.problems:
            file, line, sentence = problem.split(":", 2)
            found.append(Finding(f"{file}:{line}", "L001", sentence.strip()))
        return found
    return lint(spec, exercised, strict=strict)


def not_exercised(spec: Spec, exercised: Mapping[str, object]) -> Iterator[Finding]:
    """L005. A count of zero is as good as no entry."""
    for name in spec.requirements:
        if not exercised.get(name):
            yield Finding(
                spec.places.get(f"requirement:{name}", name), "L005", f"no case exercises {name}"
            )


SOON = 30
"""Days before its end from which a waiver is warned of."""


def check_cases(spec: Spec) -> Iterator[Finding]:
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
        if file not in (
            wanted,
            f"spec/cases/regressions/{case.id}.yaml",
            case.id,
        ):  # the latter folder: what exploration found
            yield Finding(where, "L002", f"{case.id}: the file should be {wanted}")
        lines = spec.line_counts.get(file, 0)
        if lines > CASE_LINES:
            yield Finding(
                where, "L014", f"{case.id}: {lines} lines, at most {CASE_LINES} are allowed"
            )
        for code, message in numbers(case.rules, case.bugs):
            yield Finding(where, code, f"{case.id}: {message}")


def _profiles(spec: Spec) -> Iterator[Finding]:
    for profile in spec.profiles.values():
        where = spec.places.get(f"profile:{profile.id}", profile.id)
        unknown = [name for name in profile.includes if name not in spec.profiles]
        if unknown:
            yield Finding(
                where,
                "L021",
                f"profile {profile.id} includes {', '.join(unknown)}, which does not exist",
            )
            continue
        requirements, cases = select(
            spec.profiles, profile.id, spec.requirements.values(), spec.cases.values()
        )
        for what, found, all_of in (
            ("requirement", requirements, spec.requirements),
            ("case", cases, spec.cases),
        ):
            if all_of and not found:
                yield Finding(where, "L021", f"profile {profile.id} selects no {what}")
        ids = [*spec.requirements, *spec.cases]
        for glob in (*profile.requirements, *profile.cases, *profile.exclude):
            if ids and not fnmatch.filter(ids, glob):
                yield Finding(where, "L021", f"profile {profile.id}: {glob!r} matches nothing")


def _waivers(spec: Spec) -> Iterator[Finding]:
    guarantees = [req.id for req in spec.requirements.values() if req.kind == "guarantee"]
    for number, waiver in enumerate(spec.waivers):
        where, name = (
            spec.places.get(f"waiver#{number}", "spec/waivers.yaml:1"),
            f"waiver of {waiver.requirement}",
        )
        if not fnmatch.filter(guarantees, waiver.requirement):
            yield Finding(where, "L022", f"{name}: there is no such guarantee")
        if not fnmatch.filter(spec.cases, waiver.case):
            yield Finding(where, "L022", f"{name}: there is no case {waiver.case}")
        today = date.today()
        if waiver.expired(today):
            yield Finding(
                where,
                "L032",
                f"{name} expired on {waiver.expires}: look whether vLLM still does that, and renew or remove it",
            )
        elif waiver.expired(today + timedelta(days=SOON)):
            yield Finding(where, "L032", f"{name} expires on {waiver.expires}", warning=True)


def _capabilities(spec: Spec) -> Iterator[Finding]:
    if not spec.requirements or not spec.cases:
        return
    used: set[str] = set()
    expressions = [req.capability_expr for req in spec.requirements.values()] + [
        case.needs_expr for case in spec.cases.values()
    ]
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
        yield Finding(
            "conformance/contract/capabilities.py:1",
            "L020",
            f"no requirement and no case reads capability {name}",
        )


_READ_BY_THE_SUITE = {"roles", "chunk_tokens", "saves", "lossy"}
"""Capabilities that the driver and the oracle read rather than a requirement."""


def check_defects(spec: Spec) -> Iterator[Finding]:
    """Findings about the entries."""
    for name, raw in spec.defects.items():
        where = spec.places.get(f"defect:{name}", name)
        try:
            defect = Defect(**raw)
        except ValidationError as error:
            first = error.errors()[0]
            yield Finding(
                where,
                "L027",
                f"defect {name}: {': '.join(words(Defect, first['loc'], first['type'], first['msg'])).lstrip(': ')}",
            )
            continue
        for symbol in filter(None, (defect.connector, defect.engine_fault)):
            if problem := _nowhere(symbol):
                yield Finding(where, "L027", f"defect {name}: {problem}")
        for wanted in (*defect.fails, *defect.may):
            if wanted not in spec.requirements:
                yield Finding(
                    where, "L026", f"defect {name} names the unknown requirement {wanted}"
                )
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
    names = installed.names(Path(found.origin))
    return (
        None
        if name in names
        else f"{module} has no {name}{did_you_mean(name, (each for each in names if '.' not in each))}"
    )


def unkilled(spec: Spec) -> Iterator[Finding]:
    """L028: requirements that no entry says it fails."""
    killed = {wanted for raw in spec.defects.values() for wanted in raw.get("fails", ())}
    for requirement in spec.requirements.values():
        if requirement.id not in killed:
            where = spec.places.get(f"requirement:{requirement.id}", requirement.id)
            yield Finding(
                where, "L028", f"{requirement.id} ({requirement.level}): no defect violates it"
            )


if TYPE_CHECKING:
    from kvconform.contract.loader import Spec


def covered_by(spec: Spec) -> dict[str, list[str]]:
    """Rule number -> what covers it: the ids of requirements, guarantees and, for hazards and notes only, of cases."""
    found: dict[str, list[str]] = {number: [] for number in spec.rules}
    for req in spec.requirements.values():
        for number in req.rules:
            found.setdefault(number, []).append(req.id)
    for case in spec.cases.values():
        for number in case.rules:
            rule = spec.rules.get(number)
            if rule is not None and rule.who in ("hazard", "note"):
                found[number].append(case.id)
    return found


def problems(spec: Spec) -> Iterator[tuple[str, str]]:
    """(rule number, sentence) for every rule that nothing covers, that is waived although something does, or that does not exist."""
    for number, ids in covered_by(spec).items() if spec.rules else ():
        waiver = spec.rule_waivers.get(number)
        if number not in spec.rules:
            yield number, f"{ids[0]} names rule {number}, which spec/rules.yaml does not list"
        elif waiver is None and not ids:
            kind = (
                "case or requirement"
                if spec.rules[number].who in ("hazard", "note")
                else "requirement or guarantee"
            )
            yield (
                number,
                f"no {kind} covers rule {number} ({spec.rules[number].title}), and no waiver says why",
            )
        elif waiver is not None and ids:
            yield number, f"rule {number} is waived, but {ids[0]} covers it"
    for number in spec.rule_waivers.keys() - spec.rules.keys():
        yield number, f"a waiver names rule {number}, which spec/rules.yaml does not list"


def check_rules(spec: Spec) -> Iterator[Finding]:
    """L029 for every rule that is neither covered nor waived, or both."""
    for number, sentence in problems(spec):
        places = (spec.places.get(f"{what}:{number}") for what in ("waiver", "rule"))
        yield Finding(next((place for place in places if place), number), "L029", sentence)
