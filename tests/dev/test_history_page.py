# SPDX-License-Identifier: Apache-2.0
"""Tests of the pages made from the findings of `nox -s history`."""

from __future__ import annotations

import pytest

from kvconform.contract.loader import Spec, entries, load_spec
from kvconform.contract.references import Entry
from kvconform.dev.history import findings_page, found_in, history_page
from places import ROOT


@pytest.fixture(scope="module")
def spec() -> Spec:
    return load_spec()


@pytest.fixture(scope="module")
def known(spec: Spec) -> list[Entry]:
    return entries(spec)


def line(name: str, release: str, **found: str) -> dict[str, object]:
    return {
        "id": name,
        "release": release,
        "found": {key.replace("__", "."): value for key, value in found.items()},
    }


def test_releases_are_in_order_and_the_newest_line_counts(known: list[Entry]) -> None:
    entry = known[0]
    lines = [
        line(entry.id, "0.31.0", a="old"),
        line(entry.id, "0.9.2", a="x"),
        line(entry.id, "0.31.0", a="new\n text"),
        line(entry.id, "0.33.0"),
    ]
    assert found_in(entry, lines) == [
        {"release": "0.9.2", "name": "a", "said": "x"},
        {"release": "0.31.0", "name": "a", "said": "new text"},
    ]


def test_only_what_was_found_is_on_the_page(known: list[Entry]) -> None:
    page = history_page(known, [line(known[0].id, "0.26.0", lookup__truth="chunked.abort, step 4")])
    assert "- vLLM 0.26.0: **lookup.truth** in chunked.abort, step 4" in page
    assert "1 bugs over 1 releases: 0.26.0." in page
    assert known[1].id not in page


def test_a_finding_shows_its_case_and_its_guarantee(known: list[Entry], spec: Spec) -> None:
    lines = [
        line("reset-raises", "0.33.0", engine__reset__returns="step 3: never done"),
        line(known[0].id, "0.33.0", lookup__truth="x"),
    ]
    page = findings_page(known, lines, spec, ROOT / "spec/cases/findings")
    assert "id: finding.reset-in-flight" in page
    assert spec.requirements["engine.reset-returns"].text in page
    assert known[0].id not in page, "a connector's bug is no finding about vLLM"


def test_the_pages_in_the_repository_are_about_what_the_specification_names(
    known: list[Entry],
) -> None:
    page = (ROOT / "docs/history.md").read_text(encoding="utf-8")
    for entry in known:
        assert f"## {entry.id} ({entry.bug})\n\n{entry.text}\n" in page, (
            f"docs/history.md is stale: {entry.id}"
        )
        for release in entry.releases:
            assert (
                f"\n- vLLM {release}: "
                in page.partition(f"## {entry.id} ")[2].partition("\n## ")[0]
            ), f"{entry.id} was not run on {release}"
