# SPDX-License-Identifier: Apache-2.0
"""Tests of the explanation of wrong bytes that belong to another position.

It names the block that held them and the table by which a save reads them; the excerpt shows both.
"""

from __future__ import annotations

from typing import Any

import pytest

from kvconform.judge.backtrace import EXCERPT, Story, excerpt, source, tell

Event = dict[str, Any]


def trace(
    *events: Event,
    pos: int,
    origin: tuple[str, int] | None,
    found: str = "other_position",
    **start: Any,
) -> list[Event]:
    """A run with blocks of 4 tokens that ends with wrong bytes at `pos` of request b."""
    first = {"kind": "run.start", "block_size": 4, "groups": 1, "context_ranks": 1, **start}
    wrong = {
        "kind": "kv.wrong",
        "step": 99,
        "req": "b",
        "pos": pos,
        "found": found,
        "origin_req": origin and origin[0],
        "origin_pos": origin and origin[1],
    }
    return [
        {"step": 0, **event, "seq": number} for number, event in enumerate((first, *events, wrong))
    ]


def scheduled(
    step: int, req: str, *table: int, listed_as: str = "cached", generation: int = 0
) -> Event:
    return {
        "kind": "req.scheduled",
        "step": step,
        "req": req,
        "generation": generation,
        "listed_as": listed_as,
        "table": list(table),
    }


def preempted(step: int, req: str) -> Event:
    return {"kind": "req.state", "step": step, "req": req, "from": "RUNNING", "to": "PREEMPTED"}


STORY = (
    scheduled(1, "a", 1, 2, 3, listed_as="new"),
    preempted(4, "a"),
    scheduled(6, "a", 4, 5, 6, 7, listed_as="resumed"),
    scheduled(9, "a", 4, 5, 6, 7),
)
FIRST = "a", 0


def test_the_origin_names_request_and_position() -> None:
    assert source(trace(pos=3, origin=("a", 12))[-1]) == ("a", 12)
    assert source(trace(pos=3, origin=None)[-1]) is None
    assert source({"kind": "kv.wrong", "origin_req": "a", "origin_pos": None}) is None
    assert source({"kind": "load.due"}) is None


def test_a_save_by_a_table_to_which_a_resumption_was_appended() -> None:
    run = trace(*STORY, pos=12, origin=FIRST)
    req, text, side, step, *_ = tell(run, run[-1]) or Story("", "")
    assert (side, step) == ("save", 4)
    assert req == "a" and text.startswith(
        "block 4 held it from step 6 on, as block 0 of the table of request a; "
        "appended to the table from"
    )
    assert (
        "before the preemption in step 4, it is block 3" in text
        and "appends a resumed request's blocks" in text
    )


def test_a_save_by_the_table_from_before_the_preemption() -> None:
    run = trace(
        scheduled(1, "a", 1, 2, 3, listed_as="new"),
        preempted(4, "a"),
        scheduled(6, "a", 3, 5, listed_as="resumed"),
        pos=8,
        origin=FIRST,
    )
    _, text, side, step, *_ = tell(run, run[-1]) or Story("", "")
    assert (side, step) == ("save", 4)
    assert (
        "block 3 held it from step 6 on" in text
        and "it was block 2 of that table before the preemption in step 4" in text
    )


def test_bytes_read_in_the_step_of_the_resumption_were_loaded_by_the_old_table() -> None:
    """No request can have saved it from there: it arrived in the same step."""
    mine = (
        scheduled(1, "b", 1, 2, 3, listed_as="new"),
        preempted(4, "b"),
        scheduled(99, "b", 5, 6, 2, 3, listed_as="resumed"),
    )
    run = trace(*mine, pos=8, origin=("b", 4))
    req, text, side, step, *_ = tell(run, run[-1]) or Story("", "")
    assert (side, step) == ("load", 4)
    assert req == "b" and text.startswith(
        "block 2 is block 2 of the request's table from step 99 on; it was block 1 of it before the"
    )
    assert "preemption in step 4: a load that uses the old table" in text and "save" not in text


def test_the_saver_may_be_another_request_with_the_same_prefix() -> None:
    other = [{**event, "req": "c"} for event in STORY]
    run = trace(scheduled(1, "a", 8, 9, listed_as="new"), *other, pos=12, origin=FIRST)
    assert (tell(run, run[-1]) or ("",))[0] == "c"


