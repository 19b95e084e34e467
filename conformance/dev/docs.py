# SPDX-License-Identifier: Apache-2.0
"""Generator of pages in docs/: contract/, coverage.md, systems.md, and parts of other pages.

`python -m kvconform.dev.docs [--check]` renders the specification with docs/templates/, and needs
a checkout. The table of hooks is read from the installed vLLM's source, so docs/coverage.md is only
generated if that is the version that spec/sources.yaml was read from.

Marked parts are the picture of the packages in docs/architecture.md and the example in README.md.
"""

from __future__ import annotations

import ast
import importlib.resources
import json
import os
import re
import sys
import textwrap
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

import kvconform
from kvconform.compat import installed
from kvconform.contract import loader, references
from kvconform.contract.loader import Spec, SpecError, load_spec
from kvconform.contract.references import Bug, key
from kvconform.contract.requirement import Id, Model, Requirement, Source
from kvconform.contract.yaml12 import parse
from kvconform.dev import coverage, example, lint, systems
from kvconform.errors import Location, Problem, UsageError
from kvconform.gpu.page import section
from kvconform.gpu.result import NAME as GPU
from kvconform.gpu.result import load as load_result
from kvconform.report.explain import cases_about, check_lines
from kvconform.report.pages import render

ROOT = Path(kvconform.__file__).resolve().parent.parent
VLLM = "https://github.com/vllm-project/vllm/blob/v{version}/vllm/{file}"
EXAMPLE = 260
"""Length of the longest example that a page shows."""
KINDS = (
    ("requirement", "What a connector has to do"),
    ("guarantee", "What a connector can rely on"),
)
PICTURE_WIDTH = 98
"""Columns of the picture."""


def load() -> dict[str, Bug]:
    """Return the real bugs of spec/bugs.yaml by id. SpecError for a malformed entry."""
    text = (importlib.resources.files("kvconform.spec") / "bugs.yaml").read_text(encoding="utf-8")
    try:
        found = [Bug.model_validate(raw) for raw in parse(text, "spec/bugs.yaml")]
    except ValidationError as error:
        first = error.errors()[0]
        sentence = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise SpecError([Problem(Location("spec/bugs.yaml", 1), sentence)]) from None
    return {bug.bug: bug for bug in found}


class Area(Model):
    """Title and first paragraph of an area's page."""

    area: Id
    title: str = Field(min_length=1)
    text: str = Field(min_length=1)


def areas() -> list[Area]:
    """Return the areas of spec/areas.yaml, in the order of the index."""
    text = (ROOT / "spec" / "areas.yaml").read_text(encoding="utf-8")
    return [Area.model_validate(raw) for raw in parse(text, "spec/areas.yaml")]


