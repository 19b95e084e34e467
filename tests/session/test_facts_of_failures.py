# SPDX-License-Identifier: Apache-2.0
"""Tests of the facts about failures in every report of one real run.

The connector `two_faults` raises in a hook, stores one chunk in place of another, and declares that
it cannot inject faults, although it can.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from places import BAD_CONNECTORS
from program_rig import Result, kvconform
from warm_rig import Warm

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM"),
]

RAISES = "lifecycle.abort-waiting"
WRONG_BYTES = ("lifecycle.lookup-repeated", "identity.salt")
"""Cases that fail alike; the first is shown, as it fails earlier in its run."""
SOURCE = "two_faults.py"
RAISED = 'raise LookupError("the store has forgotten it")'
SETTINGS = """connector = "two_faults:Connector"
[capabilities]
store = true
saves = "all"
async_load = false
best_effort = false
fault_injection = false
"""
DOUBTED = "fault_injection"
DOUBT = "but was seen"


@dataclass
class Reports:
    """The report of one shard, which is the whole run; its merged report; and the annotations."""

    shard: Result
    merged: Result
    annotations: list[str]
    line: int

    @property
    def both(self) -> tuple[Result, Result]:
        return self.shard, self.merged


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory, warm: Warm) -> Reports:
    folder = tmp_path_factory.mktemp("facts")
    source = shutil.copy(BAD_CONNECTORS / SOURCE, folder)
    (folder / "kvconform.toml").write_text(SETTINGS, encoding="utf-8")

    def done(command: str, *arguments: str) -> Result:
        if command == "run":
            made = warm.run(*arguments, cwd=folder)
        else:
            made = kvconform(command, *arguments, cwd=folder, env={"GITHUB_STEP_SUMMARY": ""})
        assert made.returncode == 1, made.stdout + made.stderr
        return Result(made, folder / arguments[-1])

    where = ("--pythonpath", str(folder), "--workers", "1", "--shard", "1/1")
    what = ("--engine", "reference", "--extra-config", '{"store": "{tmp}"}')
    cases = ("-k", ",".join((RAISES, *WRONG_BYTES)))
    shard = done("run", "-v", *where, *what, *cases, "--report-dir", "shard")
    merged = done("merge", "-v", "shard", "--report-dir", "merged")
    shown = done("ci", "--format", "github", "merged").out.splitlines()
    lines = Path(source).read_text(encoding="utf-8").splitlines()
    (line,) = (number for number, text in enumerate(lines, 1) if text.strip() == RAISED)
    annotations = [text for text in shown if text.startswith("::error")]
    return Reports(shard, merged, annotations, line)


def failures(result: Result, requirement: str) -> list[dict[str, Any]]:
    return [row for row in result.rows("FAIL") if row["requirement"] == requirement]


def panel(result: Result, requirement: str) -> str:
    """The section about a requirement on the terminal, without line breaks."""
    title = rf"── \d\. {re.escape(requirement)} ─+\n(.*?)\n\n"
    sections = re.findall(title, result.out, re.DOTALL)
    assert len(sections) == 1, result.out
    return " ".join(sections[0].split())


def test_exactly_the_two_faults_are_found(reports: Reports) -> None:
    for result in reports.both:
        found = {(row["requirement"], row["case"]) for row in result.rows("FAIL")}
        wrong = {("load.position", case) for case in WRONG_BYTES}
        assert found == {("hook.no-raise", RAISES), *wrong}


def test_a_hook_that_raised_has_its_place_cause_and_evidence(reports: Reports) -> None:
    (row,) = failures(reports.shard, "hook.no-raise")
    assert row["hook"] == "request_finished"
    assert row["place"] == [SOURCE, reports.line, "_forget", RAISED]
    assert {"request_finished", "LookupError", SOURCE, "_forget", RAISED} < set(row["cause"])
    assert row["evidence"].endswith("KVConnectorBase_V1.request_finished")
    assert "the store has forgotten it" in row["message"]
    assert "error" in row["check"] and row["check"] not in row["message"]


def test_wrong_bytes_have_their_origin_and_one_cause(reports: Reports) -> None:
    rows = failures(reports.shard, "load.position")
    assert len({row["req"] for row in rows}) == len({row["message"] for row in rows}) == 2
    assert len({tuple(row["cause"]) for row in rows}) == 1
    for row in rows:
        assert {"kv.wrong", "other_position", "external"} <= set(row["cause"])
        assert "place" not in row and "hook" not in row
        sentence, story = row["message"].split("; ")
        assert f"positions 4-7 of request {row['req']}" in sentence
        assert "at position 0 of request a" in sentence
        assert re.fullmatch(
            r"block [1-9]\d* of request a held position 0 from step [1-9]\d* on", story
        )


def test_the_merged_report_has_the_same_facts(reports: Reports) -> None:
    assert reports.merged.rows() == reports.shard.rows()


def test_the_terminal_shows_message_check_and_place(reports: Reports) -> None:
    for result in reports.both:
        for requirement in ("hook.no-raise", "load.position"):
            rows = failures(result, requirement)
            row = next(row for row in rows if row["case"] in (RAISES, WRONG_BYTES[0]))
            text = panel(result, requirement)
            for name in ("message", "check", "evidence"):
                assert " ".join(row[name].split()) in text, name
        assert f"{SOURCE}:{reports.line}, in _forget" in panel(result, "hook.no-raise")
        assert f"also in 1 more run: {WRONG_BYTES[1]}" in panel(result, "load.position")


def test_an_annotation_is_at_the_line_that_raised(reports: Reports) -> None:
    (raised,) = (text for text in reports.annotations if "hook.no-raise" in text)
    assert raised.startswith(f"::error file={SOURCE},line={reports.line},")
    (wrong,) = (text for text in reports.annotations if "load.position" in text)
    assert "(and in 1 more run)" in wrong and WRONG_BYTES[0] in wrong


def test_a_doubt_about_a_capability_is_in_every_report(reports: Reports) -> None:
    for result in reports.both:
        assert result.lines[0]["capability_doubts"] == {DOUBTED: DOUBT}
        statement = json.loads((result.folder / "statement.json").read_text(encoding="utf-8"))
        doubts = {name: one["doubt"] for name, one in statement["capabilities"].items()}
        assert doubts[DOUBTED] == DOUBT and [*doubts.values()].count(None) == len(doubts) - 1
        assert set(statement["failed"]) == {"hook.no-raise", "load.position"}
        page = (result.folder / "report.html").read_text(encoding="utf-8")
        assert f"declared, {DOUBT}" in page
        assert f"{DOUBTED} is declared, {DOUBT}" in " ".join(result.out.split())
