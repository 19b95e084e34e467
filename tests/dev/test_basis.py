# SPDX-License-Identifier: Apache-2.0
"""Tests of what a NOT CONFORMANT rests on, and of the severity of findings in the pages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvconform.contract.loader import load_spec
from kvconform.dev.results import basis, digest, finding, page
from kvconform.dev.results.__main__ import main
from results_rig import HERE, ROW, ROWS, report

FINDING = next(each for each in finding.read(HERE) if each.id == "example-chunked-prefill")
REASON = "vLLM never does it (v1/request.py, Request.__init__)."


def _about(**values: Any) -> finding.Finding:
    base: dict[str, Any] = {"requirements": ["save.confirmed"], "rows": [], "connector": "example"}
    base["cases"] = [ROW["case"]]
    return FINDING.model_copy(update=base | values)


def _pages(tmp_path: Path, *findings: finding.Finding) -> dict[str, str]:
    found = digest.digests(report(tmp_path / "r", ROWS), "example", [], "2026-01-01", load_spec())
    return page.pages(found, findings, load_spec(), tmp_path)


def _row(pages: dict[str, str]) -> str:
    """What failed, what is at risk and what is unexplained on engine vllm, by README.md."""
    lines = pages["README.md"].splitlines()
    (row,) = (line for line in lines if line.startswith("| [example](example.md) | vllm "))
    return "|".join(row.split("|")[7:10])


def test_a_failed_requirement_without_a_confirmed_finding_is_unexplained(tmp_path: Path) -> None:
    pages = _pages(tmp_path)
    assert _row(pages) == " save.confirmed |  | save.confirmed "
    assert "| example | vllm | `save.confirmed` | **unexplained** |" in pages["example.md"]


def test_a_confirmed_finding_explains_the_rows_that_it_names(tmp_path: Path) -> None:
    pages = _pages(tmp_path, _about())
    assert _row(pages) == " save.confirmed |  |  "
    link = "[example-chunked-prefill](example.md#example-chunked-prefill)"
    assert (
        f"| example | vllm | `save.confirmed` | {link} (wrong-tokens, rare) |"
        in pages["example.md"]
    )
    elsewhere = _pages(tmp_path, _about(rows=["multi-two-examples"]))
    assert "`save.confirmed` | **unexplained** |" in elsewhere["example.md"]
    another = _pages(tmp_path, _about(requirements=["load.only-grant"]))
    assert "`save.confirmed` | **unexplained** |" in another["example.md"]


@pytest.mark.parametrize("status", ["risk", "open question", "withdrawn"])
def test_a_finding_that_is_not_confirmed_explains_nothing(status: str, tmp_path: Path) -> None:
    pages = _pages(tmp_path, _about(status=status, reason=REASON))
    assert _row(pages) == " save.confirmed |  | save.confirmed "
    assert f"`save.confirmed` | **unexplained**; {status}: [example-chunked" in pages["example.md"]
    assert f"## {finding.STATUSES[status]}\n" in pages["example.md"]
    assert f"**{status.capitalize()}:** {REASON}" in pages["example.md"]


def test_the_pages_say_what_is_unexplained() -> None:
    """Each requirement that failed somewhere is on its page, with a finding or marked."""
    findings = finding.read(HERE)
    digests = digest.read(HERE)
    bare = [(each.entry, basis.unexplained(each, findings)) for each in digests]
    seen = 0
    for each in digests:
        text = (HERE / f"{page.family(each.entry)}.md").read_text(encoding="utf-8")
        lines = text.partition("## Risks that do not count")[0].splitlines()
        others = [other for other in digests if other.entry == each.entry]
        for name in basis.failed(each):
            (row,) = (
                line
                for line in lines
                if line.startswith(f"| {each.entry} | ") and f"| `{name}` | " in line
            )
            assert each.engine in row
            everywhere = sum(name in basis.failed(other) for other in others)
            unexplained = sum(entry == each.entry and name in names for entry, names in bare)
            assert ("**unexplained**" in row) == (unexplained == everywhere)
            seen += 1
    assert seen


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("effect: wrong-tokens", "effect: odd", "severity.effect"),
        ("effect: wrong-tokens", "effect: lost-reuse", "contradict each other"),
        ("status: confirmed", "status: risk", "must have a reason"),
        ("status: confirmed", "status: confirmed\nreason: none", "has no reason"),
        ("real_world:", "odd_world:", "real_world"),
        ("rows: [", "rows: [nobody, ", "the catalogue has no nobody"),
    ],
)
def test_a_finding_that_contradicts_itself_is_told_in_a_sentence(
    old: str, new: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = HERE / "findings" / "example-identity.yaml"
    text = path.read_text(encoding="utf-8")
    assert old in text
    (tmp_path / "findings").mkdir()
    (tmp_path / "findings" / path.name).write_text(text.replace(old, new, 1), encoding="utf-8")
    assert main(["--root", str(tmp_path), "pages", "--check"]) == 2
    assert said in capsys.readouterr().err


def test_severity_and_reports_are_shown() -> None:
    text = (HERE / "nixl.md").read_text(encoding="utf-8")
    assert "| what a user sees | wrong-tokens, only-if: The producer has freed" in text
    assert "[84](https://github.com/aws-samples/aws-do-eks/pull/84)" in text
    readme = (HERE / "README.md").read_text(encoding="utf-8")
    assert "| confirmed | engine-ends, only-if | vllm 0.32.0 | [57810]" in readme
    assert "| HiSparseConnector | exempt: " in readme and "NOT JUDGED" not in readme
