# SPDX-License-Identifier: Apache-2.0
"""Tests that each case of the gate is named by something that it finds, and no other case is.

A planted defect, a finding about a connector, a bug of vLLM, or a mutant. Other cases cost every
author time, and belong to profile full only.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvconform.contract.loader import entries, load_spec
from kvconform.contract.profile import select
from kvconform.dev.defect import load_defects
from kvconform.dev.mutants import page, result
from kvconform.dev.results import finding
from places import ROOT

SPEC = load_spec()


def found() -> Iterator[tuple[str, str]]:
    """Yield cases, each with something that it finds. Globs of findings name none."""
    for defect in load_defects(SPEC).values():
        yield from ((case, f"defect {defect.id}") for case in defect.cases)
    for entry in entries(SPEC):
        yield from ((case, f"bug {entry.id} of vLLM") for case in entry.cases)
    for each in finding.read(ROOT / "docs" / "results"):
        yield from ((case, f"finding {each.id}") for case in (each.case, *each.cases))
    for file in sorted((ROOT / page.RESULTS).glob("*.jsonl")):
        for one in result.read(file):
            if one.killed_by_a_case:
                yield result.case_of(one.run), f"mutant {one.site}"


def in_profile(name: str) -> set[str]:
    """Return the cases of a profile."""
    chosen = select(SPEC.profiles, name, (), SPEC.cases.values())
    return set(chosen[1])


def test_cases_of_the_gate_are_those_that_have_found_something() -> None:
    known = dict(found())
    gate = in_profile("core")
    others = {case for case in in_profile("full") if SPEC.cases[case].area != "findings"} - gate
    idle = gate - set(known)
    assert not idle, "add a planted defect, or exclude them from profile core"
    busy = {case: known[case] for case in others & set(known)}
    assert not busy, "they find something, so profile core must have them"
