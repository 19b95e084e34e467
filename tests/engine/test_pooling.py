# SPDX-License-Identifier: Apache-2.0
"""Tests of pooling models, whose requests have no sampling parameters and end with a vector."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from core_rig import REFERENCE, make_case, select
from kvconform.config.target import Target
from kvconform.contract.case import Variant
from kvconform.contract.trace import Event
from kvconform.refimpl.connector import ReferenceConnector
from kvconform.run.runner import run_variant

POOLING = {"pooling": True, "budget": 7}
STEPS: list[dict[str, Any]] = [
    {"add": {"req": "a", "prompt": 17}},
    {"run": {}},
    {"drop-local": {}},
    {"add": {"req": "b", "prompt": {"same": "a"}, "reloads": "a"}},
    {"run": {}},
]


class SkipsALayer(ReferenceConnector):
    """Loads the first layer only, and reports nothing."""

    def _load(self, load: Any, layers: Any) -> None:
        super()._load(load, list(layers)[:1])


def traced(connector: str, engine: str, scheduling: str, tmp_path: Path) -> list[Event]:
    depth = 2 if scheduling == "async" else 1
    variant = Variant(make_case(STEPS, config=POOLING), engine, scheduling, "v1", depth, 4)
    run = run_variant(variant, Target(connector, {"store": "{tmp}"}), seed=0, tmp=tmp_path)
    assert run.harness_error is None
    return list(run.trace)


@pytest.mark.parametrize("scheduling", ["sync", "async"])
def test_both_engines_end_a_request_with_a_vector_for_its_prompt(
    scheduling: str, tmp_path: Path
) -> None:
    fields = ("step", "req", "index", "clean", "prompt")
    found = {
        engine: select(traced(REFERENCE, engine, scheduling, tmp_path / engine), "sample")
        for engine in ("reference", "vllm")
    }
    seen = [[tuple(e[field] for field in fields) for e in events] for events in found.values()]
    assert seen[0] == seen[1]
    assert [each[1:] for each in seen[0]] == [("a", 0, True, 17), ("b", 0, True, 17)]
    for first, again in found.values():
        assert first["token"] == again["token"]


def test_kv_that_is_missing_shows_in_the_vector(tmp_path: Path) -> None:
    connector = f"{__name__}:{SkipsALayer.__name__}"
    right, wrong = select(traced(connector, "vllm", "sync", tmp_path), "sample")
    assert right["clean"] and not wrong["clean"] and right["token"] != wrong["token"]


def test_what_vllm_takes_from_sampling_parameters_is_refused() -> None:
    with pytest.raises(ValidationError, match="`stop_at` needs a model that generates"):
        make_case([{"add": {"req": "a", "prompt": 9, "stop_at": 1}}], config=POOLING)
    with pytest.raises(ValidationError, match="pooling needs one engine, and no spec_tokens"):
        make_case(STEPS, config={**POOLING, "spec_tokens": 2})
