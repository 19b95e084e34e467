# SPDX-License-Identifier: Apache-2.0
"""Tests of the worker's view of requests, and of which KV is final when.

Covers resumption under both protocols, roll-back, drafts, and reuse of ids.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from core_rig import ROUND_TRIP, check_ok, output, run_case, select
from kvconform.compat.step import STOP_TOKEN
from kvconform.engine.batch import Batch, Row, Script
from kvconform.kernels.codes import CodeBook
from kvconform.kv.provenance import Chain, Identity

PROMPT = [10, 11, 12, 13, 14, 15]
BOOK = CodeBook(2, 2, 16)


class Rig:
    """A batch whose rows are finished as the worker finishes them."""

    def __init__(self, **scripts: Script) -> None:
        self.scripts, self.generations = scripts, dict[str, int]()
        self.batch = Batch(
            4,
            lambda r: (
                self.generations.get(r, 0),
                Identity(),
                self.scripts.setdefault(r, Script()),
            ),
        )

    def step(self, **kwargs: Any) -> dict[str, Row]:
        made = output(**kwargs)
        self.batch.update(made)
        rows = {row.state.chain.req: row for row in self.batch.rows(made)}
        for row in rows.values():
            row.state.valid_end = row.known
            if row.samples:
                row.state.chain.append(
                    row.state.script.token(row.state.chain, row.state.prompt_len)
                )
        return rows

    def start(
        self,
        req: str = "a",
        tokens: list[int] = PROMPT,
        table: tuple[int, ...] = (1, 2),
        **kwargs: Any,
    ) -> Row:
        return self.step(new=[(req, tokens, list(table), 0, len(tokens))], **kwargs)[req]

    def tokens(self, req: str = "a") -> list[int]:
        return self.batch.requests[req].chain.tokens


def cached(
    req: str, computed: int, count: int, outputs: int, blocks: list[int] | None = None, **more: Any
) -> dict[str, Any]:
    return {
        "req": req,
        "computed": computed,
        "count": count,
        "outputs": outputs,
        "blocks": blocks,
        **more,
    }


def test_prefill_and_decode() -> None:
    rig = Rig()
    row = rig.start()
    assert (row.start, row.count, row.known, row.samples, row.before) == (0, 6, 6, True, 0)
    assert row.slots.tolist() == [4, 5, 6, 7, 8, 9]
    row = rig.step(cached=[cached("a", 6, 1, 1)])["a"]
    assert (row.start, row.known, row.before, row.slots.tolist()) == (6, 7, 6, [10])
    assert rig.tokens()[:6] == PROMPT and len(rig.tokens()) == 8


def test_a_chunk_samples_nothing() -> None:
    rig = Rig()
    row = rig.step(new=[("a", PROMPT, [1], 0, 4)])["a"]
    assert not row.samples and rig.tokens() == PROMPT
    assert rig.step(cached=[cached("a", 4, 2, 0, [2])])["a"].samples


def test_new_blocks_extend_the_table() -> None:
    rig = Rig()
    rig.start()
    rig.step(
        cached=[
            cached("a", 6, 1, 1),
        ]
    )
    rig.step(cached=[cached("a", 7, 1, 2)])
    assert rig.step(cached=[cached("a", 8, 1, 3, [9])])["a"].slots.tolist() == [36]
    assert rig.batch.requests["a"].table == [1, 2, 9]


def test_a_loaded_request_starts_behind_its_load() -> None:
    row = Rig().step(new=[("a", PROMPT, [1, 2], 4, 2)])["a"]
    assert (row.start, row.before, row.known) == (4, 4, 6)


@pytest.mark.parametrize("protocol", ["v1", "v2"])
def test_resumption_replaces_the_table_and_aligns_the_tokens(protocol: str) -> None:
    """Preempted with three outputs, the last of which is dropped; resumed with a 4-token hit."""
    rig = Rig()
    rig.start()
    rig.step(cached=[cached("a", 6, 1, 1)])
    rig.step(cached=[cached("a", 7, 1, 2)])
    kept = rig.tokens()[:8]
    rig.step()
    if protocol == "v1":
        row = rig.step(cached=[cached("a", 4, 4, 2, [7, 8], resumed=True, tokens=kept)])["a"]
    else:
        row = rig.step(new=[("a", PROMPT, [7, 8], 4, 4, kept)])["a"]
    assert (row.start, row.count, row.before, row.samples) == (4, 4, 4, True)
    assert row.slots.tolist() == [32, 33, 34, 35]
    assert rig.batch.requests["a"].table == [7, 8]
    assert rig.tokens()[:8] == kept and len(rig.tokens()) == 9
    assert rig.batch.requests["a"].prompt_len == 6


def test_resumption_without_tokens_keeps_what_the_engine_counts() -> None:
    """Under V1 a request of the previous step comes without its tokens.

    What was dropped shows in num_output_tokens.
    """
    rig = Rig()
    rig.start()
    rig.step(cached=[cached("a", 6, 1, 1)])
    assert len(rig.tokens()) == 8
    row = rig.step(cached=[cached("a", 0, 7, 1, [7, 8], resumed=True)])["a"]
    assert row.samples and (row.start, row.known) == (0, 7)


def test_tokens_after_a_failed_load_are_rolled_back() -> None:
    """Scheduled from 4 on a load that failed: its output is dropped, recomputation starts at 0."""
    rig = Rig()
    rig.step(new=[("a", PROMPT, [1, 2], 4, 2)])
    assert len(rig.tokens()) == 7
    row = rig.step(cached=[cached("a", 0, 6, 0)])["a"]
    assert (row.start, row.known, row.samples) == (0, 6, True)
    assert len(rig.tokens()) == 7


@pytest.mark.parametrize(("accepted", "known"), [([0], 7), ([1], 8), ([3], 10), ([9], 10)])
def test_drafts_are_accepted_as_the_script_says(accepted: list[int], known: int) -> None:
    rig = Rig(a=Script(accepted))
    rig.start(table=(1, 2, 3))
    row = rig.step(cached=[cached("a", 6, 4, 1)], drafts={"a": 3})["a"]
    assert (row.start, row.count, row.known, row.accepted) == (6, 4, known, known - 7)
    content = row.content().tolist()
    chain = row.state.chain
    assert content[: row.known - 6] == chain.ids[6 : row.known]
    assert not set(content[row.known - 6 :]) & set(chain.ids)
    assert len(chain.tokens) == known + 1


def test_accepted_drafts_are_what_would_have_been_sampled() -> None:
    one, two = Rig(a=Script([3])), Rig(a=Script())
    one.start(table=(1, 2, 3)), two.start(table=(1, 2, 3))
    one.step(cached=[cached("a", 6, 4, 1)], drafts={"a": 3})
    for computed in range(6, 10):
        two.step(cached=[cached("a", computed, 1, computed - 5)])
    assert one.tokens() == two.tokens()


def test_the_worker_corrects_the_start_that_an_asynchronous_scheduler_guessed() -> None:
    """The scheduler counts all drafts in flight as accepted (C = 10).

    The worker knows that only one was (final KV ends at 8).
    """
    rig = Rig(a=Script([1, 2]))
    rig.start(table=(1, 2, 3, 4))
    assert rig.step(cached=[cached("a", 6, 4, 1)], drafts={"a": 3})["a"].known == 8
    row = rig.step(cached=[cached("a", 10, 4, 5)], drafts={"a": 3})["a"]
    assert (row.start, row.count, row.known, row.before) == (8, 4, 11, 8)
    assert row.slots.tolist() == [12, 13, 14, 15]


def test_drafts_of_a_request_that_was_not_in_the_last_step_are_padding() -> None:
    rig = Rig(a=Script([3]))
    rig.start(table=(1, 2, 3))
    rig.start("b", [1, 2], (4,))
    row = rig.step(cached=[cached("a", 6, 4, 1)], drafts={"a": 3})["a"]
    assert (row.accepted, row.state.script.verified) == (0, 0)
    assert rig.step(cached=[cached("a", 7, 4, 2)], drafts={"a": 3})["a"].accepted == 3


def test_a_finished_id_may_be_used_again_in_the_same_step() -> None:
    rig = Rig()
    rig.start()
    rig.generations["a"], rig.scripts["a"] = 1, Script(stop_at=0)
    row = rig.step(new=[("a", [1, 2, 3], [5], 0, 3)], finished=["a"])["a"]
    assert row.state.chain.generation == 1 and rig.tokens() == [1, 2, 3, STOP_TOKEN]
    assert row.slots.tolist() == [20, 21, 22]


def test_an_id_used_again_is_not_a_resumption() -> None:
    rig = Rig()
    rig.start()
    rig.generations["a"] = 1
    rig.step(new=[("a", PROMPT[:3], [5], 0, 3)])
    assert (
        rig.tokens()[:3] == PROMPT[:3]
        and len(rig.tokens()) == 4
        and rig.batch.requests["a"].prompt_len == 3
    )


def test_a_step_beyond_the_known_tokens_is_our_own_fault() -> None:
    rig = Rig()
    rig.start()
    with pytest.raises(RuntimeError, match=r"harness: request a .* position 8"):
        rig.step(cached=[cached("a", 6, 3, 1)])


def test_rows_are_encoded_once_and_again_where_the_tokens_changed() -> None:
    rig = Rig()
    state = rig.start().state
    first = state.expected(BOOK, 6)
    assert first.shape == (6, 2, 2, 32) and state.expected(BOOK, 4).shape[0] == 4
    state.chain.truncate(3)
    for token in (1, 2, 3, 4):
        state.chain.append(token)
    fresh = Chain("x", 0, Identity())
    for token in state.chain.tokens:
        fresh.append(token)
    assert (state.expected(BOOK, 7) == BOOK.rows(fresh.array(0, 7))).all()
    state.chain.truncate(2)
    assert (state.expected(BOOK, 2) == BOOK.rows(fresh.array(0, 2))).all()


# -- what is final when: the truth tables of the contract

DECODE = [(0, 0, 10)] + [(c, c, c + 1) for c in range(10, 15)]
SYNC_DRAFTS = [(0, 0, 6), (6, 6, 8), (8, 8, 9), (9, 9, 13), (13, 13, 15), (15, 15, 16)]
ASYNC_DRAFTS = [(0, 0, 6), (6, 6, 8), (10, 8, 9), (12, 9, 13), (13, 13, 15), (17, 15, 16)]
"""(C, V_before, V_after) per step.

