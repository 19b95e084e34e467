# SPDX-License-Identifier: Apache-2.0
"""Tests of timelines, report.jsonl, reproduction commands and the overall verdict."""

from __future__ import annotations

import io
import json
import shlex
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from kvconform.config.selection import select
from kvconform.config.settings import Settings
from kvconform.contract.events import EVENTS
from kvconform.contract.loader import load_spec
from kvconform.contract.profile import Expected, Waiver
from kvconform.judge.records import CaseReport, Verdict
from kvconform.judge.verdict import rows_for
from kvconform.report import causes, jsonl, statement, summary, terminal, timeline
from kvconform.report.collector import KINDS, LOADED, Collector
from kvconform.report.html import page
from kvconform.report.jsonl import FooterLine, HeaderLine

SPEC = load_spec()
CASES = [
    case.id
    for case in SPEC.cases.values()
    if len(case.variants(["reference"], ["sync"])) == 1 and not case.beyond
][:2]
MUST = next(
    r.id for r in SPEC.requirements.values() if r.kind == "requirement" and r.level == "MUST"
)


def event(kind: str, step: int = 1, /, **fields: Any) -> dict[str, Any]:
    """An event with all its fields; those not given are empty."""
    empty = {"str": "x", "int": 0, "bool": False, "float": 0, "list": [], "dict": {}, "any": None}
    known = {
        name: None if field.optional else empty[field.type]
        for name, field in EVENTS[kind].fields.items()
    }
    return {"kind": kind, "seq": 0, "step": step, **known, **fields}


class TestTimeline:
    """kvconform.report.timeline"""

    @pytest.mark.parametrize("kind", sorted(EVENTS))
    def test_every_event_can_be_shown(self, kind: str) -> None:
        timeline.render([event(kind)])
        marked = timeline.render([event(kind, seq=7)], mark=7)
        assert marked[0].startswith(">")

    def test_hooks_of_a_stretch_share_a_line(self) -> None:
        names = [
            "start_load_kv",
            *["wait_for_layer_load", "save_kv_layer"] * 3,
            "wait_for_save",
            "get_finished",
            "get_finished",
        ]
        hooks = [event("hook.called", hook=name, half="worker") for name in names]
        nested = event("hook.called", hook="inner", half="worker", depth=1)
        (line,) = timeline.render([hooks[0], nested, *hooks[1:]])
        assert line == (
            "   1  worker      start_load_kv (wait_for_layer_load save_kv_layer)*3 "
            "wait_for_save get_finished*2"
        )

    def test_wrong_bytes(self) -> None:
        wrong = event(
            "kv.wrong",
            4,
            req="a",
            layer="l0",
            kv="k",
            pos=3,
            count=2,
            via="external",
            found="other_request",
            origin="token 3 of b",
        )
        assert timeline.render([wrong]) == [
            "   4  WRONG KV    a positions 3-4, K of layer l0, via external: other_request:"
            " token 3 of b"
        ]

    def test_a_step(self) -> None:
        events = [
            event("lookup", req="a", local=4, known=9, tokens=4),
            event("alloc", req="a", local=4, external=4, blocks=[1, 2, 3, 7]),
            event("step.scheduled", total=1, new=["a"], has_sync_loads=True),
            event(
                "req.scheduled",
                req="a",
                listed_as="new",
                computed=8,
                scheduled=1,
                placeholders=0,
                known=9,
                table=[1, 2, 3, 7],
            ),
        ]
        assert timeline.render(events) == [
            "   1  lookup      a local=4 of known=9 -> 4 tokens",
            "   1  alloc       a computed=0 local=4 external=4 blocks=[1-3,7]",
            "   1  schedule    1 token new=a loads before the forward pass",
            ("   1    a         new      computed=8 scheduled=1 known=9 blocks=[1-3,7]"),
        ]


@pytest.fixture
def collector() -> Collector:
    settings = Settings(
        connector="pkg.mod:Conn", engine="reference", scheduling="sync", select=CASES
    )
    return Collector(SPEC, settings, select(SPEC, settings, "0.32.0"), "0.32.0")


