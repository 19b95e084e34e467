# SPDX-License-Identifier: Apache-2.0
"""Tests of `kvconform ci`: annotations in the connector's source, job summary, exit codes."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import reports_rig
from kvconform.cli import app
from kvconform.errors import UsageError
from kvconform.report.ci.annotation import Annotation, in_checkout, places_of
from kvconform.report.ci.formats import LONGEST, NAME, Place, command
from reports_rig import HEADER, row

PLACES = {
    "class": "pkg/conn.py:5",
    "get_finished": "pkg/conn.py:40",
    "start_load_kv": "pkg/conn.py:20",
}
RUN = {
    "GITHUB_SERVER_URL": "https://github.example",
    "GITHUB_REPOSITORY": "owner/name",
    "GITHUB_RUN_ID": "12",
}
RUN_PAGE = "https://github.example/owner/name/actions/runs/12"
RAISED: dict[str, Any] = {
    "message": "start_load_kv raised KeyError: 100%, 'a'\nand more",
    "check": "`e.error is None` is false",
    "cause": ["hook.returned", "start_load_kv", "KeyError"],
    "hook": "start_load_kv",
}


SOURCE = """import abc


class Base(abc.ABC):
    def one(self): ...


class Conn(Base):
    @classmethod
    def two(cls): ...
