# SPDX-License-Identifier: Apache-2.0
"""Tests of the oracle: what a connector wrote and where, what it owed, what the engine read."""

from __future__ import annotations

import numpy as np
import pytest

from core_rig import BLOCK, Machine, output
from kvconform.judge.describe import describe
from kvconform.kv.content import Content
from kvconform.kv.oracle import Fill, slots_of
from kvconform.kv.provenance import Chain, Identity, Origin

TOKENS = list(range(100, 112))
OUTSIDE = ("shared", "over_computed", "null_block", "unallocated", "other_request")


# -- where a connector writes


@pytest.fixture
def machine() -> Machine:
    """A machine with requests `a` and `b`.

    `b` holds blocks 9 and 10. `a` has blocks 1 to 4: a local hit of 4 tokens in block 1, and a
    grant for positions 4 to 9 in blocks 2 and 3.
    """
    made = Machine()
    made.step(output(new=[("b", [1, 2, 3, 4, 5], [9, 10], 0, 5)]))
    made.tables["b"] = [9, 10]
    made.grant("a", [1, 2, 3, 4], 4, 9)
    return made


def test_loads_of_a_step_may_be_queued_one_behind_the_other(machine: Machine) -> None:
    """The first layer of the second load is behind all layers of the first."""
    first, second = machine.oracle.grants[0], machine.grant("c", [5, 6], 0, 5)
    ahead: list[list[str]] = []
    for grant, layer in ((first, 0), (first, 1), (second, 0), (second, 1)):
        grant.written[layer] = True
        machine.oracle.reached(0)
        ahead.append(machine.events("load.ahead")[-1]["ahead"])
    assert ahead == [[], [], [], [machine.cache.names[1]]]


@pytest.mark.parametrize(
    ("slot", "kind", "req"),
    [
        (0, "null_block", []),
        (3, "null_block", []),
        (4, "shared", ["a"]),
        (7, "shared", ["a"]),
        (8, None, ["a"]),
        (12, None, ["a"]),
        (13, None, ["a"]),
        (36, "other_request", []),
        (41, "other_request", []),
        (44, "unallocated", []),
    ],
)
def test_a_write_is_classified_by_where_it_goes(
    machine: Machine, slot: int, kind: str | None, req: list[str]
) -> None:
    machine.put(slot, 3, layers=(1,))
    machine.oracle.check_writes("start_load_kv")
    (event,) = machine.events("kv.changed")
    assert (event["layer"], event["after_hook"], event["req"]) == (1, "start_load_kv", req)
    assert {name: event[name] for name in OUTSIDE} == {
        name: [slot] if name == kind else [] for name in OUTSIDE
    }


def test_a_tail_that_was_computed_is_not_free_to_write(machine: Machine) -> None:
    machine.oracle.filled(np.array([13]), 1, Fill(("a", 0)))
    machine.put(13, 3)
    machine.oracle.check_writes("wait_for_save")
    assert [e["over_computed"] for e in machine.events("kv.changed")] == [[13], [13]]


def test_the_same_bytes_with_another_nonce_are_a_write(machine: Machine) -> None:
    machine.put(36)
    machine.oracle.check_writes("start_load_kv")
    assert [e["other_request"] for e in machine.events("kv.changed")] == [[36], [36]]
    chain = machine.batch.requests["b"].chain
    wanted = Content.of(machine.book, chain.array(0, 1))
    assert machine.cache.mismatches(0, np.array([36]), wanted).size == 0


def load_step(machine: Machine, **kwargs: object) -> None:
    """The step in which `a` computes positions 9 to 11 on top of its load."""
    a = ("a", TOKENS, [1, 2, 3, 4], 9, 3)
    machine.step(output(new=[a]), fresh=[(2, "a"), (3, "a"), (4, "a")], **kwargs)  # type: ignore[arg-type]


def loader(
    machine: Machine, start: int = 4, end: int = 9, layers: tuple[int, ...] = (0, 1)
) -> None:
    chain = machine.batch.requests["a"].chain
    machine.load(chain, start, end, slots_of([1, 2, 3, 4], start, end, BLOCK), layers)


