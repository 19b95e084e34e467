# SPDX-License-Identifier: Apache-2.0
"""Reports of a made-up run for the tests of report.html, with any number of failures."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

from kvconform.config.selection import select
from kvconform.config.settings import Settings
from kvconform.contract.events import EVENTS
from kvconform.contract.loader import load_spec
from kvconform.judge.records import CaseReport, Verdict
from kvconform.judge.verdict import rows_for
from kvconform.report import jsonl, summary
from kvconform.report.collector import Collector
from kvconform.report.html import page
from kvconform.report.html.story import build, pack

SPEC = load_spec()
CASE = next(
    case
    for case in SPEC.cases.values()
    if len(case.variants(["reference"], ["sync"])) == 1 and not case.beyond
)
NAMES = [
    "hook.no-raise",
    *sorted(
        r.id for r in SPEC.requirements.values() if r.kind == "requirement" and r.level == "MUST"
    ),
]


def event(kind: str, step: int, **fields: Any) -> dict[str, Any]:
    """An event with all its fields; those not given are empty."""
    empty = {"str": "x", "int": 0, "bool": False, "float": 0, "list": [], "dict": {}, "any": None}
    known = {
        name: None if field.optional else empty[field.type]
        for name, field in EVENTS[kind].fields.items()
    }
    return {"kind": kind, "step": step, **known, **fields}


def scheduled(
    step: int, req: str, computed: int, scheduled: int, known: int, **fields: Any
) -> dict[str, Any]:
    return event(
        "req.scheduled",
        step,
        **{
            "req": req,
            "computed": computed,
            "scheduled": scheduled,
            "known": known,
            "table": [1, 2],
            **fields,
        },
    )


def numbered(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**one, "seq": seq} for seq, one in enumerate(events)]


def small() -> tuple[dict[str, Any], int]:
    """Return the story, and the violation's seq, of three requests in six steps.

    Request b loads what request a computed; the lane of request c is between theirs.
    """
    events = numbered(
        [
            event("run.start", 0, num_blocks=32, block_size=4, case=CASE.id),
            scheduled(1, "a", 0, 8, 8),
            event("kv.computed", 1, req="a", start=0, end=8),
            event("hook.called", 1, hook="wait_for_save", half="worker"),
            scheduled(2, "a", 8, 1, 9),
            scheduled(2, "c", 0, 4, 4),
            scheduled(3, "c", 4, 1, 5),
            event("alloc", 3, req="b", external=8, blocks=[3, 4]),
            scheduled(3, "b", 8, 2, 10),
            event(
                "kv.wrong",
                3,
                req="b",
                pos=4,
                count=4,
                found="other_request",
                origin="position 4 of request a",
                origin_req="a",
                origin_pos=4,
            ),
            event("req.state", 5, req="b", to="PREEMPTED", reason="no blocks"),
            event("step.scheduled", 6),
        ]
    )
    seq = next(one["seq"] for one in events if one["kind"] == "kv.wrong")
    return build(events, {NAMES[0]: seq}), seq


def many(requests: int, steps: int) -> tuple[dict[str, Any], int]:
    """Every request in every step."""
    names = [f"r{number}" for number in range(requests)]
    events = [event("run.start", 0, num_blocks=4096, case=CASE.id)]
    story = build(numbered([*events, *(scheduled(1, name, 0, 4, 4) for name in names)]), {})
    story["cells"] = [
        [
            lane,
            step,
            step * requests + lane,
            0,
            0,
            3,
            1,
            0,
            0,
            0,
            step,
            step + 8,
            [lane, lane + requests],
        ]
        for step in range(1, steps + 1)
        for lane in range(requests)
    ]
    story["steps"] = steps
    return story, 0


def page_of(
    folder: Path,
    *,
    failures: int,
    story: tuple[dict[str, Any], int] | None = None,
    first: Sequence[str] = (),
) -> Path:
    """report.html with so many failures of one run; `first` are requirements that fail first."""
    told, seq = story or small()
    settings = Settings(
        connector="pkg:Conn", engine="reference", scheduling="sync", select=[CASE.id]
    )
    collector = Collector(SPEC, settings, select(SPEC, settings, "0.32.0"), "0.32.0")
    (variant,) = collector.selection.variants
    names = list(dict.fromkeys([*first, *NAMES]))
    rows = rows_for(
        [SPEC.requirements[name] for name in names], variant, Verdict.PASS, "", strict=False
    )
    for number, row in enumerate(rows):
        row.exercised, row.message = 1, None
        if number < failures:
            row.verdict, row.step, row.event = Verdict.FAIL, 3, seq
            row.message, row.check = f"{row.requirement} was not kept", "`e.x` is false"
    timelines = {NAMES[0]: [">  3  WRONG KV"]}
    collector.add(CaseReport(variant.id, rows=rows, timelines=timelines, story=pack(told)))
    final, found = collector.finish(date(2026, 1, 1), complete=True)
    said = summary.write(folder, collector, found, seconds=1.0, started="2026-01-01", exit_code=1)
    return page.write(folder, page.make(collector, jsonl.header_of(collector, []), said, final))