"""


def report(
    folder: Path, *rows: dict[str, Any], answer: str | None = "nonconformant", **header: Any
) -> str:
    return reports_rig.report(
        folder, *rows, answer=answer, **{"extra": {"places": PLACES}, **header}
    )


def test_annotations_are_where_the_hook_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    summary = tmp_path / "summary.md"
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    for name, value in RUN.items():
        monkeypatch.setenv(name, value)
    folder = report(
        tmp_path / "report",
        row("hook.no-raise", "FAIL", **RAISED),
        row("hook.no-raise", "FAIL", case="b.case", **RAISED),
        row("send.released", "FAIL", message="never told"),
        row("some.advice", "FAIL", message="not so good", gating=False),
        row("engine.rule", "FAIL", message="vLLM's", kind="guarantee"),
    )
    done = CliRunner().invoke(app, ["ci", folder, "--format", "github"])
    assert done.exit_code == 1
    lines = done.output.splitlines()
    assert lines[0] == (
        "::error file=pkg/conn.py,line=20,title=kvconform%3A hook.no-raise::start_load_kv "
        "raised KeyError: 100%25, 'a'%0Aand more "
        "(and in 1 more run): a.case[vllm-sync-v1-d1-b4] (report.html#hook.no-raise-2"
        f" in the artefacts of {RUN_PAGE})"
    )
    assert lines[1].startswith(
        "::error file=pkg/conn.py,line=40,title=kvconform%3A send.released"
    ), "where the requirement's hook is"
    assert len(lines) == 2
    text = summary.read_text(encoding="utf-8")
    assert (
        "❌ NOT CONFORMANT: pkg:Conn, vLLM 0.32.0" in text
        and "`pkg/conn.py:20`" in text
        and "some.advice" not in text
    )


@pytest.mark.parametrize(
    ("hook", "line"),
    [("start_load_kv", 20), ("get_finished", 40), ("shutdown", 40), (None, 40)],
)
def test_the_hook_of_the_failure_comes_before_those_of_the_requirement(
    tmp_path: Path, hook: str | None, line: int
) -> None:
    """The requirement `send.released` is about get_finished."""
    failed = row("send.released", "FAIL", message="bad", **({"hook": hook} if hook else {}))
    done = CliRunner().invoke(app, ["ci", report(tmp_path / "r", failed), "--format", "github"])
    assert done.output.startswith(f"::error file=pkg/conn.py,line={line},")


@pytest.mark.parametrize(
    "raised, place",
    [
        (["conn.py", 33, "_read"], "pkg/conn.py,line=33"),
        (["store.py", 33, "_read"], "pkg/store.py,line=33"),
        (["store.py", 33, "<lambda>"], "pkg/store.py,line=33"),
        (["other.py", 33, "_read"], "pkg/conn.py,line=20"),  # no such file
        # another file of that name: this one has no such line
        (["store.py", 991, "_read"], "pkg/conn.py,line=20"),
        (["store.py", 991, "<lambda>"], "pkg/conn.py,line=20"),
        (["store.py", 1, "_read"], "pkg/conn.py,line=20"),  # nor this function there
        (["twice.py", 33, "_read"], "pkg/conn.py,line=20"),  # either could be meant
    ],
)
def test_a_raised_error_is_shown_at_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raised: list[Any], place: str
) -> None:
    """Also in a file next to the connector's that holds no hook.

    If the error's file could be another one, the hook's line is shown instead.
    """
    monkeypatch.chdir(tmp_path)
    for name in ("pkg/conn.py", "pkg/store.py", "pkg/twice.py", "other/base.py", "other/twice.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(
            "\n" * 30 + "class A:\n    def _read(self):\n        raise KeyError('a')\n",
            encoding="utf-8",
        )
    places = PLACES | {"get_finished": "other/base.py:40"}
    folder = report(
        tmp_path / "report",
        row("hook.no-raise", "FAIL", place=raised, **RAISED),
        extra={"places": places},
    )
    done = CliRunner().invoke(app, ["ci", folder, "--format", "github"])
    assert done.output.startswith(f"::error file={place},title=")


def test_the_source_of_an_installed_copy(tmp_path: Path) -> None:
    for folder in ("src/pkg", "env/lib/site-packages/pkg", "env/lib/site-packages/other"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "conn.py").write_text("a = 1\n", encoding="utf-8")
    site = tmp_path / "env" / "lib" / "site-packages"
    assert in_checkout(site / "pkg" / "conn.py", "pkg.conn", tmp_path) == Path("src/pkg/conn.py")
    assert in_checkout(site / "other" / "conn.py", "other.conn", tmp_path) is None
    # lines of another version say nothing
    (tmp_path / "src" / "pkg" / "conn.py").write_text("a = 2\n", encoding="utf-8")
    assert in_checkout(site / "pkg" / "conn.py", "pkg.conn", tmp_path) is None


def test_each_failure_has_its_link_in_every_format(tmp_path: Path) -> None:
    rows = [
        row("save.owned", "FAIL", message="stored others' KV", event=1),
        row("load.position", "FAIL", message="loaded it", event=2),
        row("a.rule", "XPASS", case="b.case"),
    ]
    wanted = ["report.html#load.position-1", "report.html#save.owned-1"]
    for form in ("github", "plain", "gitlab"):
        folder = Path(report(tmp_path / form, *rows))
        text = CliRunner().invoke(app, ["ci", str(folder), "--format", form]).output
        if form == "gitlab":
            text = (folder / NAME).read_text(encoding="utf-8")
        assert sorted(set(re.findall(r"report\.html#[a-z.-]+[0-9]", text))) == wanted
    cut = report(tmp_path / "cut", *rows, answer=None)
    assert "report.html" not in CliRunner().invoke(app, ["ci", cut, "--format", "github"]).output


def test_links_lead_to_where_the_ci_system_has_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GitHub's artefacts have no addresses of their own; GitLab's have; else it is a path."""
    for name in ("CI_JOB_URL", "CI_PROJECT_DIR", "GITHUB_STEP_SUMMARY", *RUN):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "out").mkdir()
    folder = Path(report(tmp_path / "out" / "r", row("a.rule", "FAIL", message="bad")))
    link = "report.html#a.rule-1"

    def said(form: str) -> str:
        return CliRunner().invoke(app, ["ci", str(folder), "--format", form]).output

    assert f"({folder}/{link})" in said("github")
    assert f"report.html is in `{folder}`." in said("plain")
    for name, value in RUN.items():
        monkeypatch.setenv(name, value)
    assert f"({link} in the artefacts of {RUN_PAGE})" in said("github")
    assert f"report.html is in the artefacts of [this run]({RUN_PAGE})." in said("github")
    monkeypatch.setenv("CI_JOB_URL", "https://gitlab.example/o/r/-/jobs/7")
    monkeypatch.setenv("CI_PROJECT_DIR", str(tmp_path))
    address = "https://gitlab.example/o/r/-/jobs/7/artifacts/file/out/r"
    assert f"[report.html]({address}/report.html)" in said("gitlab")
    assert f"({address}/{link})" in quality(str(folder))[0]["description"]
    monkeypatch.setenv("CI_PROJECT_DIR", str(tmp_path / "elsewhere"))
    assert f"({folder}/{link})" in quality(str(folder))[0]["description"]


def test_without_a_known_place_the_failure_is_told_all_the_same(tmp_path: Path) -> None:
    done = CliRunner().invoke(
        app,
        [
            "ci",
            report(tmp_path / "r", row("hook.no-raise", "FAIL", **RAISED), extra={}),
            "--format",
            "github",
        ],
    )
    assert done.output.startswith("::error title=kvconform%3A hook.no-raise::")


