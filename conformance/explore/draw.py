# SPDX-License-Identifier: Apache-2.0
"""Workloads drawn at random: engine, requests and schedule. Only what an engine and its clients may do; every draw is a case."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvconform.explore import pairs
from kvconform.explore.dice import Dice
from kvconform.explore.requests import Requests
from kvconform.explore.schedule import NAMES, Schedule
from kvconform.explore.workload import Data, Workload, make
from kvconform.refimpl.settings import POLICIES

THEMES = (*["plain"] * 12, *["failing"] * 3, *["pair"] * 2, "groups", "groups", "ranks", "ranks", "siblings", "restarts", "odd")
"""What is special about a workload, besides its requests and what befalls them. One thing at a time: two are seldom needed."""
GROUPS = (["full", "sliding"], ["full", "wide"], ["full", "state"], ["full", "private"], ["full", "sliding", "state"], ["latent"])
SIBLINGS = (["winner", "self"], ["self", "holder"], ["fetcher", "self"], ["greeter", "self"], ["idle", "self"], ["self"])
ODD: tuple[Data, ...] = (
    {"stats": True}, {"long_prefill_threshold": 3}, {"layout": "LHBNC"}, {"layout": "BLHNC"},
    {"role": "kv_consumer"}, {"role": "kv_producer"},
)  # fmt: skip
SMALL: tuple[Data, ...] = (
    {"block_size": 4, "budget": 64, "max_seqs": 8, "num_blocks": 9}, {"block_size": 4, "budget": 5, "max_seqs": 8, "num_blocks": 12},
    {"block_size": 4, "budget": 64, "max_seqs": 1, "num_blocks": 9}, {"block_size": 4, "budget": 7, "max_seqs": 2, "num_blocks": 10},
)  # fmt: skip
"""Configurations of small workloads: few, because making one takes longer than running the workload. Two blocks and their output fit."""
RELATIONS: tuple[list[str], ...] = (*[[]] * 14, ["no-connector"], ["pickled-metadata"])

PROCESSES: tuple[list[str], ...] = (*[["second-process"]] * 9, ["hash-seed"])
"""Second runs that take a process of their own: half a second, and eight."""


def drawn(engines: list[str], schedulings: list[str], slows: list[str] | None, *, first_seed: int, count: int) -> Iterator[Workload]:
    """`count` workloads, the same for the same arguments on every machine."""
    for number in range(count):
        yield Workload(one(f"{first_seed}/{number}", engines, schedulings, slows), first_seed)


def small(engines: list[str], schedulings: list[str], slows: list[str] | None, *, first_seed: int, count: int) -> Iterator[Workload]:
    """As `drawn`, of two or three requests of at most two blocks and four tokens of output, with nothing special."""
    for number in range(count):
        yield Workload(one(f"small/{first_seed}/{number}", engines, schedulings, slows, simple=True), first_seed)


def one(seed: str, engines: list[str], schedulings: list[str], slows: list[str] | None, *, simple: bool = False) -> Data:
    """The data of a case of one run; `seed` decides all of it."""
    dice = Dice(seed)
    engine, scheduling = dice.pick(engines), dice.pick(schedulings)
    depth = dice.pick([2, 2, 3])
    block, drafts = (4, 0) if simple else (dice.pick([4, 4, 4, 16]), dice.pick([0, 0, 0, 2, 3]))
    theme = "plain" if simple else dice.pick(THEMES)
    config, relations = dict(dice.pick(SMALL)) if simple else _config(dice, block, drafts), [] if simple else list(dice.pick(RELATIONS))
    extra = _special(dice, theme, engine)
    needs = None
    if theme == "pair":
        needs = pairs.OVER_STORE if dice.one_in(3) else None
        steps, longest = (pairs.over_store if needs else pairs.steps)(dice, block)
        relations = []
    else:
        requests = Requests(dice, block, drafts, simple=simple)
        in_flight = depth if scheduling == "async" else 1
        schedule = Schedule(dice, requests, depth=in_flight, failing=theme == "failing", restarts=theme == "restarts")
        steps = schedule.draw(3 if simple else len(NAMES))
        longest = requests.longest
        if not simple and dice.one_in(6):
            _prioritise(dice, steps)
        if theme in ("siblings", "restarts") or extra.get("role") or extra.get("groups"):
            _promise_nothing(steps)
    enough = -(-(longest + drafts + 1) // block) + 2  # one request alone must fit
    if not simple:
        config["num_blocks"] = 64 if "groups" in extra else dice.pick([64, enough, enough + 1, enough + 3, enough + 6])
    policies = [dice.pick(sorted(POLICIES))] if engine == "reference" and not simple and dice.one_in(2) else []
    if "tensor_parallel" in extra and not drafts and dice.one_in(4):  # with drafts, vLLM does not do it (50391)
        extra |= {"groups": ["latent"], "context_parallel": 2}
    restart = next((step for step in steps if "restart" in step), None)
    if restart is not None and dice.one_in(6):
        restart["restart"] = "process"
    if extra.get("multi") == ["self"]:
        relations = ["alone"]
    elif theme == "failing" and dice.one_in(4):
        relations = ["no-connector"]
    if theme in ("plain", "failing") and not simple and not relations:
        relations = list(dice.pick(PROCESSES)) if dice.one_in(40) else []
    return make(
        f"drawn.{seed.replace('/', '.')}", "Drawn at random.", steps, engine=engine, scheduling=scheduling, runner=dice.pick(["v1", "v2"]),
        depth=depth, config={**config, **extra}, policies=policies, slow=dice.pick(slows) if slows else None, relations=relations,
        needs=needs,
    )  # fmt: skip


def _config(dice: Dice, block: int, drafts: int) -> Data:
    budget = dice.pick([64, 64, 5, 7, block, block + 1, 2 * block + 3])
    least = 2 + drafts if drafts else 1  # a decoding request is padded to its drafts, and the drafter has a slot: with less it never runs
    config: Data = {"block_size": block, "budget": max(budget, least), "max_seqs": dice.pick([8, 8, 1, 2])}
    if drafts:
        config["spec_tokens"] = drafts
    if dice.one_in(10):
        config["prefix_caching"] = False
    return config


def _special(dice: Dice, theme: str, engine: str) -> Data:
    """What the theme adds to the configuration."""
    extra: dict[str, Any] = {}
    if theme == "failing" and dice.one_in(3):
        extra["load_failure_policy"] = "fail"
    elif theme == "pair":
        extra["engines"] = dict(pairs.ENGINES)
    elif theme == "groups":
        extra["groups"] = list(dice.pick(GROUPS)) if engine == "vllm" else ["latent"]
        if {"sliding", "wide"} & set(extra["groups"]):
            extra["window"] = dice.pick([5, 6, 8, 11])
    elif theme == "ranks":
        extra["pipeline_parallel" if engine == "vllm" and dice.one_in(3) else "tensor_parallel"] = 2
    elif theme == "siblings":
        extra["multi"] = list(dice.pick(SIBLINGS))
    elif theme == "odd":
        extra.update(dice.pick(ODD))
    return extra


def _prioritise(dice: Dice, steps: list[Data]) -> None:
    for step in steps:
        if "add" in step and dice.one_in(2):
            step["add"]["priority"] = dice.pick([-1, 1, 2])


def _promise_nothing(steps: list[Data]) -> None:
    """Where others have a say in what is stored, or it is over, nothing was promised."""
    for step in steps:
        if "add" in step:
            step["add"].pop("reloads", None)
