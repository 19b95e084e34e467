# SPDX-License-Identifier: Apache-2.0
"""Tests that what the original fails, too, kills no mutant."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvconform.compat.installed import check_vllm
from kvconform.contract.loader import load_spec
from kvconform.dev.mutants import server
from kvconform.dev.mutants.child import EXPLORING, Job, Message
from kvconform.dev.mutants.mutation import Edit, Mutation, Site
from kvconform.dev.mutants.server import Server
from kvconform.dev.mutants.subject import subject
from places import ROOT

CASE = "identity.salt"
SPEC = load_spec()
MUTATION = Mutation(Site("m", "f", "o", "x"), Edit(0, 0, ""), None, b"")


def judge(
    monkeypatch: pytest.MonkeyPatch, original: list[Message], mutants: list[Message], **changes: Any
) -> tuple[server.Result, list[Job]]:
    """Judge a mutant whose messages are made up, as are those of the original's repeats."""
    whole = subject("reference")
    small = whole.model_copy(update={"id": "small", "setups": whole.setups[:1], **changes})
    jobs: list[Job] = []

    def messages(self: Server, job: Job, limit: float) -> Iterator[Message]:
        jobs.append(job)
        left = [m for m in mutants if m.get("requirement") not in excused_in(job)]
        left = [m for m in left if not job.known.intersection(m.get("causes", ()))]
        for message in left if job.mutation else original:
            failed = [message["requirement"]] if "requirement" in message else []
            run = {} if "run" in message else {"run": job.runs[0].id}
            yield {**run, "seconds": 0.1, "failed": failed, **message}
        yield {"done": True, "left": 0}

    monkeypatch.setattr(Server, "_messages", messages)
    with Server(small, SPEC, check_vllm()[0], ROOT, explore=0.0, cases=[CASE]) as made:
        made.original.seconds = dict.fromkeys(made._runs, 0.1)
        monkeypatch.setitem(made._paths, "m", Path("m.py"))
        return made.judge(MUTATION), jobs


def excused_in(job: Job) -> set[str]:
    return {each.partition(" ")[2] for each in job.excused}


def test_a_failure_that_the_original_never_has_is_a_kill(monkeypatch: pytest.MonkeyPatch) -> None:
    result, jobs = judge(monkeypatch, [], [{"requirement": "save.owned"}])
    assert (result.outcome, result.requirements) == ("killed", ["save.owned"])
    assert [job.mutation is None for job in jobs] == [False, True, True]  # it was tried twice


def test_a_failure_that_the_original_has_now_and_then_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flaky = {"requirement": "save.owned"}
    result, jobs = judge(monkeypatch, [flaky], [flaky])
    assert result.outcome == "survived"
    assert jobs[-1].excused == {f"{CASE} save.owned"}  # in every run of the case


@pytest.mark.parametrize("own", [True, False])
def test_what_the_original_fails_in_a_random_workload_is_none(
    monkeypatch: pytest.MonkeyPatch, own: bool
) -> None:
    """Also an error of the harness, which the original has in the same workload."""
    found = {"run": EXPLORING, "number": 7, "causes": ["harness: x"], "error": "x"}
    result, jobs = judge(monkeypatch, [] if own else [found], [found])
    assert result.outcome == ("killed" if own else "survived")
    (asked,) = (job for job in jobs if job.mutation is None)
    assert (asked.only, asked.runs) == (7, [])


def test_where_the_original_s_process_ends_a_mutant_s_death_decides_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dead = {"died": "exit code 1, some_hook", "hung": False}
    assert judge(monkeypatch, [dead], [dead])[0].outcome == "undecided"
    assert judge(monkeypatch, [], [dead])[0].outcome == "killed"


def test_what_a_subject_does_not_keep_is_not_judged_and_what_breaks_it_not_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, jobs = judge(monkeypatch, [], [], unkept=["save.owned"])
    assert "save.owned" not in jobs[0].judged and "save.confirmed" in jobs[0].judged
    _, jobs = judge(monkeypatch, [], [], broken=[CASE])
    assert jobs[0].runs == []
