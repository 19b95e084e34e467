# SPDX-License-Identifier: Apache-2.0
"""Text of `kvconform explain ID`: what is known about a requirement, case, defect, rule or bug."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Mapping
from importlib import resources
from typing import Any

from kvconform.contract import yaml12
from kvconform.contract.case import Case
from kvconform.contract.events import EVENTS
from kvconform.contract.loader import Spec
from kvconform.contract.references import Bug, key
from kvconform.contract.requirement import Match, Requirement
from kvconform.contract.scenario import Scenario
from kvconform.contract.situation import situations
from kvconform.errors import UsageError, did_you_mean
from kvconform.report.layout import wrapped

WIDTH = 100


def explain(spec: Spec, name: str, exercised_by: Mapping[str, Iterable[str]] | None = None) -> str:
    """Return the text about the requirement, case, scenario, defect, rule or bug `name`.

    `exercised_by`: case ids per requirement, known from a run. Raises UsageError for an unknown id.
    """
    texts = []
    if name in spec.requirements:
        cases = exercised_by.get(name) if exercised_by is not None else None
        texts.append(requirement(spec, spec.requirements[name], cases))
    if name in spec.cases:
        texts.append(case(spec, spec.cases[name]))
    elif name in spec.scenarios:
        texts.append(scenario(spec, spec.scenarios[name]))
    if name in spec.defects:
        texts.append(defect(spec, spec.defects[name]))
    if name in spec.rules:
        texts.append(rule(spec, name))
    bugs = _bugs() if re.fullmatch(r"B\d{3}", name) else {}
    if name in bugs:
        texts.append(bug(spec, bugs[name]))
    if texts:
        return "\n".join(texts)
    known = [*spec.requirements, *spec.cases, *spec.scenarios, *spec.defects, *spec.rules, *bugs]
    close = did_you_mean(name, known)
    raise UsageError(f"there is no requirement, case, defect, rule or bug {name!r}{close}")


def rule(spec: Spec, number: str) -> str:
    """Return the text about one rule of the contract."""
    found = spec.rules[number]
    until = f", until vLLM {found.until}" if found.until else ""
    parts = [f"{number} (rule; {found.who}{until})", "", _wrap(found.title)]
    waiver = spec.rule_waivers.get(number)
    if waiver is not None:
        parts += ["", f"Not covered: {waiver.because}", _wrap(waiver.reason)]
    return "\n".join([*parts, *_named_by(spec, "rules", number)]) + "\n"


def bug(spec: Spec, found: Bug) -> str:
    """Return the text about one real bug."""
    parts = [f"{found.bug} (bug; {found.where})", "", _wrap(found.what)]
    if found.cause:
        parts += ["", "Cause", _wrap(found.cause)]
    waiver = spec.bug_waivers.get(found.bug)
    if waiver is not None:
        parts += ["", f"Not covered: {waiver.because}", _wrap(waiver.reason)]
    parts += _named_by(spec, "bugs", found.bug)
    parts += ["", "Threads", *(f"  {address}" for _, address in found.links())]
    return "\n".join(parts) + "\n"


def _bugs() -> dict[str, Bug]:
    """Return the real bugs by number."""
    text = (resources.files("kvconform") / "spec" / "bugs.yaml").read_text(encoding="utf-8")
    return {raw["bug"]: Bug.model_validate(raw) for raw in yaml12.parse(text, "spec/bugs.yaml")}


def _named_by(spec: Spec, field: str, number: str) -> list[str]:
    """Return the lines about requirements, cases and defects whose `field` has a number."""
    lines: list[str] = []
    named = {
        "Requirements": [
            f"  {req.id} ({req.level}): {_one_line(req.text)}"
            for req in spec.requirements.values()
            if number in getattr(req, field)
        ],
        "Cases": [
            f"  {case.id}: {_one_line(case.text)}"
            for case in spec.cases.values()
            if number in getattr(case, field)
        ],
        "Planted defects": [
            f"  {each['id']}: {_one_line(each.get('text', ''))}"
            for each in spec.defects.values()
            if number in each.get(field, ())
        ],
    }
    for title, found in named.items():
        if found:
            lines += ["", title, *found]
    return lines


def scenario(spec: Spec, found: Scenario) -> str:
    """Return the text about one scenario of engine live."""
    start = found.start.model_dump(exclude_defaults=True)
    work = spec.workloads.get(found.workload or "")
    asked = work.text if work is not None else f"{len(found.requests)} requests"
    if found.entrypoint is not None:
        asked += f", by HTTP at the entrypoint {found.entrypoint}"
    facts = {
        "vLLM": ", ".join(f"{name} {value}" for name, value in start.items()) or "default settings",
        "asked": _one_line(asked),
        "due": ", ".join(found.due),
        "defined": spec.places.get(f"case:{found.id}", ""),
    }
    title = f"{found.id} (scenario of engine live)"
    return "\n".join([title, "", _wrap(found.text), "", *_table(facts, 11), ""])


def requirement(spec: Spec, req: Requirement, exercised_by: Iterable[str] | None = None) -> str:
    """Return the text about one requirement."""
    who = "guarantee of the engine" if req.kind == "guarantee" else "requirement"
    parts = [f"{req.id} ({who}, {req.level})", "", _wrap(req.text)]
    if req.why:
        parts += ["", "Why", _wrap(req.why)]
    if req.wrong:
        parts += ["", "How connectors get it wrong", _wrap(req.wrong)]
    if req.right:
        parts += ["", "Right", textwrap.indent(req.right.rstrip(), "    ")]
    parts += ["", "Check", *(f"  {line}" for line in check_lines(req))]
    parts += ["", "Facts", *_facts(spec, req)]
    if exercised_by is not None:
        title = "Exercised by"
        related = list(exercised_by)
    else:
        title = "Cases about the same rules or bugs"
        related = cases_about(spec, req)
    if related:
        parts += ["", title, _wrap(", ".join(related))]
    broken = [
        f"  {each['id']}: {_one_line(each.get('text', ''))}" for each in defects_of(spec, req.id)
    ]
    if broken:
        parts += ["", "Planted defects that it finds", *broken]
    return "\n".join(parts) + "\n"


def defects_of(spec: Spec, name: str) -> list[dict[str, Any]]:
    """Return the entries of spec/defects.yaml that requirement `name` has to find."""
    return [each for each in spec.defects.values() if name in each.get("fails", ())]


def defect(spec: Spec, entry: Mapping[str, Any]) -> str:
    """Return the text about one planted defect."""
    parts = [f"{entry['id']} (planted defect)", "", _wrap(entry.get("text", ""))]
    for title, kind in (("Found by", "fails"), ("May also fail", "may")):
        names = entry.get(kind, ())
        if names:
            parts += ["", title]
        for name in names:
            req = spec.requirements.get(name)
            parts.append(f"  {name}: {_one_line(req.text)}" if req else f"  {name}")
    facts: dict[str, Any] = {
        name: plain(value)
        for name, value in entry.items()
        if name not in ("id", "text", "fails", "may")
    }
    facts["defined"] = spec.places.get(f"defect:{entry['id']}", "")
    return "\n".join([*parts, "", "Facts", *_table(facts, 14)]) + "\n"


def cases_about(spec: Spec, req: Requirement) -> list[str]:
    """Return the ids of the cases that are about the requirement."""
    return [case.id for case in spec.cases.values() if case.is_about(req)]


def check_lines(req: Requirement) -> list[str]:
    """Return the check in words and expressions, one line per part."""
    if req.relate is not None:
        return _relate_lines(req)
    assert req.event is not None
    lines = [f"on     {req.event}: {EVENTS[req.event].doc}"]
    if req.where:
        lines.append(f"where  `{req.where}`")
    if req.exercised:
        lines.append(f"exercised by {_match(req.exercised)}")
    if req.always is not None:
        lines.append(f"always `{req.always}`")
    elif req.never is not None:
        lines.append("never" if req.expressions["check"].constant else f"never  `{req.never}`")
    elif req.count is not None:
        limits = (("at least", req.count.min), ("at most", req.count.max))
        bounds = " and ".join(f"{word} {bound}" for word, bound in limits if bound is not None)
        per = f" per `{req.count.per}`" if req.count.per else ""
        lines.append(f"count  {bounds} times{per}")
    elif req.precede is not None:
        lines.append(f"after  {_match(req.precede.before)}")
        if req.precede.end:
            lines.append(f"unless ended by {_match(req.precede.end)}")
    elif req.respond is not None:
        lines.append(f"then   {_match(req.respond.then)}")
        lines.append(f"by     {_match(req.respond.by)}")
    return lines


def _relate_lines(req: Requirement) -> list[str]:
    """Return the lines of a check that compares two runs."""
    relate = req.relate
    assert relate is not None
    how = "agree on" if not relate.common else "have in common, where both have one, a"
    lines = [
        f"the runs {relate.runs[0]} and {relate.runs[1]} {how} `{relate.project}`"
        f" of every {relate.event}"
    ]
    if relate.where:
        lines.append(f"where  `{relate.where}`")
    if relate.per:
        lines.append(f"per    `{relate.per}`")
    if relate.prefix:
        lines.append("a run that stops earlier agrees")
    return lines


def _match(match: Match) -> str:
    return match.event + (f" where `{match.where}`" if match.where else "")


def _facts(spec: Spec, req: Requirement) -> list[str]:
    """Return the lines of the section Facts of a requirement."""
    versions = []
    if req.since:
        versions.append(f"since {req.since}")
    if req.until:
        versions.append(f"until {req.until}")
    read = spec.sources.get(key(req.source)) if req.source else None
    blocked = "after an earlier failure of the same run: it can only be a consequence"
    facts: dict[str, Any] = {
        "area": req.area,
        "vLLM": " ".join(versions),
        "source": f"{req.source.file}: {req.source.symbol}" if req.source else "",
        "read": f"vLLM {read.version}, digest {read.digest}" if read else "",
        "capability": req.capability,
        "needs": ", ".join(sorted(req.channels)),
        "engines": ", ".join(req.engines),
        "rules": ", ".join(req.rules),
        "bugs": ", ".join(req.bugs),
        "blocked": blocked if req.consequence else "",
        "defined": spec.places.get(f"requirement:{req.id}", ""),
    }
    return _table(facts, 11)


def _table(facts: Mapping[str, Any], width: int) -> list[str]:
    """Return one line per fact, with the name in a column of `width`; empty values are left out."""
    return [f"  {name:<{width}}{value}" for name, value in facts.items() if value]


def case(spec: Spec, case: Case) -> str:
    """Return the text about one case."""
    parts = [f"{case.id} (case)", "", _wrap(case.text), "", "Steps"]
    parts += [
        f"  {number:>2}  {step.op}: {plain(step.arg)}" for number, step in enumerate(case.steps, 1)
    ]
    for title, items in (("Expects at the end", case.expect), ("Provokes", case.provokes)):
        if items:
            parts += ["", title]
        for item in items:
            when = f"  when `{item.when}`" if item.when else ""
            parts.append(f"  {item.what}: {plain(item.arg)}{when}")
    changed = case.config.model_dump(exclude_defaults=True)
    axes = [variant.id.split("[", 1)[1].rstrip("]") for variant in case.variants()]
    facts = {
        "config": plain(changed) if changed else "the default",
        "runs": f"{len(axes)}: {', '.join(axes)}",
        "needs": case.needs_expr.source if case.needs_expr.reads else "",
        "situations": ", ".join(case.situations),
        "risk only": "; ".join(f"{name}: {situations()[name].why}" for name in case.beyond),
        "rules": ", ".join(case.rules),
        "bugs": ", ".join(case.bugs),
        "defined": spec.places.get(f"case:{case.id}", ""),
    }
    return "\n".join([*parts, "", "Facts", *_table(facts, 11)]) + "\n"


def plain(value: Any) -> str:
    """Return an argument of a step or expectation as YAML flow text; defaults are left out."""
    if hasattr(value, "model_dump"):
        value = value.model_dump(by_alias=True, exclude_defaults=True)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {plain(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(plain, value)) + "]"
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _wrap(text: str) -> str:
    return "\n".join(wrapped(text, WIDTH, "  ", "  "))