def quality(folder: str) -> list[dict[str, Any]]:
    CliRunner().invoke(app, ["ci", folder, "--format", "gitlab"])
    found: list[dict[str, Any]] = json.loads((Path(folder) / NAME).read_text(encoding="utf-8"))
    return found


def test_gitlab(tmp_path: Path) -> None:
    (found,) = quality(report(tmp_path / "report", row("hook.no-raise", "FAIL", **RAISED)))
    assert (
        found["location"] == {"path": "pkg/conn.py", "lines": {"begin": 20}}
        and len(found["fingerprint"]) == 64
    )


def test_gitlab_knows_a_failure_by_its_cause(tmp_path: Path) -> None:
    rows = [
        row("a.rule", "FAIL", message="block 3 is lost", cause=["kv.wrong", "torn"]),
        row("a.rule", "FAIL", message="blocks 4, 5 are lost", cause=["kv.wrong", "torn"]),
        row("a.rule", "FAIL", message="block 3 is lost", cause=["kv.wrong", "poison"]),
        row("b.rule", "FAIL", message="block 3 is lost", cause=["kv.wrong", "torn"]),
    ]
    prints = [
        quality(report(tmp_path / str(number), line))[0]["fingerprint"]
        for number, line in enumerate(rows)
    ]
    assert prints[0] == prints[1] and len(set(prints)) == 3


def test_gitlab_wants_a_path_and_a_line(tmp_path: Path) -> None:
    (found,) = quality(report(tmp_path / "r", row("a.rule", "FAIL", message="bad"), extra={}))
    assert found["location"] == {"path": "kvconform.toml", "lines": {"begin": 1}}


@pytest.mark.parametrize(
    ("variable", "word"), [("GITHUB_ACTIONS", "::error"), ("GITLAB_CI", ""), (None, "")]
)
def test_the_ci_system_is_recognised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str | None, word: str
) -> None:
    for name in ("GITHUB_ACTIONS", "GITLAB_CI", "GITHUB_STEP_SUMMARY"):
        monkeypatch.delenv(name, raising=False)
    if variable:
        monkeypatch.setenv(variable, "true")
    folder = report(tmp_path / "r", row("a.rule", "FAIL", message="bad"))
    done = CliRunner().invoke(app, ["ci", folder])
    assert done.output.startswith(word or "## ")
    assert (Path(folder) / NAME).exists() == (variable == "GITLAB_CI")


def test_a_workflow_command_is_one_short_line() -> None:
    words = "one\r\ntwo " + "x" * 2 * LONGEST
    long = Annotation("a.rule", "a,b:c.py", 3, words, "a.run", 0, "one", "report.html#a.rule-1")
    text = command(long, Place("reports"))
    assert text.endswith("xx (reports/report.html#a.rule-1)"), "the link is never cut off"
    assert (
        text.startswith(
            "::error file=a%2Cb%3Ac.py,line=3,title=kvconform%3A a.rule::one%0D%0Atwo x"
        )
        and len(text.splitlines()) == 1
    )
    assert LONGEST < len(text) < LONGEST + 100


@pytest.mark.parametrize(
    ("answer", "policy", "code"),
    [
        ("conformant", "any", 0),
        ("partial", "any", 0),
        ("nonconformant", "any", 1),
        ("error", "any", 3),
        (None, "any", 3),
        ("nonconformant", "never", 0),
        ("error", "never", 3),
    ],
)
def test_policies(tmp_path: Path, answer: str | None, policy: str, code: int) -> None:
    folder = report(tmp_path / "report", row("hook.no-raise", "PASS"), answer=answer)
    assert CliRunner().invoke(app, ["ci", folder, "--fail-on", policy]).exit_code == code


@pytest.mark.parametrize(
    ("answer", "status", "never"),
    [("partial", 1, 0), ("conformant", 0, 0), ("error", 1, 3), ("error", 2, 3)],
)
def test_what_ends_the_run_with_a_status_ends_the_job_with_it(
    tmp_path: Path, answer: str, status: int, never: int
) -> None:
    folder = report(tmp_path / "report", row("hook.no-raise", "NOT_EXERCISED"), answer=answer)
    lines = tmp_path / "report" / "report.jsonl"
    footer = {"type": "footer", "counts": {}, "verdict": answer, "exit_code": status}
    lines.write_text("".join([*lines.read_text().splitlines(True)[:-1], json.dumps(footer)]))
    for policy, code in (("any", status), ("never", never)):
        assert CliRunner().invoke(app, ["ci", folder, "--fail-on", policy]).exit_code == code


