# SPDX-License-Identifier: Apache-2.0
"""The real bugs that requirements, cases and defects are made after: `spec/bugs.yaml`.

The reference documentation: docs/contract/ and docs/coverage.md, made from the specification by `python -m kvconform.dev.docs [--check]`.

A tool of the checkout: the templates are in docs/templates/, and Jinja is no dependency of kvconform. The table of hooks is read from the
installed vLLM's source, so docs/coverage.md can be made only where the version is installed that spec/sources.yaml was read from.
"""

from __future__ import annotations

import importlib.resources
import json
import sys
from collections import Counter
from collections.abc import Iterable
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
from kvconform.dev import coverage, lint
from kvconform.errors import UsageError
from kvconform.report.explain import cases_about, check_lines


def load() -> dict[str, Bug]:
    """All bugs by id. SpecError for an entry that is malformed."""
    text = (importlib.resources.files("kvconform.spec") / "bugs.yaml").read_text(encoding="utf-8")
    try:
        found = [Bug.model_validate(raw) for raw in parse(text, "spec/bugs.yaml")]
    except ValidationError as error:
        first = error.errors()[0]
        raise SpecError(
            [f"spec/bugs.yaml:1: {'.'.join(map(str, first['loc']))}: {first['msg']}"]
        ) from None
    return {bug.bug: bug for bug in found}


ROOT = Path(kvconform.__file__).resolve().parent.parent
VLLM = "https://github.com/vllm-project/vllm/blob/v{version}/vllm/{file}"
EXAMPLE = 260
KINDS = (
    ("requirement", "What a connector has to do"),
    ("guarantee", "What a connector can rely on"),
)


class Area(Model):
    """The first paragraph of an area's page."""

    area: Id
    title: str = Field(min_length=1)
    text: str = Field(min_length=1)


def areas() -> list[Area]:
    """spec/areas.yaml, in the order of the index."""
    text = (ROOT / "spec" / "areas.yaml").read_text(encoding="utf-8")
    return [Area.model_validate(raw) for raw in parse(text, "spec/areas.yaml")]


