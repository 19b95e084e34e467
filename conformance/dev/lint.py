# SPDX-License-Identifier: Apache-2.0
"""Lint: mistakes in a specification that loads.

This file checks cases, situations, profiles, waivers, capabilities, defects and coverage of rules;
kvconform.dev.lint_requirements checks requirements. Lint rules are numbered and never renumbered
(L016 was removed); `RULES` lists them. The loader (kvconform.contract.loader) reports what does not
load: unknown keys, steps, events and fields, duplicate keys and ids, broken expressions. Those
problems appear here as L001, so that one command shows everything.

A rule of the contract binds the connector (an obligation), the engine (a guarantee), or neither: a
hazard is what an engine may do unannounced, a note is what an older vLLM did. spec/waivers.yaml
says why a rule is not covered.
"""

from __future__ import annotations

import fnmatch
import importlib.util
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import date, timedelta
from pathlib import Path

from pydantic import ValidationError

from kvconform.compat import installed
from kvconform.contract.capabilities import CAPABILITIES
from kvconform.contract.case import OPTIONS, PROPERTIES, Config, Matrix
from kvconform.contract.expression import compile_expr
from kvconform.contract.loader import Spec, SpecError, load_spec, place_and_sentence
from kvconform.contract.profile import select
from kvconform.contract.requirement import Requirement
from kvconform.contract.steps import STEPS
from kvconform.dev import lint_requirements
from kvconform.dev.defect import Defect
from kvconform.dev.lint_requirements import Finding, numbers, place_of
from kvconform.errors import Location, did_you_mean
from kvconform.words import listed, many

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
    "L011": "an example has an event or a field, or a good one a type of value, that no run has",
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
    "L029": "a rule of the contract that is neither covered nor waived, or is both",
    "L030": "a source without a digest in spec/sources.yaml, or a digest that nothing cites",
    "L031": "`touches` names something that vLLM does not have",
    "L032": "a waiver that has expired, or soon will (a warning)",
    "L033": "a step, axis, field of `config` or property without a situation, or the reverse",
}

CASE_LINES = 40

_PLAIN = {"add", "on", "step", "run", "expect"}
"""Steps that every engine does: no situations."""

_KINDS = {"step": "step", "axis": "axis", "config": "config field", "case": "property of a case"}
"""What a situation is `of`, in words; the loader checks policies."""

MENTIONED = 3
"""Number of requirements without a defect that lint names if it is not strict."""

SOON = 30
"""Days before the end of a waiver from which on lint warns."""

_READ_BY_THE_SUITE = {"roles", "chunk_tokens", "saves", "lossy", "metrics"}
"""Capabilities that the driver and the oracle read, not a requirement or a case."""


def lint(
    spec: Spec, exercised: Mapping[str, object] | None = None, *, strict: bool = False
) -> list[Finding]:
    """Return all findings, sorted by place.

    `exercised` maps requirements to how often they were exercised in a full run; L005 is not judged
    without it. `strict` makes L028 a finding per requirement instead of one warning.
    """
    checks: list[Callable[[Spec], Iterable[Finding]]] = [
        lint_requirements.check,
        check_cases,
        check_situations,
        check_defects,
        check_rules,
    ]
    checks.append(unkilled if strict else mention_unkilled)
    found = [finding for check in checks for finding in check(spec)]
    if exercised is not None:
        found.extend(not_exercised(spec, exercised))
    return sorted(set(found))


def lint_root(
    root: Path | None = None, exercised: Mapping[str, object] | None = None, *, strict: bool = False
) -> list[Finding]:
    """Load and lint the specification under `root` (default: the built-in one)."""
    try:
        spec = load_spec(root)
    except SpecError as error:
        return [Finding(problem.where, "L001", problem.sentence) for problem in error.problems]
    return lint(spec, exercised, strict=strict)


def not_exercised(spec: Spec, exercised: Mapping[str, object]) -> Iterator[Finding]:
    """Yield L005 for every requirement with no entry, or a count of zero, in `exercised`."""
    for name in spec.requirements:
        if not exercised.get(name):
            yield Finding(place_of(spec, "requirement", name), "L005", f"no case exercises {name}")


# -- cases, profiles, waivers, capabilities


def check_cases(spec: Spec) -> Iterator[Finding]:
    """Yield the findings about cases, profiles, waivers and capabilities."""
    yield from _cases(spec)
    yield from _profiles(spec)
    yield from _waivers(spec)
    yield from _capabilities(spec)


