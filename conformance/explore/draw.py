# SPDX-License-Identifier: Apache-2.0
"""Workloads drawn at random: engine, requests and schedule. Only what an engine and its clients may do; every draw is a case.

Workloads of two engines over one store, drawn at random: what one engine computes is handed over to the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvconform.explore.dice import Dice
from kvconform.explore.requests import Requests
from kvconform.explore.schedule import NAMES, Schedule
from kvconform.explore.workload import Data, Workload, make
from kvconform.refimpl.settings import POLICIES

ENGINES = {"p": "kv_producer", "d": "kv_consumer"}
ALTERED: list[Data] = [
    {"remote_request_id": "nobody"},
    {"remote_engine_id": "nowhere"},
    {"remote_request_id": None, "remote_block_ids": None},
]


OVER_STORE = "store"
"""What a connector must be able to do for `over_store`, besides the roles of the engines."""


def over_store(dice: Dice, block: int) -> tuple[list[Data], int]:
    """As `steps`, of two engines that share a store: what one has saved the other loads, and nothing is handed over."""
    found: list[Data] = []
    lengths: dict[str, int] = {}
    for engine, names in (("p", "ab"), ("d", "cde")):
        found += [{"on": engine}] if engine == "d" else []
        for name in names[: dice.number(1, len(names))]:
            if not lengths or dice.one_in(4):
                lengths[name] = max(2, dice.number(1, 4) * block + dice.pick([-1, 0, 1, 2]))
                prompt: int | Data = lengths[name]
            else:
                source, more = dice.pick(sorted(lengths)), dice.pick([0, block + 1])
                prompt = {"of": source, "then": more} if more else {"same": source}
                lengths[name] = lengths[source] + more
            found.append(
                {"add": {"req": name, "prompt": prompt, "max_tokens": dice.pick([1, 4, 7])}}
            )
            found += [{"step": dice.number(1, 3)}] * dice.number(0, 1) + [
                {dice.pick(["abort", "preempt"]): name}
            ] * dice.one_in(6)
            found += dice.pick([[], [{"run": {}}], [{"run": {}}, {"drop-local": {}}]])
        found.append({"run": {}})
    return found, max(lengths.values()) + 7


def pair_steps(dice: Dice, block: int) -> tuple[list[Data], int]:
    """(steps, length of the longest request with its output)."""
    found: list[Data] = []
    count, longest = dice.number(1, 2), 0
    for number in range(1, count + 1):
        length = max(2, dice.number(1, 4) * block + dice.pick([-1, 0, 1, 2]))
        longest = max(longest, length)
        found.append(
            {"add": {"req": f"p{number}", "prompt": length, "max_tokens": 1, "hand_over": True}}
        )
        found += [{"step": dice.number(1, 2)}] * dice.number(0, 1)
        found += [{"abort": f"p{number}"}] * dice.one_in(8)
    if not dice.one_in(8):
        found.append({"run": {"until": f"p{count}"}})
    found.append({"on": "d"})
    for number in range(1, count + 1):
        handed = (
            {"of": f"p{number}", "alter": dice.pick(ALTERED)} if dice.one_in(8) else f"p{number}"
        )
        name = f"d{number}"
        found.append(
            {
                "add": {
                    "req": name,
                    "prompt": {"same": f"p{number}"},
                    "max_tokens": dice.pick([1, 4, 7]),
                    "handed": handed,
                }
            }
        )
        found += [{"step": dice.number(1, 3)}] * dice.number(0, 1)
        found += [{dice.pick(["abort", "preempt"]): name}] * dice.one_in(4)
    if dice.one_in(4):
        again, longer = _replayed(dice, block)
        found, longest = found + again, max(longest, longer)
    return [*found, {"run": {}}], longest + 7


def _replayed(dice: Dice, block: int) -> tuple[list[Data], int]:
    """The first transfer's parameters come again, when it is long over and the producer's blocks have gone to others."""
    length = dice.number(3, 6) * block
    return [
        {"run": {}},
        {"drop-local": {}},
        {"on": "p"},
        {"add": {"req": "p9", "prompt": length, "max_tokens": 1}},
        {"run": {"until": "p9"}},
        {"on": "d"},
        {"add": {"req": "d9", "prompt": {"same": "p1"}, "max_tokens": 4, "handed": "p1"}},
    ], length


THEMES = (
    *["plain"] * 12,
    *["failing"] * 3,
    *["pair"] * 2,
    "groups",
    "groups",
    "ranks",
    "ranks",
    "siblings",
    "restarts",
    "odd",
)
"""What is special about a workload, besides its requests and what befalls them. One thing at a time: two are seldom needed."""
GROUPS = (
    ["full", "sliding"],
    ["full", "wide"],
    ["full", "state"],
    ["full", "private"],
    ["full", "sliding", "state"],
    ["latent"],
)
SIBLINGS = (
    ["winner", "self"],
    ["self", "holder"],
    ["fetcher", "self"],
    ["greeter", "self"],
    ["idle", "self"],
    ["self"],
)
ODD: tuple[Data, ...] = (
    {"stats": True},
    {"long_prefill_threshold": 3},
    {"layout": "LHBNC"},
    {"layout": "BLHNC"},
    {"role": "kv_consumer"},
    {"role": "kv_producer"},
)
SMALL: tuple[Data, ...] = (
    {"block_size": 4, "budget": 64, "max_seqs": 8, "num_blocks": 9},
    {"block_size": 4, "budget": 5, "max_seqs": 8, "num_blocks": 12},
    {"block_size": 4, "budget": 64, "max_seqs": 1, "num_blocks": 9},
    {"block_size": 4, "budget": 7, "max_seqs": 2, "num_blocks": 10},
)
"""Configurations of small workloads: few, because making one takes longer than running the workload. Two blocks and their output fit."""
RELATIONS: tuple[list[str], ...] = (*[[]] * 14, ["no-connector"], ["pickled-metadata"])

PROCESSES: tuple[list[str], ...] = (*[["second-process"]] * 9, ["hash-seed"])
"""Second runs that take a process of their own: half a second, and eight."""


def drawn(
    engines: list[str],
    schedulings: list[str],
    slows: list[str] | None,
    *,
    first_seed: int,
    count: int,
) -> Iterator[Workload]:
    """`count` workloads, the same for the same arguments on every machine."""
    for number in range(count):
        yield Workload(one(f"{first_seed}/{number}", engines, schedulings, slows), first_seed)


def small(
    engines: list[str],
    schedulings: list[str],
    slows: list[str] | None,
    *,
    first_seed: int,
    count: int,
) -> Iterator[Workload]:
    """As `drawn`, of two or three requests of at most two blocks and four tokens of output, with nothing special."""
    for number in range(count):
        yield Workload(
            one(f"small/{first_seed}/{number}", engines, schedulings, slows, simple=True),
            first_seed,
        )


def one(
    seed: str,
    engines: list[str],
    schedulings: list[str],
    slows: list[str] | None,
    *,
    simple: bool = False,
) -> Data:
    """The data of a case of one run; `seed` decides all of it."""
    dice = Dice(seed)
    engine, scheduling = dice.pick(engines), dice.pick(schedulings)
    depth = dice.pick([2, 2, 3])
    block, drafts = (4, 0) if simple else (dice.pick([4, 4, 4, 16]), dice.pick([0, 0, 0, 2, 3]))
    theme = "plain" if simple else dice.pick(THEMES)
    config, relations = (
        dict(dice.pick(SMALL)) if simple else _config(dice, block, drafts),
        [] if simple else list(dice.pick(RELATIONS)),
    )
    extra = _special(dice, theme, engine)
    needs = None
    if theme == "pair":
        needs = OVER_STORE if dice.one_in(3) else None
        steps, longest = (over_store if needs else pair_steps)(dice, block)
        relations = []
    else:
        requests = Requests(dice, block, drafts, simple=simple)
        in_flight = depth if scheduling == "async" else 1
        schedule = Schedule(
            dice,
            requests,
            depth=in_flight,
            failing=theme == "failing",
            restarts=theme == "restarts",
        )
        steps = schedule.draw(3 if simple else len(NAMES))
        longest = requests.longest
        if not simple and dice.one_in(6):
            _prioritise(dice, steps)
        if theme in ("siblings", "restarts") or extra.get("role") or extra.get("groups"):
            _promise_nothing(steps)
    enough = -(-(longest + drafts + 1) // block) + 2  # one request alone must fit
    if not simple:
        config["num_blocks"] = (
            64 if "groups" in extra else dice.pick([64, enough, enough + 1, enough + 3, enough + 6])
        )
    policies = (
        [dice.pick(sorted(POLICIES))]
        if engine == "reference" and not simple and dice.one_in(2)
        else []
    )
    if (
        "tensor_parallel" in extra and not drafts and dice.one_in(4)
    ):  # with drafts, vLLM does not do it (50391)
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
        f"drawn.{seed.replace('/', '.')}",
        "Drawn at random.",
        steps,
        engine=engine,
        scheduling=scheduling,
        runner=dice.pick(["v1", "v2"]),
        depth=depth,
        config={**config, **extra},
        policies=policies,
        slow=dice.pick(slows) if slows else None,
        relations=relations,
        needs=needs,
    )


def _config(dice: Dice, block: int, drafts: int) -> Data:
    budget = dice.pick([64, 64, 5, 7, block, block + 1, 2 * block + 3])
    least = (
        2 + drafts if drafts else 1
    )  # a decoding request is padded to its drafts, and the drafter has a slot: with less it never runs
    config: Data = {
        "block_size": block,
        "budget": max(budget, least),
        "max_seqs": dice.pick([8, 8, 1, 2]),
    }
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
        extra["engines"] = dict(ENGINES)
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
