# SPDX-License-Identifier: Apache-2.0
"""Tests of structured output.

A request waits for its grammar, and the connector does not see it until then.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from kvconform.config.target import Target
from kvconform.contract.case import Case
from kvconform.contract.loader import load_spec
from kvconform.run.runner import run_variant

STEPS = [
    {"add": {"req": "a", "prompt": 9, "structured": True}},
    {"step": 2},
    {"grammar": "a"},
    {"run": {}},
]


def case(**changes: object) -> Case:
    return Case.model_validate(
        {
            "id": "t.structured",
            "area": "t",
            "text": "t",
            "steps": STEPS,
            "engines": ["vllm"],
            **changes,
        }
    )


def test_only_engine_vllm_has_it() -> None:
    with pytest.raises(ValidationError, match="structured output: only engine vllm has it"):
        case(engines=["reference", "vllm"])


def test_the_step_names_a_request_that_exists() -> None:
    with pytest.raises(ValidationError, match="names request 'b', which no earlier step adds"):
        case(steps=[*STEPS, {"grammar": "b"}])


@pytest.mark.parametrize("scheduling", ["sync", "async"])
def test_no_lookup_before_the_grammar_is_there(scheduling: str, tmp_path: Path) -> None:
    (variant,) = (
        v for v in load_spec().cases["lifecycle.structured"].variants(["vllm"], [scheduling])
    )
    run = run_variant(
        variant, Target("kvconform.refimpl.connector:ReferenceConnector", {}), seed=0, tmp=tmp_path
    )
    assert run.harness_error is None
    mine = [e for e in run.trace if e.get("req") == "c"]
    assert not any(e["kind"] in ("lookup", "alloc") for e in mine)
    assert [e["kind"] for e in mine if e["kind"] == "req.finished"] == ["req.finished"], (
        "aborted while it waited, and announced once"
    )
    states = [
        (e["from"], e["to"]) for e in run.trace if e["kind"] == "req.state" and e["req"] == "b"
    ]
    assert states[0] == ("WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR", "RUNNING")
