# SPDX-License-Identifier: Apache-2.0
"""Tests of edge cases of the oracle and the observer.

They cover the reach of a failure report, the owner of a tail slot, and counts of failed claims.
"""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")
from core_rig import BLOCK, Machine, output, run_case, select
from kvconform.contract.events import WRITES
from kvconform.kv.oracle import slots_of
from kvconform.observe.observer import Observer

TOKENS = list(range(100, 112))


@pytest.fixture
def machine() -> Machine:
    """`a` holds blocks 1-4, and a grant for positions 0 to 8 in the first two."""
    made = Machine()
    made.grant("a", [1, 2, 3, 4], 0, 8)
    return made


def test_a_failed_block_excuses_itself_and_no_other(machine: Machine) -> None:
    def shifted() -> None:
        machine.load(machine.batch.requests["a"].chain, 1, 9, slots_of([1, 2, 3, 4], 0, 8, BLOCK))
        machine.oracle.failed_blocks = {2}

    step = output(new=[("a", TOKENS, [1, 2, 3, 4], 8, 4)])
    machine.step(step, fresh=[(block, "a") for block in (1, 2, 3, 4)], before=shifted)
    assert {(e["pos"], e["count"]) for e in machine.events("kv.wrong")} == {(0, 4)}


@pytest.mark.parametrize(("still_open", "kind"), [(True, None), (False, "over_computed")])
def test_a_tail_is_free_to_write_while_its_load_is_under_way(
    machine: Machine, still_open: bool, kind: str | None
) -> None:
    machine.oracle.grants[0].open = still_open
    machine.put(3 * BLOCK, 3, layers=(0,))
    machine.oracle.check_writes("start_load_kv")
    (event,) = machine.events("kv.changed")
    assert {name for name in WRITES if event[name]} == ({kind} if kind else set())
    assert kind is None or event[kind] == [3 * BLOCK]
    assert event["req"] == ["a"]


def seen_by(machine: Machine) -> Any:
    """Return what an Observer has seen of failed loads: nothing yet."""
    return SimpleNamespace(
        trace=machine.trace,
        _loads=machine.oracle,
        sees_arrivals=False,
        _failed_claims={},
        _failed_loads=set(),
        _unused={},
        _losses=0,
        activity=0,
    )


def test_every_failure_of_the_same_claim_counts(machine: Machine) -> None:
    seen = seen_by(machine)
    for attempt in (1, 2, 3):
        grant = machine.grant("a", [1, 2, 3, 4], 0, 8)
        for block in (1, 2):  # the second report of a failure is no second failure
            Observer._fail(seen, "a", grant, [block], [])
            grant.failed.add(block)
        assert Observer._failures(seen, ("a", 0), 8) == attempt
        assert seen.activity == 2 * attempt, "the store may have become smaller"
    assert Observer._failures(seen, ("a", 0), 4) == Observer._failures(seen, ("a", 1), 8) == 0


def test_a_load_that_fails_on_every_rank_has_failed_once(machine: Machine) -> None:
    seen = seen_by(machine)
    grant = machine.grant("a", [1, 2, 3, 4], 0, 8)
    for _ in range(4):  # each rank has a grant of its own for the same transfer
        Observer._fail(seen, "a", copy.deepcopy(grant), [1, 2], [])
    assert Observer._failures(seen, ("a", 0), 8) == 1


def test_a_store_that_nothing_touched_has_not_shrunk(tmp_path: Path) -> None:
    steps = [
        {"add": {"req": "a", "prompt": 14, "max_tokens": 3}},
        {"run": {}},
        {"drop-local": {}},
        {"add": {"req": "b", "prompt": {"same": "a"}, "max_tokens": 3}},
        {"run": {}},
    ]
    run = run_case(
        "kvconform.refimpl.defects.lookup:PopsOnLookup",
        steps,
        tmp_path,
        policies=["deny-first-alloc"],
    )
    lookups = [
        (e["repeat"], e["prev_tokens"], e["tokens"], e["store_may_have_shrunk"])
        for e in select(run.trace, "lookup", req="b")
    ]
    assert lookups == [(False, None, 12, True), (True, 12, 0, False)]
    steps.insert(4, {"step": 1})  # the same when something was stored between
    steps.insert(3, {"add": {"req": "z", "prompt": 9, "max_tokens": 9}})
    run = run_case(
        "kvconform.refimpl.defects.lookup:PopsOnLookup",
        steps,
        tmp_path / "other",
        policies=["deny-first-alloc"],
    )
    assert {e["store_may_have_shrunk"] for e in select(run.trace, "lookup", req="b")} == {True}
