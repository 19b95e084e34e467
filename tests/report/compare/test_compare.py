# SPDX-License-Identifier: Apache-2.0
"""Tests of `kvconform compare`: what changed between two reports."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from kvconform.cli import app
from kvconform.errors import UsageError
from kvconform.report import pages
from kvconform.report.compare import changes
from kvconform.report.compare.changes import compare, kind_of
from kvconform.report.compare.command import show
from kvconform.report.jsonl import read
from reports_rig import HEADER, report, row


@pytest.mark.parametrize(
    ("was", "now", "kind"),
    [
        ("PASS", "FAIL", "fails now"),
        ("NOT_EXERCISED", "FAIL", "fails now"),
        ("FAIL", "FAIL", "fails differently"),
        ("FAIL", "PASS", "holds now"),
        ("FAIL", "XFAIL", "is expected to fail"),
        ("PASS", "XFAIL", "is expected to fail"),
        ("PASS", "ERROR", "has no verdict"),
        ("FAIL", "ERROR", "has no verdict"),
        ("ERROR", "PASS", "is judged now"),
        ("ERROR", "FAIL", "fails now"),
        ("PASS", "XPASS", "holds unexpectedly"),
        ("FAIL", "XPASS", "holds unexpectedly"),
        ("XFAIL", "XPASS", "holds unexpectedly"),
        ("XFAIL", "PASS", "holds now"),
        ("XPASS", "PASS", "other"),
        ("FAIL", "BLOCKED", "is no longer judged"),
        ("FAIL", "NOT_EXERCISED", "is no longer judged"),
        ("PASS", "BLOCKED", "is no longer judged"),
        ("UNSUPPORTED", "PASS", "is judged now"),
    ],
)
def test_kinds(was: str, now: str, kind: str) -> None:
    assert kind_of(was, now) == kind


def test_what_fails_now_comes_first_and_counts(tmp_path: Path) -> None:
    old = report(
        tmp_path / "old",
        row("a.rule", "FAIL", message="was bad"),
        row("b.rule", "PASS"),
        row("c.rule", "PASS", gating=False),
    )
    new = report(
        tmp_path / "new",
        row("a.rule", "PASS"),
        row("b.rule", "FAIL", message="is bad", check="`x` is false"),
        row("c.rule", "FAIL", gating=False),
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
    same = [
        row("a.rule", "FAIL", message=f"raised at step {step}", cause=["kv.wrong", "torn"])
        for step in (3, 4)
    ]
    other = row("a.rule", "FAIL", message="raised at step 3", cause=["kv.wrong", "poison"])
    one, two, three = (
        read(report(tmp_path / str(i), line)) for i, line in enumerate([*same, other])
    )
    assert not compare(one, two).flips
    assert [flip.kind for flip in compare(one, three).worse] == ["fails differently"]


def test_of_runs_that_only_one_has_only_failures_are_changes(tmp_path: Path) -> None:
    old = read(report(tmp_path / "old", row("a.rule", "PASS")))
    new = read(report(tmp_path / "new", row("a.rule", "PASS", case="b.case"), vllm="0.33.0"))
    found = compare(old, new)
    assert not found.flips and len(found.only_old) == len(found.only_new) == 1
    assert found.settings == [("vllm", "0.32.0", "0.33.0")]
    fails = read(
        report(
            tmp_path / "fails",
            row("a.rule", "FAIL", case="b.case"),
            row("b.rule", "FAIL", case="b.case", gating=False),
        )
    )
    (flip,) = compare(old, fails).flips
    assert (flip.requirement, flip.kind, flip.was, flip.counts) == (
        "a.rule",
        "fails now",
        "NOT_JUDGED",
        True,
    )


def test_a_requirement_that_the_earlier_report_does_not_know_is_new_if_it_fails(
    tmp_path: Path,
) -> None:
    old = read(report(tmp_path / "old", row("a.rule", "PASS")))
    new = read(
        report(
            tmp_path / "new",
            row("a.rule", "PASS"),
            row("new.rule", "FAIL", message="bad"),
            row("new.other", "PASS"),
        )
    )
    assert compare(old, new).added == {("new.rule", "a.case[vllm-sync-v1-d1-b4]")}


def test_what_a_crash_cut_short_counts_and_what_a_failure_explains_does_not(tmp_path: Path) -> None:
    """As in the overall verdict, BLOCKED counts unless it is explained.

    The explanation can be an expected failure, the engine's failure, or one that counts itself.
    """
    old = report(
        tmp_path / "old",
        row("a.rule", "PASS"),
        row("b.rule", "FAIL"),
        row("e.rule", "PASS", kind="guarantee"),
    )
    crash = [
        row("a.rule", "BLOCKED", blocked_by="engine.crash"),
        row("b.rule", "BLOCKED", blocked_by="engine.crash"),
    ]
    new = report(tmp_path / "new", *crash)
    assert [flip.kind for flip in compare(read(old), read(new)).worse] == ["is cut short"] * 2
    assert not compare(read(new), read(new)).flips
    for name, why in (
        ("known", row("b.rule", "FAIL")),
        ("expected", row("b.rule", "XFAIL")),
        ("engine", row("e.rule", "FAIL", kind="guarantee")),
    ):
        later = report(
            tmp_path / name, row("a.rule", "BLOCKED", blocked_by=why["requirement"]), why
        )
        assert not compare(read(old), read(later)).worse
    advice = report(
        tmp_path / "advice", row("a.rule", "BLOCKED", blocked_by="engine.crash", gating=False)
    )
    assert not compare(read(old), read(advice)).worse
    again = report(
        tmp_path / "again", row("a.rule", "BLOCKED", blocked_by="b.rule"), row("b.rule", "FAIL")
    )
    assert [flip.kind for flip in compare(read(again), read(new)).worse] == ["is cut short"] * 2, (
        "another cause, and BLOCKED as before"
    )


@pytest.mark.parametrize("verdict", ["XPASS", "BLOCKED"])
def test_what_makes_a_connector_nonconformant_ends_with_1(tmp_path: Path, verdict: str) -> None:
    old = report(tmp_path / "old", row("a.rule", "PASS"))
    new = report(
        tmp_path / "new",
        row("a.rule", verdict, **({"blocked_by": "engine.crash"} if verdict == "BLOCKED" else {})),
    )
    assert CliRunner().invoke(app, ["compare", old, new]).exit_code == 1


def test_an_error_of_the_harness_is_not_the_connectors(tmp_path: Path) -> None:
    old = report(tmp_path / "old", row("a.rule", "PASS"))
    new = report(tmp_path / "new", row("a.rule", "ERROR", message="worker died"), answer="error")
    done = CliRunner().invoke(app, ["compare", old, new])
    assert done.exit_code == 3 and "has no verdict" in done.output and "worker died" in done.output
    assert CliRunner().invoke(app, ["compare", new, old]).exit_code == 0


def test_what_an_earlier_report_that_was_cut_off_lacks_hides_no_failure(tmp_path: Path) -> None:
    old = report(tmp_path / "old", row("a.rule", "PASS"), answer=None)
    new = report(tmp_path / "new", row("a.rule", "PASS"), row("b.rule", "FAIL", message="bad"))
    page = tmp_path / "page"
    done = CliRunner().invoke(app, ["compare", old, new, "--markdown", str(page)])
    assert done.exit_code == 1 and "cut off" in done.output
    assert "cut off" in page.read_text(encoding="utf-8") and "not judged | fail" in page.read_text(
        encoding="utf-8"
    )
    assert "cut off" in changes.html([compare(read(old), read(new))])


def test_a_report_that_was_cut_off_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    folder = Path(report(tmp_path / "old", row("a.rule", "PASS"), answer=None))
    with (folder / "report.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"type": "row", "requi')
    found = read(str(folder))
    assert len(found.rows) == 1 and not found.complete


@pytest.mark.parametrize(
    "text",
    [
        "nonsense\n",
        '{"type": "row"}\n',
        json.dumps(HEADER) + "\n[]\n" + json.dumps(HEADER),
        "3\n",
        json.dumps(HEADER) + "\n3\n{}",
    ],
)
def test_what_is_no_report_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "report.jsonl").write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match="not a line of a report"):
        read(str(tmp_path))
    with pytest.raises(UsageError, match="there is no .*nowhere"):
        read(str(tmp_path / "nowhere"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="has no readable report.jsonl"):
        read(str(tmp_path / "empty"))


def test_an_empty_file_is_said_to_be_empty(tmp_path: Path) -> None:
    (tmp_path / "report.jsonl").touch()
    with pytest.raises(UsageError, match="is empty: no run has written a report to it"):
        read(str(tmp_path))


def test_pages_hold_what_a_connector_says_as_text(tmp_path: Path) -> None:
    old = read(report(tmp_path / "old", row("a.rule", "PASS")))
    new = read(
        report(tmp_path / "new", row("a.rule", "FAIL", message="<b>|x|", check="`e.y` is false"))
    )
    found = [compare(old, new)]
    shown = changes.markdown(found)
    assert "| `a.rule` | **fails now** | pass | fail | 1 | &lt;b>\\|x\\| |" in shown
    assert "&lt;b&gt;|x|" in changes.html(found) and "<b>|x|" not in changes.html(found)


def test_markdown_shows_what_a_connector_says_as_it_is(tmp_path: Path) -> None:
    name = "pkg:Conn <img src=x>\n\n# pwned"
    old = read(report(tmp_path / "old", row("a.rule", "PASS"), connector=name))
    said = "see [x](http://e) ![](www.e.com) *b* _c_ `d` ~~e~~ & @you #12, a_b \\| of [a] is"
    new = read(
        report(
            tmp_path / "new",
            row(
                "a.rule",
                "FAIL",
                message=said,
                check="t.x #365 (t.y=[0]) was not followed by kv.event",
            ),
        )
    )
    text = changes.markdown([compare(old, new)])
    assert (
        "### pkg:Conn &lt;img src=x> \\# pwned, vLLM" in text
        and "\n#" not in text.partition("###")[2]
    )
    assert (
        r"see \[x\](http:\//e) !\[\](www\.e.com) \*b\* \_c\_ \`d\` \~\~e\~\~ &amp; "
        r"@<!-- -->you #<!-- -->12, a_b \\\| of \[a\] is |"
    ) in text, "and not the check"
    assert pages.code("a`b|c\nd") == r"`a'b\|c d`"


def test_the_command_ends_with_1_if_something_fails_that_did_not(tmp_path: Path) -> None:
    old, new = (
        report(tmp_path / "old", row("a.rule", "PASS")),
        report(tmp_path / "new", row("a.rule", "FAIL", message="bad")),
    )
    page = tmp_path / "page.html"
    worse = CliRunner().invoke(
        app, ["compare", old, new, "--html", str(page), "--markdown", str(tmp_path / "page.md")]
    )
    assert worse.exit_code == 1 and "fails now" in worse.output and "a.rule" in worse.output
    assert "a.rule" in page.read_text(encoding="utf-8")
    better = CliRunner().invoke(app, ["compare", new, old])
    assert better.exit_code == 0 and "holds now" in better.output
    assert isinstance(CliRunner().invoke(app, ["compare", old]).exception, UsageError)


@pytest.mark.parametrize("later", ["cut", "error", "empty"])
def test_a_later_report_that_says_nothing_is_no_success(tmp_path: Path, later: str) -> None:
    old = report(tmp_path / "old", row("a.rule", "PASS"))
    new = Path(
        report(
            tmp_path / "new", *([] if later == "empty" else [row("a.rule", "PASS")]), answer=None
        )
    )
    if later == "error":
        with (new / "report.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"type": "footer", "counts": {}, "verdict": "error"}) + "\n")
    done = CliRunner().invoke(app, ["compare", old, str(new)])
    assert done.exit_code == 3
    assert later == "error" or "was cut off" in done.output


@pytest.mark.parametrize("width", range(25, 120, 9))
def test_paths_and_what_is_said_about_them_are_not_broken(tmp_path: Path, width: int) -> None:
    folder = tmp_path / "a-name-that-is-long" / "and-another-one"
    folder.mkdir(parents=True)
    old = read(report(folder / "old", row("a.rule", "PASS"), answer=None))
    new = read(report(folder / "new", row("a.rule", "FAIL", message="bad " * 40)))
    said = io.StringIO()
    show(Console(file=said, width=width), compare(old, new))
    assert f"({old.path})" in said.getvalue() and f"({new.path})" in said.getvalue()
    assert f"{old.path} was cut off: failures of runs that it lacks" in said.getvalue()
    assert "fails now  a.rule  pass → fail in 1 run\n" in said.getvalue()
    longest = max(len(line) for line in said.getvalue().splitlines() if "bad" in line)
    assert longest <= width


def test_a_run_with_slow_streams_is_another_one(tmp_path: Path) -> None:
    old = read(report(tmp_path / "old", row("a.rule", "PASS", slow="compute")))
    new = read(report(tmp_path / "new", row("a.rule", "FAIL", slow="transfers", message="bad")))
    assert [flip.was for flip in compare(old, new).flips] == ["NOT_JUDGED"]


def test_capabilities_that_differ_are_told(tmp_path: Path) -> None:
    old = read(report(tmp_path / "old", row("a.rule", "PASS")))
    new = read(
        report(
            tmp_path / "new", row("a.rule", "PASS"), capabilities={"store": False, "lossy": True}
        )
    )
    assert compare(old, new).settings == [("capability store", "True", "False")], (
        "one that only one of them knows says nothing"
    )


def test_a_build_of_the_same_vllm_is_no_other(tmp_path: Path) -> None:
    old = read(report(tmp_path / "old", row("a.rule", "PASS")))
    for number, version in enumerate(("0.32.0+cpu", "0.33.0+cpu")):
        new = read(report(tmp_path / str(number), row("a.rule", "PASS"), vllm=version))
        assert [name for name, _, _ in compare(old, new).settings] == (["vllm"] if number else [])
