# SPDX-License-Identifier: Apache-2.0
"""Tests of report.html: what it says, and that it is one file without external resources."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import date
from html.parser import HTMLParser
from pathlib import Path

import pytest

from html_rig import page_of
from kvconform.config.selection import select
from kvconform.config.settings import Settings
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
MUST = next(
    r.id
    for r in SPEC.requirements.values()
    if r.kind == "requirement" and r.level == "MUST" and r.right
)
MESSAGE = "wrong <script>alert(1)</script> & bytes"
CHECK = "`e.x == 1` is false: e.x=2"


def html(
    tmp_path: Path,
    *,
    fails: bool,
    verdict: Verdict = Verdict.FAIL,
    counts: bool = True,
    unmet: Sequence[str] = (),
) -> str:
    """A report about one requirement in one run. `counts`: against the connector."""
    settings = Settings(
        connector="pkg:Conn", engine="reference", scheduling="sync", select=[CASE.id]
    )
    collector = Collector(SPEC, settings, select(SPEC, settings, "0.32.0"), "0.32.0")
    (variant,) = collector.selection.variants
    rows = rows_for([SPEC.requirements[MUST]], variant, Verdict.PASS, "", strict=False)
    rows[0].exercised, rows[0].message = 1, None
    rows[0].gating = counts
    if fails:
        rows[0].verdict, rows[0].step, rows[0].event = verdict, 3, 0
        rows[0].message, rows[0].check = MESSAGE, CHECK
        rows[0].evidence = "v1/core/sched/scheduler.py: Scheduler.schedule"
    story = pack(
        build(
            [
                {
                    "kind": "engine.lifecycle",
                    "seq": 0,
                    "step": 0,
                    "op": "start",
                    "pid": 0,
                    "error": None,
                }
            ],
            {MUST: 0},
        )
    )
    timelines = {MUST: [">  3  engine  <start>"]}
    report = CaseReport(variant.id, rows=rows, timelines=timelines, story=story)
    report.unmet = list(unmet)
    collector.add(report)
    final, found = collector.finish(date(2026, 1, 1), complete=True)
    header = jsonl.header_of(collector, [])
    told = summary.write(tmp_path, collector, found, seconds=1.0, started="2026-01-01", exit_code=1)
    return page.write(tmp_path, page.make(collector, header, told, final)).read_text(
        encoding="utf-8"
    )


class Elements(HTMLParser):
    """The elements of a page, with their attributes; unbalanced ones are reported."""

    VOID = frozenset({"meta", "input", "br", "link", "img", "hr"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.all: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.all.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes something else"


def test_the_failure_is_told_with_its_evidence(tmp_path: Path) -> None:
    text = html(tmp_path, fails=True)
    elements = Elements(text)
    assert elements.open == []
    links = [attrs["href"] for tag, attrs in elements.all if tag == "a"]
    assert (
        "https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/v1/core/sched/scheduler.py" in links
    )
    assert f"#{MUST}-1" in links
    assert "NOT CONFORMANT" in text and f"kvconform run pkg:Conn -k {CASE.id}" in text
    assert "e.x == 1 is false: e.x=2" in text


def test_root_causes_come_before_everything_and_name_their_consequences(tmp_path: Path) -> None:
    names = ["save.owned", "load.position", "api.constructor"]
    text = page_of(tmp_path, failures=3, first=names).read_text("utf-8")
    overview = text[text.index('<ol class="toc">') : text.index("</ol>")]
    causes = overview.split("<li>")[1:]
    sections = re.findall(r'<section class="failure" id="([^"]+)"', text)
    assert [re.findall(r'href="#([^"]+)"', one)[0] for one in causes] == sections
    (save,) = [one for one in causes if "save.owned" in one]
    assert "consequences: " in save and ">load.position</a>" in save
    number = next(one for one in sections if one.startswith("save.owned")).rpartition("-")[2]
    consequence = text[text.index('<details class="failure consequence"') :]
    assert f"consequence of {number}. save.owned" in consequence[:300]
    assert f'id="load.position-{number}"' in consequence[:300]


def test_nothing_of_the_overview_is_scrolled_out_of_view() -> None:
    rules = dict(re.findall(r"(\.toc[^{,]*?)\s*\{([^}]*)\}", page.stylesheet()))
    assert rules
    assert not [name for name, rule in rules.items() if "overflow: " in rule or "height" in rule]


def test_the_timeline_follows_what_was_found_and_the_rest_is_folded(tmp_path: Path) -> None:
    elements = Elements(html(tmp_path, fails=True)).all
    begin = next(n for n, (_, attrs) in enumerate(elements) if attrs.get("class") == "failure")
    tags = [f"{tag}.{attrs.get('class')}" for tag, attrs in elements[begin:]]
    found = next(n for n, tag in enumerate(tags) if tag.startswith("p.found"))
    assert tags[found + 1] == "div.timeline"
    text = (tmp_path / page.NAME).read_text(encoding="utf-8")
    folded = re.findall(r"<details><summary>(.*?)</summary>(.*?)</details>", text, re.S)
    assert [name for name, _ in folded[:2]] == ["Reproduce", "Check"]
    assert "kvconform run" in folded[0][1] and "e.x == 1" in folded[1][1]


def test_the_numbers_at_the_top_add_up(tmp_path: Path) -> None:
    text = html(tmp_path, fails=True)
    line = re.sub(r"<[^>]+>", "", text[text.index('<p class="counts">') :].partition("</p>")[0])
    total, _, rest = line.partition(": ")
    numbers = [int(number) for number in re.findall(r"(\d+) [a-z]", rest)]
    assert int(total.split()[0]) == sum(numbers) == 1


def test_no_comma_before_what_does_not_count(tmp_path: Path) -> None:
    """The stylesheet puts a comma behind each count but the last child."""
    text = html(tmp_path, fails=True, counts=False)
    counts, _, rest = text[text.index('<p class="counts">') :].partition("(of those that fail, 1")
    assert rest.startswith(" recommended only)")
    assert counts.endswith('1 fail</span></span> <span class="quiet">')


def test_what_a_connector_says_is_text_and_not_markup(tmp_path: Path) -> None:
    text = html(tmp_path, fails=True)
    assert "<script>alert(1)" not in text
    assert "wrong &lt;script&gt;alert(1)&lt;/script&gt; &amp; bytes" in text
    assert "&lt;start&gt;" in text


@pytest.mark.parametrize("fails", [True, False])
def test_nothing_is_fetched(tmp_path: Path, fails: bool) -> None:
    text = html(tmp_path, fails=fails)
    elements = Elements(text)
    assert not [
        attrs for tag, attrs in elements.all if tag in {"link", "img", "iframe"} or attrs.get("src")
    ]
    code = "".join(re.findall(r"<script>.*?</script>|<style>.*?</style>", text, re.S))
    assert not re.search(r"https?://|@import|url\(|fetch\(|XMLHttpRequest|importScripts", code)


def test_the_story_of_a_run_without_failure_is_left_out(tmp_path: Path) -> None:
    assert 'type="application/kvconform" data-run=' in html(tmp_path, fails=True)
    assert 'type="application/kvconform" data-run=' not in html(tmp_path, fails=False)


def test_that_nothing_was_judged_is_told(tmp_path: Path) -> None:
    assert "NOTHING JUDGED" in html(tmp_path, fails=True, verdict=Verdict.NOT_EXERCISED)


def test_errors_are_told(tmp_path: Path) -> None:
    assert "Errors of the harness" in html(tmp_path, fails=True, verdict=Verdict.ERROR)
    assert "Errors of the harness" not in html(tmp_path, fails=True)


def test_all_that_was_not_reached_is_told(tmp_path: Path) -> None:
    text = html(tmp_path, fails=False, unmet=["a was not preempted", "b <never> came"])
    assert Elements(text).open == []
    assert "1 run did not reach the situation" in text
    assert "a was not preempted; b &lt;never&gt; came" in text
    assert "did not reach" not in html(tmp_path, fails=False)
