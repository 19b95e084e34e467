# SPDX-License-Identifier: Apache-2.0
"""Tests of short report files: all rows come back, whatever they say."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from kvconform.errors import UsageError
from kvconform.judge.records import CaseReport, Row, Verdict
from kvconform.report import jsonl
from kvconform.report.compact import Judged, compacted, line_for, restored, rows_of
from kvconform.report.jsonl import FooterLine, HeaderLine

JUDGED: list[Judged] = [
    ("load.a", "requirement", "MUST"),
    ("load.b", "requirement", "SHOULD"),
    ("engine.c", "guarantee", "MUST NOT"),
]


def row(position: int, verdict: Verdict = Verdict.PASS, *, strict: bool = False) -> Row:
    name, kind, level = JUDGED[position]
    found = Row(name, "case", "vllm", "sync", "v1", 1, 4, verdict, level=level)
    found.kind = "guarantee" if kind == "guarantee" else "requirement"
    found.gating = kind == "requirement" and (strict or level == "MUST")
    found.exercised = 3 if verdict is Verdict.PASS else 0
    return found


def back(rows: list[Row]) -> list[Row]:
    line, rest = line_for(rows, JUDGED)
    return [*([] if line is None else rows_of(line, JUDGED)), *rest]


@pytest.mark.parametrize("strict", [False, True])
def test_rows_without_findings_share_a_line(strict: bool) -> None:
    silent = row(2, Verdict.UNSUPPORTED, strict=strict)
    silent.message = "needs hma"
    rows = [row(0, strict=strict), row(1, Verdict.NOT_EXERCISED, strict=strict), silent]
    line, rest = line_for(rows, JUDGED)
    assert line is not None and rest == []
    assert list(rows_of(line, JUDGED)) == rows


def test_situations_that_vllm_does_not_bring_about_come_back() -> None:
    rows = [replace(row(0), beyond=("reused-id",), gating=False, slow="compute")]
    line, rest = line_for(rows, JUDGED)
    assert rest == [] and line is not None and list(rows_of(line, JUDGED)) == rows


@pytest.mark.parametrize(
    "odd",
    [
        row(0, Verdict.FAIL),
        row(0, Verdict.DISABLED),
        replace(row(0), message="a message"),
        replace(row(0), gating=False),
        replace(row(0), level="MAY"),
        replace(row(0), requirement="process.died"),
        replace(row(0, Verdict.NOT_EXERCISED), exercised=1),
    ],
    ids=str,
)
def test_what_says_more_has_a_line_of_its_own(odd: Row) -> None:
    rows = [odd, row(2)]
    line, rest = line_for(rows, JUDGED)
    assert rest == [odd] and line is not None and len(line.passed) == 1
    assert sorted(back(rows), key=str) == sorted(rows, key=str)


def test_nothing_to_share() -> None:
    assert line_for([], JUDGED) == (None, [])
    assert line_for([row(0)], []) == (None, [row(0)])


def written(folder: Path, judged: list[Judged], rows: list[Row]) -> Path:
    header = HeaderLine(
        suite="0",
        vllm="0",
        connector="c",
        engines=["vllm"],
        scheduling=["sync"],
        seed=0,
        profile="core",
        judged=judged,
    )
    footer = FooterLine(counts={}, verdict="conformant")
    path = folder / jsonl.NAME
    jsonl.rewrite(path, header, rows, [CaseReport(rows[0].run)], footer)
    return path


def test_a_short_report_reads_like_a_full_one(tmp_path: Path) -> None:
    rows = [row(0), row(1, Verdict.NOT_EXERCISED), row(2, Verdict.FAIL)]
    full = jsonl.read(written(tmp_path, [], rows))
    assert len(full.path.read_text().splitlines()) == 5
    short = jsonl.read(written(tmp_path, JUDGED, rows))
    assert len(short.path.read_text().splitlines()) == 4
    assert short.rows == full.rows


def test_a_line_that_the_header_does_not_fit_is_damage(tmp_path: Path) -> None:
    path = written(tmp_path, JUDGED, [row(0), row(2)])
    header, line, footer = path.read_text().splitlines()
    path.write_text("\n".join([header, line.replace("[2, 3]", "[7, 3]"), footer]) + "\n")
    with pytest.raises(UsageError, match="does not fit"):
        jsonl.read(path)
    path.write_text("\n".join([header, line, line, footer]) + "\n")
    with pytest.raises(UsageError, match="twice"):
        jsonl.read(path)


def test_a_packed_report_comes_back() -> None:
    failed = replace(row(2, Verdict.FAIL), message="wrong", event=7)
    unlisted = replace(row(0), requirement="died.alone")
    passes = [row(0), row(1)]
    report = CaseReport("case[x]", unmet=["nothing"], rows=[failed, *passes, unlisted])
    text = json.dumps(compacted(report, JUDGED))
    assert "died.alone" in text and JUDGED[0][0] not in text  # a position stands for it
    found = restored(json.loads(text), JUDGED)
    assert found.rows == [*passes, failed, unlisted]
    assert replace(found, rows=[]) == replace(report, rows=[])
