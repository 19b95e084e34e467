# SPDX-License-Identifier: Apache-2.0
"""`kvconform compare`: what flipped between two reports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvconform.cli import app
from kvconform.compare import pages
from kvconform.compare.changes import compare, kind_of
from kvconform.compare.reports import read
from kvconform.errors import UsageError

HEADER = {
    "type": "header", "suite": "0.1.0", "vllm": "0.32.0", "connector": "pkg:Conn", "engines": ["vllm"], "scheduling": ["sync"],
    "seed": 0, "profile": "core", "capabilities": {"store": True},
}  # fmt: skip


def row(requirement: str, verdict: str, case: str = "a.case", **fields: Any) -> dict[str, Any]:
    where = {"engine": "vllm", "scheduling": "sync", "runner": "v1", "depth": 1, "block_size": 4}
    return {"type": "row", "requirement": requirement, "case": case, **where, "verdict": verdict, **fields}


def report(folder: Path, *rows: dict[str, Any], whole: bool = True, **header: Any) -> str:
    folder.mkdir()
    footer = [{"type": "footer", "counts": {}, "verdict": "conformant"}] if whole else []
    lines = [HEADER | header, *rows, *footer]
    (folder / "report.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return str(folder)


@pytest.mark.parametrize(
    ("was", "now", "kind"),
    [
        ("PASS", "FAIL", "fails now"),
        ("NOT_EXERCISED", "FAIL", "fails now"),
        ("FAIL", "FAIL", "fails otherwise"),
        ("FAIL", "PASS", "holds now"),
        ("FAIL", "XFAIL", "is expected to fail"),
        ("PASS", "XFAIL", "is expected to fail"),
        ("PASS", "ERROR", "fails now"),
        ("FAIL", "NOT_EXERCISED", "says nothing any more"),
        ("PASS", "BLOCKED", "says nothing any more"),
        ("UNSUPPORTED", "PASS", "says something now"),
    ],
)
def test_kinds(was: str, now: str, kind: str) -> None:
    assert kind_of(was, now) == kind


def test_what_fails_now_comes_first_and_counts(tmp_path: Path) -> None:
    old = report(tmp_path / "old", row("a.rule", "FAIL", message="was bad"), row("b.rule", "PASS"), row("c.rule", "PASS", gating=False))
    new = report(
        tmp_path / "new", row("a.rule", "PASS"), row("b.rule", "FAIL", message="is bad [`x` is false]"), row("c.rule", "FAIL", gating=False)
    )
    found = compare(read(old), read(new))
    assert [(flip.requirement, flip.kind) for flip in found.flips] == [
        ("b.rule", "fails now"),
        ("a.rule", "holds now"),
        ("c.rule", "fails now"),
    ]
    assert [flip.requirement for flip in found.worse] == ["b.rule"]
    assert compare(read(new), read(old)).worse[0].requirement == "a.rule"


def test_guarantees_are_not_the_connectors(tmp_path: Path) -> None:
    old = report(tmp_path / "old", row("engine.rule", "PASS", kind="guarantee"))
    new = report(tmp_path / "new", row("engine.rule", "FAIL", kind="guarantee"))
    found = compare(read(old), read(new))
    assert len(found.flips) == 1 and not found.worse


def test_a_failure_with_another_cause_is_told(tmp_path: Path) -> None:
    same = [row("a.rule", "FAIL", message=f"raised KeyError at step {step}") for step in (3, 4)]
    other = row("a.rule", "FAIL", message="holds bytes of another request")
    one, two, three = (read(report(tmp_path / str(i), line)) for i, line in enumerate([*same, other]))
    assert not compare(one, two).flips
    assert [flip.kind for flip in compare(one, three).flips] == ["fails otherwise"]


def test_runs_that_only_one_has_are_listed_and_not_compared(tmp_path: Path) -> None:
    old = read(report(tmp_path / "old", row("a.rule", "PASS")))
    new = read(report(tmp_path / "new", row("a.rule", "FAIL", case="b.case"), vllm="0.33.0"))
    found = compare(old, new)
    assert not found.flips and len(found.only_old) == len(found.only_new) == 1
    assert found.settings == [("vllm", "0.32.0", "0.33.0")]


def test_a_report_that_was_cut_off_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    folder = Path(report(tmp_path / "old", row("a.rule", "PASS"), whole=False))
    with (folder / "report.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"type": "row", "requi')
    found = read(str(folder))
    assert len(found.verdicts) == 1 and not found.complete


@pytest.mark.parametrize("text", ["", "nonsense\n", '{"type": "row"}\n', json.dumps(HEADER) + "\n[]\n" + json.dumps(HEADER)])
def test_what_is_no_report_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "report.jsonl").write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match="not a line of a report"):
        read(str(tmp_path))
    with pytest.raises(UsageError, match="no readable report"):
        read(str(tmp_path / "nowhere"))


def test_pages_hold_what_a_connector_says_as_text(tmp_path: Path) -> None:
    old = read(report(tmp_path / "old", row("a.rule", "PASS")))
    new = read(report(tmp_path / "new", row("a.rule", "FAIL", message="<b>|x| [`e.y` is false]")))
    found = [compare(old, new)]
    assert "| `a.rule` | **fails now** | pass | fail | 1 | &lt;b>\\|x\\| |" in pages.markdown(found)
    assert "&lt;b&gt;|x|" in pages.html(found) and "<b>|x|" not in pages.html(found)


def test_the_command_ends_with_1_if_something_fails_that_did_not(tmp_path: Path) -> None:
    old, new = report(tmp_path / "old", row("a.rule", "PASS")), report(tmp_path / "new", row("a.rule", "FAIL", message="bad"))
    page = tmp_path / "page.html"
    worse = CliRunner().invoke(app, ["compare", old, new, "--html", str(page), "--markdown", str(tmp_path / "page.md")])
    assert worse.exit_code == 1 and "fails now" in worse.output and "a.rule" in worse.output
    assert "a.rule" in page.read_text(encoding="utf-8")
    better = CliRunner().invoke(app, ["compare", new, old])
    assert better.exit_code == 0 and "holds now" in better.output
    assert isinstance(CliRunner().invoke(app, ["compare", old]).exception, UsageError)


@pytest.mark.parametrize("later", ["cut", "error", "empty"])
def test_a_later_report_that_says_nothing_is_no_success(tmp_path: Path, later: str) -> None:
    old = report(tmp_path / "old", row("a.rule", "PASS"))
    new = Path(report(tmp_path / "new", *([] if later == "empty" else [row("a.rule", "PASS")]), whole=False))
    if later == "error":
        with (new / "report.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"type": "footer", "counts": {}, "verdict": "error"}) + "\n")
    done = CliRunner().invoke(app, ["compare", old, str(new)])
    assert done.exit_code == 3
    assert later == "error" or "was cut off" in done.output


def test_a_run_with_slow_streams_is_another_one(tmp_path: Path) -> None:
    old = read(report(tmp_path / "old", row("a.rule", "PASS", slow="compute")))
    new = read(report(tmp_path / "new", row("a.rule", "FAIL", slow="transfers", message="bad")))
    assert not compare(old, new).flips


def test_capabilities_that_differ_are_told(tmp_path: Path) -> None:
    old = read(report(tmp_path / "old", row("a.rule", "PASS")))
    new = read(report(tmp_path / "new", row("a.rule", "PASS"), capabilities={"store": False, "lossy": True}))
    assert compare(old, new).settings == [("capability store", "True", "False")], "one that only one of them knows says nothing"
