# SPDX-License-Identifier: Apache-2.0
"""Tests of what an engine's KV events say is stored."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from vllm.distributed.kv_events import BlockRemoved, BlockStored

from kvconform.contract.trace import Trace
from kvconform.kv.provenance import Identity
from kvconform.observe.announced import Announced
from kvconform.observe.call import Call
from kvconform.observe.probe import Probe
from kvconform.observe.telemetry import HashBook, Telemetry


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


def stored(medium: str) -> BlockStored:
    return BlockStored(
        block_hashes=[b"x"],
        parent_block_hash=None,
        token_ids=[1, 2],
        block_size=2,
        lora_id=None,
        lora_name=None,
        medium=medium,
    )


def told(*events: Any) -> list[str]:
    """Return what is wrong with events that are published one after another."""
    trace = Trace()
    probe = Probe(trace)
    book = HashBook(2, lambda name: Identity.of(None, None, []))
    Telemetry(trace, probe, book, SimpleNamespace(kv_events_config=None))
    for event in events:
        call = Call(None, "take_events", "scheduler", 0, (), {})
        call.result = [event]
        for listener in probe.after["take_events"]:
            listener(call)
    return [event["problem"] for event in trace.events]


def test_a_removal_names_a_medium_in_which_the_block_was_stored() -> None:
    from_gpu = BlockRemoved(block_hashes=[b"x"], medium="GPU")
    from_files = BlockRemoved(block_hashes=[b"x"], medium="STORAGE")
    assert told(stored("STORAGE"), stored("CPU"), from_files, from_gpu) == [
        "",
        "",
        "",
        "medium is 'GPU', and the block was stored in 'CPU' and 'STORAGE'",
    ]
    assert told(from_gpu) == [""]  # another engine may have stored it
