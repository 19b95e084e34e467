# SPDX-License-Identifier: Apache-2.0
"""Tests of where the states of recurrent layers are: each is found where it was written."""

from __future__ import annotations

import random

import pytest

from kvconform.engine.batch import Row

SIZE = 4


def row(start: int, count: int, drafts: int, accepted: int, newest: int | None) -> Row:
    return Row(
        None,  # type: ignore[arg-type]
        start,
        count,
        drafts,
        accepted,
        [],
        [],
        samples=True,
        before=start,
        newest=newest,
    )


@pytest.mark.parametrize("most_drafts", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("resumes", [False, True])
def test_the_newest_state_and_those_at_the_ends_of_blocks_are_found(
    most_drafts: int, resumes: bool
) -> None:
    dice = random.Random(most_drafts)
    for _ in range(50):
        held: dict[int, int] = {}  # column -> tokens that its state is behind
        known, newest = 0, None
        for number in range(30):
            drafts = dice.randint(0, most_drafts) if number > 2 else 0
            count = 1 + drafts if number > 2 else dice.randint(1, 9)
            one = row(known, count, drafts, dice.randint(0, drafts), newest)
            if known:
                assert held[one.state_before(SIZE)] == known
            first, certain = one.first_state(SIZE), known + count - drafts
            held |= {first + index: certain + index for index in range(drafts + 1)}
            copied = one.copied_state(SIZE)
            if copied is not None:
                held[copied[1]] = held[copied[0]]
            known, newest = one.known, one.last_state(SIZE)
            assert held[newest] == known
            for end in range(certain, known + 1):
                if end % SIZE == 0 and end > known - SIZE:
                    assert held[end // SIZE - 1] == end
            if resumes and known % SIZE == 0:
                newest = None  # it was preempted, and its blocks were in the prefix cache


def test_an_example_of_vllm() -> None:
    """Three tokens and two drafts, of which the first is accepted: v1/worker/mamba_utils.py."""
    one = row(2, 3, 2, 1, 0)
    assert one.first_state(SIZE) == 1
    assert one.copied_state(SIZE) == (2, 0)
    assert one.last_state(SIZE) == 2