@pytest.mark.parametrize(
    ("events", "pos", "origin"),
    [
        (STORY[:1], 12, FIRST),  # never preempted
        (STORY, 13, FIRST),  # not the same place of the block
        (STORY, 20, FIRST),  # where neither table has that block
        # another request of that id
        (
            (scheduled(0, "a", 9, 8, 7), preempted(0, "a"), scheduled(6, "a", 1, generation=1)),
            12,
            FIRST,
        ),
    ],
)
def test_otherwise_only_who_held_it_is_said(
    events: tuple[Event, ...], pos: int, origin: tuple[str, int]
) -> None:
    run = trace(*events, pos=pos, origin=origin)
    assert (tell(run, run[-1]) or ("", ""))[1].startswith(
        "block 1 of request a held position 0 from step "
    )


def test_nothing_is_said_where_tables_do_not_tell() -> None:
    for run in (
        trace(*STORY, pos=12, origin=None),
        trace(*STORY, pos=12, origin=FIRST, groups=2),
        trace(*STORY, pos=12, origin=FIRST, found="other_layer"),
        trace(pos=12, origin=FIRST),
    ):
        assert tell(run, run[-1]) is None


def test_the_excerpt_shows_preemption_resumption_and_save_of_the_origin() -> None:
    many = [scheduled(10 + step, "b", 9) for step in range(EXCERPT + 5)]
    saved = {"kind": "plan", "step": 9, "op": "save", "req": "a", "start": 12, "end": 16}
    elsewhere = {"kind": "plan", "step": 9, "op": "save", "req": "a", "start": 16, "end": 20}
    # in the middle of the reader's events
    many.insert(10, scheduled(40, "a", 4, 5, 6, 7, 8, listed_as="resumed"))
    run = trace(*STORY, saved, elsewhere, *many, pos=12, origin=FIRST)
    shown = excerpt(run, run[-1]["seq"], "b")
    assert shown[:5] == run[1:6] and shown[-1] is run[-1] and len(shown) == 6 + EXCERPT
    assert [event["seq"] for event in shown] == sorted(event["seq"] for event in shown) and many[
        10
    ]["step"] in [e["step"] for e in shown]
    without = trace(*STORY, saved, *many, pos=12, origin=None)
    assert len(excerpt(without, without[-1]["seq"], "b")) == EXCERPT


def test_kv_of_another_request_was_saved_from_a_block_that_had_changed_hands() -> None:
    """The block was a's until its preemption; a's save by the old table read b's KV there."""
    mine = (
        scheduled(1, "a", 1, 2, listed_as="new"),
        scheduled(1, "x", 8, listed_as="new"),
        preempted(4, "a"),
        scheduled(6, "x", 8, 2),
    )
    run = trace(*mine, pos=4, origin=("x", 5), found="other_request")
    assert tell(run, run[-1]) is None, "not the same place of the block"
    run = trace(*mine, pos=5, origin=("x", 5), found="other_request")
    req, text, side, _, suspected, _ = tell(run, run[-1]) or Story("", "")
    assert (req, side, suspected) == ("a", "save", 4)
    assert text.startswith(
        "block 2 was block 1 of request a up to its preemption in step 4,"
        " and belongs to request x from step 6 on"
    )
    early = [{**event, "step": 2} if event.get("step") == 6 else event for event in run]
    assert tell(early, early[-1]) is None, "both had the block at once"


def test_a_block_changes_hands_when_its_request_ends() -> None:
    run = trace(
        scheduled(1, "a", 7, listed_as="new"),
        {"kind": "req.finished", "step": 3, "req": "a"},
        scheduled(3, "x", 7, listed_as="new"),
        pos=0,
        origin=("x", 0),
        found="other_request",
    )
    story = tell(run, run[-1])
    assert story is not None and story.req == "a" and "up to its end in step 3" in story.text


def test_the_excerpt_shows_the_step_that_saved() -> None:
    saving = {**scheduled(9, "a", 4, 5, 6, 7), "computed": 15, "scheduled": 1}
    saved = {"kind": "plan", "step": 9, "op": "save", "req": "a", "start": 12, "end": 16}
    later = {**scheduled(10, "a", 4, 5, 6, 7), "computed": 16, "scheduled": 1}
    run = trace(*STORY[:3], saving, saved, later, pos=12, origin=FIRST)
    shown = excerpt(run, run[-1]["seq"], "b")
    assert run[4] in shown and run[5] in shown and run[6] not in shown


