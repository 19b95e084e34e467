# SPDX-License-Identifier: Apache-2.0
"""Tests of what an engine's KV events say is stored."""

from __future__ import annotations

from kvconform.observe.announced import Announced


def test_a_block_is_announced_until_it_has_left_each_medium() -> None:
    announced = Announced()
    announced.add([b"x", b"y"], "CPU", 4)
    announced.add([b"x"], "STORAGE", 4)
    announced.withdraw([b"x", b"y"], "CPU")
    assert announced.tokens == {b"x": 4}
    announced.withdraw([b"x"], "STORAGE")
    assert announced.tokens == {} and announced.media(b"x") == {"CPU", "STORAGE"}


def test_a_medium_that_nothing_has_named_withdraws_from_all() -> None:
    announced = Announced()
    announced.add([b"x"], "CPU", 4)
    announced.withdraw([b"x", b"z"], "GPU")
    assert announced.tokens == {}
    announced.add([b"x"], "CPU", 4)
    announced.clear()
    assert announced.tokens == {} and announced.media(b"x") == set()