def judged(collector: Collector, position: int, *failing: str) -> CaseReport:
    """A worker's report about the variant at `position` of those that vLLM brings about."""
    variant = [each for each in collector.selection.variants if not each.beyond][position]
    rows = rows_for(
        [SPEC.requirements[name] for name in collector.selection.judged],
        variant,
        Verdict.PASS,
        "",
        strict=False,
    )
    for row in rows:
        row.exercised, row.message = 1, None
        if row.requirement in failing:
            row.verdict, row.message = Verdict.FAIL, "it broke"
    return CaseReport(variant.id, rows=rows)


def test_the_order_of_arrival_does_not_matter(tmp_path: Path, collector: Collector) -> None:
    header = HeaderLine(
        suite="0",
        vllm="0",
        connector="c",
        engines=[],
        scheduling=[],
        seed=0,
        profile="core",
        capabilities={},
    )
    texts = []
    for order in ((0, 1), (1, 0)):
        fresh = Collector(SPEC, collector.settings, collector.selection, "0.32.0")
        stream = jsonl.Stream(tmp_path, header)
        for position in order:
            stream.write(jsonl.lines_of(fresh.add(judged(fresh, position, MUST))))
        # all of it is there at once
        assert len(stream.path.read_text().splitlines()) == 1 + 2 * len(collector.selection.judged)
        stream.close()
        rows, found = fresh.finish(date(2026, 1, 1), complete=True)
        footer = FooterLine(counts=found.counts, verdict=found.verdict)
        jsonl.rewrite(stream.path, header, rows, fresh.ordered_reports(), footer)
        texts.append(stream.path.read_text())
    assert texts[0] == texts[1]
    assert json.loads(texts[0].splitlines()[-1])["verdict"] == "nonconformant"
    assert [path.name for path in tmp_path.iterdir()] == ["report.jsonl"]


def test_an_unfinished_run_has_no_answer(collector: Collector) -> None:
    collector.add(judged(collector, 0))
    _, found = collector.finish(date(2026, 1, 1), complete=False)
    assert (found.verdict, collector.exit_code(found)) == ("error", 3)
    assert "1 of 2 runs were not made" in found.reasons


def test_expected_failures_of_a_part_are_not_unexpected_passes(collector: Collector) -> None:
    collector.settings.expected_failures = [Expected(requirement=MUST, reason="known")]
    for position in (0, 1):
        collector.add(judged(collector, position))
    rows, found = collector.finish(date(2026, 1, 1), complete=True)
    assert not any(row.verdict is Verdict.XPASS for row in rows)
    assert collector.exit_code(found) == 0


def test_an_expected_failure_that_passes_counts(collector: Collector) -> None:
    collector.settings.expected_failures = [Expected(requirement=MUST, reason="known")]
    collector.selection.narrowed = False
    for position in (0, 1):
        collector.add(judged(collector, position))
    _, found = collector.finish(date(2026, 1, 1), complete=True)
    assert collector.exit_code(found) == 1
    assert found.reasons == [f"XPASS: {MUST}"]


