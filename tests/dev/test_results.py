# SPDX-License-Identifier: Apache-2.0
"""Tests of docs/results: digests of reports, findings, and the pages made from both."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvconform.contract.loader import load_spec
from kvconform.dev.results import digest, finding, page
from kvconform.dev.results.__main__ import ROOT as RESULTS
from kvconform.dev.results.__main__ import main, wanted
from kvconform.errors import UsageError
from results_rig import HEADER, HERE, ROWS, report


def test_a_report_becomes_a_digest_per_engine(tmp_path: Path) -> None:
    found = digest.digests(
        report(tmp_path / "r", ROWS),
        "example",
        ["pytest>=1", "no-such-package"],
        "2026-01-01",
        load_spec(),
    )
    reference, vllm = found
    assert (reference.engine, reference.verdict, reference.saves, reference.loads) == (
        "reference",
        "conformant",
        2,
        0,
    )
    assert (vllm.verdict, vllm.saves, vllm.loads, vllm.runs) == ("nonconformant", 3, 5, 1)
    assert (
        vllm.areas["save"].failed == ["save.confirmed"]
        and vllm.areas["load"].passed == 1
        and vllm.areas["identity"].not_shown == 1
    )
    assert (
        vllm.packages == {"pytest": pytest.__version__}
        and vllm.adapters == ["a stand-in"]
        and vllm.complete
    )
    digest.write(tmp_path, vllm)
    assert digest.read(tmp_path) == [vllm]


def test_a_call_that_loads_nothing_is_no_load(tmp_path: Path) -> None:
    judged = [("load.only-grant", 5), ("load.complete-or-failed", 2), ("load.errors-in-a-set", 40)]
    rows = [
        {"requirement": name, "engine": "vllm", "verdict": "PASS", "exercised": count}
        for name, count in judged
    ]
    (found,) = digest.digests(
        report(tmp_path / "r", rows), "example", [], "2026-01-01", load_spec()
    )
    assert (found.transfers, found.loads) == (2, 47)
    before = found.model_copy(update={"transfers": None})
    shown, bracketed = (
        page.pages([each], [], load_spec(), tmp_path)["README.md"] for each in (found, before)
    )
    assert "| CONFORMANT | 1 | 2 | 0 |" in shown and "| CONFORMANT | 1 | (47) | 0 |" in bracketed


def test_a_campaign_is_told_apart(tmp_path: Path) -> None:
    """Random workloads alone; its digest takes no other's place, nor a column of the areas."""
    drawn = [{**ROWS[2], "engine": "live", "case": f"live.random-{seed}"} for seed in (0, 1)]
    spec = load_spec()
    (campaign,) = digest.digests(report(tmp_path / "c", drawn), "example", [], "2026-01-01", spec)
    (mixed,) = digest.digests(
        report(tmp_path / "m", [*drawn, {**ROWS[2], "engine": "live"}]),
        "example",
        [],
        "2026-01-01",
        spec,
    )
    assert campaign.seeds == "0-1" and not mixed.seeds
    assert len({digest.write(tmp_path, campaign), digest.write(tmp_path, mixed)}) == 2
    text = page.pages([campaign], [], spec, tmp_path)
    assert (
        "| [example](example.md) | 0-1 | CONFORMANT |" in text["README.md"]
        and "## By area" not in text["example.md"]
    )


def test_a_report_that_was_cut_short_says_so(tmp_path: Path) -> None:
    found = digest.digests(
        report(tmp_path / "r", ROWS, end=False), "example", [], "2026-01-01", load_spec()
    )
    assert not found[0].complete
    assert "cut short" in page.pages(found, [], load_spec(), tmp_path)["README.md"]


@pytest.mark.parametrize("text", ["", "{}\n", json.dumps(HEADER) + "\n"])
def test_what_is_no_report_is_told_in_a_sentence(text: str, tmp_path: Path) -> None:
    (tmp_path / "report.jsonl").write_text(text)
    with pytest.raises(UsageError):
        digest.digests(tmp_path, "example", [], "2026-01-01", load_spec())


def test_the_marks_of_an_area(tmp_path: Path) -> None:
    found = digest.digests(report(tmp_path / "r", ROWS), "example", [], "2026-01-01", load_spec())
    lines = page.pages(found, [], load_spec(), tmp_path)["example.md"].splitlines()
    assert (
        "| save | `✓✗-` |" in lines
        and "| load | `·✓-` |" in lines
        and "| identity | `··-` |" in lines
    )


def test_findings_name_what_exists_and_the_pages_are_as_they_should_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(HERE.parents[1])
    assert finding.read(HERE), "there are findings"
    stale = [
        name
        for name, text in wanted(RESULTS, load_spec()).items()
        if (HERE / name).read_text(encoding="utf-8") != text
    ]
    assert not stale, "python -m kvconform.dev.results pages"


FINDING = HERE / "findings" / "example-identity.yaml"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("status: confirmed", "status: sure", "status"),
        ("requirements: [", "requirements: [no.such, ", "there is no requirement no.such"),
        ("case: ", "case: no-", "there is no case no-"),
        ("connector: ", "connector: no-", "the catalogue has no no-"),
        ("id: ", "id: other-", "the file must have the same name"),
        ("cases: [", 'cases: ["layout.*", ', "layout.* in `cases` covers a whole area"),
        ("cases: [", 'cases: ["lay*", ', "lay* in `cases` covers a whole area"),
    ],
)
def test_a_broken_finding_is_told_in_a_sentence(
    old: str, new: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "findings").mkdir()
    (tmp_path / "findings" / FINDING.name).write_text(
        FINDING.read_text(encoding="utf-8").replace(old, new, 1), encoding="utf-8"
    )
    assert main(["--root", str(tmp_path), "pages", "--check"]) == 2
    assert said in capsys.readouterr().err