@pytest.fixture
def shared(machine: Machine) -> Machine:
    """`a`'s first block holds what it must, as a local hit would."""
    chain = Chain("first", 0, Identity())
    for pos, token in enumerate(TOKENS):
        machine.registry.note(
            chain.append(token), Origin("token", "first", 0, pos, chain.plain[pos], token)
        )
    content = Content.of(machine.book, chain.array(0, 4))
    for layer in (0, 1):
        machine.cache.write(layer, np.arange(4, 8), content)
    machine.oracle.filled(np.arange(4, 8), 1, Fill(("first", 0)))
    return machine


# -- loads


def test_a_load_in_time_is_right(shared: Machine) -> None:
    load_step(shared, before=lambda: loader(shared))
    (due,) = shared.events("load.due")
    assert (due["missing"], due["wrong"], due["granted"], due["local"], due["reported_failed"]) == (
        [],
        [],
        5,
        4,
        False,
    )
    assert not shared.events("kv.wrong") and not shared.worker.corrupt


def test_a_load_that_never_arrives_is_missing_and_nothing_else(shared: Machine) -> None:
    load_step(shared, before=lambda: loader(shared, 4, 7))
    (due,) = shared.events("load.due")
    assert (due["missing"], due["layers"], due["reported_failed"]) == ([7, 8], [], False)
    assert not shared.events("kv.wrong")
    assert shared.worker.corrupt == {"a"}


def test_one_layer_that_never_arrives_is_missing(shared: Machine) -> None:
    load_step(shared, before=lambda: loader(shared, layers=(1,)))
    (due,) = shared.events("load.due")
    assert (due["missing"], due["layers"]) == ([4, 5, 6, 7, 8], [0])
    assert not shared.events("kv.wrong")


def load_heads(machine: Machine, heads: slice) -> None:
    """Load these heads of positions 4 to 8 of `a`, and leave the others as they are."""
    chain = machine.batch.requests["a"].chain
    rows = machine.book.rows(chain.array(4, 9), nonce=0x5A5A)
    for index, slot in enumerate(slots_of([1, 2, 3, 4], 4, 9, BLOCK)):
        for layer in (0, 1):
            row = machine.cache.read(layer, slot[None])[0].numpy()
            row[heads] = rows[index, layer][heads]
            machine.put_row(layer, int(slot), row)


def test_slots_that_stay_written_in_part_are_missing_and_nothing_else(shared: Machine) -> None:
    load_step(shared, before=lambda: load_heads(shared, slice(1)))
    (due,) = shared.events("load.due")
    assert due["missing"] == due["partial"] == [4, 5, 6, 7, 8]
    assert due["wrong"] == []
    assert not shared.events("kv.wrong")
    assert shared.worker.corrupt == {"a"}
    assert "positions 4-8 were written only in part" in (describe(due) or "")


def test_a_slot_whose_other_part_arrives_after_the_read_is_late(shared: Machine) -> None:
    load_step(
        shared,
        before=lambda: load_heads(shared, slice(1)),
        after=lambda: load_heads(shared, slice(1, None)),
    )
    (due,) = shared.events("load.due")
    assert (due["missing"], due["partial"]) == ([], [])
    assert {e["found"] for e in shared.events("kv.wrong")} == {"not_yet_loaded"}
    assert {e["pos"] for e in shared.events("kv.wrong")} == {4, 5, 6, 7, 8}


def test_other_bytes_in_the_slot_of_an_overdue_load_do_not_arrive_late(shared: Machine) -> None:
    load_step(shared, before=lambda: loader(shared, 4, 7))

    def write_over() -> None:
        chain = shared.batch.requests["a"].chain
        shared.load(chain, 4, 6, slots_of([1, 2, 3, 4], 7, 9, BLOCK))

    write_over()
    shared.oracle.check_writes("start_load_kv")
    (due,) = shared.events("load.due")
    assert due["missing"] == [7, 8]
    assert not shared.events("kv.wrong")
    assert any(e["over_computed"] for e in shared.events("kv.changed"))


def test_a_load_that_arrives_after_the_read_is_late_and_not_missing(shared: Machine) -> None:
    load_step(shared, after=lambda: loader(shared))
    assert shared.events("load.due")[0]["missing"] == []
    late = shared.events("kv.wrong")
    assert {(e["found"], e["via"], e["transfer_sync"]) for e in late} == {
        ("not_yet_loaded", "external", True)
    }
    assert sorted((e["layer"], e["pos"]) for e in late) == [
        (layer, pos) for layer in (0, 1) for pos in range(4, 9)
    ]