def _cases(spec: Spec) -> Iterator[Finding]:
    for case in spec.cases.values():
        where = place_of(spec, "case", case.id)
        wanted = f"spec/cases/{case.area}/{case.id}.yaml"
        found_by_exploration = f"spec/cases/regressions/{case.id}.yaml"
        if where.file not in (wanted, found_by_exploration, case.id):
            yield Finding(where, "L002", f"{case.id}: the file should be {wanted}")
        lines = spec.line_counts.get(where.file, 0)
        if lines > CASE_LINES:
            sentence = f"{case.id}: {lines} lines, at most {CASE_LINES} are allowed"
            yield Finding(where, "L014", sentence)
        for code, message in numbers(case.rules, case.bugs):
            yield Finding(where, code, f"{case.id}: {message}")


def _profiles(spec: Spec) -> Iterator[Finding]:
    for profile in spec.profiles.values():
        where = place_of(spec, "profile", profile.id)
        unknown = [name for name in profile.includes if name not in spec.profiles]
        if unknown:
            names = ", ".join(unknown)
            sentence = f"profile {profile.id} includes {names}, which does not exist"
            yield Finding(where, "L021", sentence)
            continue
        requirements, cases = select(
            spec.profiles, profile.id, spec.requirements.values(), spec.cases.values()
        )
        if spec.requirements and not requirements:
            yield Finding(where, "L021", f"profile {profile.id} selects no requirement")
        if spec.cases and not cases:
            yield Finding(where, "L021", f"profile {profile.id} selects no case")
        ids = [*spec.requirements, *spec.cases, *spec.scenarios]
        for glob in (*profile.requirements, *profile.cases, *profile.exclude):
            if ids and not fnmatch.filter(ids, glob):
                yield Finding(where, "L021", f"profile {profile.id}: {glob!r} matches nothing")


def _waivers(spec: Spec) -> Iterator[Finding]:
    guarantees = [req.id for req in spec.requirements.values() if req.kind == "guarantee"]
    today = date.today()
    for number, waiver in enumerate(spec.waivers):
        where = spec.places.get(f"waiver#{number}", Location("spec/waivers.yaml", 1))
        name = f"waiver of {waiver.requirement}"
        if not fnmatch.filter(guarantees, waiver.requirement):
            yield Finding(where, "L022", f"{name}: there is no such guarantee")
        if not fnmatch.filter(spec.cases, waiver.case):
            yield Finding(where, "L022", f"{name}: there is no case {waiver.case}")
        if waiver.expired(today):
            sentence = (
                f"{name} expired on {waiver.expires}: "
                "check whether vLLM still does that, and renew or remove it"
            )
            yield Finding(where, "L032", sentence)
        elif waiver.expired(today + timedelta(days=SOON)):
            yield Finding(where, "L032", f"{name} expires on {waiver.expires}", warning=True)


def _capabilities(spec: Spec) -> Iterator[Finding]:
    if not spec.requirements or not spec.cases:
        return
    expressions = [req.capability_expr for req in spec.requirements.values()]
    expressions += [case.needs_expr for case in spec.cases.values()]
    for req in spec.requirements.values():
        expressions.extend(req.expressions.values())
    for case in spec.cases.values():
        guards = [e.when for e in (*case.expect, *case.provokes)]
        guards += [step.arg.when for step in case.steps if step.op == "expect"]
        expressions.extend(compile_expr(guard, {}) for guard in guards if guard is not None)
    used: set[str] = set()
    for expression in expressions:
        used |= {name for base, name in expression.reads if base == "cap"}
    for name in CAPABILITIES.keys() - used - _READ_BY_THE_SUITE:
        where = Location("conformance/contract/capabilities.py", 1)
        yield Finding(where, "L020", f"no requirement and no case reads capability {name}")


# -- situations


def check_situations(spec: Spec) -> Iterator[Finding]:
    """Yield the findings about spec/situations.yaml; L033 for what it lacks, or has too much."""
    if not spec.situations:
        return
    for name, found in spec.situations.items():
        where = place_of(spec, "situation", name)
        for code, message in lint_requirements.cited(found.source, spec, installed_has_it=True):
            yield Finding(where, code, f"situation {name}: {message}")
        for each in [each for each in found.excuses if each not in spec.requirements]:
            sentence = f"situation {name}: there is no requirement {each}"
            yield Finding(where, "L033", f"{sentence}{did_you_mean(each, spec.requirements)}")
    axes = Matrix.model_fields.keys()
    wanted = {
        "step": STEPS.keys() - _PLAIN,
        "axis": axes,
        "config": Config.model_fields.keys() - OPTIONS.keys() - axes,
        "case": PROPERTIES.keys(),
    }
    for kind, known in wanted.items():
        entries = {name for name, found in spec.situations.items() if found.of == kind}
        for name in known - entries:
            sentence = f"no situation says whether vLLM does this: {_KINDS[kind]} {name}"
            yield Finding(Location("spec/situations.yaml", 1), "L033", sentence)
        for name in entries - known:
            no_such = f"there is no such {_KINDS[kind]}{did_you_mean(name, known)}"
            sentence = f"situation {name}: {no_such}"
            yield Finding(place_of(spec, "situation", name), "L033", sentence)