def test_a_late_save_shows_how_the_block_was_given_up() -> None:
    """Its request is reported as sent, another one gets the block, and the save reads it then."""
    run = trace(
        scheduled(1, "a", 1, 2, listed_as="new"),
        {"kind": "req.finished", "step": 2, "req": "a"},
        {"kind": "hold", "step": 2, "req": "a", "direction": "send"},
        {"kind": "transfer.reported", "step": 3, "req": "a", "direction": "send"},
        {"kind": "transfer.reported", "step": 3, "req": "a", "direction": "recv"},
        scheduled(4, "c", 8, 2, listed_as="new"),
        {"kind": "transfer.reported", "step": 5, "req": "c", "direction": "send"},
        pos=5,
        origin=("c", 5),
        found="other_request",
    )
    shown = excerpt(run, len(run) - 1, "b")
    reports = [(e["req"], e["direction"]) for e in shown if e["kind"] == "transfer.reported"]
    assert reports == [("a", "send")]
    assert {"req.finished", "hold"} <= {e["kind"] for e in shown}


def test_a_session_gets_a_new_table_without_a_preemption() -> None:
    """Its next admission lists all of its blocks, which are not to be appended to those before."""
    session = (
        scheduled(1, "a", 1, 2, 3, listed_as="new"),
        scheduled(6, "a", 1, 2, 3, 4, listed_as="new"),
    )
    run = trace(*session, pos=12, origin=FIRST)
    _, text, side, step, *_ = tell(run, run[-1]) or Story("", "")
    assert (side, step) == ("save", 6)
    assert "appended to the table from before the admission in step 6, it is block 3" in text
    assert "appends a session's blocks" in text


def never_computed(block: int | None, pos: int) -> Event:
    return {
        "kind": "kv.wrong",
        "req": "b",
        "pos": pos,
        "found": "never_computed",
        "origin_req": "a",
        "origin_pos": None,
        "origin_block": block,
    }


def ending(*events: Event, last: Event) -> list[Event]:
    """A run that ends with another event than wrong bytes of another position."""
    run = trace(*events, pos=0, origin=None)
    run[-1] = {"step": 99, **last, "seq": run[-1]["seq"]}
    return run


def test_a_save_of_appended_blocks_reads_some_before_they_are_computed() -> None:
    run = ending(*STORY, last=never_computed(5, 16))
    req, text, side, step, *_ = tell(run, run[-1]) or Story("", "")
    assert (req, side, step) == ("a", "save", 4)
    assert text.startswith("block 5 is block 1 of the table of request a from step 6 on")
    assert "from before the preemption in step 4 ahead of it, it is block 4" in text
    of_another = ending(*STORY, *({**e, "req": "c"} for e in STORY), last=never_computed(5, 16))
    assert (tell(of_another, of_another[-1]) or Story("", "")).req == "a", "the block's owner"
    for other in (
        ending(*STORY, last=never_computed(5, 4)),  # where the request has it indeed
        # It was there before the preemption, when it was saved too early.
        ending(scheduled(1, "a", 9, 5), *STORY[1:], last=never_computed(5, 4)),
        ending(*STORY, last=never_computed(None, 16)),
        ending(*STORY[:1], last=never_computed(2, 4)),  # never preempted
    ):
        assert tell(other, other[-1]) is None


def test_a_save_that_came_after_its_block_had_got_another_owner() -> None:
    """Request c had the block up to its end, at this place; only then did a get it."""
    mine = (
        scheduled(1, "c", 7, 5, listed_as="new"),
        {"kind": "req.finished", "step": 3, "req": "c"},
        scheduled(4, "a", 9, 8, 5, listed_as="new"),
    )
    run = ending(*mine, last=never_computed(5, 4))
    req, text, side, step, suspected, _ = tell(run, run[-1]) or Story("", "")
    assert (req, side, step, suspected) == ("c", "save", None, None)
    assert text.endswith("from step 4 on: a save of c read it after that")
    assert "block 5 was block 1 of request c up to its end in step 3" in text


def test_a_save_of_a_block_whose_load_had_failed() -> None:
    failed = {"kind": "transfer.failed", "step": 7, "req": "a", "blocks": [5]}
    run = ending(*STORY, failed, last=never_computed(5, 4))
    told = tell(run, run[-1])
    assert told == Story("a", "the load into block 5 had failed in step 7", failed=True)
    for change in ({"blocks": [6]}, {"req": "x"}):
        other = ending(*STORY, {**failed, **change}, last=never_computed(5, 4))
        assert tell(other, other[-1]) is None


