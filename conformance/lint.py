# SPDX-License-Identifier: Apache-2.0
"""Lint: what is wrong with the specification although it loads. Rules are numbered and never renumbered (there
is no L016 any more); `RULES` says what each is.

What cannot be loaded at all (unknown keys, steps, events, fields; duplicate keys and ids; broken expressions) is reported by
kvconform.load as `file:line: sentence`; `L001` carries those sentences here, so that one command shows everything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from kvconform.load import Spec, SpecError, load_spec

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
RULE_NUMBERS = range(1, 231)
BUG_NUMBERS = range(1, 133)


@dataclass(frozen=True, slots=True, order=True)
class Finding:
    """One breach of a lint rule: `where` is `file:line` (or an id if there is no place). A `warning` is no failure yet."""

    where: str
    code: str
    message: str
    warning: bool = False

    def __str__(self) -> str:
        return f"{self.where}: {self.code} {'(warning) ' if self.warning else ''}{self.message}"


def lint(spec: Spec, exercised: Mapping[str, object] | None = None, *, strict: bool = False) -> list[Finding]:
    """All findings, sorted by place. `exercised`: how often each requirement was exercised in a full run; without it L005 is not judged.

    `strict`: L028 too.
    """
    from kvconform import lint_cases, lint_defects, lint_requirements, lint_rules

    checks: list[Callable[[Spec], Iterable[Finding]]] = [lint_requirements.check, lint_cases.check, lint_defects.check]
    checks += [lint_rules.check]
    checks += [lint_defects.unkilled] if strict else []
    found = [finding for check in checks for finding in check(spec)]
    if exercised is not None:
        found.extend(not_exercised(spec, exercised))
    return sorted(set(found))


def lint_root(root: Path | None = None, exercised: Mapping[str, object] | None = None, *, strict: bool = False) -> list[Finding]:
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
            yield Finding(spec.places.get(f"requirement:{name}", name), "L005", f"no case exercises {name}")
