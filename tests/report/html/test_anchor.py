# SPDX-License-Identifier: Apache-2.0
"""Tests of the links to failures in report.html."""

from __future__ import annotations

import re
from pathlib import Path

from html_rig import page_of
from kvconform.judge.records import Row, Verdict
from kvconform.report import jsonl
from kvconform.report.html.anchor import anchors, links
from kvconform.report.roots import roots


def failed(requirement: str, case: str = "c", cause: str = "x", event: int = 1) -> Row:
    row = Row(requirement, case, "vllm", "sync", "v1", 1, 4, Verdict.FAIL, cause=(cause,))
    row.event = event
    return row


ROWS = [
    failed("save.owned"),
    failed("save.owned", "d"),
    failed("load.position"),
    failed("load.position", "d", cause="y"),
    failed("hook.no-raise", "other"),
    failed("hook.no-raise", "third", cause="y"),
]


def ids(rows: list[Row]) -> list[str]:
    found = roots(rows)
    return [one.id for number, root in enumerate(found, 1) for one in anchors(root, number)]


def test_an_anchor_is_the_requirement_and_the_number_of_its_root_cause() -> None:
    assert ids(ROWS) == [
        "hook.no-raise-1",
        "hook.no-raise-2",
        "save.owned-3",
        "load.position-3",
        "load.position-3.2",
    ]


def test_a_consequence_is_not_numbered_as_a_root_cause() -> None:
    root = roots(ROWS)[-1]
    assert [one.title for one in anchors(root, 3)] == [
        "3. save.owned",
        "load.position",
        "load.position (2)",
    ]


def test_links_do_not_change_when_other_verdicts_do() -> None:
    more = [
        Row("load.truth", "c", "vllm", "sync", "v1", 1, 4, Verdict.PASS),
        *ROWS,
        Row("save.owned", "fifth", "vllm", "sync", "v1", 1, 4, Verdict.NOT_EXERCISED),
        failed("hook.no-raise", "sixth"),
    ]
    before = links(ROWS)
    after = links(more)
    assert before.items() <= after.items() and len(after) == len(before) + 1
    assert after["hook.no-raise", more[-1].run] == "report.html#hook.no-raise-1"


def test_every_link_leads_to_a_section_of_the_page(tmp_path: Path) -> None:
    text = page_of(tmp_path, failures=5, first=["save.owned", "load.position"]).read_text("utf-8")
    sections = re.findall(r'class="failure[^"]*" id="([^"]+)"', text)
    assert len(sections) == len(set(sections)) == 5
    assert {"save.owned", "load.position"} <= {one.rpartition("-")[0] for one in sections}
    targets = set(re.findall(r'href="#([^"]+)"', text)) - {"failures"}
    assert targets == set(sections)


def test_a_report_that_is_read_again_has_the_same_links(tmp_path: Path) -> None:
    header = jsonl.HeaderLine(
        suite="1",
        vllm="0.32.0",
        connector="pkg:Conn",
        engines=["vllm"],
        scheduling=["sync"],
        device="cpu",
        adapters=[],
        seed=0,
        profile="core",
        capabilities={},
        capability_sources={},
        capability_doubts={},
        cases=1,
        requirements=1,
        judged=[],
        warnings=[],
        extra={},
    )
    lines = [jsonl.line_of(header), *(jsonl.line_of(row) for row in ROWS)]
    (tmp_path / jsonl.NAME).write_text("\n".join(lines) + "\n", encoding="utf-8")
    found = links(jsonl.read(tmp_path).rows.values())
    assert found == links(ROWS) and len(found) == len(ROWS)
