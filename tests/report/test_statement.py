# SPDX-License-Identifier: Apache-2.0
"""Tests of statement.json and badge.json: they say what was found, and nothing better."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from kvconform.config.selection import select
from kvconform.config.settings import Settings
from kvconform.contract.loader import load_spec
from kvconform.dev.schema import folder
from kvconform.judge.records import CaseReport, Verdict
from kvconform.judge.verdict import rows_for
from kvconform.report import statement
from kvconform.report.collector import LOADED, Collector

SPEC = load_spec()
REQUIREMENTS = [each for each in SPEC.requirements.values() if each.kind == "requirement"]
MUST = [LOADED, *[each.id for each in REQUIREMENTS if each.level == "MUST"][:2]]
SHOULD = next(each.id for each in REQUIREMENTS if each.level == "SHOULD")
GUARANTEE = next(r.id for r in SPEC.requirements.values() if r.kind == "guarantee")

OWN = """id: lifecycle.mine-one
area: lifecycle
text: One request.
steps:
  - add: {req: a, prompt: 5, max_tokens: 2}
  - run: {}
"""


def made(
    *verdicts: Verdict, whole: bool = True, lost: bool = False, **changed: Any
) -> statement.Statement:
    """Return the statement about three requirements that count with these verdicts.

    A recommendation and a guarantee that fail are added. With `lost`, another run delivered
    nothing.
    """
    settings = Settings.model_validate(
        {"connector": "pkg:Conn", "engine": "reference", "scheduling": "sync"} | changed
    )
    collector = Collector(SPEC, settings, select(SPEC, settings, "0.32.0"), "0.32.0")
    variant, other = [each for each in collector.selection.variants if not each.beyond][:2]
    collector.only({variant.id, *([other.id] if lost else [])})
    collector.selection.narrowed = not whole
    names = [*MUST, SHOULD, GUARANTEE]
    rows = rows_for(
        [SPEC.requirements[name] for name in names],
        variant,
        Verdict.FAIL,
        "bad",
        strict=settings.strict,
    )
    for row, verdict in zip(rows, verdicts, strict=False):
        row.verdict, row.exercised = verdict, int(verdict in (Verdict.PASS, Verdict.FAIL))
    collector.add(CaseReport(variant.id, rows=rows))
    collector.capabilities, collector.sources = {"store": True, "hma": False}, {"store": "inferred"}
    _, found = collector.finish(date(2026, 1, 1), complete=True)
    return statement.make(collector, found, judged=date(2026, 1, 1))


def test_what_is_not_supported_does_not_count_as_passed() -> None:
    found = made(Verdict.PASS, Verdict.UNSUPPORTED, Verdict.NOT_EXERCISED)
    assert (found.passed, found.core) == (1, 3)
    assert set(found.requirements) == set(MUST), "recommendations and guarantees are no part of it"
    assert statement.badge(found)["message"] == "conformant in what it supports · 1/3 · vLLM 0.32.0"


@pytest.mark.parametrize(
    ("verdicts", "whole", "word", "colour"),
    [
        ((Verdict.PASS, Verdict.PASS, Verdict.PASS), True, "conformant", "brightgreen"),
        ((Verdict.PASS, Verdict.PASS, Verdict.UNSUPPORTED), True, "conformant", "brightgreen"),
        (
            (Verdict.PASS, Verdict.UNSUPPORTED, Verdict.NOT_EXERCISED),
            True,
            "conformant in what it supports",
            "yellowgreen",
        ),
        ((Verdict.PASS, Verdict.PASS, Verdict.PASS), False, "judged in part (core)", "lightgrey"),
        ((Verdict.PASS, Verdict.PASS, Verdict.XFAIL), True, "partly conformant", "yellow"),
        ((Verdict.PASS, Verdict.PASS, Verdict.XFAIL), False, "judged in part (core)", "lightgrey"),
        ((Verdict.PASS, Verdict.FAIL, Verdict.PASS), False, "not conformant", "red"),
        ((Verdict.PASS, Verdict.ERROR, Verdict.PASS), True, "no verdict", "lightgrey"),
        (
            (Verdict.UNSUPPORTED, Verdict.NOT_EXERCISED, Verdict.UNOBSERVABLE),
            True,
            "nothing judged",
            "yellow",
        ),
    ],
)
def test_the_badge(verdicts: tuple[Verdict, ...], whole: bool, word: str, colour: str) -> None:
    found = statement.badge(made(*verdicts, whole=whole))
    assert (
        found["message"].startswith(f"{word} · ")
        and found["color"] == colour
        and found["schemaVersion"] == 1
    )


def test_a_badge_counts_risks() -> None:
    found = made(Verdict.PASS, Verdict.PASS, Verdict.PASS)
    assert "risk" not in statement.badge(found)["message"]
    for names, said in ((["a.b"], " · 1 risk"), (["a.b", "c.d"], " · 2 risks")):
        badge = statement.badge(found.model_copy(update={"risks": names}))
        assert badge["message"].endswith(said)


@pytest.mark.parametrize("verdict", [Verdict.PASS, Verdict.XFAIL])
def test_another_profile_than_core_gives_no_good_badge(verdict: Verdict) -> None:
    found = statement.badge(made(Verdict.PASS, Verdict.PASS, verdict, profile="smoke"))
    assert (
        found["message"].startswith("judged in part (smoke) · ") and found["color"] == "lightgrey"
    )
    assert statement.badge(made(Verdict.FAIL, profile="smoke"))["color"] == "red"


def test_a_statement_about_less_says_so() -> None:
    good = (Verdict.PASS, Verdict.PASS, Verdict.PASS)
    assert made(*good).complete
    for less in ({"shard": "1/2"}, {"lost": True}, {"whole": False}):
        assert not made(*good, **less).complete, less  # type: ignore[arg-type]


def test_a_case_of_ones_own_is_not_the_profile(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(OWN, encoding="utf-8")
    spec = load_spec(cases=[str(file)])
    assert [*spec.own_cases] == ["lifecycle.mine-one"]
    settings = Settings(connector="pkg:Conn")
    assert select(spec, settings, "0.32.0").narrowed
    assert not select(SPEC, settings, "0.32.0").narrowed
    one_kind = Settings(connector="pkg:Conn", emulate_cuda=True, slow="compute")
    assert select(SPEC, one_kind, "0.32.0").narrowed, "half of the runs"


def test_recommendations_are_part_of_it_where_they_count() -> None:
    good = (Verdict.PASS, Verdict.PASS, Verdict.PASS, Verdict.PASS)
    assert (made(*good).core, made(*good, strict=True).core) == (3, 4)
    assert (
        SHOULD in made(*good, strict=True).requirements
        and GUARANTEE not in made(*good, strict=True).requirements
    )


def test_the_files_are_what_the_schema_says(tmp_path: Path) -> None:
    statement.write(tmp_path, made(Verdict.PASS, Verdict.FAIL, Verdict.PASS))
    data = json.loads((tmp_path / statement.NAME).read_text(encoding="utf-8"))
    jsonschema.validate(data, json.loads((folder() / "statement.json").read_text(encoding="utf-8")))
    assert data["failed"] == [MUST[1]] and data["requirements"][MUST[1]] == "FAIL"
    assert data["capabilities"] == {
        "hma": {"value": False, "source": "default", "doubt": None},
        "store": {"value": True, "source": "inferred", "doubt": None},
    }
    assert json.loads((tmp_path / statement.BADGE).read_text(encoding="utf-8"))["color"] == "red"
