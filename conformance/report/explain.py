# SPDX-License-Identifier: Apache-2.0
"""The text of `kvconform explain ID`: everything that the specification knows about a requirement, a case or a defect, for a terminal."""

from __future__ import annotations

import difflib
import textwrap
from collections.abc import Iterable, Mapping
from typing import Any

from kvconform.contract.case import Case
from kvconform.contract.events import EVENTS
from kvconform.contract.loader import Spec
from kvconform.contract.references import key
from kvconform.contract.requirement import Match, Requirement
from kvconform.contract.scenario import Scenario
from kvconform.errors import UsageError

WIDTH = 100


def explain(spec: Spec, name: str, exercised_by: Mapping[str, Iterable[str]] | None = None) -> str:
    """The text about requirement, case or defect `name`. `exercised_by`: case ids per requirement, known from a run. UsageError."""
    texts = []
    if name in spec.requirements:
        texts.append(
            requirement(
                spec,
                spec.requirements[name],
                exercised_by.get(name) if exercised_by is not None else None,
            )
        )
    if name in spec.cases:
        texts.append(case(spec, spec.cases[name]))
    elif name in spec.scenarios:
        texts.append(scenario(spec, spec.scenarios[name]))
    if name in spec.defects:
        texts.append(defect(spec, spec.defects[name]))
    if texts:
        return "\n".join(texts)
    close = difflib.get_close_matches(
        name, [*spec.requirements, *spec.cases, *spec.scenarios, *spec.defects], 3
    )
    raise UsageError(
        f"there is no requirement, case or defect {name!r}"
        + (f"; did you mean {' or '.join(close)}?" if close else "")
    )


def scenario(spec: Spec, found: Scenario) -> str:
    """All about one scenario of engine live."""
    start = (
        ", ".join(
            f"{key} {value}" for key, value in found.start.model_dump(exclude_defaults=True).items()
        )
        or "as ever"
    )
    work = spec.workloads.get(found.workload or "")
    asked = work.text if work is not None else f"{len(found.requests)} requests"
    facts = {
        "vLLM": start,
        "asked": " ".join(asked.split()),
        "due": ", ".join(found.due),
        "defined": spec.places.get(f"case:{found.id}", ""),
    }
    lines = [f"  {key:<11}{value}" for key, value in facts.items() if value]
    return "\n".join(
        [f"{found.id} (scenario of engine live)", "", _wrap(found.text), "", *lines, ""]
    )


def requirement(spec: Spec, req: Requirement, exercised_by: Iterable[str] | None = None) -> str:
    """All about one requirement."""
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
    related = list(exercised_by) if exercised_by is not None else cases_about(spec, req)
    if related:
        parts += [
            "",
            "Exercised by" if exercised_by is not None else "Cases about the same rules or bugs",
            _wrap(", ".join(related)),
        ]
    broken = [
        f"  {each['id']}: {' '.join(each.get('text', '').split())}"
        for each in defects_of(spec, req.id)
    ]
    if broken:
        parts += ["", "Planted defects that it finds", *broken]
    return "\n".join(parts) + "\n"


def defects_of(spec: Spec, name: str) -> list[dict[str, Any]]:
    """The entries of spec/defects.yaml that requirement `name` has to find."""
    return [each for each in spec.defects.values() if name in each.get("fails", ())]


def defect(spec: Spec, entry: Mapping[str, Any]) -> str:
    """All about one planted defect."""
    parts = [f"{entry['id']} (planted defect)", "", _wrap(entry.get("text", ""))]
    for title, kind in (("Found by", "fails"), ("May fail besides", "may")):
        names = [(name, spec.requirements.get(name)) for name in entry.get(kind, ())]
        if names:
            parts += [
                "",
                title,
                *(
                    f"  {name}" + (f": {' '.join(req.text.split())}" if req else "")
                    for name, req in names
                ),
            ]
    told = {
        key: plain(value)
        for key, value in entry.items()
        if key not in ("id", "text", "fails", "may")
    }
    told["defined"] = spec.places.get(f"defect:{entry['id']}", "")
    return (
        "\n".join(
            [*parts, "", "Facts", *(f"  {key:<14}{value}" for key, value in told.items() if value)]
        )
        + "\n"
    )


def cases_about(spec: Spec, req: Requirement) -> list[str]:
    """The cases that name one of the requirement's rules or bugs."""
    return [
        case.id
        for case in spec.cases.values()
        if set(case.rules) & set(req.rules) or set(case.bugs) & set(req.bugs)
    ]