def test_only_new_failures_end_the_job_when_there_is_a_baseline(tmp_path: Path) -> None:
    old = report(
        tmp_path / "old", row("hook.no-raise", "FAIL", **RAISED), row("send.released", "PASS")
    )
    same = report(
        tmp_path / "same",
        row("hook.no-raise", "FAIL", **RAISED),
        row("send.released", "PASS"),
    )
    worse = report(
        tmp_path / "worse",
        row("hook.no-raise", "FAIL", **RAISED),
        row("send.released", "FAIL", message="never told"),
    )
    kept = CliRunner().invoke(app, ["ci", same, "--baseline", old, "--format", "github"])
    assert kept.exit_code == 0 and "::error" not in kept.output
    new = CliRunner().invoke(app, ["ci", worse, "--baseline", old, "--format", "github"])
    assert new.exit_code == 1 and new.output.count("::error") == 1 and "send.released" in new.output
    assert (
        CliRunner().invoke(app, ["ci", worse, "--baseline", old, "--fail-on", "any"]).exit_code == 1
    )


def test_of_a_requirement_only_the_new_cause_is_annotated(tmp_path: Path) -> None:
    known = row("load.position", "FAIL", message="cause one words")
    old = report(tmp_path / "old", known, row("load.position", "PASS", case="b.case"))
    new = report(
        tmp_path / "new",
        known,
        row("load.position", "FAIL", case="b.case", message="other thing here", cause=["other"]),
    )
    done = CliRunner().invoke(app, ["ci", new, "--baseline", old, "--format", "github"])
    assert (
        done.exit_code == 1
        and done.output.count("::error") == 1
        and "::other thing here" in done.output
    )
    assert CliRunner().invoke(app, ["ci", new, "--format", "github"]).output.count("::error") == 2


@pytest.mark.parametrize(
    ("rows", "answer", "code", "told"),
    [
        (
            [row("a.rule", "PASS"), row("a.rule", "FAIL", case="new.case", message="bad")],
            "nonconformant",
            1,
            "3A a.rule::bad",
        ),
        (
            [row("a.rule", "PASS"), row("new.rule", "FAIL", message="bad")],
            "nonconformant",
            1,
            "3A new.rule::bad",
        ),
        (
            [row("a.rule", "FAIL", message="another cause", cause=["another"])],
            "nonconformant",
            1,
            "title=kvconform%3A a.rule::another cause",
        ),
        ([row("a.rule", "FAIL", message="bad")], "error", 3, None),
        ([row("a.rule", "XPASS")], "nonconformant", 1, "a.rule::holds, and was expected to fail"),
        (
            [row("a.rule", "BLOCKED", blocked_by="engine.crash")],
            "nonconformant",
            1,
            "engine.crash::a.rule and all other BLOCKED",
        ),
        ([row("a.rule", "ERROR", message="worker died")], "error", 3, None),
        (
            [
                row("a.rule", "FAIL", message="another cause", cause=["another"]),
                row("b.rule", "ERROR"),
            ],
            "error",
            1,
            "a.rule::another cause",
        ),
        ([row("a.rule", "PASS")], None, 3, None),
    ],
)
def test_what_the_gate_lets_through(
    tmp_path: Path, rows: list[dict[str, Any]], answer: str | None, code: int, told: str | None
) -> None:
    known = (
        row("a.rule", "FAIL", message="bad")
        if rows[0]["verdict"] == "FAIL"
        else row("a.rule", "PASS")
    )
    old = report(tmp_path / "old", known)
    done = CliRunner().invoke(
        app,
        [
            "ci",
            report(tmp_path / "new", *rows, answer=answer),
            "--baseline",
            old,
            "--format",
            "github",
        ],
    )
    assert done.exit_code == code
    assert (told or "") in done.output and done.output.count("::error") == (told is not None)


def test_all_that_a_crash_cut_short_is_one_annotation(tmp_path: Path) -> None:
    rows = [
        row(name, "BLOCKED", case=case, blocked_by="engine.crash")
        for case in ("a.case", "b.case")
        for name in ("a.rule", "b.rule")
    ]
    done = CliRunner().invoke(app, ["ci", report(tmp_path / "r", *rows), "--format", "github"])
    assert done.output.count("::error") == 1 and "(and in 1 more run)" in done.output