# -- planted defects


def check_defects(spec: Spec) -> Iterator[Finding]:
    """Yield the findings about the entries of spec/defects.yaml."""
    for name, raw in spec.defects.items():
        where = place_of(spec, "defect", name)
        try:
            defect = Defect(**raw)
        except ValidationError as error:
            first = error.errors()[0]
            part, sentence = place_and_sentence(Defect, first["loc"], first["type"], first["msg"])
            sentence = f"{part}: {sentence}" if part else sentence
            yield Finding(where, "L027", f"defect {name}: {sentence}")
            continue
        for symbol in filter(None, (defect.connector, defect.engine_fault)):
            if problem := _nowhere(symbol):
                yield Finding(where, "L027", f"defect {name}: {problem}")
        for wanted in (*defect.fails, *defect.may):
            if wanted not in spec.requirements:
                sentence = f"defect {name} names the unknown requirement {wanted}"
                yield Finding(where, "L026", sentence)
        for case in defect.cases:
            if case not in spec.cases and case not in spec.scenarios:
                yield Finding(where, "L027", f"defect {name} names the unknown case {case}")
        for code, message in numbers([], defect.bugs):
            yield Finding(where, code, f"defect {name}: {message}")


def _nowhere(symbol: str) -> str | None:
    """Return a sentence if module or name of `package.module:name` does not exist, or None.

    Reads the module instead of importing it, because it may need vLLM.
    """
    module, _, name = symbol.partition(":")
    try:
        found = importlib.util.find_spec(module)
    except ImportError:
        found = None
    if found is None or found.origin is None:
        return f"there is no module {module}"
    names = installed.names(Path(found.origin))
    if name in names:
        return None
    top_level = (each for each in names if "." not in each)
    return f"{module} has no {name}{did_you_mean(name, top_level)}"


def unkilled(spec: Spec) -> Iterator[Finding]:
    """Yield L028 for every requirement that no defect is listed to fail."""
    for req in _unkilled(spec):
        where = place_of(spec, "requirement", req.id)
        yield Finding(where, "L028", f"{req.id} ({req.level}): no defect violates it")


def _unkilled(spec: Spec) -> list[Requirement]:
    killed = {wanted for raw in spec.defects.values() for wanted in raw.get("fails", ())}
    return [req for req in spec.requirements.values() if req.id not in killed]


def mention_unkilled(spec: Spec) -> Iterator[Finding]:
    """Yield L028 once, as a warning that counts the findings of `unkilled` and names the first.

    A specification without planted defects has none to miss.
    """
    found = _unkilled(spec)
    if not found or not spec.defects:
        return
    names = listed([req.id for req in found], MENTIONED)
    sentence = f"no defect violates {many(len(found), 'requirement')}: {names}"
    where = place_of(spec, "requirement", found[0].id)
    yield Finding(where, "L028", f"{sentence} (--strict names all)", warning=True)


# -- coverage of the rules of the contract


def covered_by(spec: Spec) -> dict[str, list[str]]:
    """Map rule numbers to the ids of what covers them.

    Requirements and guarantees cover rules; cases cover hazards and notes only.
    """
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
    """Yield (rule number, sentence) for every rule that is neither covered nor waived.

    Likewise for rules that are both, and for numbers that are not listed.
    """
    for number, ids in covered_by(spec).items() if spec.rules else ():
        waiver = spec.rule_waivers.get(number)
        rule = spec.rules.get(number)
        if rule is None:
            yield number, f"{ids[0]} names rule {number}, which spec/rules.yaml does not list"
        elif waiver is None and not ids:
            unannounced = rule.who in ("hazard", "note")
            kind = "case or requirement" if unannounced else "requirement or guarantee"
            yield number, f"no {kind} covers rule {number} ({rule.title}), and no waiver says why"
        elif waiver is not None and ids:
            yield number, f"rule {number} is waived, but {ids[0]} covers it"
    for number in spec.rule_waivers.keys() - spec.rules.keys():
        yield number, f"a waiver names rule {number}, which spec/rules.yaml does not list"


def check_rules(spec: Spec) -> Iterator[Finding]:
    """Yield L029 for every sentence of `problems`."""
    for number, sentence in problems(spec):
        places = (spec.places.get(f"{kind}:{number}") for kind in ("waiver", "rule"))
        where = next((place for place in places if place), Location(number))
        yield Finding(where, "L029", sentence)
