# SPDX-License-Identifier: Apache-2.0
"""`kvconform ci`: annotations in the connector's own source, a job's summary, exit codes by policy."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvconform.ci.gitlab import NAME
from kvconform.ci.places import in_checkout, places_of
from kvconform.cli import app
from kvconform.errors import UsageError

HEADER = {
    "type": "header", "suite": "0.1.0", "vllm": "0.32.0", "connector": "pkg:Conn", "engines": ["vllm"], "scheduling": ["sync"], "seed": 0,
    "profile": "core", "capabilities": {},
    "extra": {"places": {"class": "pkg/conn.py:5", "get_finished": "pkg/conn.py:40", "start_load_kv": "pkg/conn.py:20"}},
}  # fmt: skip
RAISED = "start_load_kv raised KeyError: 100%, 'a'\nand more [`e.error is None` is false]"


SOURCE = """import abc


class Base(abc.ABC):
    def one(self): ...


class Conn(Base):
    @classmethod
    def two(cls): ...
"""


def row(requirement: str, verdict: str, case: str = "a.case", **fields: Any) -> dict[str, Any]:
    where = {"engine": "vllm", "scheduling": "sync", "runner": "v1", "depth": 1, "block_size": 4}
    return {"type": "row", "requirement": requirement, "case": case, **where, "verdict": verdict, **fields}


def report(folder: Path, *rows: dict[str, Any], answer: str | None = "nonconformant", **header: Any) -> str:
    folder.mkdir()
    footer = [{"type": "footer", "counts": {}, "verdict": answer}] if answer else []
    (folder / "report.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [HEADER | header, *rows, *footer]), encoding="utf-8")
    return str(folder)


def test_annotations_are_where_the_hook_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    summary = tmp_path / "summary.md"
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    folder = report(
        tmp_path / "report",
        row("hook.no-raise", "FAIL", message=RAISED),
        row("hook.no-raise", "FAIL", case="b.case", message=RAISED),
        row("send.released", "FAIL", message="never told"),
        row("some.advice", "FAIL", message="not so good", gating=False),
        row("engine.rule", "FAIL", message="vLLM's", kind="guarantee"),
    )
    done = CliRunner().invoke(app, ["ci", folder, "--format", "github"])
    assert done.exit_code == 1
    lines = done.output.splitlines()
    assert lines[0] == (
        "::error file=pkg/conn.py,line=20,title=kvconform%3A hook.no-raise::start_load_kv raised KeyError: 100%25, 'a'%0Aand more "
        "(and in 1 more runs): a.case[vllm-sync-v1-d1-b4]"
    )
    assert lines[1].startswith("::error file=pkg/conn.py,line=40,title=kvconform%3A send.released"), "where the requirement's hook is"
    assert len(lines) == 2
    text = summary.read_text(encoding="utf-8")
    assert "❌ NOT CONFORMANT: pkg:Conn, vLLM 0.32.0" in text and "`pkg/conn.py:20`" in text and "some.advice" not in text


@pytest.mark.parametrize(
    "raised, place",
    [
        ("conn.py:33, in _read", "pkg/conn.py,line=33"),
        ("store.py:33, in _read", "pkg/store.py,line=33"),
        ("store.py:33, in <lambda>", "pkg/store.py,line=33"),
        ("other.py:33, in _read", "pkg/conn.py,line=20"),  # no such file
        ("store.py:991, in _read", "pkg/conn.py,line=20"),  # another file of that name: this one has no such line
        ("store.py:991, in <lambda>", "pkg/conn.py,line=20"),
        ("store.py:1, in _read", "pkg/conn.py,line=20"),  # nor this function there
        ("twice.py:33, in _read", "pkg/conn.py,line=20"),  # either could be meant
    ],
)
def test_a_raised_error_is_shown_at_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raised: str, place: str) -> None:
    """Also in a file beside the connector's, which holds no hook; nowhere that can be another file than the one that raised."""
    monkeypatch.chdir(tmp_path)
    for name in ("pkg/conn.py", "pkg/store.py", "pkg/twice.py", "other/base.py", "other/twice.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("\n" * 30 + "class A:\n    def _read(self):\n        raise KeyError('a')\n", encoding="utf-8")
    message = f"start_load_kv raised KeyError: 'a' ({raised}) [`e.error is None` is false]"
    places = HEADER["extra"]["places"] | {"get_finished": "other/base.py:40"}
    folder = report(tmp_path / "report", row("hook.no-raise", "FAIL", message=message), extra={"places": places})
    done = CliRunner().invoke(app, ["ci", folder, "--format", "github"])
    assert done.output.startswith(f"::error file={place},title=")


def test_the_source_of_an_installed_copy(tmp_path: Path) -> None:
    for folder in ("src/pkg", "env/lib/site-packages/pkg", "env/lib/site-packages/other"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "conn.py").write_text("a = 1\n", encoding="utf-8")
    site = tmp_path / "env" / "lib" / "site-packages"
    assert in_checkout(site / "pkg" / "conn.py", "pkg.conn", tmp_path) == Path("src/pkg/conn.py")
    assert in_checkout(site / "other" / "conn.py", "other.conn", tmp_path) is None
    (tmp_path / "src" / "pkg" / "conn.py").write_text("a = 2\n", encoding="utf-8")  # lines of another version say nothing
    assert in_checkout(site / "pkg" / "conn.py", "pkg.conn", tmp_path) is None


def test_without_a_known_place_the_failure_is_told_all_the_same(tmp_path: Path) -> None:
    done = CliRunner().invoke(
        app, ["ci", report(tmp_path / "r", row("hook.no-raise", "FAIL", message=RAISED), extra={}), "--format", "github"]
    )
    assert done.output.startswith("::error title=kvconform%3A hook.no-raise::")


def test_gitlab(tmp_path: Path) -> None:
    folder = report(tmp_path / "report", row("hook.no-raise", "FAIL", message=RAISED))
    CliRunner().invoke(app, ["ci", folder, "--format", "gitlab"])
    (found,) = json.loads((Path(folder) / NAME).read_text(encoding="utf-8"))
    assert found["location"] == {"path": "pkg/conn.py", "lines": {"begin": 20}} and len(found["fingerprint"]) == 64


@pytest.mark.parametrize(
    ("answer", "policy", "code"),
    [
        ("conformant", "any", 0), ("partial", "any", 0), ("nonconformant", "any", 1), ("error", "any", 3), (None, "any", 3),
        ("nonconformant", "never", 0), ("error", "never", 3),
    ],
)  # fmt: skip
def test_policies(tmp_path: Path, answer: str | None, policy: str, code: int) -> None:
    folder = report(tmp_path / "report", row("hook.no-raise", "PASS"), answer=answer)
    assert CliRunner().invoke(app, ["ci", folder, "--fail-on", policy]).exit_code == code


def test_only_new_failures_end_the_job_when_there_is_a_baseline(tmp_path: Path) -> None:
    old = report(tmp_path / "old", row("hook.no-raise", "FAIL", message=RAISED), row("send.released", "PASS"))
    same = report(tmp_path / "same", row("hook.no-raise", "FAIL", message=RAISED), row("send.released", "PASS"))
    worse = report(tmp_path / "worse", row("hook.no-raise", "FAIL", message=RAISED), row("send.released", "FAIL", message="never told"))
    kept = CliRunner().invoke(app, ["ci", same, "--baseline", old, "--format", "github"])
    assert kept.exit_code == 0 and "::error" not in kept.output
    new = CliRunner().invoke(app, ["ci", worse, "--baseline", old, "--format", "github"])
    assert new.exit_code == 1 and new.output.count("::error") == 1 and "send.released" in new.output
    assert CliRunner().invoke(app, ["ci", worse, "--baseline", old, "--fail-on", "any"]).exit_code == 1


@pytest.mark.parametrize("arguments", [["--format", "jenkins"], ["--fail-on", "some"], ["--fail-on", "new"]])
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
    assert places_of(module.Conn, tmp_path) == {"class": "pkg/conn.py:8", "one": "pkg/conn.py:5", "two": "pkg/conn.py:9"}
    assert places_of(module.Conn, tmp_path / "elsewhere") == {}
    assert places_of(dict, tmp_path) == {}
