# SPDX-License-Identifier: Apache-2.0
"""Tests of the parts of the live engine that do not start vLLM.

They cover scenarios, workloads, the comparison, reduction, and the tiny model.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file

from kvconform.config.settings import Settings
from kvconform.config.target import Target
from kvconform.contract import yaml12
from kvconform.contract.events import check_event
from kvconform.contract.loader import SpecError, load_spec
from kvconform.contract.scenario import MAX_MODEL_LEN, Scenario, Workload
from kvconform.errors import EnvironmentProblem, UsageError
from kvconform.fixtures.tiny_llama import make
from kvconform.judge.describe import describe
from kvconform.live import child, events
from kvconform.live.events import compare, end_event, missing, own_events
from kvconform.live.job import Answer, Ask, Counts, Outcome, PhaseDone, plays
from kvconform.live.pair_run import asked
from kvconform.live.process import Ended
from kvconform.live.random import (
    PAIR_REQUESTS,
    PAIR_STARTS,
    STARTS,
    claim,
    random_pair,
    random_scenario,
    reduce,
    spec_for,
    text_of,
)
from kvconform.live.run import unhurried
from kvconform.live.state import Roster
from kvconform.run import live_runs

SPEC = load_spec(live=True)
CONVERSATION = SPEC.workloads["conversation"]
BASE: Any = SPEC.cases["live.base"]


# -- scenarios
def test_scenarios_take_the_place_of_cases() -> None:
    assert {"live.base", "live.preempt-async", "live.drafts-preempt", "live.no-local-cache"} <= set(
        SPEC.cases
    )
    assert not set(SPEC.cases) & set(load_spec().cases)
    assert [variant.id for variant in BASE.variants()] == ["live.base[live-sync-v1-d1-b32]"]
    assert BASE.variants(["vllm"]) == [] and BASE.variants(["live"], ["async"]) == []


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ({"id": "x", "text": "t"}, "needs a workload"),
        ({"id": "x", "text": "t", "workload": "w", "due": ["preemptions"]}, "large enough"),
        ({"id": "x", "text": "t", "workload": "w", "due": ["drafts"]}, "spec_tokens is 0"),
        (
            {
                "id": "x",
                "text": "t",
                "workload": "w",
                "start": {"spec_tokens": 3, "scheduling": "async"},
            },
            "n-gram",
        ),
        ({"id": "x", "text": "t", "workload": "w", "start": {"draft_model": True}}, "draft model"),
        ({"id": "x", "text": "t", "workload": "w", "start": {"block": 3}}, "block"),
        ({"id": "x", "text": "t", "workload": "w", "start": {"blocks": "3"}}, "blocks"),
        ({"id": "x", "text": "t", "workload": "w", "start": {"budget": 7}}, "each of max_seqs"),
        ({"id": "x", "text": "t", "requests": [{"own": 1}, {}]}, "`own: 1` is the place of"),
    ],
)
def test_a_scenario_that_makes_no_sense_does_not_load(data: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        Scenario.model_validate(data)


def test_a_file_that_is_no_scenario_is_named(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("id: mine\ntext: t\nworkload: conversatoin\n")
    with pytest.raises(SpecError, match=r"there is no workload 'conversatoin'.*conversation"):
        load_spec(live=True, cases=[str(path)])


def test_prompts_share_what_they_say_and_no_more() -> None:
    asks = {ask.id: ask.tokens for ask in plays(BASE, CONVERSATION, 0)[0].asks}
    assert asks["cold/twin"] == asks["cold/odd"]
    assert (
        asks["cold/branch"][:100] == asks["cold/trunk"][:100]
        and asks["cold/branch"][100] != asks["cold/trunk"][100]
    )
    loop = asks["cold/loop"]
    assert loop[:3] * 30 == loop
    assert plays(BASE, CONVERSATION, 1)[0].asks[0].tokens != asks["cold/odd"]


def test_no_request_is_longer_than_the_model_can_take() -> None:
    """A conversation has prompt, answer and more."""
    longest = max(prompt.tokens for prompt in CONVERSATION.prompts) + 2 * CONVERSATION.output
    assert longest + max(phase.more for phase in CONVERSATION.phases) <= MAX_MODEL_LEN
    for seed in range(40):
        assert all(
            r.shared + r.tail + r.out <= MAX_MODEL_LEN for r in random_scenario(seed).requests
        )


# -- random workloads
def test_a_seed_gives_the_same_workload_and_another_one_another() -> None:
    assert random_scenario(3) == random_scenario(3)
    assert random_scenario(3).requests != random_scenario(3 + len(STARTS)).requests


def test_every_request_of_a_workload_is_asked_for_once_and_in_its_part() -> None:
    for seed in range(8):
        scenario = random_scenario(seed)
        found = plays(scenario, None, 0)
        assert [ask.id for play in found for ask in play.asks] == [f"r{n}" for n in range(100)]
        assert len(found) == 1 + sum(request.reset for request in scenario.requests[1:])
        assert not found[0].reset and all(play.reset for play in found[1:])


def test_random_workloads_have_what_they_are_for() -> None:
    found = [random_scenario(seed) for seed in range(len(STARTS))]
    requests = [request for scenario in found for request in scenario.requests]
    assert all(len(scenario.requests) == 100 for scenario in found)
    assert (
        any(r.abort for r in requests)
        and any(r.reset for r in requests)
        and any(r.priority for r in requests)
    )
    assert {scenario.start.scheduling for scenario in found} == {"sync", "async"}


def test_seeds_are_selected_and_replayed_by_name() -> None:
    spec = spec_for(Settings(engine="live", seeds=2, seed=5))
    assert {"live.random-5", "live.random-6", "pair.random-5", "pair.random-6"} <= set(spec.cases)
    assert (
        "live.random-9"
        in spec_for(Settings(engine="live", select=["live.random-9[live-sync-v1-d1-b32]"])).cases
    )
    with pytest.raises(UsageError, match="--engine live"):
        spec_for(Settings(seeds=2))


def test_random_pairs_have_what_they_are_for_and_are_asked_without_a_connector_first() -> None:
    found = [random_pair(seed) for seed in range(len(PAIR_STARTS))]
    requests = [request for scenario in found for request in scenario.requests]
    assert (
        any(r.abort for r in requests)
        and any(r.early for r in requests)
        and any(r.reset for r in requests)
    )
    assert all(
        scenario.unmet({"transfer": False})
        and not scenario.unmet({"transfer": True, "store": False})
        for scenario in found
    )
    (play,) = asked(found[0], 7)
    assert [ask.id for ask in play.asks] == [f"r{n}" for n in range(PAIR_REQUESTS)] and not any(
        ask.abort for ask in play.asks
    )
    smaller = reduce(found[0], lambda scenario: 5 in {request.own for request in scenario.requests})
    assert (
        Scenario.model_validate(yaml12.parse(text_of(smaller), "x")) == smaller
        and smaller.pair == "requests"
    )
    assert asked(smaller, 0)[0].asks[0].tokens == play.asks[5].tokens


@pytest.mark.parametrize(
    "wrong",
    [{"pair": "requests"}, {"requests": [{"early": 1}]}, {"pair": "handed", "requests": [{}]}],
)
def test_requests_of_a_pair_are_for_a_pair(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="pair|producer"):
        Scenario.model_validate({"id": "pair.x", "text": "x", **wrong})


def test_a_workload_is_reduced_to_the_requests_that_it_takes() -> None:
    whole, tried = random_scenario(2), []

    def fails(scenario: Scenario) -> bool:
        tried.append(len(scenario.requests))
        return {17, 71} <= {request.own for request in scenario.requests}

    small = reduce(whole, fails, tries=200)
    assert [request.own for request in small.requests] == [17, 71]
    reread = Scenario.model_validate(yaml12.parse(text_of(small), "x"))
    assert reread == small and len(text_of(small).splitlines()) < 40
    first = {ask.id: ask.tokens for play in plays(whole, None, 0) for ask in play.asks}
    assert all(first[ask.id] == ask.tokens for play in plays(small, None, 0) for ask in play.asks)


def test_what_fails_whatever_is_asked_takes_one_try() -> None:
    tried: list[int] = []
    small = reduce(random_scenario(2), lambda scenario: not tried.append(len(scenario.requests)))
    assert tried == [1] and len(small.requests) == 1


def test_a_failure_is_made_small_once_in_a_campaign(tmp_path: Path) -> None:
    assert claim(tmp_path / "cases", ["a.b", "c.d"], "live.random-3") == {
        "a.b": "live.random-3",
        "c.d": "live.random-3",
    }
    assert claim(tmp_path / "cases", ["c.d", "e.f"], "live.random-1") == {
        "c.d": "live.random-3",
        "e.f": "live.random-1",
    }


def test_reduction_has_a_limit() -> None:
    tried: list[int] = []
    whole = random_scenario(2)
    assert reduce(whole, lambda scenario: bool(tried.append(1)), tries=7).requests == whole.requests
    assert len(tried) == 7


# -- comparison
def answer(tokens: list[int], **other: Any) -> Answer:
    fields: dict[str, Any] = {
        "logprobs": [-1.0] * len(tokens),
        "seconds": [9] * len(tokens),
        "gaps": [1.0] * len(tokens),
        "why": "length",
    }
    return Answer(id="p/a", prompt=[1, 2], tokens=tokens, **fields | other)


def tokens_event(plain: Answer, with_connector: Answer) -> dict[str, Any]:
    outcome = Outcome()
    outcome.phases = [
        PhaseDone(name="p", reset_done=None, counts=Counts(), answers=[with_connector])
    ]
    (event,) = compare({"p/a": plain}, outcome)
    assert check_event({"seq": 0, "step": 0, **event}) == []
    return event


def test_the_same_tokens_are_the_same() -> None:
    assert tokens_event(answer([5, 6, 7]), answer([5, 6, 7]))["same"]


def test_the_first_other_token_is_told() -> None:
    event = tokens_event(answer([5, 6, 7]), answer([5, 8, 8]))
    assert (event["same"], event["ambiguous"], event["at"], event["token"], event["instead"]) == (
        False,
        False,
        1,
        8,
        6,
    )
    assert "token 1 of the answer is 8, without the connector 6" in str(describe(event))


@pytest.mark.parametrize(
    ("gap", "second", "ambiguous"),
    [(0.001, 8, True), (0.004, 8, False), (0.001, 9, False)],
)
def test_a_near_tie_is_no_corruption_but_only_between_the_two(
    gap: float, second: int, ambiguous: bool
) -> None:
    plain = answer([5, 6, 7], gaps=[1.0, gap, 1.0], seconds=[9, second, 9])
    assert tokens_event(plain, answer([5, 8, 1]))["ambiguous"] is ambiguous


def test_an_answer_that_stops_early_differs_unless_it_was_aborted() -> None:
    assert not tokens_event(answer([5, 6, 7]), answer([5, 6]))["same"]
    assert tokens_event(answer([5, 6, 7]), answer([5, 6], why="abort"))["same"]
    assert not tokens_event(answer([5, 6, 7]), answer([5, 1], why="abort"))["same"]


def test_drift_is_measured_up_to_the_first_other_token() -> None:
    event = tokens_event(answer([5, 6, 7]), answer([5, 6, 8], logprobs=[-1.0, -1.25, -9.0]))
    assert (event["drift"], event["drift_at"]) == (0.25, 1)


def test_rounding_is_that_of_the_model_s_number_format(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, other = answer([5, 6], gaps=[1.0, 0.01], seconds=[9, 8]), answer([5, 8])
    event = tokens_event(plain, other)
    assert (event["rounding"], event["ambiguous"]) == (0.002, False)
    monkeypatch.setattr(events, "dtype", lambda: "float16")
    event = tokens_event(plain, other)
    assert (event["rounding"], event["ambiguous"]) == (0.02, True)


# -- what happened
def outcome_with(**counts: int) -> Outcome:
    found = Outcome()
    found.phases = [PhaseDone(name="p", reset_done=True, counts=Counts(**counts), answers=[])]
    found.ended = True
    return found


def test_what_was_due_and_did_not_happen_is_missing() -> None:
    preempt: Any = SPEC.cases["live.preempt"]
    assert len(missing(preempt, outcome_with(), 0)) == 2
    assert missing(preempt, outcome_with(external_hits=1, preemptions=1), 0) == []
    assert missing(SPEC.cases["live.failed-loads"], outcome_with(external_hits=9), 0) == [
        "no load failed"
    ]  # type: ignore[arg-type]


def test_a_phase_that_ends_before_its_reset_is_named() -> None:
    found = outcome_with(external_hits=1)
    found.phases[0].missed = True
    assert missing(SPEC.cases["live.reset-running"], found, 0) == [
        "phase p ended before its caches were reset"
    ]  # type: ignore[arg-type]


def test_a_baseline_run_is_neither_restarted_nor_interrupted() -> None:
    for name in ("live.restart", "live.reset-running"):
        scenario: Any = SPEC.cases[name]
        wanted = plays(scenario, SPEC.workloads[scenario.workload], 0)
        assert any(play.restart or play.interrupt for play in wanted)
        calm = unhurried(wanted)
        assert not any(play.restart or play.interrupt for play in calm)
        assert [bool(play.reset) for play in calm] == [
            bool(play.reset or play.restart) for play in wanted
        ]


def test_a_session_gets_its_prompt_in_three_inputs_and_is_asked_again_as_one() -> None:
    scenario: Any = SPEC.cases["live.sessions"]
    cold, *_, whole, _ = plays(scenario, SPEC.workloads["in-turns"], 0)
    prompts = {prompt.name: prompt.tokens for prompt in SPEC.workloads["in-turns"].prompts}
    for ask in cold.asks:
        inputs = [ask.tokens, *ask.turns]
        assert len(inputs) == 3
        assert sum(map(len, inputs)) == prompts[ask.id.partition("/")[2]]
    assert {ask.after for ask in whole.asks} == {ask.id for ask in cold.asks}


def test_what_a_session_holds_lacks_the_last_token_of_each_earlier_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[list[int] | None] = []
    ask = Ask(id="p/a", tokens=[1, 2], turns=[[3], [4, 5]], out=2)
    output: Any = SimpleNamespace(outputs=[SimpleNamespace(token_ids=[10, 11])])
    monkeypatch.setattr(child, "go_on", lambda _engine, _ask, _id, more: sent.append(more))
    ask = child.next_turn(None, ask, [1, 2], "a-0", output)
    output.outputs[0].token_ids += [12, 13]
    ask = child.next_turn(None, ask, [1, 2], "a-0", output)
    assert (ask.turns, ask.said) == ([], [1, 2, 10, 3, 12, 4, 5])
    assert sent == [[3], [4, 5]]


def test_what_follows_a_cut_is_another_content() -> None:
    request: Any = SimpleNamespace(request_id="r", all_token_ids=[1, 2, 3, 4])
    roster = Roster()
    roster.add(request)
    before = list(roster.chain(request)[0])
    request.all_token_ids = [1, 2, 3, 9, 10]  # its session dropped the 4
    roster.cut_back("r", 3)
    after = roster.chain(request)[0]
    assert after[:3] == before[:3] and after[3] != before[3] and len(after) == 5


def test_an_image_that_a_session_is_given_later_is_other_content() -> None:
    def content(image: str) -> list[int]:
        request: Any = SimpleNamespace(request_id="r", all_token_ids=[1, 2, 3])
        roster = Roster()
        roster.add(request)
        roster.chain(request)
        place = SimpleNamespace(offset=2, length=2)
        request.mm_features = [SimpleNamespace(identifier=image, mm_position=place)]
        request.all_token_ids = [1, 2, 7, 7]  # its session dropped the 3
        roster.cut_back("r", 2)
        roster.extended(request)
        return list(roster.chain(request)[0])

    cat, dog = content("cat"), content("dog")
    assert cat[:2] == dog[:2] and cat[2] != dog[2] and cat[3] != dog[3]


def test_a_restart_needs_an_engine_in_a_process_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("id: mine\ntext: t\nworkload: restarted\n")
    with pytest.raises(SpecError, match=r"restarts vLLM, which needs start\.processes"):
        load_spec(live=True, cases=[str(path)])


def test_our_events_are_as_listed() -> None:
    events = own_events(BASE, outcome_with(external_hits=3), Ended("exit", 0, 1.0), {}, 0, {"p"})
    assert [event["kind"] for event in events] == ["live.phase", *["live.happened"] * 4, "live.end"]
    for event in events:
        assert check_event({"seq": 0, "step": 0, **event}) == []


@pytest.mark.parametrize(
    ("ended", "error", "done", "how"),
    [
        (Ended("exit", 0, 1.0), None, True, "ended"),
        (Ended("timeout", 0, 1.0), None, True, "ended"),
        (Ended("exit", 1, 1.0), {"text": "E: e"}, False, "crash"),
        (Ended("exit", 1, 1.0), {"text": "E: e", "stalled": True}, False, "timeout"),
        (Ended("timeout", 0, 9.0), None, False, "timeout"),
        (Ended("signal", 9, 1.0), None, False, "killed"),
        (Ended("exit", 3, 1.0), None, True, "ended"),
    ],
)
def test_how_a_run_ended(ended: Ended, error: dict[str, Any] | None, done: bool, how: str) -> None:
    outcome = Outcome()
    outcome.error, outcome.ended = error, done
    event = end_event(outcome, ended)
    assert event["how"] == how
    assert bool(event["processes"]) == (done and ended.how == "timeout")


def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "out").write_text('{"kind": "begin", "name": "cold"}\n{"kind": "phase", "na')
    outcome = Outcome.read(tmp_path / "out")
    assert outcome.current == "cold" and not outcome.phases and not outcome.ended


# -- the model
def test_the_tiny_model_is_the_same_every_time(tmp_path: Path) -> None:
    digests = {
        hashlib.sha256((make(tmp_path / name) / "model.safetensors").read_bytes()).hexdigest()
        for name in ("a", "b", "a")
    }
    assert len(digests) == 1 and (tmp_path / "a" / "config.json").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_a_drafter_s_weights_are_near_the_model_s_and_windows_leave_them_alone(
    tmp_path: Path,
) -> None:
    plain = load_file(make(tmp_path / "plain") / "model.safetensors")
    drafter = load_file(make(tmp_path / "drafter", drafter=True) / "model.safetensors")
    windows = make(tmp_path / "windows", windows=True)
    name = "model.layers.1.self_attn.k_proj.weight"
    error = (drafter[name] - plain[name]).norm() / plain[name].norm()
    assert 0.02 < error < 0.1
    same = load_file(windows / "model.safetensors")
    assert all(torch.equal(tensor, plain[name]) for name, tensor in same.items())
    config = json.loads((windows / "config.json").read_text())
    assert config["layer_types"] == ["full_attention", "sliding_attention"]


def test_every_workload_is_used_and_every_name_is_known() -> None:
    used = {getattr(scenario, "workload", None) for scenario in SPEC.cases.values()}
    assert set(SPEC.workloads) <= used
    assert isinstance(CONVERSATION, Workload)


@pytest.mark.parametrize("requirement", ["live.tokens", "live.likelihood", "live.same-bytes"])
def test_reuse_of_what_is_no_prefix_may_change_tokens(requirement: str) -> None:
    declared = load_spec().requirements[requirement].capability_expr
    caps = {"lossy": False, "synthesises_kv": False, "non_prefix_reuse": False}
    assert declared.bind(caps)({})
    assert not declared.bind({**caps, "non_prefix_reuse": True})({})


def test_engine_live_says_that_vllm_is_without_its_compiled_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (variant,) = random_scenario(0).variants(["live"])
    monkeypatch.setattr(live_runs, "is_python_only", lambda: True)
    with pytest.raises(EnvironmentProblem, match="compiled parts, which this vLLM does not have"):
        live_runs.make_live_runs(variant, Target(None), load_spec(), seed=0, tmp=tmp_path)
