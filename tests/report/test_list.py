# SPDX-License-Identifier: Apache-2.0
"""Tests of `kvconform list` and of hints at what -k and --engine can name."""

from __future__ import annotations

import io
from collections import Counter

import pytest
from rich.console import Console

from kvconform import commands
from kvconform.config.selection import select
from kvconform.config.settings import load
from kvconform.contract.loader import load_spec
from kvconform.errors import UsageError

SPEC = load_spec()
AREAS = Counter(each.area for each in SPEC.requirements.values())


def printed(area: str | None = None, *, everything: bool = False) -> list[str]:
    columns, rows = commands._rows(SPEC, "requirements")
    rows = [row for row in rows if area is None or row[1] == area]
    out = io.StringIO()
    console = Console(file=out, width=80, markup=False)
    commands.print_list(console, "requirements", columns, rows, area, everything)
    return out.getvalue().splitlines()


def test_the_list_names_the_areas_and_how_to_see_all() -> None:
    lines = printed()
    assert len(lines) <= 40 and "--all shows all" in lines[-1]
    assert lines[0].split() == ["allocation", str(AREAS["allocation"])]


@pytest.mark.parametrize("area", AREAS)
def test_an_area_fits_a_screen(area: str) -> None:
    lines = printed(area)
    assert len(lines) == 2 * AREAS[area] + 2 <= 40
    assert max(map(len, lines)) <= 80 and "explain ID" in lines[-1]


def test_all_prints_whole_texts() -> None:
    text = " ".join(" ".join(printed(everything=True)).split())
    assert all(" ".join(each.text.split()) in text for each in SPEC.requirements.values())
    assert "load.position load MUST A load" in text


def test_an_area_may_be_named_alone(capsys: pytest.CaptureFixture[str]) -> None:
    commands.show("load")
    assert {line.split("\t")[1] for line in capsys.readouterr().out.splitlines()} == {"load"}
    commands.show("cases", "chunked")
    assert {line.split("\t")[1] for line in capsys.readouterr().out.splitlines()} == {"chunked"}
    with pytest.raises(UsageError, match="did you mean load"):
        commands.show("loadd")
    with pytest.raises(UsageError, match="no cases of area 'startup'"):
        commands.show("cases", "startup")
    with pytest.raises(UsageError) as refused:
        commands.show("requirements", "findings")
    assert "did you mean findings" not in str(refused.value)


def test_a_word_that_is_no_id_is_made_a_glob() -> None:
    with pytest.raises(UsageError, match=r"-k fail: .*'\*fail\*', which matches \d+ ids, such as"):
        select(SPEC, load({"select": ["fail"]}), "0.32.0")
    with pytest.raises(UsageError, match="there is no area, case or requirement 'zzz'"):
        select(SPEC, load({"select": ["zzz"]}), "0.32.0")


def test_both_engines_may_be_listed() -> None:
    for names in ("reference,vllm", "vllm, reference"):
        assert load({"engine": names}).engine == "all"
    assert load({"scheduling": "sync,async"}).scheduling == "all"
    with pytest.raises(UsageError, match="name one, or all"):
        load({"engine": "vllm,live"})
