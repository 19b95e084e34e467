# SPDX-License-Identifier: Apache-2.0
"""Tests of workloads as data.

A drawn workload is a case, and the same one everywhere. A shrunk one can be read back.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from kvconform.contract import yaml12
from kvconform.contract.case import Case
from kvconform.contract.steps import STEPS, Add
from kvconform.contract.yaml12 import flow
from kvconform.explore.dice import Dice
from kvconform.explore.draw import _has_fine_hashes, drawn
from kvconform.explore.races import FAMILIES, POINTS, races
from kvconform.explore.scenes import resets_overtake
from kvconform.explore.shrink import shrink
from kvconform.explore.workload import Workload, make, text_of

BOTH = ["reference", "vllm"]


def some(count: int = 150, seed: int = 1) -> list[Workload]:
    return list(drawn(BOTH, ["sync", "async"], None, first_seed=seed, count=count))


def test_what_is_drawn_is_a_case_of_one_run() -> None:
    for workload in some():
        variant = workload.variant()
        assert variant.engine in BOTH and variant.block_size in (4, 16)


def test_the_same_seed_draws_the_same_and_another_seed_does_not() -> None:
    assert some(50) == some(50)
    assert some(50) != some(50, seed=2)


def test_draws_differ_in_everything_that_matters() -> None:
    found: Counter[str] = Counter()
    for workload in some(600):
        data = workload.data
        found.update(name for step in data["steps"] if "add" in step for name in step["add"])
        found.update(next(iter(step)) for step in data["steps"])
        found.update(
            f"{name} {value}"
            for name in ("scheduling", "runner", "depth")
            for value in data["matrix"][name]
        )
        found.update(data.get("policies", []))
        found.update(f"config {name}" for name in data["config"])
    wanted = (
        "abort",
        "preempt",
        "drop-local",
        "reset",
        "idle",
        "reorder",
        "depth 3",
        "runner v2",
        "scheduling async",
        "ignore-hits",
    )
    others = (
        "fail-load",
        "restart",
        "schedule",
        "lookup-only",
        "pause",
        "mm",
        "priority",
        "id",
        "stop_at",
        "params",
        "handed",
        "reloads",
    )
    special = (
        "engines",
        "groups",
        "tensor_parallel",
        "multi",
        "load_failure_policy",
        "spec_tokens",
        "prefix_caching",
        "context_parallel",
        "kernel_block_size",
        "layers",
        "narrow_layer",
        "drafter",
    )
    assert all(
        found[name] > 1 for name in (*wanted, *others, *(f"config {each}" for each in special))
    ), found


def test_resets_come_step_after_step_or_in_rounds_and_to_one_rank_or_two() -> None:
    scenes = [resets_overtake(Dice(seed), 4) for seed in range(40)]
    for scene in scenes:
        data = make(
            "scene.drawn",
            "Resets.",
            scene.steps,
            engine="reference",
            scheduling="sync",
            config=scene.config,
        )
        assert Workload(data).variant().case.steps
    kinds = Counter(
        (sum("reset" in step for step in scene.steps) > 1, "tensor_parallel" in scene.config)
        for scene in scenes
    )
    assert len(kinds) == 4 and min(kinds.values()) > 3


def test_few_have_a_second_run_in_a_process_of_its_own() -> None:
    """A process takes as long as a hundred workloads."""
    found = Counter(relation for workload in some(4000) for relation in workload.data["relations"])
    assert 20 < found["second-process"] < 80 and 2 < found["hash-seed"] < 20
    restarts = Counter(
        str(step["restart"])
        for workload in some(4000)
        for step in workload.data["steps"]
        if "restart" in step
    )
    assert 2 < restarts["process"] < restarts["engine"] / 3


def test_every_step_and_property_of_a_request_is_drawn() -> None:
    steps = [step for work in some(4000) for step in work.data["steps"]]
    assert {op for step in steps for op in step} == set(STEPS) - {"expect"}
    fields = {name for step in steps for name in step.get("add", {})}
    assert fields == set(Add.model_fields)
    changes = {tuple(step["restart"]) for step in steps if isinstance(step.get("restart"), dict)}
    assert ("tensor_parallel", "pipeline_parallel") in changes
    assert {("layout",), ("block_size",), ("kernel_block_size",)} <= changes


def test_layouts_ranks_and_groups_that_few_models_have() -> None:
    drawn_ones = some(4000)
    restarts = [
        step["restart"]
        for workload in drawn_ones
        for step in workload.data["steps"]
        if isinstance(step.get("restart"), dict)
    ]
    degrees = [how["context_parallel"] for how in restarts if "context_parallel" in how]
    models = {how["model"] for how in restarts if "model" in how}
    configs = [workload.data["config"] for workload in drawn_ones]
    assert len(set(degrees)) == 3 and len(degrees) > 5
    assert len(models) == 2
    assert sum(config.get("context_parallel") == 4 for config in configs) > 5
    assert sum(config.get("groups") == ["sliding"] for config in configs) > 5
    assert sum("local" in config.get("groups", ()) for config in configs) > 5
    if _has_fine_hashes():
        assert sum("prefix_match_unit" in config for config in configs) > 5
    pairs = Counter(
        (config.get("tensor_parallel", 1), config.get("context_parallel", 1))
        for config in configs
        if "engines" in config
    )
    assert min(pairs[place] for place in ((1, 1), (2, 1), (2, 2))) > 5
    peers = [config for config in configs if "engines" in config]
    assert sum(config.get("groups") == ["full", "sliding"] for config in peers) > 5
    assert sum("num_blocks" in str(config["engines"]) for config in peers) > 5
    assert any("drafter" in config and len(config.get("groups", ())) > 1 for config in configs)
    states = [config for config in configs if "state" in config.get("groups", ())]
    assert all(config.get("prefix_caching", True) for config in states)
    assert any("engines" in config for config in states)
    drafted = [config for config in states if config.get("spec_tokens")]
    assert len(drafted) > 5 and any("drafter" in config for config in drafted)
    assert all(config["budget"] != config["block_size"] for config in drafted)


def length_of(prompt: int | dict[str, Any], lengths: dict[str, int]) -> int:
    """Return the tokens of a prompt, given those of the prompts before it."""
    if isinstance(prompt, int):
        return prompt
    then = int(prompt.get("then", 0))
    if "parts" in prompt:
        return then + sum(part.get("new") or part["tokens"] for part in prompt["parts"])
    return then + int(prompt.get("tokens") or lengths[prompt.get("same") or prompt["of"]])


def test_prompts_agree_with_others_in_their_middle() -> None:
    parts = [
        step["add"]["prompt"]["parts"]
        for workload in some(1500)
        for step in workload.data["steps"]
        if "add" in step
        and isinstance(step["add"]["prompt"], dict)
        and "parts" in step["add"]["prompt"]
    ]
    moved = [each for each in parts if each[0].get("from")]
    behind_another = [each for each in parts if len(each) == 2 and "of" in each[0]]
    behind_new = [each for each in parts if "new" in each[0]]
    assert min(len(moved), len(behind_another), len(behind_new)) > 40


def test_a_request_alone_fits_into_the_memory_that_is_drawn() -> None:
    for workload in some():
        lengths: dict[str, int] = {}
        for step in workload.data["steps"]:
            if "add" in step:
                add, prompt = step["add"], step["add"]["prompt"]
                base = length_of(prompt, lengths)
                lengths[add["req"]] = base
                config = workload.data["config"]
                blocks = -(
                    -(base + add["max_tokens"] + config.get("spec_tokens", 0))
                    // config["block_size"]
                )
                assert blocks < config["num_blocks"]


def test_what_is_drawn_can_run() -> None:
    """Workloads avoid two things that vLLM cannot do.

    It never runs a padded decoding request in a smaller budget. It refuses an image whose number of
    tokens has changed.
    """
    tight = again = 0
    for workload in some(1500):
        config, images = workload.data["config"], dict[str, int]()
        drafts = config.get("spec_tokens", 0)
        assert config["budget"] >= (2 + drafts if drafts else 1)
        tight += bool(drafts) and config["budget"] == 2 + drafts
        for step in workload.data["steps"]:
            for image in step["add"].get("mm", []) if "add" in step else []:
                again += image["id"] in images
                assert images.setdefault(image["id"], image["length"]) == image["length"]
    assert tight and again


def test_races_are_every_point_of_every_situation_once() -> None:
    every = list(races(BOTH, ["sync", "async"], None, 0))
    assert len({json.dumps(workload.data) for workload in every}) == len(every) > 4_000
    begun = {f"race.{family}.{point}" for family in FAMILIES for point in POINTS}
    assert {workload.data["id"].rsplit(".", 2)[0] for workload in every} == begun
    # the id determines the tokens, so that no race finds what another one stored late
    assert len({workload.variant().id for workload in every}) == len(every)
    assert list(races(BOTH, ["sync"], None, 0)) != list(races(BOTH, ["sync"], None, 1))
    for workload in every[::40]:
        workload.variant()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"a": [1, "x y"]}, '{a: [1, "x y"]}'),
        (True, "true"),
        ("no", '"no"'),
        (None, "null"),
        ("1", '"1"'),
        (0.5, "0.5"),
        ("a-b", "a-b"),
    ],
)
def test_flow_style_reads_back(value: object, text: str) -> None:
    assert flow(value) == text and yaml12.parse(f"x: {text}\n", "x")["x"] == value


def test_a_file_of_a_case_reads_back() -> None:
    for workload in some(60):
        data = yaml12.parse(text_of(workload.data, "why\nand how"), "x")
        assert Workload(data, workload.seed).variant().case == workload.variant().case


def _preempts_a_long_one(workload: Workload) -> bool:
    adds = [step["add"] for step in workload.data["steps"] if "add" in step]
    long = {add["req"] for add in adds if isinstance(add["prompt"], int) and add["prompt"] > 4}
    return any(step.get("preempt") in long for step in workload.data["steps"])


def test_shrinking_keeps_the_failure_and_drops_the_rest() -> None:
    began = [workload for workload in some(150) if _preempts_a_long_one(workload)]
    assert len(began) > 3
    for workload in began[:3]:
        small, tries = shrink(workload, _preempts_a_long_one)
        added, preempted = small.data["steps"]
        assert tries <= 400 and added == {
            "add": {"req": preempted["preempt"], "prompt": 5, "max_tokens": 1}
        }
        assert small.data["matrix"] == {
            "scheduling": ["sync"],
            "runner": ["v1"],
            "depth": [2],
        } and not small.data.get("policies")


def test_a_prompt_that_others_repeat_is_handed_on() -> None:
    steps = [
        {"add": {"req": "a", "prompt": 9, "max_tokens": 1}},
        {"add": {"req": "b", "prompt": {"same": "a"}, "max_tokens": 1}},
    ]
    workload = Workload(make("x.y", "X.", steps, engine="vllm", scheduling="sync"))
    small, _ = shrink(
        workload,
        lambda each: any(
            "add" in step and step["add"]["req"] == "b" for step in each.data["steps"]
        ),
    )
    assert small.data["steps"] == [{"add": {"req": "b", "prompt": 1, "max_tokens": 1}}]


def kind_of(prompt: int | dict[str, Any]) -> str:
    if isinstance(prompt, int):
        return "new"
    if "of" in prompt:
        return "output" if prompt.get("outputs") else "continued"
    return "repeated" if "same" in prompt else "joined"


def test_reloads_are_promised_of_what_ended_by_itself_and_was_not_forgotten_since() -> None:
    promised: Counter[str] = Counter()
    for work in some(6000):
        running: set[str] = set()
        settled: set[str] = set()
        restarted = False
        for step in work.data["steps"]:
            if step.get("run") == {}:
                settled, running = settled | running, set()
            running.discard(step.get("abort", ""))
            restarted = restarted or "restart" in step
            if "restart" in step or step.get("reset", {}).get("connector"):
                settled, running = set(), set()
            add = step.get("add", {})
            if "reloads" in add:
                assert add["reloads"] in settled, work.data
                promised[kind_of(add["prompt"])] += 1
                promised["after a restart"] += restarted
                promised["between engines"] += bool(work.data["config"].get("engines"))
            if add:
                running.add(add["req"])
    del promised["new"]  # none
    assert len(promised) == 6 and min(promised.values()) > 5, promised


def test_what_a_request_reloads_has_its_identity_or_a_part_of_it() -> None:
    """An image that is cut off is left out: the request has nothing in common from there on."""
    alike: Counter[bool] = Counter()
    for work in some(6000):
        adds = [step["add"] for step in work.data["steps"] if "add" in step]
        known = {add["req"]: add for add in adds}
        for add in adds:
            source = known.get(add.get("reloads"))
            if source is None or "engines" in work.data["config"] or "restart" in str(adds):
                continue
            for name in ("salt", "embeds"):
                assert add.get(name) == source.get(name), work.data
            images = add.get("mm", [])
            assert all(image in source.get("mm", []) for image in images), work.data
            alike[images == source.get("mm", [])] += 1
    assert alike[True] > 100 and alike[False] > 2, alike


def test_one_request_alone_fits_with_all_that_steps_in_flight_compute() -> None:
    """Else it preempts itself again and again, which vLLM's max_model_len rules out.

    Found by exploration of an independent connector, with four steps of three drafts in flight.
    """
    tight = 0
    for workload in some(3000):
        case = Case.model_validate(workload.data)
        config, depth = case.config, max(workload.data["matrix"]["depth"])
        if config.engines or config.groups or config.multi or config.num_blocks >= 64:
            continue
        lengths = [add.prompt + add.max_tokens for add in case.added if isinstance(add.prompt, int)]
        ahead = depth * (1 + config.spec_tokens) if config.spec_tokens else 1
        room = (config.num_blocks - 1) * config.block_size
        assert max(lengths, default=0) + ahead <= room, workload.data
        tight += room < max(lengths, default=0) + 4 * ahead
    assert tight > 100