class Pages:
    """The pages of one specification."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.bugs = load()
        self.areas = areas()
        versions = Counter(entry.version for entry in spec.sources.values())
        self.version = versions.most_common(1)[0][0]
        self.broken: dict[str, list[dict[str, Any]]] = {name: [] for name in spec.requirements}
        self.reproduced: dict[str, list[references.Entry]] = {
            name: [] for name in spec.requirements
        }
        for defect in spec.defects.values():
            for name in defect.get("fails", ()):
                self.broken[name].append(defect)
        for entry in loader.entries(spec):
            for name in entry.fails:
                self.reproduced[name].append(entry)

    def pages(self) -> dict[str, str]:
        """Map paths relative to docs/ to texts.

        UsageError for an area without an entry in spec/areas.yaml, an entry without requirements,
        or a page without its markers.
        """
        used = {req.area for req in self.spec.requirements.values()}
        if odd := used ^ {area.area for area in self.areas}:
            names = ", ".join(sorted(odd))
            raise UsageError(f"spec/areas.yaml and the areas of the requirements differ: {names}")
        found = {
            "contract/README.md": self.index(),
            **{f"contract/{area.area}.md": self.area(area) for area in self.areas},
            "systems.md": self.systems(),
            **{name: with_part(ROOT, name) for name in PARTS},
        }
        if (installed.vllm_version() or "").split("+")[0] == self.version:
            found["coverage.md"] = self.coverage()
        return found

    def index(self) -> str:
        """Return the first page: all areas, and the text of every requirement."""
        counts: dict[str, Counter[str]] = {
            area.area: Counter(req.kind for req in self._of(area)) for area in self.areas
        }
        rows = [
            {"area": a.area, "title": a.title, **{kind: counts[a.area][kind] for kind, _ in KINDS}}
            for a in self.areas
        ]
        everything = [
            req
            for area in self.areas
            for kind, _ in KINDS
            for req in self._of(area)
            if req.kind == kind
        ]
        total = sum(counts.values(), Counter())
        return self._render("index", rows=rows, counts=total, everything=everything)

    def area(self, area: Area) -> str:
        """Return the page of one area."""
        return self._render("area", area=area, requirements=self._of(area), kinds=KINDS)

    def systems(self) -> str:
        """Return the page of what covers each system."""
        rows = systems.load(self.spec, ROOT)
        return self._render("systems", rows=rows, sections=systems.SECTIONS)

    def coverage(self) -> str:
        """Return the page of what covers each hook, field, rule and bug. Needs vLLM's source."""
        return self._render(
            "coverage",
            hooks=coverage.render(self.spec),
            rules=list(self.spec.rules.values()),
            bugs=self.bugs,
            bug_waivers=list(self.spec.bug_waivers.values()),
        )

    def _of(self, area: Area) -> list[Requirement]:
        return [req for req in self.spec.requirements.values() if req.area == area.area]

    def _render(self, name: str, **values: Any) -> str:
        filters: dict[str, Callable[..., Any]] = {
            "squeeze": lambda text: " ".join(text.split()),
            "codes": _codes,
            "sentence": _sentence,
        }
        functions = {
            "check": check_lines,
            "examples": _examples,
            "cases": self._cases,
            "real": self._real,
            "source": self._source,
            "history": _history,
            "rule_cover": self._rule,
        }
        return render(
            ROOT / "docs" / "templates",
            f"{name}.md.jinja",
            filters,
            version=self.version,
            broken=self.broken,
            reproduced=self.reproduced,
            **functions,
            **values,
        )

    def _cases(self, req: Requirement) -> list[str]:
        """Return links to the cases that name its rules or bugs, or run its defects."""
        names = {*cases_about(self.spec, req)}
        for defect in self.broken[req.id]:
            names.update(defect["cases"])
        files = {name: self.spec.places[f"case:{name}"].file for name in sorted(names)}
        return [f"[{name}](../../{file})" for name, file in files.items()]

    def _real(self, req: Requirement) -> list[references.Bug]:
        """Return the bugs that it names, and those that its defects are modelled on."""
        names = {*req.bugs}
        for defect in self.broken[req.id]:
            names.update(defect.get("bugs", ()))
        return [self.bugs[name] for name in sorted(names) if name in self.bugs]

    def _source(self, source: Source) -> str:
        read = self.spec.sources.get(key(source))
        address = VLLM.format(version=read.version if read else self.version, file=source.file)
        place = f"`{source.file}`: `{source.symbol}`"
        if read is None:
            return f"[{place}]({address})"
        return f"[{place}]({address}#L{read.line}), digest `{read.digest}`"

    def _rule(self, number: str) -> str:
        waiver = self.spec.rule_waivers.get(number)
        if waiver is not None:
            return f"waived ({waiver.because}): {' '.join(waiver.reason.split())}"
        return _codes(self._covered.get(number, [])) or "**nothing**"

    @cached_property
    def _covered(self) -> dict[str, list[str]]:
        return lint.covered_by(self.spec)


def _codes(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _sentence(text: str) -> str:
    """Return the text with a capital, unless it begins with a name in code."""
    return text if "_" in text.split()[0] else text[:1].upper() + text[1:]


def _history(req: Requirement) -> str:
    start = f"since vLLM {req.since}" if req.since else "in all versions"
    return start + (f", no more in {req.until}" if req.until else "")


def _examples(req: Requirement) -> list[str]:
    """Return the first short accepted trace, all short rejected ones, and the number of others."""
    found: list[str] = []
    left: list[str] = []
    for which, word in (("good", "Accepted"), ("bad", "Rejected")):
        texts = [json.dumps(trace[0] if len(trace) == 1 else trace) for trace in req.traces(which)]  # type: ignore[arg-type]
        shown = [text for text in texts if len(text) <= EXAMPLE and "`" not in text]
        shown = shown[:1] if which == "good" else shown
        found += [f"{word}: `{text}`" for text in shown]
        if len(texts) > len(shown):
            left.append(f"{len(texts) - len(shown)} {word.lower()}")
    if left:
        found.append(f"More in the specification: {', '.join(left)}.")
    return found


def picture(root: Path) -> str:
    """Return the picture of the checkout `root` as Markdown, with the import contracts below it.

    Each floor of the picture is a layer of the contracts. UsageError for a package whose
    `__init__.py` does not say what it is for.
    """
    contracts = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"][
        "importlinter"
    ]["contracts"]
    layers = next(contract for contract in contracts if contract["type"] == "layers")["layers"]
    floors = [
        [(label(root, name), charter(root, name)) for name in re.split(r" *[|:] *", layer)]
        for layer in layers
    ]
    lines = ["```", *_drawn(floors), "```", "", *map(_rule, contracts)]
    return "\n".join(lines) + "\n"