def check_lines(req: Requirement) -> list[str]:
    """The check in words and expressions, one line per part."""
    if req.relate is not None:
        relate = req.relate
        order = "" if relate.ordered else ", in any order"
        lines = [
            f"the runs {relate.runs[0]} and {relate.runs[1]} agree on `{relate.project}` of every {relate.event}{order}"
        ]
        lines += [f"where  `{relate.where}`"] if relate.where else []
        lines += [f"per    `{relate.per}`"] if relate.per else []
        return lines + (["a run that stops earlier agrees"] if relate.prefix else [])
    assert req.event is not None
    lines = [f"on     {req.event}: {EVENTS[req.event].doc}"]
    lines += [f"where  `{req.where}`"] if req.where else []
    lines += [f"at stake with {_match(req.exercised)}"] if req.exercised else []
    if req.always is not None:
        lines.append(f"always `{req.always}`")
    elif req.never is not None:
        lines.append(
            "never  at all" if req.expressions["check"].constant else f"never  `{req.never}`"
        )
    elif req.count is not None:
        bounds = [
            f"{word} {bound}"
            for word, bound in (("at least", req.count.min), ("at most", req.count.max))
            if bound is not None
        ]
        lines.append(
            f"count  {' and '.join(bounds)} times"
            + (f" per `{req.count.per}`" if req.count.per else "")
        )
    elif req.precede is not None:
        lines.append(f"after  {_match(req.precede.before)}")
        lines += [f"unless ended by {_match(req.precede.end)}"] if req.precede.end else []
    elif req.respond is not None:
        lines += [f"then   {_match(req.respond.then)}", f"by     {_match(req.respond.by)}"]
    return lines


def _match(match: Match) -> str:
    return match.event + (f" where `{match.where}`" if match.where else "")


def _facts(spec: Spec, req: Requirement) -> list[str]:
    """Key and value lines; what is not known is left out."""
    versions = " ".join(
        filter(
            None,
            [f"since {req.since}" if req.since else "", f"until {req.until}" if req.until else ""],
        )
    )
    read = spec.sources.get(key(req.source)) if req.source else None
    facts: dict[str, Any] = {
        "area": req.area,
        "vLLM": versions,
        "source": f"{req.source.file}: {req.source.symbol}" if req.source else "",
        "read": f"vLLM {read.version}, digest {read.digest}" if read else "",
        "capability": req.capability,
        "needs": ", ".join(sorted(req.channels)),
        "engines": ", ".join(req.engines),
        "rules": ", ".join(req.rules),
        "bugs": ", ".join(req.bugs),
        "blocked": "after an earlier failure of the same run: it can only be a consequence"
        if req.consequence
        else "",
        "defined": spec.places.get(f"requirement:{req.id}", ""),
    }
    return [f"  {key:<11}{value}" for key, value in facts.items() if value]


def case(spec: Spec, case: Case) -> str:
    """All about one case."""
    parts = [f"{case.id} (case)", "", _wrap(case.text), "", "Steps"]
    parts += [
        f"  {number:>2}  {step.op}: {plain(step.arg)}" for number, step in enumerate(case.steps, 1)
    ]
    for title, items in (("Expects at the end", case.expect), ("Provokes", case.provokes)):
        if items:
            parts += [
                "",
                title,
                *(
                    f"  {item.what}: {plain(item.arg)}"
                    + (f"  when `{item.when}`" if item.when else "")
                    for item in items
                ),
            ]
    variants = case.variants()
    changed = case.config.model_dump(exclude_defaults=True)
    facts = {
        "config": plain(changed) if changed else "the default",
        "runs": f"{len(variants)}: "
        + ", ".join(variant.id.split("[", 1)[1].rstrip("]") for variant in variants),
        "needs": case.needs_expr.source if case.needs_expr.reads else "",
        "rules": ", ".join(case.rules),
        "bugs": ", ".join(case.bugs),
        "defined": spec.places.get(f"case:{case.id}", ""),
    }
    return (
        "\n".join(
            [*parts, "", "Facts", *(f"  {key:<11}{value}" for key, value in facts.items() if value)]
        )
        + "\n"
    )


def plain(value: Any) -> str:
    """A step's or expectation's argument, as it could be written in YAML; what has its default is left out."""
    if hasattr(value, "model_dump"):
        value = value.model_dump(by_alias=True, exclude_defaults=True)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {plain(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(plain, value)) + "]"
    return (
        {True: "true", False: "false", None: "null"}[value]
        if value is None or isinstance(value, bool)
        else str(value)
    )


def _wrap(text: str) -> str:
    return textwrap.fill(" ".join(text.split()), WIDTH, initial_indent="  ", subsequent_indent="  ")
