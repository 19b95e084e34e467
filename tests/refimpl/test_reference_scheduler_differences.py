# SPDX-License-Identifier: Apache-2.0
"""Tests of the intended differences between the reference scheduler and vLLM 0.32.

docs/reference-vs-vllm.md lists them; there is one test per difference. Each test shows what an
unrepaired vLLM does, so it fails when a new vLLM no longer does it.
"""

from __future__ import annotations

import pytest
from vllm.v1.request import RequestStatus

from kvconform.compat.vllm_api import force_preemption
from scheduler_rig import Ask, Rig, Setup


def pair(setup: Setup, *asks: Ask) -> tuple[Rig, Rig]:
    """(reference, vLLM as it is) with the same requests added."""
    rigs = Rig("reference", setup), Rig("vllm", setup, repaired=False)
    for rig in rigs:
        for ask in asks:
            rig.add(ask)
    return rigs


def test_requests_that_fail_together_end_in_the_order_of_their_ids() -> None:
    asks = [
        Ask(f"r{i}", tuple(range(100 * i, 100 * i + 12)), answers=((8, False),), failures=((0,),))
        for i in (3, 1, 2)
    ]
    ours, theirs = pair(Setup(failure="fail"), *asks)
    for rig in (ours, theirs):
        rig.run()
    ends = [
        [line.split()[1] for line in rig.story if line.startswith("end")] for rig in (ours, theirs)
    ]
    assert ends[0] == ["r1", "r2", "r3"]
    assert sorted(ends[1]) == ends[0]  # the order of a set of strings: another one in every process


def test_a_failed_load_does_not_reserve_blocks_against_its_own_retry() -> None:
    # 8 blocks: room for one load of 6 blocks, not for the load and its own reservation
    setup = Setup(num_blocks=9)
    ask = Ask("r0", tuple(range(24)), 3, answers=((24, True),), failures=("request",))
    ours, theirs = pair(setup, ask)
    for rig in (ours, theirs):
        rig.run(60)
    assert not ours.s.has_requests()
    assert ours.requests["r0"].num_output_tokens == 3
    assert theirs.s.has_requests()  # waits for blocks that only it could free
    assert theirs.requests["r0"].num_tokens == 24


def test_who_lost_its_blocks_waits_behind_those_whose_loads_are_over() -> None:
    # 10 blocks: r1 holds 3 of them, and 5 more are kept free for it and for drafts
    setup = Setup(num_blocks=11, spec=2)
    asks = [
        Ask("r0", tuple(range(14)), 2, answers=((12, True),), failures=("request",)),
        Ask("r1", tuple(range(100, 116)), 2, answers=((12, True),)),
    ]
    ours, theirs = pair(setup, *asks)
    for rig in (ours, theirs):
        rig.run(60)
    assert not ours.s.has_requests()
    assert [each.num_output_tokens for each in ours.requests.values()] == [2, 2]
    assert len(theirs.s.kv_holding_waiting) == 2  # r0 waits for r1, which is behind it


def test_who_lost_its_blocks_lets_a_session_go_on_that_comes_later() -> None:
    asks = [
        Ask("s", tuple(range(20)), 8, session=True),
        Ask(
            "r",
            tuple(range(100, 114)),
            2,
            answers=((12, True),),
            load_steps=4,
            failures=("request",),
        ),
    ]
    ours, theirs = pair(Setup(num_blocks=11), asks[0])
    for rig in (ours, theirs):
        rig.step()
        rig.add(asks[1])
        for _ in range(12):
            rig.step()
        for tokens in ((7, 8), ()):
            rig.proceed("s", tokens, 2)
            rig.run(60)
    assert not ours.s.has_requests()
    assert len(theirs.s.kv_holding_waiting) == 2


def test_tokens_computed_on_a_failed_synchronous_load_do_not_count() -> None:
    """R136: the step after the failed one was in flight already and read what was not loaded."""
    ask = Ask("r0", tuple(range(12)), 4, answers=((8, False),), failures=((1,),))
    ours, theirs = pair(Setup(scheduling="async"), ask)
    for rig in (ours, theirs):
        for _ in range(3):
            rig.step()
    assert "3 cached r0 C4+8 P0 F1 N12 drafts0 None" in ours.story
    # two placeholders for tokens that never come
    assert "3 cached r0 C4+10 P2 F1 N12 drafts0 None" in theirs.story
    for rig in (ours, theirs):
        rig.run()
    assert "P0 F0 N16" in next(line for line in ours.story if line.startswith("end"))
    assert "P1 F0 N16" in next(line for line in theirs.story if line.startswith("end"))


def test_who_shares_a_failed_block_falls_back_to_before_all_its_steps_in_flight() -> None:
    prompt = tuple(range(7))
    asks = (
        Ask("d", prompt, 1, answers=((4, False),), failures=((0,),)),
        Ask("e", prompt, 4),
    )
    ours, theirs = pair(Setup(scheduling="async"), *asks)
    for rig in (ours, theirs):
        for _ in range(2):
            rig.step()
    assert ours.requests["d"].num_computed_tokens == theirs.requests["d"].num_computed_tokens == 0
    assert ours.requests["e"].num_computed_tokens == 4
    # position 4 was computed on the failed block, and is not computed again
    assert theirs.requests["e"].num_computed_tokens == 5