class Pages:
    """The pages of one specification. `pages()` is all of them by path, relative to docs/."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.bugs = load()
        self.areas = areas()
        self.version = Counter(entry.version for entry in spec.sources.values()).most_common(1)[0][
            0
        ]
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
        """Path below docs/ -> text. UsageError for an area without an entry in spec/areas.yaml, or an entry without requirements."""
        used = {req.area for req in self.spec.requirements.values()}
        if odd := used ^ {area.area for area in self.areas}:
            raise UsageError(
                f"spec/areas.yaml and the areas of the requirements differ: {', '.join(sorted(odd))}"
            )
        found = {
            "contract/README.md": self.index(),
            **{f"contract/{area.area}.md": self.area(area) for area in self.areas},
        }
        if (installed.source_version() or "").split("+")[0] == self.version:
            found["coverage.md"] = self.coverage()
        return found

    def index(self) -> str:
        """The first page: all areas, and all sentences."""
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
        return self._render(
            "index", rows=rows, counts=sum(counts.values(), Counter()), everything=everything
        )

    def area(self, area: Area) -> str:
        """The page of one area."""
        return self._render("area", area=area, requirements=self._of(area), kinds=KINDS)

    def coverage(self) -> str:
        """What covers each hook, field and rule. Needs vLLM's source."""
        return self._render(
            "coverage", hooks=coverage.render(self.spec), rules=list(self.spec.rules.values())
        )

    def _of(self, area: Area) -> list[Requirement]:
        return [req for req in self.spec.requirements.values() if req.area == area.area]

    def _render(self, name: str, **values: Any) -> str:
        text = self._environment.get_template(f"{name}.md.jinja").render(
            version=self.version, **values
        )
        return text.rstrip() + "\n"

    @cached_property
    def _environment(self) -> Any:
        from jinja2 import Environment, FileSystemLoader, StrictUndefined

        made = Environment(  # Markdown, not HTML: nothing is to be escaped
            loader=FileSystemLoader(ROOT / "docs" / "templates"),
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        made.filters |= {
            "squeeze": lambda text: " ".join(text.split()),
            "codes": _codes,
            "sentence": _sentence,
        }
        made.globals |= {
            "broken": self.broken,
            "reproduced": self.reproduced,
            "check": check_lines,
            "examples": _examples,
        }
        made.globals |= {
            "cases": self._cases,
            "real": self._real,
            "source": self._source,
            "history": _history,
            "rule_cover": self._rule,
        }
        return made

    def _cases(self, req: Requirement) -> list[str]:
        """Links to the cases that name its rules or bugs, and to those of the defects that it finds."""
        names = [
            *cases_about(self.spec, req),
            *(name for defect in self.broken[req.id] for name in defect["cases"]),
        ]
        return [
            f"[{name}](../../{self.spec.places[f'case:{name}'].rsplit(':', 1)[0]})"
            for name in sorted(set(names))
        ]

    def _real(self, req: Requirement) -> list[references.Bug]:
        """The bugs that it names, and those that its defects are made after."""
        names = {
            *req.bugs,
            *(name for defect in self.broken[req.id] for name in defect.get("bugs", ())),
        }
        return [self.bugs[name] for name in sorted(names) if name in self.bugs]

    def _source(self, source: Source) -> str:
        read = self.spec.sources.get(key(source))
        version = read.version if read else self.version
        link = f"[`{source.file}`: `{source.symbol}`]({VLLM.format(version=version, file=source.file)}{f'#L{read.line}' if read else ''})"
        return link + (f", digest `{read.digest}`" if read else "")

    def _rule(self, number: str) -> str:
        waiver = self.spec.rule_waivers.get(number)
        names = _codes(self._covered.get(number, []))
        reason = " ".join(waiver.reason.split()) if waiver else ""
        return f"waived ({waiver.because}): {reason}" if waiver else names or "**nothing**"

    @cached_property
    def _covered(self) -> dict[str, list[str]]:
        return lint.covered_by(self.spec)


def _codes(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _sentence(text: str) -> str:
    """With a capital, unless it begins with a name in code."""
    return text if "_" in text.split()[0] else text[:1].upper() + text[1:]


def _history(req: Requirement) -> str:
    start = f"since vLLM {req.since}" if req.since else "in all versions"
    return start + (f", no more in {req.until}" if req.until else "")


def _examples(req: Requirement) -> list[str]:
    """The first short trace that it accepts, all short ones that it rejects, and how many there are besides."""
    found, left = [], []
    for which, word in (("good", "Accepted"), ("bad", "Rejected")):
        texts = [json.dumps(trace[0] if len(trace) == 1 else trace) for trace in req.traces(which)]  # type: ignore[arg-type]
        shown = [text for text in texts if len(text) <= EXAMPLE and "`" not in text]
        shown = shown[:1] if which == "good" else shown
        found += [f"{word}: `{text}`" for text in shown]
        left += [f"{len(texts) - len(shown)} {word.lower()}"] if len(texts) > len(shown) else []
    return found + [f"More in the specification: {', '.join(left)}."] * bool(left)


def stale(pages: dict[str, str]) -> list[str]:
    """The pages whose file says something else, and files in docs/contract/ that are no page."""
    docs = ROOT / "docs"
    found = [
        name
        for name, text in pages.items()
        if not (docs / name).is_file() or (docs / name).read_text(encoding="utf-8") != text
    ]
    return found + [
        name
        for name in sorted(f"contract/{path.name}" for path in (docs / "contract").glob("*.md"))
        if name not in pages
    ]


def main(arguments: list[str] | None = None) -> int:
    """Write what is stale; with --check only say so, and return 1."""
    given = sys.argv[1:] if arguments is None else arguments
    if given not in ([], ["--check"]):
        print("usage: python -m kvconform.dev.docs [--check]", file=sys.stderr)
        return 2
    pages = Pages(load_spec()).pages()
    names = stale(pages)
    for name in names:
        path = ROOT / "docs" / name
        if given:
            print(f"docs/{name} is stale: python -m kvconform.dev.docs")
        elif name in pages:
            path.parent.mkdir(exist_ok=True)
            path.write_text(pages[name], encoding="utf-8")
            print(f"wrote docs/{name}")
        else:
            path.unlink()
            print(f"removed docs/{name}")
    return int(bool(given and names))


if __name__ == "__main__":
    sys.exit(main())