The block size is 4, the prompt has 6 tokens, and of three drafts 1, 0, 3, 1, 0 ... are accepted.
"""


@pytest.mark.parametrize("engine", ["reference", "vllm"])
@pytest.mark.parametrize("scheduling", ["sync", "async"])
def test_decoding(engine: str, scheduling: str, tmp_path: Path) -> None:
    run = run_case(
        None,
        [{"add": {"req": "a", "prompt": 10, "max_tokens": 6}}, {"run": {}}],
        tmp_path,
        engine=engine,
        scheduling=scheduling,
    )
    check_ok(run)
    rows = [
        (e["computed"], e["final_before"], e["final_after"])
        for e in select(run.trace, "req.scheduled")
    ]
    assert rows == DECODE


@pytest.mark.parametrize("engine", ["reference", "vllm"])
@pytest.mark.parametrize(
    ("scheduling", "expected"), [("sync", SYNC_DRAFTS), ("async", ASYNC_DRAFTS)]
)
def test_drafts(
    engine: str, scheduling: str, expected: list[tuple[int, int, int]], tmp_path: Path
) -> None:
    steps = [
        {"add": {"req": "a", "prompt": 6, "max_tokens": 20, "drafts": [1, 0, 3, 1, 0]}},
        {"run": {}},
    ]
    run = run_case(
        None, steps, tmp_path, engine=engine, scheduling=scheduling, config={"spec_tokens": 3}
    )
    check_ok(run)
    rows = [
        (e["computed"], e["final_before"], e["final_after"])
        for e in select(run.trace, "req.scheduled")
    ]
    assert rows[: len(expected)] == expected


def test_what_was_loaded_counts_as_final_before_the_step(tmp_path: Path) -> None:
    run = run_case("kvconform.refimpl.connector:ReferenceConnector", ROUND_TRIP, tmp_path)
    check_ok(run)
    first = select(run.trace, "req.scheduled", req="b")[0]
    assert (
        first["computed"],
        first["output_computed"],
        first["final_before"],
        first["final_after"],
    ) == (12, 12, 12, 13)
