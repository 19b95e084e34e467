# SPDX-License-Identifier: Apache-2.0
"""Tests of what the reports say about runs that did not reach the situation of their case."""

from __future__ import annotations

import io
import json
from datetime import date
from pathlib import Path

import pytest
from rich.console import Console

from kvconform.config.selection import select
from kvconform.config.settings import Settings
from kvconform.contract.loader import load_spec
from kvconform.judge.records import CaseReport, Verdict
from kvconform.judge.verdict import rows_for
from kvconform.report import jsonl, summary, terminal
from kvconform.report.collector import Collector
from kvconform.report.html import page

SPEC = load_spec()
ABOUT, OTHER = "transfer.fail-closed", "save.owned"
LATE, ALTERED = "transfer.late", "transfer.altered"
RUN = "transfer.late[reference-sync-v1-d1-b4]"
SAYS = f"They did not exercise {ABOUT}"


def collector(unmet: list[str], verdict: Verdict = Verdict.NOT_EXERCISED) -> Collector:
    """Two requirements on two cases; `verdict`: of the first, in the case that it is for."""
    settings = Settings(
        connector="pkg:Conn",
        engine="reference",
        scheduling="sync",
        select=[LATE, ALTERED],
        verbose=True,
    )
    found = Collector(SPEC, settings, select(SPEC, settings, "0.32.0"), "0.32.0")
    for variant in found.selection.variants:
        requirements = [SPEC.requirements[name] for name in (ABOUT, OTHER)]
        rows = rows_for(requirements, variant, Verdict.PASS, "", strict=False)
        late = variant.case.id == LATE
        for row in rows:
            row.exercised = 1
            if late:
                row.verdict = verdict if row.requirement == ABOUT else Verdict.NOT_EXERCISED
        found.add(CaseReport(variant.id, unmet=unmet if late else [], rows=rows))
    return found


def reports(found: Collector, tmp_path: Path) -> tuple[dict[str, list[str]], str, str]:
    """Return what summary.json has, the text of the terminal, and that of report.html."""
    rows, aggregate = found.finish(date(2026, 1, 1), complete=True)
    totals = summary.write(tmp_path, found, aggregate, seconds=1.0, started="", exit_code=0)
    out = io.StringIO()
    console = Console(file=out, width=200)
    terminal.report(console, found, rows, aggregate, where="here", seconds=1.0)
    made = page.make(found, jsonl.header_of(found, []), totals, rows)
    written = json.loads((tmp_path / summary.NAME).read_text(encoding="utf-8"))
    return written["extra"]["unreached"], out.getvalue(), page.render(made)


def test_every_report_says_it_although_another_case_exercised_the_requirement(
    tmp_path: Path,
) -> None:
    runs, printed, html = reports(collector(["given-up: of p1: 0"]), tmp_path)
    assert runs == {ABOUT: [RUN]}
    assert SAYS in " ".join(printed.split())
    (line,) = (line for line in printed.splitlines() if line.startswith(ABOUT))
    assert "PASS" in line and line.rstrip().endswith("not reached in 1")
    assert html.count("not reached: the situation of 1 run about it") == 1
    assert f"first <code>{RUN}</code>" in html


@pytest.mark.parametrize(
    ("unmet", "verdict"), [([], Verdict.NOT_EXERCISED), (["given-up: 0"], Verdict.PASS)]
)
def test_nothing_is_said_of_a_run_that_got_there_or_exercised_it_all_the_same(
    unmet: list[str], verdict: Verdict, tmp_path: Path
) -> None:
    runs, printed, html = reports(collector(unmet, verdict), tmp_path)
    assert runs == {}
    assert "did not exercise" not in " ".join(printed.split())
    assert "not reached in" not in printed and "not reached: the situation" not in html