def test_padding_gives_way_to_the_limit_for_long_prefills() -> None:
    setup = Setup(spec=3, long_prefill=3)
    asks = (
        Ask("a", tuple(range(9)), 9),
        Ask("b", tuple(range(9)), 9, answers=((8, True),), load_steps=5),
    )
    ours, theirs = pair(setup, *asks)
    ours.run()
    assert not ours.s.has_requests()
    with pytest.raises(AssertionError):
        theirs.run()


def test_output_in_flight_belongs_to_the_request_that_was_scheduled_not_to_its_id() -> None:
    ours, theirs = pair(Setup(scheduling="async"), Ask("r0", tuple(range(9)), 9))
    for rig in (ours, theirs):
        rig.step()
        rig.step()
        rig.abort("r0")
        foreign = rig.queue[-1][1].sampled_token_ids[0][0]
        rig.add(Ask("r0", tuple(range(50, 60)), 3))
        rig.run()
        assert (foreign in rig.requests["r0"].output_token_ids) == (rig is theirs)
    assert ours.requests["r0"].num_output_tokens == 3


def test_a_session_whose_turn_ends_while_it_is_preempted_goes_on() -> None:
    setup = Setup(scheduling="async", role="kv_producer", delivery=False)
    ours, theirs = pair(setup, Ask("s", tuple(range(13)), 2, session=True))
    for rig in (ours, theirs):
        rig.step()
        rig.step()  # that which samples the last token is in flight
        assert force_preemption(rig.s, rig.requests["s"])
        rig.land(*rig.queue.pop())
        rig.proceed("s", (500, 501, 502), 4)
        rig.run(30)
    session, forgotten = ours.requests["s"], theirs.requests["s"]
    assert session.num_prompt_tokens == 13 + 1 + 3 and session.num_output_tokens == 4
    assert forgotten.num_output_tokens == 0 and forgotten.num_tokens == 3
    for rig in (ours, theirs):
        rig.proceed("s", (), 1)
        rig.run(30)
    assert "s" not in ours.s.requests
    assert "s" in theirs.s.requests


def test_sessions_are_queued_by_the_arrival_of_their_input() -> None:
    asks = [Ask(name, tuple(range(9)), 2, session=True) for name in ("s", "t")]
    order = []
    for rig in pair(Setup(policy="priority"), *asks):
        rig.run(20)
        rig.proceed("t", (500,), 2)
        rig.proceed("s", (500,), 2)
        output, _ = rig.schedule()
        order.append([request.req_id for request in output.scheduled_new_reqs])
    assert order == [["t", "s"], ["s", "t"]]


def test_drafts_behind_the_end_of_a_turn_are_not_counted() -> None:
    ask = Ask("s", tuple(range(13)), 3, accepted=(3,), session=True)
    computed = []
    for rig in pair(Setup(spec=3), ask):
        rig.run(20)
        session = rig.requests["s"]
        assert session.num_tokens == 16
        computed.append(session.num_computed_tokens)
    assert computed == [15, 17]


def test_the_window_of_a_token_that_is_computed_again_is_loaded() -> None:
    setup = Setup(connector="ScriptedHMAConnector", windows=(0, 5))
    tables = []
    for rig in pair(setup, Ask("r0", tuple(range(12)), answers=(("raw", (12, True)),))):
        rig.step()
        tables.append(rig.s.kv_cache_manager.get_block_ids("r0")[1])
        rig.step()
        # The last token of the prompt is computed again.
        assert any(line.startswith("2 new r0 C11+1 ") for line in rig.story)
    # position 11 reads the positions from 7 on
    assert [block > 0 for block in tables[0]] == [False, True, True]
    assert [block > 0 for block in tables[1]] == [False, False, True]


def test_an_abort_frees_no_window_that_a_load_still_fills() -> None:
    ask = Ask("r0", tuple(range(12)), answers=(("raw", (12, True)),), load_steps=3)
    ours, theirs = pair(Setup(connector="ScriptedHMAConnector", windows=(0, 5)), ask)
    for rig, held in ((ours, [False, True, True]), (theirs, [False, False, True])):
        rig.step()
        rig.s.finish_requests("r0", RequestStatus.FINISHED_ABORTED)
        table = rig.s.kv_cache_manager.get_block_ids("r0")[1]
        assert [block > 0 for block in table] == held
        rig.run()
        assert not rig.s.has_requests()


def test_a_request_starts_over_if_it_has_not_the_window_before_what_failed() -> None:
    ask = Ask("r0", tuple(range(12)), 2, answers=((8, False), (0, False)))
    computed = []
    for rig in pair(Setup(windows=(5,)), ask):
        output, result = rig.schedule()
        first, second, _ = rig.s.kv_cache_manager.get_block_ids("r0")[0]
        assert first == 0
        result.kv_connector_output.invalid_block_ids = {second}
        rig.land(output, result)
        computed.append(rig.requests["r0"].num_computed_tokens)
        rig.run(20)
        assert rig.requests["r0"].num_output_tokens == 2
    assert computed == [0, 4]  # position 4 reads the positions from 0 on
