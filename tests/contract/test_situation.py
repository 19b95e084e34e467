# SPDX-License-Identifier: Apache-2.0
"""Tests of situations: which of a case's are beyond vLLM, and what a broken file says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from kvconform.contract import situation
from kvconform.contract.case import Case
from kvconform.errors import UsageError

ADD: dict[str, Any] = {"add": {"req": "a", "prompt": 13}}
AGAIN: dict[str, Any] = {"add": {"req": "b", "prompt": 9, "id": "a"}}
RUN: dict[str, Any] = {"run": {}}


def case(*steps: dict[str, Any], **more: Any) -> Case:
    return Case.model_validate(
        {"id": "test.case", "area": "test", "text": "A test.", "steps": list(steps), **more}
    )


@pytest.mark.parametrize(
    ("found", "wanted", "beyond"),
    [
        (case(ADD, RUN), [], ()),
        (case(ADD, RUN, {"preempt": "a"}, RUN), ["preempt"], ()),
        (case(ADD, RUN, AGAIN, RUN), ["reused-id"], ("reused-id",)),
        (
            case(ADD, RUN, {"reorder": {}}, policies=["reverse-batch", "split-prefill"]),
            ["reverse-batch", "split-prefill", "reorder"],
            ("reverse-batch",),
        ),
    ],
)
def test_a_run_says_which_of_its_situations_are_beyond_vllm(
    found: Case, wanted: list[str], beyond: tuple[str, ...]
) -> None:
    assert found.situations == wanted
    assert {variant.beyond for variant in found.variants()} == {beyond}


def test_an_unknown_policy_is_a_mistake_of_the_case() -> None:
    with pytest.raises(
        ValidationError, match="no policy 'reverse-bach'; did you mean reverse-batch"
    ):
        case(ADD, policies=["reverse-bach"])


def test_a_broken_file_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / situation.FILE).write_text("- {id: one, of: step, text: t, vllm: maybe}\n")
    monkeypatch.setattr("importlib.resources.files", lambda _: tmp_path)
    with pytest.raises(UsageError, match=r"^spec/situations\.yaml: entry 0\.vllm: "):
        situation.situations.__wrapped__()
