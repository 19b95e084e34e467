# SPDX-License-Identifier: Apache-2.0
"""Language of hand-written pages and of the specification: plain words, and a named reader.

A page says in its first paragraph for whom it is. Code, links and ids are not looked at.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvconform.contract import yaml12
from places import ROOT

PHRASES = {
    "anew": "again, or a verb with re-",
    "at all": "nothing, or a stronger verb",
    "beside": "next to, with, or under",
    "by now": "nothing, or the time",
    "let go of": "release",
    "lets go of": "releases",
    "nobody": "the passive, or who does not",
    "of theirs": "whose it is",
    "put to the test": "exercised",
    "run without connector": "baseline run",
    "runs without connector": "baseline runs",
    "somebody": "who it is",
    "told": "reported, informed or named",
    "what has none": "what it is",
    "whoever": "who it is",
}
"""Phrases that a reader has to read twice -> what to write instead."""
FOUND = re.compile(
    r"(?<![\w.-])(?:{})(?![\w-]|\.\w)".format(
        "|".join(r"\s+".join(map(re.escape, phrase.split())) for phrase in PHRASES)
    ),
    re.I,
)
CODE = re.compile(r"^ *```.*?^ *```|`[^`]*`|(?<=\])\([^)]*\)|<!--.*?-->", re.M | re.S)
"""Fenced blocks, code in a sentence, targets of links, comments."""
READER = re.compile(r"# .*\n\nFor [^\n]*[.:;,]")
"""Beginning of a page: its title, and a paragraph that begins with its readers."""
WRITTEN_BY_PROGRAMS = (
    "coverage.md",
    "systems.md",
    "engine-findings.md",
    "history.md",
    "mutants.md",
    "versions.md",
)
"""Pages of docs/ that are generated; their templates and the specification are looked at."""

DOCS = ROOT / "docs"
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(page for page in DOCS.glob("*.md") if page.name not in WRITTEN_BY_PROGRAMS),
]
OTHER_TEXTS = [*sorted((DOCS / "decisions").glob("*.md")), *sorted((DOCS / "templates").glob("*"))]
DATA = sorted((ROOT / "spec").rglob("*.yaml"))


def banned_in(text: str) -> list[str]:
    """The banned phrases of a text, each with the words to write instead."""
    return [
        f"{found[0]!r} (write: {PHRASES[' '.join(found[0].lower().split())]})"
        for found in FOUND.finditer(text)
    ]


def prose(page: str) -> str:
    """A Markdown page without its code."""
    return CODE.sub(" ", page)


def sentences(value: Any) -> Iterator[str]:
    """The strings of a YAML document that have more than one word."""
    if isinstance(value, str) and " " in value:
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from sentences(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from sentences(inner)


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", [*PAGES, *OTHER_TEXTS], ids=name)
def test_pages_use_plain_words(page: Path) -> None:
    assert not banned_in(prose(page.read_text(encoding="utf-8")))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_pages_name_their_readers_first(page: Path) -> None:
    assert READER.match(page.read_text(encoding="utf-8")), "the first paragraph begins with 'For '"


@pytest.mark.parametrize("file", DATA, ids=name)
def test_the_specification_uses_plain_words(file: Path) -> None:
    data = yaml12.parse(file.read_text(encoding="utf-8"), name(file))
    assert not banned_in("\n\n".join(sentences(data)))


@pytest.mark.parametrize("phrase", PHRASES)
def test_a_banned_phrase_is_found_in_prose_only(phrase: str) -> None:
    broken = (
        f"# Title\n\nFor authors.\n{phrase.capitalize()}, or\n{phrase.replace(' ', chr(10))}.\n"
    )
    assert len(banned_in(prose(broken))) == 2
    allowed = (
        f"```\n{phrase}\n```\n\n`{phrase}`, [text]({phrase}) and x.{phrase.replace(' ', '-')}\n"
    )
    assert not banned_in(prose(allowed))
    data = yaml12.parse(f"- id: a.{phrase.replace(' ', '-')}\n  text: It is {phrase}.\n", "a.yaml")
    assert len(banned_in("\n\n".join(sentences(data)))) == 1


def test_a_page_without_a_reader_is_found() -> None:
    assert READER.match("# Title\n\nFor authors.\n")
    assert not READER.match("# Title\n\nKernels exist twice.\nFor authors.\n")
    assert not READER.match("# Title\n\n## For authors\n\nText.\n")


def test_generated_pages_say_so() -> None:
    """A page is excused only if a generator writes it."""
    for page in WRITTEN_BY_PROGRAMS:
        assert re.search(
            r"[Gg]enerate|Made by", (DOCS / page).read_text(encoding="utf-8")[:3000]
        ), page
