# SPDX-License-Identifier: Apache-2.0
"""Tests of the selection: which runs of its cases a profile has."""

from __future__ import annotations

from typing import Any

import pytest

from kvconform.config.selection import select
from kvconform.config.settings import Settings
from kvconform.contract.loader import load_spec
from kvconform.contract.profile import select as select_profile

SPEC = load_spec()


def runs(**settings: Any) -> set[tuple[str, str, str]]:
    found = select(SPEC, Settings(**settings), "0.32.0").variants
    return {(each.case.id, each.engine, each.scheduling) for each in found}


def cases(profile: str) -> set[str]:
    return set(select_profile(SPEC.profiles, profile, (), SPEC.cases.values())[1])


def test_core_is_a_part_of_full_with_every_engine_and_scheduling_of_its_cases() -> None:
    core, full = runs(), runs(profile="full")
    assert core < full
    for axis in (1, 2):
        assert {(run[0], run[axis]) for run in core} == {
            (run[0], run[axis]) for run in full if run[0] in cases("core")
        }
    assert {run[0] for run in full} == cases("full")


def test_core_crosses_engines_and_schedulings_where_scheduling_is_the_subject() -> None:
    def of(area: str, found: set[tuple[str, str, str]]) -> set[tuple[str, str, str]]:
        return {run for run in found if run[0].startswith(f"{area}.")}

    core, full = runs(), runs(profile="full")
    crossed = of("placeholders", full)
    assert of("placeholders", core) == {run for run in crossed if run[0] in cases("core")}
    assert of("identity", core) < of("identity", full)


def test_who_names_cases_gets_all_their_runs() -> None:
    named = ["identity.*"]
    assert runs(select=named) == runs(profile="full", select=named)


@pytest.mark.parametrize("axis", [{"engine": "vllm"}, {"scheduling": "sync"}])
def test_who_names_an_axis_gets_all_its_runs_of_the_profile_s_cases(axis: dict[str, Any]) -> None:
    full = runs(profile="full", **axis)
    assert runs(**axis) == {run for run in full if run[0] in cases("core")}


def test_cases_that_are_named_and_have_no_run_are_told() -> None:
    named = ["identity.two-salts", "identity.salt", "lifecycle.fail-*"]
    found = select(SPEC, Settings(select=named, scheduling="sync"), "0.32.0")
    assert found.runless == ["identity.two-salts"]
    assert "identity.salt" in found.order()


@pytest.mark.parametrize(
    "narrowed",
    [{}, {"select": ["save.owned"]}, {"slow": "compute", "emulate_cuda": True}],
)
def test_runs_that_only_profile_full_has_are_counted(narrowed: dict[str, Any]) -> None:
    core = select(SPEC, Settings(**narrowed), "0.32.0")
    full = select(SPEC, Settings(profile="full", **narrowed), "0.32.0")
    assert core.beyond_profile == len(full.variants) - len(core.variants) > 0
    assert full.beyond_profile == 0


def test_a_requirement_that_is_named_along_with_a_case_is_judged_with_all_others() -> None:
    case, beyond = "placeholders.conversation", "engine.reset-returns"
    alone = select(SPEC, Settings(select=[case]), "0.32.0")
    both = select(SPEC, Settings(select=[case, beyond]), "0.32.0")
    assert beyond not in alone.judged
    assert both.judged == both.shown == [*alone.judged, beyond]