def test_only_the_layer_that_was_late_is_blamed(shared: Machine) -> None:
    """Layer 0 arrives after its read, layer 1 before it."""
    load_step(shared, attention=lambda layer: loader(shared) if layer == 1 else None)
    assert {e["layer"] for e in shared.events("kv.wrong")} == {0}
    assert shared.events("load.due")[0]["missing"] == []


def test_a_layer_that_is_only_missing_is_not_called_late(shared: Machine) -> None:
    load_step(shared, attention=lambda layer: loader(shared, layers=(1,)) if layer == 1 else None)
    assert not shared.events("kv.wrong")
    assert shared.events("load.due")[0]["missing"] == [4, 5, 6, 7, 8]


def test_bytes_that_arrive_in_a_later_step_were_late(shared: Machine) -> None:
    """Until the bytes arrive, the load counts as missing.

    The engine relied on it; an asynchronous load was reported too early.
    """
    shared.oracle.grants[0].is_async = True
    load_step(shared)
    (due,) = shared.events("load.due")
    assert due["missing"] == [4, 5, 6, 7, 8]
    loader(shared, 4, 8)
    shared.oracle.check_writes("start_load_kv")
    assert due["missing"] == [8]
    late = shared.events("kv.wrong")
    assert {(e["found"], e["transfer"], e["transfer_sync"]) for e in late} == {
        ("not_yet_loaded", "a#0.1", False)
    }
    assert not any(e[kind] for e in shared.events("kv.changed") for kind in OUTSIDE)
    loader(shared, 4, 5, layers=(1,))
    shared.put(8)  # the same slot again: no load waits for it any more
    shared.oracle.check_writes("start_load_kv")
    assert {8} == {s for e in shared.events("kv.changed") for s in e["over_computed"]}


def test_whoever_gets_the_blocks_later_does_not_wait_for_them(shared: Machine) -> None:
    load_step(shared)
    shared.tables["a"] = []
    loader(shared, 4, 5)
    shared.oracle.check_writes("start_load_kv")
    assert [e["unallocated"] for e in shared.events("kv.changed")] == [[8], [8]]
    shared.tables["c"] = [2]
    shared.step(output(new=[("c", [1, 2], [2], 0, 2)]), fresh=[(2, "c")])
    loader(shared, 6, 7)
    shared.oracle.check_writes("start_load_kv")
    assert [e["other_request"] for e in shared.events("kv.changed")][-2:] == [[10], [10]]


def test_a_reported_failure_is_neither_missing_without_notice_nor_wrong(shared: Machine) -> None:
    def fail() -> None:
        loader(shared, 4, 8)
        shared.oracle.failed_blocks = {3}

    load_step(shared, before=fail)
    (due,) = shared.events("load.due")
    assert (due["missing"], due["reported_failed"]) == ([8], True)
    assert not shared.events("kv.wrong") and not shared.oracle.overdue


def test_a_failure_may_have_been_reported_in_a_step_before(shared: Machine) -> None:
    def rest() -> None:
        loader(shared, 6, 8)
        shared.oracle.failed_blocks = {3}

    shared.oracle.grants[-1].failed = {2}
    load_step(shared, before=rest)
    (due,) = shared.events("load.due")
    assert (due["missing"], due["reported_failed"]) == ([4, 5, 8], True)


def test_a_failure_report_must_cover_what_is_missing(shared: Machine) -> None:
    load_step(shared, before=lambda: setattr(shared.oracle, "failed_blocks", {3}))
    (due,) = shared.events("load.due")
    assert (due["missing"], due["reported_failed"]) == ([4, 5, 6, 7, 8], False)


def test_a_failed_request_covers_all_of_its_load(shared: Machine) -> None:
    load_step(shared, before=lambda: setattr(shared.oracle, "failed_reqs", {"a"}))
    assert shared.events("load.due")[0]["reported_failed"] is True