def test_an_entry_that_no_longer_fails_is_annotated(tmp_path: Path) -> None:
    done = CliRunner().invoke(
        app, ["ci", report(tmp_path / "r", row("a.rule", "XPASS")), "--format", "github"]
    )
    assert done.output.count("::error") == 1 and "delete the entry" in done.output


def test_a_cut_off_run_or_baseline_is_told(tmp_path: Path) -> None:
    cut, whole = (
        report(tmp_path / "cut", row("a.rule", "PASS"), answer=None),
        report(tmp_path / "whole", row("a.rule", "PASS")),
    )
    assert "The run was cut off" in CliRunner().invoke(app, ["ci", cut]).output
    assert (
        "The earlier report was cut off"
        in CliRunner().invoke(app, ["ci", whole, "--baseline", cut]).output
    )
    assert "cut off" not in CliRunner().invoke(app, ["ci", whole, "--baseline", whole]).output


def test_what_a_connector_is_called_is_text_in_the_summary(tmp_path: Path) -> None:
    folder = report(
        tmp_path / "r",
        row("a.rule", "FAIL", message="see [x](http://e)"),
        connector="pkg:Conn <img src=x>\n\n# pwned",
        extra={},
    )
    text = CliRunner().invoke(app, ["ci", folder, "--format", "plain"]).output
    assert (
        "NOT CONFORMANT: pkg:Conn &lt;img src=x> \\# pwned, vLLM" in text and "\n#" not in text[1:]
    )
    assert r"see \[x\](http:\//e)" in text


def test_that_nothing_was_judged_is_told(tmp_path: Path) -> None:
    folder = report(tmp_path / "none", row("a.rule", "NOT_EXERCISED"), answer="partial")
    assert "NOTHING JUDGED" in CliRunner().invoke(app, ["ci", folder, "--format", "plain"]).output
    some = report(tmp_path / "some", row("a.rule", "XFAIL"), answer="partial")
    assert "PARTLY CONFORMANT" in CliRunner().invoke(app, ["ci", some, "--format", "plain"]).output


@pytest.mark.parametrize(
    "arguments", [["--format", "jenkins"], ["--fail-on", "some"], ["--fail-on", "new"]]
)
def test_what_is_wrong_is_told(tmp_path: Path, arguments: list[str]) -> None:
    folder = report(tmp_path / "report", row("hook.no-raise", "PASS"))
    assert isinstance(CliRunner().invoke(app, ["ci", folder, *arguments]).exception, UsageError)


def test_places_of_a_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "pkg" / "conn.py"
    file.parent.mkdir()
    file.write_text(SOURCE)
    spec = importlib.util.spec_from_file_location("conn_for_places", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "conn_for_places", module)
    spec.loader.exec_module(module)
    assert places_of(module.Conn, tmp_path) == {
        "class": "pkg/conn.py:8",
        "one": "pkg/conn.py:5",
        "two": "pkg/conn.py:9",
    }
    assert places_of(module.Conn, tmp_path / "elsewhere") == {}
    assert places_of(dict, tmp_path) == {}


def test_a_run_that_ended_before_anything_was_known_has_no_answer(tmp_path: Path) -> None:
    """Its header lacks what the first run reports."""
    header = {name: value for name, value in HEADER.items() if name != "capabilities"}
    (tmp_path / "report.jsonl").write_text(json.dumps(header) + "\n", encoding="utf-8")
    done = CliRunner().invoke(app, ["ci", str(tmp_path), "--format", "plain"])
    assert done.exit_code == 3 and "NO VERDICT" in done.output
    whole = {
        **dict.fromkeys(("vllm", "connector"), None),
        **dict.fromkeys(("suite", "engine", "scheduling"), ""),
        "verdict": "error",
        "counts": {},
        "requirements": {"total": 0, "exercised": 0, "failed": []},
        "cases": {"total": 0},
        "seconds": 0.0,
    }
    summary = {**whole, "extra": {"reasons": ["its store holds KV of an earlier run"]}}
    for content in (summary, {}, []):
        (tmp_path / "summary.json").write_text(json.dumps(content), encoding="utf-8")
        done = CliRunner().invoke(app, ["ci", str(tmp_path), "--format", "plain"])
        assert done.exit_code == 3
        assert ("KV of an earlier run" in done.output) == (content is summary)
