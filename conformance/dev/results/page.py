# SPDX-License-Identifier: Apache-2.0
"""Generator of docs/results/: README.md, and one page per family of connectors.

The pages come from digests, findings and notes; their texts are templates in docs/templates/.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvconform.config import catalogue
from kvconform.contract.loader import Spec
from kvconform.contract.requirement import Source
from kvconform.dev import registered
from kvconform.dev.example import ROOT
from kvconform.dev.results import basis
from kvconform.dev.results.basis import Basis
from kvconform.dev.results.digest import Area, Digest
from kvconform.dev.results.finding import STATUSES, Finding
from kvconform.judge.aggregate import called
from kvconform.live.random import PAIR_REQUESTS
from kvconform.report.pages import render
from kvconform.words import listed

ENGINES = ("reference", "vllm", "live")
LISTED = 5
"""How many cases a cell names."""


def family(entry: str) -> str:
    """Return the family of a catalogue entry, or its own name if the catalogue has it no more."""
    return catalogue.named(entry).group(entry) if entry in catalogue.names() else entry


def pages(
    digests: Sequence[Digest], findings: Sequence[Finding], spec: Spec, root: Path
) -> dict[str, str]:
    """Map file names to the texts of the pages. Reads the notes below `root`; writes nothing."""
    campaigns = [digest for digest in digests if digest.seeds]
    digests = [digest for digest in digests if not digest.seeds]
    families = sorted(
        {family(digest.entry) for digest in (*digests, *campaigns)}
        | {finding.family for finding in findings}
    )
    by_family = [
        (name, [digest for digest in digests if family(digest.entry) == name]) for name in families
    ]
    found = {
        "README.md": _page(
            "results",
            spec,
            findings,
            digests=digests,
            campaigns=campaigns,
            findings=findings,
            families=by_family,
            registered=registered.recorded(),
            exempt=registered.exempt(),
            judged=registered.judged(),
            # About connectors that were tried and belong to no family that was judged.
            notes=_notes(root, "README"),
        )
    }
    for name, mine in by_family:
        drawn = [digest for digest in campaigns if family(digest.entry) == name]
        found[f"{name}.md"] = _family(name, mine, drawn, findings, spec, _notes(root, name))
    return found


def _notes(root: Path, name: str) -> str:
    notes = root / "notes" / f"{name}.md"
    return notes.read_text(encoding="utf-8").strip() if notes.is_file() else ""


def _family(
    name: str,
    digests: Sequence[Digest],
    campaigns: Sequence[Digest],
    findings: Sequence[Finding],
    spec: Spec,
    notes: str,
) -> str:
    both = [*digests, *campaigns]
    about = [each for each in findings if each.family == name]
    return _page(
        "results-family",
        spec,
        findings,
        name=name,
        entries={
            each.entry: catalogue.named(each.entry).text
            for each in both
            if each.entry in catalogue.names()
        },
        digests=digests,
        campaigns=campaigns,
        adapters=sorted({title for each in both for title in each.adapters}),
        broken=_broken(both),
        findings=[
            (heading, [each for each in about if each.status == status])
            for status, heading in STATUSES.items()
        ],
        bases=basis.bases(both, findings),
        risks=basis.risks(both, findings),
        notes=notes,
    )


def _page(template: str, spec: Spec, findings: Sequence[Finding], /, **values: Any) -> str:
    filters: dict[str, Callable[..., Any]] = {
        "areas": _areas,
        "cases": _cases,
        "cell": _cell,
        "explained": basis.explained_by,
        "failed": _failed,
        "family": family,
        "installed": _installed,
        "link": _link,
        "loads": _loads,
        "named": _named,
        "rests": _rests,
        "risks": _risks,
        "rules": lambda finding: _rules(finding, spec),
        "severity": _severity,
        "unexplained": lambda digest: ", ".join(basis.unexplained(digest, findings)),
        "verdict": _verdict,
    }
    folder = ROOT / "docs" / "templates"
    return render(folder, f"{template}.md.jinja", filters, pair_requests=PAIR_REQUESTS, **values)


def _broken(digests: Sequence[Digest]) -> dict[str, list[str]]:
    """Map the guarantees that vLLM broke to the connectors and engines with which it did."""
    where: dict[str, list[str]] = {}
    for each in digests:
        workloads = " (random workloads)" if each.seeds else ""
        for name in each.guarantees:
            where.setdefault(name, []).append(f"{each.entry} on {each.engine}{workloads}")
    return where


def _rules(finding: Finding, spec: Spec) -> str:
    """Return the requirements of a finding, each with the place in vLLM's source that it cites."""
    found = [spec.requirements[name] for name in finding.requirements if name in spec.requirements]
    return "; ".join(f"`{rule.id}`: {rule.text} ({_source(rule.source)})" for rule in found)