GRANT = {
    "kind": "alloc",
    "step": 6,
    "req": "a",
    "transfer": "t",
    "external": 8,
    "blocks": [4, 5, 6, 7],
}


@pytest.mark.parametrize("field", ["unallocated", "other_request"])
@pytest.mark.parametrize(
    ("slots", "told"), [([8, 9, 10, 11], True), ([8, 16], False), ([32], False), ([], False)]
)
def test_a_load_that_wrote_to_blocks_of_its_old_table(
    slots: list[int], field: str, *, told: bool
) -> None:
    """Blocks 1 to 3 are those from before the preemption; block 4 is its own, block 8 nobody's."""
    last = {
        "kind": "kv.changed",
        "after_hook": "start_load_kv",
        "unallocated": [],
        "other_request": [],
        field: slots,
    }
    run = ending(*STORY[:2], GRANT, last=last)
    found = tell(run, run[-1])
    assert (found is not None) == told
    if found is not None:
        assert (found.req, found.side, found.outdated) == ("a", "load", 4)
        assert found.text.startswith("request a had block 2 before the preemption in step 4")
    two = ending(*STORY[:2], GRANT, {**GRANT, "req": "c", "transfer": "u"}, last=last)
    assert tell(two, two[-1]) is None, "two loads, of which either may have written"


def test_a_load_by_an_old_table_may_explain_what_is_missing() -> None:
    last = {
        "kind": "load.due",
        "req": "a",
        "transfer": "t",
        "missing": list(range(8)),
        "reported_failed": False,
    }
    wrote = {
        "kind": "kv.changed",
        "after_hook": "start_load_kv",
        "unallocated": [4, 5, 6, 7],
        "other_request": [8, 9, 10, 11],
    }
    run = ending(*STORY[:2], GRANT, wrote, last=last)
    assert tell(run, run[-1]) == Story(
        "a",
        "a load that keeps the request's table from before the preemption in step 4 writes"
        " blocks 1-2 instead",
        suspected=4,
    )
    for less in ({"after_hook": "save_kv_layer"}, {"other_request": []}):
        run = ending(*STORY[:2], GRANT, {**wrote, **less}, last=last)
        assert tell(run, run[-1]) == Story(
            "a", "the request has another block table since the preemption in step 4", suspected=4
        ), "no load is known to have written there"
    for change in ({"missing": []}, {"reported_failed": True}, {"transfer": "other"}):
        other = ending(*STORY[:2], GRANT, last={**last, **change})
        assert tell(other, other[-1]) is None
    first = ending(STORY[0], {**GRANT, "blocks": [1, 2, 3]}, last=last)
    assert tell(first, first[-1]) is None, "never preempted"
    later = ending(*STORY[:1], GRANT, STORY[1], last=last)
    assert tell(later, later[-1]) is None, "preempted after the grant"
    longer = ending(*STORY[:2], GRANT, last={**last, "missing": [*range(12, 16)]})
    text = (tell(longer, longer[-1]) or Story("", "")).text
    assert text.endswith("writes block 4 instead"), "beyond the old table"
    short = ending(*STORY[:2], {**GRANT, "blocks": []}, last={**last, "missing": [40]})
    assert tell(short, short[-1]) is None, "a table that does not reach so far"
    same = ending(*STORY[:2], {**GRANT, "blocks": [1, 2, 3]}, last=last)
    assert tell(same, same[-1]) is None, "the same blocks, where the old table is right"


def test_a_save_by_an_old_table_to_which_only_later_blocks_were_added() -> None:
    """The table of the connector is 1, 2, 3, 8: those of the resumption, 4 and 5, are not in it."""
    run = trace(
        scheduled(1, "a", 1, 2, 3, listed_as="new"),
        preempted(4, "a"),
        scheduled(6, "a", 4, 5, listed_as="resumed"),
        scheduled(9, "a", 4, 5, 8),
        pos=12,
        origin=("a", 8),
    )
    story = tell(run, run[-1])
    assert story is not None and (story.req, story.side, story.outdated) == ("a", "save", 4)
    assert "block 8 held it from step 9 on, as block 2 of the table of request a" in story.text
    assert "before the preemption in step 4, with the blocks that came later, it is block 3" in (
        story.text
    )


