# SPDX-License-Identifier: Apache-2.0
"""Tests that what is recorded as killed is killed still: a sample of every subject's mutants."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest

import program_rig
from kvconform.dev.mutants import page, result
from kvconform.dev.mutants.campaign import kills
from kvconform.dev.mutants.mutation import Edit, Mutation
from kvconform.dev.mutants.result import Result
from kvconform.dev.mutants.subject import lacks, subjects
from places import ROOT

RECORDED = ROOT / page.RESULTS
SAMPLE = 1
"""Mutants of each subject; all of them are judged every night."""
OFTEN = ("reference", "template")
"""Subjects that are sampled at every change; the others every night."""


def again(folder: Path, *arguments: str) -> tuple[int | None, str]:
    """Judge kills again whose results are in a folder; return the exit code and what was said.

    The process is forked from one that has imported vLLM: the import takes longer than a mutant.
    """
    typed = ["mutants", "--kills", "--results", str(folder), "--executor", "here", *arguments]
    text = f"""
import os, sys, typer
os.chdir({str(ROOT)!r})
from kvconform.dev.mutants.__main__ import main
sys.argv = {typed!r}
typer.run(main)
"""
    return program_rig.forked_python(text, folder, timeout=600)


@pytest.mark.e2e
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in OFTEN else pytest.mark.long) for name in subjects()],
)
def test_a_sample_of_the_recorded_kills_is_killed_still(name: str, tmp_path: Path) -> None:
    problem = lacks(subjects()[name], ROOT)
    if problem is not None:
        pytest.skip(problem)
    file = f"{name}.jsonl"
    shutil.copy(RECORDED / file, tmp_path)
    before = len((tmp_path / file).read_text().splitlines())
    code, said = again(tmp_path, "--subject", name, "--sample", str(SAMPLE))
    assert code == 0, said
    assert f"{name}: {SAMPLE} of " in said and f"{name}: {SAMPLE} confirmed" in said
    # Each kill that was confirmed is recorded with the day of this one.
    assert len((tmp_path / file).read_text().splitlines()) == before + SAMPLE


@pytest.mark.e2e
def test_a_kill_that_is_none_is_reported(tmp_path: Path) -> None:
    file = "reference.jsonl"
    recorded = result.read(RECORDED / file)
    line = "if len(stored) < HEADER.size:"
    (survivor,) = (one for one in recorded if one.line == line and one.operator == "boundary")
    assert survivor.outcome == "survived"
    claimed = "sync/lifecycle.hook-order[reference-sync-v1-d1-b4]"
    made_up = dataclasses.replace(survivor, outcome="killed", means="requirement", run=claimed)
    result.append(tmp_path / file, made_up)
    code, said = again(tmp_path, "--subject", "reference")
    assert code == 1, said
    assert f"no longer killed by {claimed}:\nsurvived" in said
    assert len((tmp_path / file).read_text().splitlines()) == 1  # it is not confirmed


def test_kills_are_known_by_their_site_although_the_module_has_changed() -> None:
    def of(line: str, outcome: result.Outcome, run: str, **fields: bool) -> Result:
        return Result("s", "m", "f", "o", line, 0, "other", "", outcome, run=run, **fields)

    done = [
        of("a", "killed", "sync/area.case[x]"),
        of("b", "survived", ""),
        of("c", "killed", "", means="start"),  # type: ignore[arg-type]
        of("d", "killed", "explore", explored=True),
    ]
    mutants = [Mutation(each.site, Edit(0, 0, ""), None, b"") for each in done]
    assert list(kills(mutants, done).values()) == done[:1]
