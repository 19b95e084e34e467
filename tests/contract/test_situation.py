# SPDX-License-Identifier: Apache-2.0
"""Tests of situations: which of a case's are beyond vLLM, and what a broken file says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from kvconform.contract import situation
from kvconform.contract.case import Case
from kvconform.contract.loader import SpecError, load_spec
from kvconform.contract.situation import Situation
from kvconform.errors import UsageError

ADD: dict[str, Any] = {"add": {"req": "a", "prompt": 13}}
AGAIN: dict[str, Any] = {"add": {"req": "b", "prompt": 9, "id": "a"}}
RUN: dict[str, Any] = {"run": {}}
PAIR: dict[str, Any] = {"engines": {"p": "kv_producer", "d": "kv_consumer"}}
OFFER: dict[str, Any] = {"add": {"req": "p", "prompt": 13, "max_tokens": 1, "hand_over": True}}


def consumer(req: str, **altered: Any) -> dict[str, Any]:
    return {"add": {"req": req, "prompt": 9, "handed": {"of": "p", "alter": altered}}}


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
        (case(ADD, RUN, config={"graphs": True}), ["graphs"], ()),
        (case(ADD, RUN, config={"num_blocks": 9}), [], ()),
        (case(OFFER, RUN, {"on": "d"}, consumer("d"), config=PAIR), ["engines"], ()),
        (
            case(OFFER, RUN, {"on": "d"}, consumer("d"), consumer("e"), config=PAIR),
            ["replayed-params", "engines"],
            (),
        ),
        (
            case(OFFER, RUN, {"on": "d"}, consumer("d", remote_request_id="x"), config=PAIR),
            ["unknown-peer", "engines"],
            (),
        ),
        (
            case(OFFER, RUN, {"on": "d"}, consumer("d", remote_block_ids=None), config=PAIR),
            ["incomplete-params", "engines"],
            ("incomplete-params",),
        ),
    ],
)
def test_a_run_says_which_of_its_situations_are_beyond_vllm(
    found: Case, wanted: list[str], beyond: tuple[str, ...]
) -> None:
    assert found.situations == wanted
    assert {variant.beyond for variant in found.variants()} == {beyond}


def test_a_scenario_says_which_of_its_situations_are_beyond_vllm() -> None:
    runs = [run for each in load_spec().scenarios.values() for run in each.variants()]
    beyond = {run.case.id: run.beyond for run in runs if run.beyond}
    assert beyond == {
        "live.files-damaged": ("damage",),
        "pair.incomplete": ("incomplete-params",),
    }


def test_only_the_excused_requirements_are_a_risk_where_a_situation_names_some() -> None:
    found = load_spec().situations["reset-before-work"]
    assert found.makes_a_risk_of("reset.forgets")
    assert not found.makes_a_risk_of("end.baseline")
    every = load_spec().situations["other-model"]
    assert every.makes_a_risk_of("end.baseline")


@pytest.mark.parametrize(
    ("config", "beyond"),
    [
        ({}, ("reset-before-work",)),
        ({"role": "kv_consumer"}, ("reset-before-work",)),
        ({"role": "kv_producer"}, ()),
        ({"engines": {"p": "kv_producer", "d": "kv_consumer"}}, ("reset-before-work",)),
    ],
)
def test_a_producer_is_told_that_a_reset_before_work_succeeded(
    config: dict[str, Any], beyond: tuple[str, ...]
) -> None:
    steps = [ADD, {"schedule": 1}, {"reset": {"connector": True}}, RUN]
    asynchronous = {"scheduling": ["async"]}
    found = case(*steps, config=config, policies=["late-workers"], matrix=asynchronous)
    resets = {name for each in found.variants() for name in each.beyond if "reset" in name}
    assert resets - {"common-reset"} == {*beyond}


@pytest.mark.parametrize("vllm", [True, False])
def test_a_line_is_quoted_only_for_what_vllm_does(vllm: bool) -> None:
    read = {"why": "A CPU has none.", "line": "x = 1"}
    source = {"file": "v1/core.py", "symbol": "f"}
    entry = {"id": "a", "text": "t", "of": "case", "vllm": vllm, "why": "w", "source": source}
    if vllm:
        assert Situation(**entry, read=read).read
        return
    with pytest.raises(ValidationError, match="`read` is for what vLLM does"):
        Situation(**entry, read=read)


def test_every_run_says_whether_it_inspects_the_connector() -> None:
    """Runs of engine live, too, whose scenarios are no cases."""
    spec = load_spec()
    runs = [run for each in spec.cases.values() for run in each.variants()]
    assert {run.case.id for run in runs if run.inspects} == {
        each.id for each in spec.cases.values() if each.inspect is not None
    }
    scenarios = [run for each in spec.scenarios.values() for run in each.variants()]
    assert scenarios
    assert not any(run.inspects for run in scenarios)


def test_an_unknown_policy_is_a_mistake_of_the_case() -> None:
    with pytest.raises(
        ValidationError, match="no policy 'reverse-bach'; did you mean reverse-batch"
    ):
        case(ADD, policies=["reverse-bach"])


BROKEN = "# a comment\n- {id: one, of: step, text: t, vllm: maybe}\n"
CASE = "id: test.case\narea: test\ntext: A test.\npolicies: [reverse-batch]\nsteps: [{run: {}}]\n"
OWN = """- id: mine
  of: policy
  text: A policy of this specification only.
  vllm: true
  why: It is a test.
  source: {file: v1/core/block_pool.py, symbol: BlockPool}
"""


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(situation._Known, "entries", None)
    (tmp_path / "cases" / "test").mkdir(parents=True)
    (tmp_path / "cases" / "test" / "test.case.yaml").write_text(CASE)
    return tmp_path


def test_a_broken_file_is_one_sentence(root: Path) -> None:
    (root / situation.FILE).write_text(OWN.replace("vllm: true", "vllm: maybe"))
    with pytest.raises(SpecError, match=r"^spec/situations\.yaml:4: vllm must be true or false$"):
        load_spec(root, cache=False)
    (root / situation.FILE).write_text("- {id: [\n")
    with pytest.raises(SpecError, match=r"^spec/situations\.yaml:2: [^\n]+$"):
        load_spec(root, cache=False)


def test_without_a_loaded_specification_a_broken_file_has_its_line(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / situation.FILE).write_text(BROKEN)
    monkeypatch.setattr("importlib.resources.files", lambda _: root)
    with pytest.raises(UsageError, match=r"^spec/situations\.yaml:2: vllm: "):
        situation.situations()


def test_the_loader_reads_the_file_once_and_before_the_cases(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_again() -> None:
        raise AssertionError("spec/situations.yaml is read a second time")

    monkeypatch.setattr(situation, "_read", read_again)
    (root / situation.FILE).write_text(OWN)
    with pytest.raises(SpecError, match="there is no policy 'reverse-batch'"):
        load_spec(root, cache=False)
    (root / "cases" / "test" / "test.case.yaml").write_text(CASE.replace("reverse-batch", "mine"))
    assert load_spec(root, cache=False).cases["test.case"].beyond == ()
    assert situation.policies() == ["mine"]