def test_wrong_bytes_of_a_load_are_named_once_as_one_range(shared: Machine) -> None:
    def shifted() -> None:
        chain = shared.batch.requests["a"].chain
        shared.load(chain, 3, 8, slots_of([1, 2, 3, 4], 4, 9, BLOCK))

    load_step(shared, before=shifted)
    events = shared.events("kv.wrong")
    assert [(e["layer"], e["pos"], e["count"], e["found"], e["kv"]) for e in events] == [
        (layer, 4, 5, "other_position", "both") for layer in (0, 1)
    ]
    assert all(
        e["via"] == "external" and e["transfer"] == "a#0.1" and e["block"] == 2 for e in events
    )
    assert shared.events("load.due")[0]["wrong"] == [4, 5, 6, 7, 8]


def test_ranges_end_where_something_else_begins(shared: Machine) -> None:
    def mixed() -> None:
        loader(shared)
        chain = shared.batch.requests["a"].chain
        shared.load(chain, 3, 4, [8])
        shared.put(9, 0)
        shared.load(chain, 3, 4, [11])

    load_step(shared, before=mixed)
    assert [(e["pos"], e["count"], e["found"]) for e in shared.events("kv.wrong", layer=0)] == [
        (4, 1, "other_position"),
        (5, 1, "never_computed"),
        (7, 1, "other_position"),
    ]


# -- reads


# has a local hit of `a`'s first two blocks
SHARER = output(new=[("c", [*TOKENS[:8], 1, 2], [1, 2, 5], 8, 2)])


def decode(machine: Machine, req: str, computed: int, outputs: int) -> None:
    machine.step(
        output(
            cached=[
                {"req": req, "blocks": None, "computed": computed, "count": 1, "outputs": outputs}
            ]
        )
    )


def test_only_the_first_reader_of_a_filling_is_reported(shared: Machine) -> None:
    """Layers are loaded one by one: a write to layer 1 is not a new filling of layer 0."""

    def wrong(layer: int) -> None:
        shared.load(
            shared.batch.requests["a"].chain, 3, 8, slots_of([1, 2, 3, 4], 4, 9, BLOCK), (layer,)
        )

    load_step(shared, attention=wrong)
    first = len(shared.events("kv.wrong"))
    assert first == 2
    decode(shared, "a", 12, 1)
    shared.step(SHARER)
    assert len(shared.events("kv.wrong")) == first
    assert shared.worker.corrupt == {"c"}
    shared.put(8, 5)
    shared.oracle.check_writes("start_load_kv")
    decode(shared, "c", 10, 1)
    assert {(e["req"], e["found"]) for e in shared.events("kv.wrong")[first:]} == {("c", "unknown")}


def test_where_the_bytes_came_from(shared: Machine) -> None:
    load_step(shared, before=lambda: loader(shared))
    for slot in (4, 8, 13):  # a local hit, loaded, computed by `a`
        shared.put(slot, 7)
    shared.oracle.check_writes("start_load_kv")
    decode(shared, "a", 12, 1)
    assert [
        (e["pos"], e["via"], e["transfer"], e["transfer_sync"])
        for e in shared.events("kv.wrong", layer=0)
    ] == [
        (0, "local", None, None),
        (4, "external", "a#0.1", True),
        (9, "own", None, None),
    ]


def test_a_sharer_of_a_loaded_block_read_it_locally(shared: Machine) -> None:
    load_step(shared, before=lambda: loader(shared))
    shared.put(8, 7)
    shared.oracle.check_writes("start_load_kv")
    shared.step(SHARER)
    assert {
        (e["req"], e["via"], e["transfer"], e["transfer_sync"]) for e in shared.events("kv.wrong")
    } == {("c", "local", "a#0.1", True)}


def test_wrong_bytes_change_the_sampled_token(machine: Machine) -> None:
    other = Machine()
    other.step(output(new=[("b", [1, 2, 3, 4, 5], [9, 10], 0, 5)]))
    step = output(cached=[{"req": "b", "blocks": None, "computed": 5, "count": 1, "outputs": 1}])
    other.cache.tensors[1][9, 0, 2, 0] += 1
    assert machine.step(step)["b"] != other.step(step)["b"]
    assert (machine.worker.corrupt, other.worker.corrupt) == (set(), {"b"})


def test_a_changed_nonce_changes_no_token(machine: Machine) -> None:
    other = Machine()
    other.step(output(new=[("b", [1, 2, 3, 4, 5], [9, 10], 0, 5)]))
    step = output(cached=[{"req": "b", "blocks": None, "computed": 5, "count": 1, "outputs": 1}])
    other.put(36)
    assert machine.step(step) == other.step(step)