@pytest.mark.parametrize(
    ("table", "text"),
    [((1, 2, 3), "got more tokens and blocks"), ((4, 5), "another block table")],
)
def test_a_hook_that_raises_for_a_session_that_goes_on(table: tuple[int, ...], text: str) -> None:
    run = ending(
        scheduled(1, "a", 1, 2, listed_as="new"),
        scheduled(3, "a", *table, listed_as="new"),
        last={"kind": "hook.returned", "step": 3, "error": "IndexError: tuple index out of range"},
    )
    story = tell(run, run[-1])
    assert story is not None and story.text.startswith(f"request a of this step has {text} since")


@pytest.mark.parametrize("apart", [True, False])
def test_a_list_of_the_engine_may_explain_what_an_old_table_does(apart: bool) -> None:
    """Kept, the list 4, 5 becomes 4, 5, 8, 8: block 8 is number 3 of it, and of 1, 2, 3, 8.

    With both blocks in one step it becomes 4, 5, 8, 9, 8, 9.
    """
    run = trace(
        scheduled(1, "a", 1, 2, 3, listed_as="new"),
        preempted(4, "a"),
        scheduled(6, "a", 4, 5, listed_as="resumed"),
        *[scheduled(9, "a", 4, 5, 8)] * apart,
        scheduled(10, "a", 4, 5, 8, 9),
        pos=12,
        origin=("a", 8),
    )
    story = tell(run, run[-1])
    assert story is not None and ("kept a list of the SchedulerOutput" in story.text) is apart


@pytest.mark.parametrize("reported", [False, True])
def test_a_save_of_a_block_that_its_load_left_out(reported: bool) -> None:
    due = {"kind": "load.due", "step": 5, "req": "c", "transfer": "c", "missing": [8, 9, 10, 11]}
    run = ending(
        scheduled(5, "c", 6, 8, 10, 12, listed_as="new"),
        {**due, "reported_failed": reported},
        last={**never_computed(10, 8), "origin_req": "c"},
    )
    story = tell(run, run[-1])
    if reported:
        assert story is None
    else:
        text = "the load in step 5 had left block 10 out, and reported nothing"
        assert story == Story("c", text, failed=True)
    other = {**run[-1], "origin_block": 12, "pos": 12}
    assert tell([*run[:-1], other], other) is None, "block 12 was loaded"


def test_a_late_save_may_be_one_by_an_old_table() -> None:
    """Block 12 was index 3 of c up to its preemption; now it is index 2, and block 9 is index 3."""
    known = (
        scheduled(1, "a", 1, 2, 4, 9, listed_as="new"),
        scheduled(5, "c", 6, 8, 10, 12, listed_as="new"),
    )
    again = (
        {"kind": "req.finished", "step": 15, "req": "a"},
        scheduled(16, "c", 6, 8, 12, 9, listed_as="resumed"),
    )
    event = {**never_computed(12, 12), "origin_req": "c"}
    run = ending(*known, preempted(12, "c"), *again, last=event)
    story = tell(run, run[-1])
    assert story == Story(
        "c",
        "block 12 was block 3 of request c before step 12: a save that uses the old table reads it",
        suspected=12,
    ), "not that a save of a read block 9"
    run = ending(*known, *again, last=event)
    story = tell(run, run[-1])
    assert story is None or story.suspected is None, "c was never preempted"


@pytest.mark.parametrize("late", [False, True])
def test_a_hook_that_raised_in_a_step_of_a_resumed_request(late: bool) -> None:
    again = [scheduled(6, "a", 4, 5, 6, 7, listed_as="resumed")] if late else []
    step = 7 if late else 6
    seen = scheduled(step, "a", 4, 5, 6, 7) if late else {"kind": "alloc", "step": 6, "req": "a"}
    raised = {"kind": "hook.returned", "step": step, "error": "IndexError"}
    run = ending(*STORY[:2], *again, seen, last=raised)
    story = tell(run, run[-1])
    assert story == Story(
        "a",
        "request a of this step has another block table since the preemption in step 4",
        suspected=4,
    )
    assert tell(run, {**run[-1], "step": 98}) is None, "a was in no plan of that step"
    assert tell(run, {**run[-1], "error": None}) is None
    first = ending(STORY[0], {"kind": "alloc", "step": 1, "req": "a"}, last={**raised, "step": 1})
    assert tell(first, first[-1]) is None, "its only table"


def test_a_hook_that_raised_as_a_session_went_on() -> None:
    raised = {"kind": "hook.returned", "step": 6, "error": "IndexError"}
    run = ending(STORY[0], {"kind": "alloc", "step": 6, "req": "a"}, last=raised)
    story = tell(run, run[-1])
    assert story is not None and story.suspected == 6
    assert story.text.endswith("another block table since its admission in step 6")
