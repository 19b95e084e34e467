# SPDX-License-Identifier: Apache-2.0
"""docs/mutants.md and docs/mutants/score.json, generated from recorded results."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from kvconform.dev.mutants import judgement, result
from kvconform.dev.mutants.judgement import Judgement
from kvconform.dev.mutants.mutation import Site
from kvconform.dev.mutants.result import Result
from kvconform.dev.mutants.score import KILLS, Score, scores
from kvconform.dev.mutants.sites import mutations_of
from kvconform.dev.mutants.subject import FOLDER, Subject, path_of, subjects
from kvconform.errors import UsageError
from kvconform.report.pages import code, render

RESULTS = Path("docs/mutants")
KINDS = ("open", "unjudged", "recommendation", "performance", "equivalent")


@dataclass(frozen=True)
class Survivor:
    """A survivor and what is known about it."""

    result: Result
    judgement: Judgement | None


@dataclass(frozen=True)
class Module:
    """How many mutants a module of a subject has, and how many of those have a result.

    `total`: None for a module outside the repository, whose source depends on what is installed.
    """

    name: str
    total: int | None
    judged: int


@dataclass(frozen=True)
class Chapter:
    """The results of one subject."""

    subject: Subject
    results: list[Result]
    judgements: dict[Site, Judgement]
    modules: list[Module]

    @property
    def all_mutants(self) -> int | None:
        """The number of mutants of all modules; None if it is unknown."""
        totals = [each.total for each in self.modules if each.total is not None]
        return sum(totals) if len(totals) == len(self.modules) else None

    @property
    def judged(self) -> int:
        """The number of mutants that have a result."""
        return sum(each.judged for each in self.modules)

    @property
    def never_judged(self) -> list[str]:
        """The modules without any judged mutant."""
        return [each.name for each in self.modules if not each.judged]

    @property
    def total(self) -> Score:
        """The score of all results."""
        return scores(self.results, self.judgements, lambda each: "")[""]

    @property
    def by_module(self) -> dict[str, Score]:
        """The score of each module."""
        return scores(self.results, self.judgements, lambda each: each.module)

    @property
    def by_operator(self) -> dict[str, Score]:
        """The score of each operator."""
        return scores(self.results, self.judgements, lambda each: each.operator)

    @property
    def explored(self) -> int:
        """Kills that took a random workload."""
        return sum(each.explored for each in self.results)

    @property
    def days(self) -> str:
        """When the mutants were judged: `on DAY`, or `from DAY to DAY`."""
        days = sorted({each.date for each in self.results})
        return f"on {days[0]}" if len(days) == 1 else f"from {days[0]} to {days[-1]}"

    @property
    def sites(self) -> list[Site]:
        """The mutants that were judged."""
        return [each.site for each in self.results]

    def survivors(self, kind: str) -> list[Survivor]:
        """Return the survivors of one kind."""
        found = []
        for each in self.results:
            known = self.judgements.get(each.site)
            if each.outcome == "survived" and (known.kind if known else "unjudged") == kind:
                found.append(Survivor(each, known))
        return sorted(found, key=lambda one: one.result.site)


def chapters(root: Path, folder: Path = FOLDER) -> list[Chapter]:
    """Return the subjects that have results."""
    found = []
    for name, subject in subjects().items():
        results = result.read(root / RESULTS / f"{name}.jsonl")
        if results:
            known = judgement.read(name, folder)
            found.append(Chapter(subject, results, known, modules_of(subject, results, root)))
    return found


def modules_of(subject: Subject, results: list[Result], root: Path) -> list[Module]:
    """Return the modules of a subject, in the order of its file.

    Results about lines that a module no longer has are not counted.
    """
    found = []
    for name in subject.modules:
        judged = {each.site for each in results if each.module == name}
        total = None
        if _is_ours(name, subject, root):
            source = path_of(name, subject, root).read_bytes()
            sites = {each.site for each in mutations_of(source, name)}
            judged &= sites
            total = len(sites)
        found.append(Module(name, total, len(judged)))
    return found


def _is_ours(name: str, subject: Subject, root: Path) -> bool:
    """Return whether a module's source is part of the repository."""
    try:
        path = path_of(name, subject, root).resolve()
    except UsageError:  # not installed
        return False
    return path.is_relative_to(root.resolve()) and "site-packages" not in path.parts


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.0f} %"


def texts(root: Path) -> dict[Path, str]:
    """Return the text of both pages, by path."""
    made = chapters(root)
    page = render(
        root / "docs" / "templates",
        "mutants.md.jinja",
        {"code": code, "percent": _percent},
        chapters=made,
        totals=[(each.subject.id, each.total) for each in made],
        missing=[name for name in subjects() if name not in {each.subject.id for each in made}],
        kills=KILLS,
        kinds=KINDS,
    )
    data = {
        each.subject.id: {
            "total": each.total.to_dict(),
            "coverage": {
                module.name: {"mutants": module.total, "judged": module.judged}
                for module in each.modules
            },
            "modules": {name: score.to_dict() for name, score in each.by_module.items()},
            "operators": {name: score.to_dict() for name, score in each.by_operator.items()},
        }
        for each in made
    }
    return {
        root / "docs" / "mutants.md": page,
        root / RESULTS / "score.json": json.dumps(data, indent=1) + "\n",
    }


def problems(root: Path) -> list[str]:
    """Return what is wrong with the judgements, in sentences.

    Modules that are not installed here are not looked at.
    """
    found = []
    for name, subject in subjects().items():
        known = judgement.read(name)
        sites: set[Site] = set()
        installed: set[str] = set()
        for module in {site.module for site in known}:
            try:
                path = path_of(module, subject, root)
            except UsageError:
                continue
            installed.add(module)
            sites |= {each.site for each in mutations_of(path.read_bytes(), module)}
        mine = [site for site in known if site.module in installed]
        found += [
            f"survivors/{name}.yaml: there is no mutant {site}"
            for site in judgement.obsolete(mine, sites)
        ]
    return found


def main(root: Path, *, check: bool) -> int:
    """Write the pages; with `check` report the stale ones. 1 if a page or a judgement is stale."""
    wrong = problems(root)
    for path, text in texts(root).items():
        if path.is_file() and path.read_text(encoding="utf-8") == text:
            continue
        if check:
            name = path.relative_to(root)
            wrong.append(f"{name} is stale; run python -m kvconform.dev.mutants --pages")
        else:
            path.write_text(text, encoding="utf-8")
            print(f"wrote {path.relative_to(root)}")
    print(*wrong, sep="\n", end="\n" if wrong else "")
    return int(bool(wrong))
