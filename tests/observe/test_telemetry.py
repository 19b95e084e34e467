# SPDX-License-Identifier: Apache-2.0
"""Tests of KV events, of block hashes, and of what vLLM refuses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored

from kvconform.compat import vllm_api
from kvconform.contract.trace import Trace
from kvconform.kv.provenance import Identity
from kvconform.observe import static_checks
from kvconform.observe.call import Call
from kvconform.observe.probe import Probe
from kvconform.observe.static_checks import bound, inspect_class
from kvconform.observe.telemetry import HashBook, Telemetry, _shape
from kvconform.refimpl.connector import ReferenceConnector


def request(tokens: list[int], keys: list[bytes], name: str = "a") -> Any:
    return SimpleNamespace(
        request_id=name,
        all_token_ids=tokens,
        block_hashes=keys,
        lora_request=None,
        num_tokens=len(tokens),
    )


def book() -> HashBook:
    return HashBook(2, lambda name: Identity.of("salt" if name == "salted" else None, None, []))


def test_equal_content_has_equal_hashes_and_nothing_else_has() -> None:
    known = book()
    assert known.enter(request([1, 2, 3, 4, 5], [b"x", b"y"])) == {
        "count": 2,
        "full": 2,
        "same": True,
        "distinct": True,
    }
    assert known.enter(request([1, 2, 3, 4], [b"x", b"y"], "b")) == {
        "count": 2,
        "full": 2,
        "same": True,
        "distinct": True,
    }
    assert not known.enter(request([1, 2], [b"z"], "c"))["same"]
    assert not known.enter(request([1, 2], [b"x"], "salted"))["distinct"]
    assert known.enter(request([7, 8, 9, 9], [b"q"]))["count"] == 1


def test_announced_blocks_reach_as_far_as_there_is_no_gap() -> None:
    known, asked = book(), request([1, 2, 3, 4, 5, 6], [b"x", b"y", b"z"])
    x, y, z = known.keys(asked)
    assert known.reach(asked, {x: 2, y: 2}) == 4 and known.reach(asked, {x: 2, z: 2}) == 2
    assert known.reach(asked, {y: 4}) == 4 and known.reach(asked, {y: 2}) == 0
    # what the engine has itself needs no announcement
    assert known.reach(asked, {y: 2}, 2) == 4 and known.reach(asked, {z: 2}, 2) == 2
    assert known.reach(asked, {x: 2}, 4) == 4 and known.reach(asked, {y: 2, z: 2}, 3) == 6
    assert list(known.between(asked, 2, 4)) == [y] and list(known.between(asked, 2)) == [y, z]
    assert known.numbers([z, x]) == [0, 1] and known.numbers([x]) == [1]


def stored(**changes: Any) -> Any:
    fields = {
        "block_hashes": [b"x"],
        "parent_block_hash": None,
        "token_ids": [1, 2],
        "block_size": 2,
        "lora_id": None,
        "medium": "CPU",
    }
    return BlockStored(**{**fields, "lora_name": None, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"token_ids": [1]},
        {"block_hashes": []},
        {"block_hashes": ["x"]},
        {"block_size": 0},
        {"token_ids": [], "block_size": -1},
    ],
)
def test_a_malformed_event_is_told(changes: dict[str, Any]) -> None:
    event = stored(**changes)
    assert _shape("stored", event, event.block_hashes, event.token_ids, event.block_size)


def test_a_well_formed_event_is_not() -> None:
    assert _shape("stored", stored(), [b"x"], [1, 2], 2) == ""
    assert _shape("stored", stored(medium=None), [b"x"], [1, 2], 2) == "", "its type permits it"
    assert _shape("stored", stored(token_ids=[], block_size=0), [b"x"], [], 0) == ""
    assert _shape("cleared", AllBlocksCleared(), [], [], 0) == ""
    assert _shape("other", object(), [], [], 0)


def told(*events: Any) -> list[str]:
    """Return what is wrong with events that are published one after another."""
    trace = Trace()
    probe = Probe(trace)
    Telemetry(trace, probe, book(), SimpleNamespace(kv_events_config=None))
    for event in events:
        call = Call(None, "take_events", "scheduler", 0, (), {})
        call.result = [event]
        for listener in probe.after["take_events"]:
            listener(call)
    return [event["problem"] for event in trace.events]


@pytest.mark.parametrize(("tokens", "found"), [(0, [False] * 3 + [True] * 2), (1, [False] * 5)])
def test_a_list_that_is_equal_in_idle_steps_is_never_emptied(
    tokens: int, found: list[bool]
) -> None:
    """Where tokens are computed, the same may be stored and announced again."""
    trace = Trace()
    probe = Probe(trace)
    Telemetry(trace, probe, book(), SimpleNamespace(kv_events_config=None))
    output = SimpleNamespace(total_num_scheduled_tokens=tokens)
    for _ in found:
        built = Call(None, "build_connector_meta", "scheduler", 0, (output,), {})
        taken = Call(None, "take_events", "scheduler", 0, (), {})
        taken.result = [stored(medium="STORAGE")]
        for call in (built, taken):
            for listener in probe.after[call.hook]:
                listener(call)
    assert [event["repeated"] for event in trace.events] == found


def test_a_removal_names_a_medium_in_which_the_block_was_stored() -> None:
    from_gpu = BlockRemoved(block_hashes=[b"x"], medium="GPU")
    from_files = BlockRemoved(block_hashes=[b"x"], medium="STORAGE")
    assert told(stored(medium="STORAGE"), stored(medium="CPU"), from_files, from_gpu) == [
        "",
        "",
        "",
        "medium is 'GPU', and the block was stored in 'CPU' and 'STORAGE'",
    ]
    assert told(from_gpu) == [""]  # another engine may have stored it


def test_what_vllm_refuses() -> None:
    config = vllm_api.build_config(
        block_size=4,
        num_blocks=8,
        max_model_len=64,
        transfer=vllm_api.transfer_config(
            "ReferenceConnector", "kv_both", {}, "kvconform.refimpl.connector", "fail", "test"
        ),
    )
    cache = vllm_api.build_cache_config(8, 4, 2, 16, ["l0"])
    found = list(static_checks.inspect_engine(config, cache, "its-class"))
    assert len(found) == len({item for item, _, _ in found}) == 18
    assert [item for item, ok, _ in found if not ok] == []
    assert static_checks.NAME not in vllm_api.KVConnectorFactory._registry
    assert static_checks._refuses("x", ValueError, lambda: None) == ("x", False, "is accepted")
    assert static_checks._refuses("x", ValueError, lambda: {}["kind"])[1] is False


class _Overrides(ReferenceConnector):
    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None: ...
    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None: ...
    async def finish_forward(self) -> None: ...  # type: ignore[override]
    def requires_kv_delivery(self) -> bool:  # type: ignore[override]
        return False


def test_the_class_is_inspected() -> None:
    wrong = {item for item, ok, _ in inspect_class(_Overrides, {}, None) if not ok}
    assert wrong == {"awaited:hooks", "property:requires_kv_delivery"}
    assert {item for item, ok, _ in inspect_class(ReferenceConnector, {}, None) if not ok} == set()
    connector: Any = object.__new__(_Overrides)
    assert not bound(connector, {"bind_kv_cache_manager"})[1]
    assert bound(connector, {"bind_kv_cache_manager", "bind_gpu_block_pool"})[1]
    assert bound(object.__new__(ReferenceConnector), {"bind_kv_cache_manager"})[1]
