# SPDX-License-Identifier: Apache-2.0
"""Tests that what is recorded as killed is killed still: a sample of every subject's mutants."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
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
SAMPLE = 2
"""Mutants of each subject."""


def again(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Judge kills again whose results are in a folder."""
    more = ("--kills", "--results", str(folder), "--jobs", "1", *arguments)
    return program_rig.python("-m", "kvconform.dev.mutants", *more, cwd=ROOT, timeout=600)


@pytest.mark.e2e
@pytest.mark.parametrize("name", list(subjects()))
def test_a_sample_of_the_recorded_kills_is_killed_still(name: str, tmp_path: Path) -> None:
    problem = lacks(subjects()[name], ROOT)
    if problem is not None:
        pytest.skip(problem)
    file = f"{name}.jsonl"
    shutil.copy(RECORDED / file, tmp_path)
    before = len((tmp_path / file).read_text().splitlines())
    done = again(tmp_path, "--subject", name, "--sample", str(SAMPLE))
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{name}: {SAMPLE} of " in done.stdout and f"{name}: {SAMPLE} confirmed" in done.stdout
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
    done = again(tmp_path, "--subject", "reference")
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"no longer killed by {claimed}:\nsurvived" in done.stdout
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
