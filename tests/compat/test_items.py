# SPDX-License-Identifier: Apache-2.0
"""Tests of identifiers of multi-modal items, and of prompts that are given as embeddings."""

from __future__ import annotations

import pytest

from kvconform.compat.step import build_request, item_identifier, prompt_embeddings


def test_an_identifier_looks_like_a_hash() -> None:
    found = item_identifier("cat")
    assert len(found) == 64 and int(found, 16)
    assert found == item_identifier("cat") != item_identifier("dog")


@pytest.mark.parametrize(("first", "last"), [(16, 0), (0, 32), (20, 20), (63, 0), (0, 63)])
@pytest.mark.parametrize("name", ["dog", "cow", "cat"])
def test_alike_identifiers_agree_where_they_should_and_differ(
    name: str, first: int, last: int
) -> None:
    cat = item_identifier("cat")
    other = item_identifier(name, {"id": "cat", "first": first, "last": last})
    assert len(other) == 64 and other != cat
    assert other[:first] == cat[:first] and other[64 - last :] == cat[64 - last :]


def test_embeddings_depend_on_content_and_position() -> None:
    speech, song = prompt_embeddings("speech", 5), prompt_embeddings("song", 5)
    assert speech.shape == (5, 8)
    assert speech.equal(prompt_embeddings("speech", 7)[:5])
    assert not speech.equal(song) and len({tuple(row) for row in speech.tolist()}) == 5


def test_a_request_of_embeddings_has_no_token_ids() -> None:
    request = build_request(
        "a",
        [0] * 9,
        max_tokens=2,
        block_size=4,
        stop=False,
        salt=None,
        lora=None,
        items=[],
        embeds=[("speech", 0, 9)],
        priority=0,
        params=None,
        skip_reading_prefix_cache=False,
        arrival=0.0,
    )
    assert request.prompt_token_ids is None and request.num_prompt_tokens == 9
    assert list(request.all_token_ids) == [0] * 9
