# SPDX-License-Identifier: Apache-2.0
"""Lint of requirements: wording, sources, and that their checks do what their examples say."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from kvconform import coverage, evidence, sources
from kvconform.closest import did_you_mean
from kvconform.examples import misspelt, outcomes
from kvconform.lint import BUG_NUMBERS, RULE_NUMBERS, Finding
from kvconform.load import Spec
from kvconform.requirement import KEYWORDS, Requirement, version_key

UPDATE = "`python -m kvconform.evidence update` reads vLLM's source again"


def check(spec: Spec) -> Iterator[Finding]:
    """All findings about requirements."""
    texts: dict[str, str] = {}
    items = _items(spec)
    for req in spec.requirements.values():
        where = spec.places.get(f"requirement:{req.id}", req.id)
        for code, message in (*_wording(req), *_references(req, items), *_source(req, spec), *_examples(req)):
            yield Finding(where, code, f"{req.id}: {message}")
        other = texts.setdefault(" ".join(req.text.split()), req.id)
        if other != req.id:
            yield Finding(where, "L024", f"{req.id}: has the text of {other}")
    for place in sorted(spec.sources.keys() - evidence.cited(spec).keys()):
        yield Finding(spec.places.get(f"source:{place}", place), "L030", f"no requirement rests on {place} any more; {UPDATE}")


def _wording(req: Requirement) -> Iterator[tuple[str, str]]:
    found = KEYWORDS.findall(req.text)
    if len(found) != 1:
        yield "L003", f"the text holds {len(found)} RFC 2119 keywords ({', '.join(found) or 'none'}), not one"
    elif found[0] != req.level:
        yield "L004", f"the text says {found[0]}, the level is {req.level}"
    if req.since is not None and req.until is not None and version_key(req.since) >= version_key(req.until):
        yield "L023", f"since {req.since} is not before until {req.until}"
    if not req.why:
        yield "L025", "says no reason (why)"


def _references(req: Requirement, items: Collection[str]) -> Iterator[tuple[str, str]]:
    yield from numbers(req.rules, req.bugs)
    for item in req.touches if items else ():
        if item not in items:
            yield "L031", f"touches {item}, which is no hook and no field of what connectors are given{did_you_mean(item, items)}"


def _items(spec: Spec) -> set[str]:
    """The hooks and fields that there are; none where the vLLM is not installed that the specification was read from."""
    read = {entry.version for entry in spec.sources.values()}
    if (sources.vllm_version() or "").split("+")[0] not in read:
        return set()
    try:
        return {*coverage.items(), *coverage.LATER}
    except OSError:  # a vLLM that is not whole
        return set()


def numbers(rules: list[str], bugs: list[str]) -> Iterator[tuple[str, str]]:
    """L017 and L015 for a list of rule numbers and bug ids."""
    yield from (("L017", f"there is no rule {rule}") for rule in rules if int(rule[1:]) not in RULE_NUMBERS)
    yield from (("L015", f"there is no bug {bug}") for bug in bugs if int(bug[1:]) not in BUG_NUMBERS)
    for name in {name for name in (*rules, *bugs) if (*rules, *bugs).count(name) > 1}:
        yield "L024", f"{name} is named twice"


def _source(req: Requirement, spec: Spec) -> Iterator[tuple[str, str]]:
    version = sources.vllm_version()
    if req.source is None:
        yield "L018", "names no source (file and symbol)"
    elif version is None or req.in_force(version):
        problem = sources.missing(req.source.file, req.source.symbol)
        if problem is not None:
            yield "L019", problem
    if spec.sources and req.source is not None and evidence.key(req.source) not in spec.sources:
        yield "L030", f"{evidence.key(req.source)} has no digest in spec/sources.yaml; {UPDATE}"


def _examples(req: Requirement) -> Iterator[tuple[str, str]]:
    problems = list(misspelt(req))
    if problems:
        yield from (("L011", problem) for problem in problems)
        return
    if _cannot_fail(req):
        yield "L006", "the check is a constant that no event can violate"
        return
    triggered = False
    for outcome in outcomes(req):
        monitor = outcome.monitor
        if monitor.error is not None:
            yield "L012", f"{outcome.name}: {monitor.error}"
        elif not outcome.as_wanted:
            first = f": {monitor.violations[0].message}" if monitor.violations else "" if monitor.exercised else " (never triggered)"
            yield (
                ("L010", f"{outcome.name} is rejected{first}")
                if outcome.which == "good"
                else ("L008", f"{outcome.name} is accepted{first}")
            )
        triggered = triggered or (outcome.which == "good" and monitor.exercised > 0)
    if not req.bad:
        yield "L007", "no bad example: nothing shows that the check can fail"
    if not req.good:
        if _can_be_good(req):
            yield "L009", "no good example"
    elif not triggered and _can_be_good(req):
        yield "L013", "no good example triggers the check"


def _cannot_fail(req: Requirement) -> bool:
    """A constant that is what the pattern wants: `always: True`, `never: False`."""
    expression = req.expressions.get("check")
    return expression is not None and expression.constant and bool(expression.bind()({})) is (req.always is not None)


def _can_be_good(req: Requirement) -> bool:
    """Whether a triggered good example can exist: not if every occurrence is a violation (`never: True`)."""
    expression = req.expressions.get("check")
    return req.exercised is not None or expression is None or not expression.constant