def label(root: Path, name: str) -> str:
    """Return how the picture names a module or package: `cli.py`, `run/`, `../refimpl/`."""
    place = root / "conformance" / name
    if place.is_symlink():
        return f"../{name}/"
    return f"{name}/" if place.is_dir() else f"{name}.py"


def charter(root: Path, name: str) -> str:
    """Return the first paragraph of the docstring of a module or package, on one line."""
    place = root / "conformance" / name
    file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8")))
    if not text:
        raise UsageError(f"{file.relative_to(root)} has no docstring that says what it is for")
    return " ".join(text.split("\n\n")[0].split())


def _drawn(floors: list[list[tuple[str, str]]]) -> list[str]:
    """Return the lines of the picture: a box per floor, with a line or more per package."""
    left = max(len(name) for floor in floors for name, _ in floor)
    right = PICTURE_WIDTH - left - 7
    edge = "─" * (left + 2), "─" * (right + 2)
    lines = ["┌{}┬{}┐".format(*edge)]
    for number, floor in enumerate(floors):
        if number:
            lines.append("├{}┼{}┤".format(*edge))
        for name, text in floor:
            for index, part in enumerate(textwrap.wrap(text, right)):
                lines.append(f"│ {'' if index else name:<{left}} │ {part:<{right}} │")
    return [*lines, "└{}┴{}┘".format(*edge)]


def _rule(contract: dict[str, Any]) -> str:
    """Return a contract as an item of a list."""
    if contract["type"] != "protected":
        return f"- {contract['name']}."
    sides = (contract["allowed_importers"], contract["protected_modules"])
    who, what = (", ".join(f"`{name}`" for name in side) for side in sides)
    return f"- {contract['name']}: {who} may import {what}."


def measured(root: Path) -> str:
    """Return the section about the stored result of `kvconform gpu`."""
    return section(load_result(root / "docs" / GPU))


PARTS: dict[str, tuple[str, Callable[[Path], str]]] = {
    "architecture.md": ("PACKAGES", picture),
    "../README.md": ("REPORT", example.excerpt),
    "performance.md": ("GPU", measured),
}
"""Generated parts: page relative to docs/ -> the name in its markers, and what makes the part."""


def with_part(root: Path, name: str) -> str:
    """Return the text of a page in PARTS, with its generated part up to date."""
    marker, make = PARTS[name]
    text = (root / "docs" / name).read_text(encoding="utf-8")
    first, last = f"<!-- {marker} -->\n", f"<!-- /{marker} -->"
    before, opened, rest = text.partition(first)
    _, closed, after = rest.partition(last)
    if not opened or not closed:
        raise UsageError(f"{_shown(name)} lacks {first.strip()} or {last}")
    return f"{before}{first}{make(root)}{last}{after}"


def stale(pages: dict[str, str]) -> list[str]:
    """Return the pages whose file differs, and the files in docs/contract/ that are no page."""
    docs = ROOT / "docs"
    files = sorted(f"contract/{path.name}" for path in (docs / "contract").glob("*.md"))
    found = [name for name, text in pages.items() if not _holds(docs / name, text)]
    return found + [name for name in files if name not in pages]


def _shown(name: str) -> str:
    """Return the path of a page relative to the checkout."""
    return os.path.normpath(f"docs/{name}")


def _holds(path: Path, text: str) -> bool:
    return path.is_file() and path.read_text(encoding="utf-8") == text


def main(arguments: list[str] | None = None) -> int:
    """Write stale pages; with --check only report them, and return 1 if there are any."""
    given = sys.argv[1:] if arguments is None else arguments
    if given not in ([], ["--check"]):
        print("usage: python -m kvconform.dev.docs [--check]", file=sys.stderr)
        return 2
    pages = Pages(load_spec()).pages()
    names = stale(pages)
    for name in names:
        path = ROOT / "docs" / name
        if given:
            print(f"{_shown(name)} is stale; run python -m kvconform.dev.docs")
        elif name in pages:
            path.parent.mkdir(exist_ok=True)
            path.write_text(pages[name], encoding="utf-8")
            print(f"wrote {_shown(name)}")
        else:
            path.unlink()
            print(f"removed {_shown(name)}")
    return int(bool(given and names))


if __name__ == "__main__":
    sys.exit(main())
