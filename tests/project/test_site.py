# SPDX-License-Identifier: Apache-2.0
"""Tests of the documentation as a site: all pages are reached, links and anchors lead somewhere.

The site must also read as the pages do in the repository. The tests in the second half need MkDocs
and run in `nox -s docs`.
"""

from __future__ import annotations

import html.parser
import importlib.util
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from urllib.parse import unquote

import pytest

from kvconform.contract import yaml12
from kvconform.contract.events import PROVENANCE
from places import ROOT

DOCS = ROOT / "docs"
NEEDS_MKDOCS = pytest.mark.skipif(
    importlib.util.find_spec("mkdocs") is None or importlib.util.find_spec("material") is None,
    reason="MkDocs and its theme are not installed here: nox -s docs",
)


def load_hooks() -> Any:
    """docs/site/hooks.py, as MkDocs loads it: by its path."""
    spec = importlib.util.spec_from_file_location(
        "kvconform_site_hooks", DOCS / "site" / "hooks.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


HOOKS: ModuleType | Any = load_hooks()
CONFIG = yaml12.parse((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), "mkdocs.yml")
LEFT_OUT = tuple(line.lstrip("/ ") for line in CONFIG["exclude_docs"].split() if line.endswith("/"))
PAGES = [ROOT / name for name in HOOKS.PAGES] + sorted(
    page
    for page in DOCS.rglob("*.md")
    if not page.relative_to(DOCS).as_posix().startswith(LEFT_OUT)
)


def text_of(page: Path) -> str:
    """A page without its code."""
    return HOOKS.LINK.sub(lambda found: found["target"] or "", page.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def anchors(page: Path) -> set[str]:
    """What a link into a page may name: its headings, by GitHub's rules, and `<a id=...>`."""
    plain = re.sub(r"^ *```.*?^ *```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    headings = [
        re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
        for heading in re.findall(r"^#+ +(.*?) *$", plain, re.M)
    ]
    return {HOOKS.slug(heading) for heading in headings} | set(
        re.findall(r'<a id="([^"]+)"', plain)
    )


def leaves(nav: list[Any]) -> Iterator[str]:
    for entry in nav:
        if isinstance(entry, str):
            yield entry
        else:
            for inner in entry.values():
                yield from leaves(inner) if isinstance(inner, list) else [inner]


def test_every_page_is_in_the_navigation_once() -> None:
    there = [HOOKS.uri_of(page.relative_to(ROOT).as_posix()) for page in PAGES]
    assert Counter(leaves(HOOKS.expanded(CONFIG["nav"]))) == Counter(there)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_anchors_lead_somewhere(page: Path) -> None:
    missing = []
    for found in HOOKS.LINK.finditer(page.read_text(encoding="utf-8")):
        path, _, anchor = (found["target"] or "").partition("#")
        target = page.parent / path if path else page
        if (
            anchor
            and "://" not in path
            and target.suffix == ".md"
            and anchor not in anchors(target)
        ):
            missing.append(found["target"])
    assert not missing


def test_anchors_are_githubs() -> None:
    assert HOOKS.slug("load.only-grant") == "loadonly-grant"
    assert (
        HOOKS.slug("A window into the connector (optional)")
        == "a-window-into-the-connector-optional"
    )
    assert HOOKS.slug("0.11.2 → 0.12.0") == "0112--0120"


class Files(list[Any]):
    """As much of mkdocs.structure.files.Files as the hooks use."""

    def get_file_from_path(self, uri: str) -> Any:
        return next((file for file in self if file.uri == uri), None)


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> Files:
    monkeypatch.setattr(
        HOOKS, "copy_of", lambda path, uri, config: SimpleNamespace(uri=uri, path=path)
    )
    return Files()


def changed(text: str, place: str, files: Files) -> str:
    page = SimpleNamespace(
        file=SimpleNamespace(abs_src_path=str(ROOT / place), src_uri=HOOKS.uri_of(place))
    )
    return HOOKS.on_page_markdown(text, page, None, files)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "place, link, expected",
    [
        ("README.md", "docs/report.md", "report.md"),
        ("README.md", "CONTRIBUTING.md", "contributing.md"),
        ("README.md", "docs/results/README.md", "results/README.md"),
        ("CONTRIBUTING.md", "docs/adapters.md#write-one", "adapters.md#write-one"),
        ("docs/report.md", "../CONTRIBUTING.md#style", "contributing.md#style"),
        ("docs/contract/load.md", "../../README.md", "../index.md"),
        ("docs/contract/load.md", "../coverage.md", "../coverage.md"),
        ("docs/contract/load.md", "save.md#x", "save.md#x"),
        ("docs/report.md", "https://example.org/README.md", "https://example.org/README.md"),
        ("docs/report.md", "#comparing-reports", "#comparing-reports"),
        ("docs/report.md", "no-such-page.md", "no-such-page.md"),  # MkDocs says so
    ],
)
def test_links_are_those_of_the_site(place: str, link: str, expected: str, files: Files) -> None:
    assert changed(f"see [this]({link}).", place, files) == f"see [this]({expected})."
    assert files == []


def test_what_is_no_page_is_brought_along_once(files: Files) -> None:
    case = "spec/cases/identity/identity.salt.yaml"
    text = changed(f"[a](../../{case}) and [b](../../{case})", "docs/contract/identity.md", files)
    assert text == f"[a](../source/{case}.txt) and [b](../source/{case}.txt)"
    assert [(file.uri, file.path) for file in files] == [(f"source/{case}.txt", case)]


def test_code_is_left_alone(files: Files) -> None:
    text = "`[a](../README.md)`\n\n    ```\n    [b](../README.md)\n    ```\n\n[`c`](../README.md)\n"
    assert changed(text, "docs/report.md", files) == text.replace(
        "[`c`](../README.md)", "[`c`](index.md)"
    )


def commands(page: str) -> list[str]:
    """The command lines in a page's code, continued lines joined."""
    code = "".join(
        re.findall(r"^```\n(.*?)^```", (DOCS / page).read_text(encoding="utf-8"), re.M | re.S)
    )
    return re.findall(r"^(?:\$ )?((?:kvconform|nox|sed) .*)$", code.replace("\\\n", " "), re.M)


FIRST = ["quickstart.md", "reading-a-failure.md"]


@pytest.mark.parametrize("page", FIRST)
def test_commands_of_the_first_pages_exist(page: str) -> None:
    import typer.main

    from kvconform.cli import app

    group = typer.main.get_command(app)
    known = group.commands  # type: ignore[attr-defined]
    found = [
        line.split()
        for line in commands(page)
        if line.startswith("kvconform") and not re.match(r"kvconform [0-9]", line)
    ]
    assert found
    for _, command, *arguments in found:
        options = {option for parameter in known[command].params for option in parameter.opts}
        assert {word for word in arguments if word.startswith("-") and word != "-k"} <= options, (
            command
        )


@pytest.mark.parametrize("page", FIRST)
def test_the_first_pages_have_no_numbers_that_age(page: str) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    assert re.findall(r"\d+ (?:requirements|guarantees)|exercised +\d", text) == [], page


def test_the_fault_of_the_quickstart_can_be_made() -> None:
    (line,) = [line for line in commands("quickstart.md") if line.startswith("sed")]
    (pattern,) = re.findall(r"'s\|(.*?)\|.*\|'", line)
    assert pattern in (ROOT / "fixtures" / "template" / line.split()[-1]).read_text(
        encoding="utf-8"
    )


def test_what_a_wrong_byte_can_be_is_all_explained() -> None:
    section = (
        (DOCS / "reading-a-failure.md")
        .read_text(encoding="utf-8")
        .split("## What a wrong byte turned out to be")[1]
        .split("\n## ")[0]
    )
    named = [re.findall(r"`(\w+)`", row) for row in re.findall(r"^\| (`.*?) \|", section, re.M)]
    assert sorted(word for row in named for word in row) == sorted(PROVENANCE)


# -- with MkDocs


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built strictly.

    A broken link or anchor, or a page without a link to it, ends the build.
    """
    found = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(found)]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}  # the theme's advertisement of its successor
    done = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return found


class Structure(html.parser.HTMLParser):
    """Counts what a reader sees as structure; links and anchors of the whole page."""

    TAGS = ("li", "pre", "table", "tr", "blockquote", "h1", "h2", "h3", "h4", "img")

    def __init__(self, text: str, within: str | None) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.within, self.inside = within, within is None
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.inside = self.inside or tag == self.within
        self.count[tag] += self.inside and tag in self.TAGS
        for name, value in attrs:
            if name in ("href", "src") and value:
                self.links.append(value)
            elif name == "id" and value:
                self.ids.add(value)

    def handle_endtag(self, tag: str) -> None:
        self.inside = self.inside and tag != self.within


@NEEDS_MKDOCS
def test_the_site_reads_as_the_repository_does(site: Path) -> None:
    """GitHub and MkDocs use different dialects of Markdown.

    A list that only GitHub sees (three spaces, no empty line before it) shows here.
    """
    from markdown_it import MarkdownIt

    github = MarkdownIt("commonmark", {"html": True}).enable("table")
    otherwise = {}
    for page in PAGES:
        uri = HOOKS.uri_of(page.relative_to(ROOT).as_posix())
        built = site / re.sub(r"(^|/)README\.md$", r"\1index.md", uri).replace(".md", ".html")
        here = Structure(github.render(page.read_text(encoding="utf-8")), None).count
        there = Structure(built.read_text(encoding="utf-8"), "article").count
        if +here != +there:
            otherwise[uri] = {
                tag: (here[tag], there[tag]) for tag in here | there if here[tag] != there[tag]
            }
    assert not otherwise


@NEEDS_MKDOCS
def test_links_of_the_site_lead_to_files_and_anchors(site: Path) -> None:
    pages = {
        page: Structure(page.read_text(encoding="utf-8"), None) for page in site.rglob("*.html")
    }
    assert len(pages) >= len(PAGES)
    dead = []
    for page, found in pages.items():
        for link in found.links:
            path, _, anchor = link.partition("#")
            if "://" in path or path.startswith(("data:", "mailto:")) or page.name == "404.html":
                continue
            target = (page.parent / unquote(path)).resolve() if path else page
            if (
                not target.is_file()
                or anchor
                and target in pages
                and unquote(anchor) not in pages[target].ids
            ):
                dead.append(f"{page.relative_to(site)}: {link}")
    assert not dead


@NEEDS_MKDOCS
def test_what_is_not_for_readers_is_not_there(site: Path) -> None:
    assert not [
        place
        for place in (
            "site/hooks.py",
            "templates",
            "results/notes",
            "results/data",
            "results/findings",
        )
        if (site / place).exists()
    ]
    assert (site / "index.html").is_file() and (site / "search" / "search_index.json").is_file()
