# SPDX-License-Identifier: Apache-2.0
"""Tests that docs/contract/ and docs/coverage.md agree with the specification and are complete."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvconform.contract.loader import Spec, load_spec
from kvconform.dev import docs
from kvconform.errors import UsageError
from kvconform.report import explain

pytest.importorskip("jinja2")


@pytest.fixture(scope="module")
def spec() -> Spec:
    return load_spec()


@pytest.fixture(scope="module")
def pages(spec: Spec) -> dict[str, str]:
    return docs.Pages(spec).pages()


def test_the_pages_are_up_to_date(pages: dict[str, str]) -> None:
    assert docs.stale(pages) == [], "python -m kvconform.dev.docs"


def test_a_stale_page_and_one_too_many_are_named(
    pages: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(docs, "ROOT", tmp_path)
    for name, text in pages.items():
        path = tmp_path / "docs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert docs.stale(pages) == []
    (tmp_path / "docs/contract/load.md").write_text("old", encoding="utf-8")
    (tmp_path / "docs/contract/gone.md").write_text("", encoding="utf-8")
    assert docs.stale(pages) == ["contract/load.md", "contract/gone.md"]


def test_every_requirement_is_told_once(spec: Spec, pages: dict[str, str]) -> None:
    told = [
        name
        for page, text in pages.items()
        if page != "coverage.md"
        for name in re.findall(r"^### (\S+)$", text, re.M)
    ]
    assert sorted(told) == sorted(spec.requirements)
    for name, req in spec.requirements.items():
        page = pages[f"contract/{req.area}.md"]
        part = page.split(f"### {name}\n")[1].split("\n### ")[0]
        assert all(
            " ".join(text.split()) in part for text in (req.text, req.why or "", req.wrong or "")
        )
        assert all(line in part for line in explain.check_lines(req))
        assert (
            req.source is not None
            and f"`{req.source.symbol}`](https://github.com/vllm-project/vllm/blob/v" in part
        )
        assert all(
            f"- `{defect['id']}`: " in part
            for defect in spec.defects.values()
            if name in defect["fails"]
        )


def test_anchors_of_the_index_exist(pages: dict[str, str]) -> None:
    links = re.findall(r"\]\(([a-z-]+\.md)#([\w-]+)\)", pages["contract/README.md"])
    assert links
    for page, anchor in links:
        headings = re.findall(r"^### (\S+)$", pages[f"contract/{page}"], re.M)
        assert anchor in {heading.replace(".", "") for heading in headings}


def test_an_area_without_words_is_an_error(spec: Spec, monkeypatch: pytest.MonkeyPatch) -> None:
    first, *others = docs.areas()
    monkeypatch.setattr(docs, "areas", lambda: others)
    with pytest.raises(UsageError, match=first.area):
        docs.Pages(spec).pages()


def test_every_bug_that_is_named_is_described(spec: Spec) -> None:
    known = docs.load()
    named = {
        bug for item in (*spec.requirements.values(), *spec.cases.values()) for bug in item.bugs
    }
    named |= {bug for defect in spec.defects.values() for bug in defect.get("bugs", ())}
    assert named - known.keys() == set()
    assert all(
        address.startswith("https://github.com/")
        for bug in known.values()
        for _, address in bug.links()
    )


def test_what_a_check_rejects_is_shown_or_counted(spec: Spec, pages: dict[str, str]) -> None:
    for name, req in spec.requirements.items():
        part = pages[f"contract/{req.area}.md"].split(f"### {name}\n")[1].split("\n### ")[0]
        shown, more = (
            part.count("\nRejected: `"),
            re.search(r"^More in the specification: .*?(\d+) rejected", part, re.M),
        )
        assert shown + int(more[1] if more else 0) == len(req.traces("bad")), name