def test_reproduction(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(causes.THROUGH, raising=False)
    collector.settings.arguments = ["--extra-config", '{"a": "{tmp}"}']
    row = collector.add(judged(collector, 0, MUST)).rows[0]
    assert causes.command(collector.settings, row, alone=True) == [
        "kvconform",
        "run",
        "pkg.mod:Conn",
        "-k",
        CASES[0],
        "--engine",
        "reference",
        "--scheduling",
        "sync",
        "--seed",
        "0",
        "--extra-config",
        '{"a": "{tmp}"}',
    ]
    words = causes.command(collector.settings, row, alone=False)
    assert f"-k '{CASES[0]}[reference-sync-v1-d1-b4]'" in shlex.join(words)
    monkeypatch.setenv(causes.THROUGH, "nox -s conformance -- --install './my conn'")
    assert causes.command(collector.settings, row, alone=True)[:8] == [
        "nox",
        "-s",
        "conformance",
        "--",
        "--install",
        "./my conn",
        "--connector",
        "pkg.mod:Conn",
    ]


def test_a_connector_in_the_working_directory_is_found_again(
    collector: Collector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    row = collector.add(judged(collector, 0, MUST)).rows[0]
    collector.settings.connector = "only_here:Conn"

    def added() -> bool:
        return "--pythonpath" in causes.command(collector.settings, row, alone=True)

    assert not added(), "it is installed, or found in another way"
    (tmp_path / "only_here.py").write_text("", encoding="utf-8")
    assert added()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert not added()
    monkeypatch.delenv("PYTHONPATH")
    collector.settings.pythonpath = [str(tmp_path)]
    assert not added(), "the settings say it"


def test_an_expired_waiver_of_the_suite_is_a_note(collector: Collector) -> None:
    waiver = Waiver(requirement="engine.*", reason="known", expires="2025-12-31")
    collector.spec = replace(SPEC, waivers=[waiver])
    for position in (0, 1):
        collector.add(judged(collector, position))
    _, found = collector.finish(date(2026, 1, 1), complete=True)
    assert collector.exit_code(found) == 0
    assert found.reasons == ["note: waiver of engine.* expired on 2025-12-31"]


def shown(
    collector: Collector, *, end: bool = True, verbose: bool = False, width: int = 200
) -> str:
    collector.settings.verbose = verbose
    out = io.StringIO()
    console = Console(file=out, width=width)
    terminal.header(console, collector, [])
    if end:
        rows, found = collector.finish(date(2026, 1, 1), complete=True)
        terminal.report(console, collector, rows, found, where="x", seconds=1.0)
    return out.getvalue()


def test_a_panel_shows_the_check_below_the_message(collector: Collector) -> None:
    told = judged(collector, 0, MUST)
    failing = next(row for row in told.rows if row.verdict is Verdict.FAIL)
    collector.add(told)
    assert "check " not in shown(collector)
    failing.check = "`e.good` is false: e.good=False"
    found, check = (
        line.split(maxsplit=1)
        for line in shown(collector).splitlines()
        if line.startswith(("found ", "check "))
    )
    assert found == ["found", "it broke"] and check == ["check", failing.check]


def test_a_doubt_about_a_capability_is_in_every_report(
    tmp_path: Path, collector: Collector
) -> None:
    told = judged(collector, 0)
    told.capabilities = {"store": True, "hma": False}
    told.sources = {"store": "declared", "hma": "declared"}
    told.doubts = {"store": "but was not seen"}
    collector.add(CaseReport.from_dict(json.loads(json.dumps(told.to_dict()))))
    rows, found = collector.finish(date(2026, 1, 1), complete=True)
    header = jsonl.header_of(collector, [])
    assert json.loads(jsonl.line_of(header))["capability_doubts"] == told.doubts
    capabilities = statement.make(collector, found, judged=date(2026, 1, 1)).capabilities
    assert (capabilities["store"].doubt, capabilities["hma"].doubt) == (told.doubts["store"], None)
    totals = summary.write(tmp_path, collector, found, seconds=1.0, started="", exit_code=0)
    assert page.make(collector, header, totals, rows).capabilities == [
        ("hma", False, "declared"),
        ("store", True, f"declared, {told.doubts['store']}"),
    ]
    assert f"store is declared, {told.doubts['store']}" in shown(collector)


def test_what_the_engine_broke_is_told_from_what_the_connector_did(collector: Collector) -> None:
    guarantee = next(
        r.id
        for r in SPEC.requirements.values()
        if r.kind == "guarantee" and r.id in collector.selection.shown
    )
    for position in (0, 1):
        collector.add(judged(collector, position, guarantee))
    text = shown(collector, verbose=True)
    assert ", 1 fail (engine's)" in text and "2 fail (not counted)" in text
    collector.add(judged(collector, 0, MUST))
    text = shown(collector, verbose=True)
    assert ", 1 fail (engine's), 1 fail" in text or ", 1 fail, 1 fail (engine's)" in text
    assert "verdicts" in text and "recommended" not in text


def test_a_requirement_alone_gets_a_hint(collector: Collector) -> None:
    collector.settings.select = ["load.only-grant"]
    case = SPEC.defects["loads-over-local-prefix"]["cases"][0]
    assert case in terminal.hint_of(collector).split("cases about it: -k ")[1]
    collector.settings.select = ["load.only-grant", CASES[0]]
    assert terminal.hint_of(collector) == ""


def test_one_of_a_kind_is_singular(collector: Collector) -> None:
    assert "2 cases, 2 runs, " in shown(collector, end=False)
    collector.only({next(iter(collector.variants))})
    assert "1 case, 1 run, " in shown(collector, end=False)


def test_the_terminal_survives_markup_in_messages(collector: Collector) -> None:
    told = judged(collector, 0, MUST)
    failing = next(row for row in told.rows if row.verdict is Verdict.FAIL)
    failing.message = "list [/] of [red] things"
    collector.add(told)
    rows, found = collector.finish(date(2026, 1, 1), complete=False)
    out = io.StringIO()
    console = Console(file=out, width=100)
    terminal.header(console, collector, ["[/bold] warning"])
    assert "[/bold] warning" in out.getvalue()
    terminal.report(console, collector, rows, found, where="x", seconds=1.0)
    assert "list [/] of [red] things" in out.getvalue()


@pytest.mark.parametrize(("blends", "verdict"), [(True, "conformant"), (False, "partial")])
def test_a_profile_that_is_for_other_connectors_says_little(blends: bool, verdict: str) -> None:
    settings = Settings(connector="pkg.mod:Conn", profile="blending")
    collector = Collector(SPEC, settings, select(SPEC, settings, "0.32.0"), "0.32.0")
    collector.add(judged(collector, 0))
    for row in collector.ordered():
        row.verdict = Verdict.PASS
        row.exercised = 1
    collector.capabilities = {"store": True, "non_prefix_reuse": blends}
    _, found = collector.finish(date(2026, 1, 1), complete=True)
    assert found.verdict == verdict
    assert any("profile blending is for connectors with" in each for each in found.reasons) is (
        not blends
    )


@pytest.mark.parametrize("kinds", [{"state"}, {"sliding"}, set()])
def test_a_kind_of_model_of_which_nothing_is_loaded_is_named(kinds: set[str]) -> None:
    """Whether what is stored of it comes back is otherwise judged by what came back before."""
    selection = select(SPEC, Settings(connector="pkg.mod:Conn"), "0.32.0")
    collector = Collector(SPEC, Settings(connector="pkg.mod:Conn"), selection, "0.32.0")
    for number in range(sum(not each.beyond for each in selection.variants)):
        report = judged(collector, number)
        groups = collector.variants[report.variant].case.config.groups
        for row in report.rows:
            if row.requirement == LOADED and kinds & {*groups}:
                row.exercised, row.verdict = 0, Verdict.NOT_EXERCISED
        collector.add(report)
    _, found = collector.finish(date(2026, 1, 1), complete=True)
    named = {KINDS[kind] for kind in kinds & KINDS.keys()}
    notes = [reason for reason in found.reasons if "of models with" in reason]
    assert found.verdict == "conformant"
    assert len(notes) == len(named)
    assert all(any(name in note for note in notes) for name in named)


@pytest.mark.parametrize(
    ("loaded", "declared", "verdict", "code"),
    [
        (1, True, "conformant", 0),
        (0, False, "partial", 0),
        (0, True, "partial", 1),
    ],
)
def test_a_connector_that_loads_nothing_is_only_partly_judged(
    loaded: int, declared: bool, verdict: str, code: int
) -> None:
    """A declared store from which nothing comes, such as a server that is down, is no success."""
    settings = Settings(connector="pkg.mod:Conn")
    selection = select(SPEC, settings, "0.32.0")
    assert not selection.partial
    collector = Collector(SPEC, settings, selection, "0.32.0")
    report = judged(collector, 0)
    for row in report.rows:
        if row.requirement == LOADED:
            row.exercised = loaded
            row.verdict = Verdict.PASS if loaded else Verdict.NOT_EXERCISED
    collector.add(report)
    collector.capabilities = {"store": True, "best_effort": True}
    collector.sources = {"store": "declared" if declared else "inferred"}
    _, found = collector.finish(date(2026, 1, 1), complete=True)
    assert found.verdict == verdict
    assert any("loaded no KV" in reason for reason in found.reasons) is not bool(loaded)
    assert any("its store be reached" in reason for reason in found.reasons) is bool(code)
    assert collector.exit_code(found) == code
