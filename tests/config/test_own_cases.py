# SPDX-License-Identifier: Apache-2.0
"""Tests of cases in the user's own files: `kvconform run --case FILE`."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvconform.config.selection import select
from kvconform.config.settings import load
from kvconform.contract.loader import SpecError, load_spec
from kvconform.errors import UsageError
from places import ROOT

CASE = """id: mine.one
area: load
text: A prompt comes back.
rules: [R109]
steps:
  - add: {req: a, prompt: 12, max_tokens: 1}
  - run: {}
provokes: [{loads: 0}]
"""
RESULTS = sorted((ROOT / "docs" / "results" / "cases").glob("*.yaml"))


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(
        CASE.replace("provokes: [{loads: 0}]\n", "expect: [{outputs: {req: a, count: 1}}]\n")
    )
    return path


def test_alone_it_is_all_that_is_run(mine: Path) -> None:
    settings = load({"cases": [str(mine)]})
    found = select(load_spec(cases=settings.cases), settings, "0.32.0")
    assert {variant.case.id for variant in found.variants} == {"mine.one"}


def test_with_k_it_can_be_named_beside_others(mine: Path) -> None:
    settings = load({"cases": [str(mine)], "select": ["mine.one", "chunked.abort"]})
    found = select(load_spec(cases=settings.cases), settings, "0.32.0")
    assert {variant.case.id for variant in found.variants} == {"mine.one", "chunked.abort"}


def test_a_relative_path_is_from_where_it_was_given(
    mine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(mine.parent)
    assert load({"cases": ["mine.yaml"]}).cases == [str(mine)]


def test_what_is_wrong_with_it_is_told_with_its_line(mine: Path) -> None:
    mine.write_text(CASE.replace("area: load", "area: load\nneedz: x"))
    with pytest.raises(SpecError, match=r"mine\.yaml:\d+: .*needz"):
        load_spec(cases=[str(mine)])


def test_an_id_that_the_suite_has_is_refused(mine: Path) -> None:
    mine.write_text(mine.read_text().replace("mine.one", "chunked.abort"))
    with pytest.raises(SpecError, match=r"chunked\.abort is defined at"):
        load_spec(cases=[str(mine)])


def test_no_file_and_shards_are_told_in_a_sentence(mine: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        load_spec(cases=[str(mine.parent / "none.yaml")])
    with pytest.raises(UsageError, match="is a directory; name a file in it"):
        load_spec(cases=[str(mine.parent)])
    mine.with_name("binary.yaml").write_bytes(b"\xbe\xff")
    with pytest.raises(UsageError, match=r"cannot be read: it is not UTF-8 text$"):
        load_spec(cases=[str(mine.with_name("binary.yaml"))])
    with pytest.raises(UsageError, match="cannot be combined"):
        load({"cases": [str(mine)], "shard": "1/2"})


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_the_cases_of_the_findings_load_and_are_short(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert load_spec(cases=[str(path)], live="\nsteps:" not in text).own_cases
    assert len(text.splitlines()) <= 40


def test_a_prompt_that_no_engine_takes_is_no_case(mine: Path) -> None:
    mine.write_text(mine.read_text().replace("prompt: 12", "prompt: 256"))
    with pytest.raises(SpecError, match="a prompt of 256 tokens; config.max_model_len is 256"):
        load_spec(cases=[str(mine)])
    mine.write_text(mine.read_text().replace("prompt: 256", "prompt: 255"))
    with pytest.raises(
        SpecError, match="255 tokens, too many for num_blocks 32: there is room for 124"
    ):
        load_spec(cases=[str(mine)])
    mine.write_text(mine.read_text() + "\nconfig: {num_blocks: 65}\n")
    load_spec(cases=[str(mine)])
