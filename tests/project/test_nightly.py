# SPDX-License-Identifier: Apache-2.0
"""Tests of the nightly workflow: its parts can be run, and one issue reports on all of them."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvconform.config import catalogue
from kvconform.contract.yaml12 import parse
from kvconform.dev import nightly
from kvconform.dev.mutants.subject import Subject, subjects
from kvconform.dev.nightly import Part
from kvconform.explore.places import ARTIFACT
from places import ROOT

TEXT = (ROOT / ".github" / "workflows" / "nightly.yml").read_text(encoding="utf-8")
WORKFLOW: Any = parse(TEXT, "nightly.yml")
JOBS: Any = WORKFLOW["jobs"]
PARTS = JOBS["part"]["strategy"]["matrix"]["include"]
GOOD = Part("long tests", "nox -s tests", 0, 90, [], "part", 2)
BAD = Part("sweep", "nox -s dev", 1, 60, ["a ``` b", "1 alarm"], "part", 2)
GH = """#!{python}
import json, sys
words = sys.argv[1:]
body = sys.stdin.read() if "--body-file" in words else ""
open("said", "a").write(json.dumps([words, body]) + "\\n")
if words[:2] == ["issue", "list"]:
    print({issues!r})
"""


def test_actions_are_pinned_and_commands_hold_no_expressions() -> None:
    found = re.findall(r"uses: (\S+)", TEXT)
    assert len(found) > 8
    assert all(re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", action) for action in found)
    steps = [step for job in JOBS.values() for step in job["steps"]]
    assert not any("${{" in step.get("run", "") for step in steps)


def test_only_the_report_may_write_and_it_waits_for_all() -> None:
    assert WORKFLOW["permissions"] == {"contents": "read"}
    assert JOBS["report"]["permissions"] == {"contents": "read", "issues": "write"}
    assert not any("permissions" in job for name, job in JOBS.items() if name != "report")
    assert set(JOBS["report"]["needs"]) == set(JOBS) - {"report"}
    assert JOBS["report"]["if"] == "always()"


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part["part"])
def test_a_part_names_a_session_and_its_options(part: dict[str, Any]) -> None:
    session, *rest = shlex.split(part["command"])
    sources = [ROOT / "noxfile.py"]
    assert f"def {session}(session: nox.Session)" in sources[0].read_text(encoding="utf-8")
    if session == "dev":
        sources.append(ROOT / "conformance" / "dev" / f"{rest[1]}.py")
    elif session in ("conformance", "explore"):
        sources += [ROOT / "conformance" / "cli.py", ROOT / "conformance" / "explore" / "cli.py"]
    known = "\n".join(path.read_text(encoding="utf-8") for path in sources)
    for option in (word for word in rest if re.fullmatch(r"--\w[\w-]*", word)):
        declared = (f'"{option}"', f"{option[2:].replace('-', '_')}: Annotated")
        assert any(each in known for each in declared), option


def test_names_of_parts_differ_and_shards_draw_other_workloads() -> None:
    names = [part["part"] for part in PARTS]
    assert len(set(names)) == len(names)
    shards = [part["command"] for part in PARTS if "explore_correct" in part["command"]]
    assert len(shards) > 1
    assert len({re.search(r"--seed (\S+)", each)[1] for each in shards}) == len(shards)  # type: ignore[index]


def test_every_subject_that_needs_no_package_has_its_mutants() -> None:
    def needs(subject: Subject) -> list[str]:
        entries = [setup.catalogue for setup in subject.setups if setup.catalogue is not None]
        return [package for entry in entries for package in catalogue.named(entry).requires]

    wanted = {name for name, subject in subjects().items() if not needs(subject)}
    assert set(JOBS["mutants"]["strategy"]["matrix"]["subject"]) == wanted


def test_the_corpus_is_kept_after_a_failure_and_found_by_its_name() -> None:
    [part] = [part for part in PARTS if part.get("corpus")]
    steps = [step for step in JOBS["part"]["steps"] if "matrix.corpus" in str(step.get("if", ""))]
    restore, save, upload = steps
    assert restore["with"]["path"] == save["with"]["path"] == upload["with"]["path"] == "corpus"
    assert "--corpus corpus" in part["command"] and upload["with"]["name"] == ARTIFACT
    assert save["with"]["key"].startswith(restore["with"]["restore-keys"])
    assert all(step["if"].startswith("always()") for step in (save, upload))


def test_a_part_is_run_and_its_outcome_is_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GITHUB_JOB", "part")
    monkeypatch.setenv("PARTS", "2")
    program = "import sys; print('seed', sys.argv[1]); sys.exit(3)"
    command = shlex.join([sys.executable, "-c", program, "{seed}1"])
    words = ["part", "--seed", "7", "--folder", str(tmp_path / "a"), "long tests", command]
    assert nightly.main(words) == 3
    assert "seed 71" in capfd.readouterr().out
    [part] = nightly.read(tmp_path)
    assert (part.name, part.status, part.said) == ("long tests", 3, ["seed 71"])
    assert (part.job, part.total) == ("part", 2)


def test_the_page_shows_what_failed() -> None:
    text = nightly.page([GOOD, BAD], ["A sentence."], "https://x/run")
    assert text.startswith("1 of 2 parts failed in [this run](https://x/run).\nA sentence.\n")
    assert "| long tests | passed | 2 |" in text and "| sweep | 1 | 1 |" in text
    assert "````\na ``` b\n1 alarm\n````\n" in text and "## long tests" not in text
    many = [Part(str(number), "x" * 300, 1, 1, ["y" * 300] * 25) for number in range(30)]
    long = nightly.page(many, [], "")
    assert len(long) < 65_536 and long.endswith("The rest is left out: see the run.\n")


@pytest.mark.parametrize(
    ("result", "parts", "said"),
    [
        ("success", [GOOD, GOOD], []),
        ("failure", [GOOD, BAD], []),
        ("failure", [BAD], ["1 of 2 parts of the job `part` have no report."]),
        ("failure", [GOOD, GOOD], ["The job `part` ended as failure after its parts had passed."]),
        ("cancelled", [], ["The job `part` ended as cancelled, without any report."]),
    ],
)
def test_a_part_without_a_report_is_no_success(
    result: str, parts: list[Part], said: list[str]
) -> None:
    assert nightly.without_report({"part": {"result": result}}, parts) == said


@pytest.mark.parametrize(
    ("issues", "part", "verbs"),
    [
        ([], BAD, ["issue list", "label create", "issue create"]),
        ([], GOOD, ["issue list"]),
        ([9, 4], BAD, ["issue list", "issue edit 4"]),
        ([4], GOOD, ["issue list", "issue edit 4", "issue close 4"]),
    ],
)
def test_there_is_one_issue(
    issues: list[int],
    part: Part,
    verbs: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program = tmp_path / "gh"
    listed = json.dumps([{"number": number} for number in issues])
    program.write_text(GH.format(python=sys.executable, issues=listed), encoding="utf-8")
    program.chmod(0o755)
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "a.json").write_text(json.dumps(part.__dict__), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    file = ROOT / "conformance" / "dev" / "nightly.py"
    path = f"{tmp_path}:{os.environ['PATH']}"
    env = {"PATH": path, "RUN_URL": "https://x"}
    command = [sys.executable, "-I", str(file), "publish", "parts"]  # without kvconform
    subprocess.run(command, env=env, check=True, timeout=60)
    said = [json.loads(line) for line in (tmp_path / "said").read_text().splitlines()]
    assert len(said) == len(verbs)
    for (words, body), verb in zip(said, verbs, strict=True):
        assert " ".join(words).startswith(verb)
        if {"edit", "create"} & set(words) and words[0] == "issue":
            assert "https://x" in body
            assert f"{bool(part.status):d} of 1 parts failed" in words[words.index("--title") + 1]