def _source(source: Source | None) -> str:
    return f"{source.file}: {source.symbol}" if source else "no single place"


def _areas(digests: Sequence[Digest]) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """Return the entries, and per area a cell for each of them: a mark per engine."""
    entries = list(dict.fromkeys(digest.entry for digest in digests))
    names = sorted({area for digest in digests for area in digest.areas})
    at = {(digest.entry, digest.engine): digest for digest in digests}
    rows = []
    for area in names:
        cells = [
            "".join(_mark(at.get((entry, engine)), area) for engine in ENGINES) for entry in entries
        ]
        rows.append((area, cells))
    return entries, rows


def _mark(digest: Digest | None, name: str) -> str:
    if digest is None:
        return " "
    area = digest.areas.get(name, Area())
    if area.failed:
        return "✗"
    if area.advice or area.risks:
        return "!"
    if area.blocked:
        return "b"
    if area.passed:
        return "✓"
    return "u" if area.unsupported and not area.not_shown else "·"


def _loads(digest: Digest) -> str:
    return f"({digest.loads})" if digest.transfers is None else str(digest.transfers)


def _verdict(digest: Digest) -> str:
    exercised = bool(digest.guarantees) or any(
        area.passed or area.failed or area.risks or area.advice or area.blocked
        for area in digest.areas.values()
    )
    return called(digest.verdict, exercised) + ("" if digest.complete else " (cut short)")


def _failed(digest: Digest) -> str:
    return ", ".join(basis.failed(digest))


def _risks(digest: Digest) -> str:
    return ", ".join(basis.at_risk(digest)) if digest.knows_risks else "not recorded"


def _rests(each: Basis) -> str:
    """Return the findings that explain a failed requirement or a risk, in one line."""
    parts = []
    if each.unexplained:
        parts.append("**unexplained**" if each.status == "confirmed" else "no finding")
    parts += [_stated(finding, each) for finding in each.fitting]
    if each.named:
        named = ", ".join(_stated(finding, each) for finding in each.named)
        parts.append(f"by requirement only: {named}")
    return "; ".join(parts)


def _stated(finding: Finding, each: Basis) -> str:
    """Return a link to a finding, with its status unless that is the one that explains."""
    status = "" if finding.status == each.status else f"{finding.status}: "
    return f"{status}{_named(finding)} ({_severity(finding)})"


def _cases(names: Sequence[str]) -> str:
    return listed([f"`{name}`" for name in names], LISTED)


def _named(finding: Finding) -> str:
    """Return a link to a finding."""
    return f"[{finding.id}]({finding.family}.md#{finding.id})"


def _severity(finding: Finding) -> str:
    """Return the severity of a finding in two terms."""
    return f"{finding.severity.effect}, {finding.severity.likely}"


def _installed(digest: Digest) -> str:
    packages = [f"{name} {version}" for name, version in sorted(digest.packages.items())]
    return ", ".join([f"vllm {digest.vllm}", *packages])


def _link(address: str) -> str:
    return f"[{address.rstrip('/').rsplit('/', 1)[-1]}]({address})"


def _cell(text: str) -> str:
    """Return the text on one line, with bars escaped. Blank cells stay as they are."""
    return " ".join(text.replace("|", "\\|").split()) if text.strip() else text
