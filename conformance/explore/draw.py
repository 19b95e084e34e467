# SPDX-License-Identifier: Apache-2.0
"""Random workloads: engine configuration, requests and schedule, all of them legal cases.

Some have two engines: one engine hands KV over to the other, or both share a store.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvconform.contract.case import EVEN, LARGE, LOADERS, OF_GENERATION
from kvconform.contract.situation import policies as known_policies
from kvconform.explore.dice import Dice
from kvconform.explore.requests import Requests, installed_since
from kvconform.explore.scenes import SCENES, Scene
from kvconform.explore.schedule import NAMES, Schedule
from kvconform.explore.workload import Data, Workload, make

ENGINES = {"p": "kv_producer", "d": "kv_consumer"}
OTHERWISE: list[Data] = [{"tensor_parallel": 2}, {"cache_dtype": "bfloat16"}]
"""Settings in which one of two engines may differ; sizes and numbers of blocks are drawn apart."""
IDENTITIES: list[Data] = [{}] * 6 + [{"lora": "one"}, {"salt": "one"}]
LEASED: Data = {"idle": {"steps": 12, "seconds": 1200}}
"""Time in which any lease ends."""
ALTERED: list[Data] = [
    {"remote_request_id": "unknown", "transfer_id": "unknown"},
    {"remote_engine_id": "nowhere"},
    {"remote_request_id": None, "remote_block_ids": None},
]


OVER_STORE = "store"
"""The capability that `over_store` needs, in addition to the roles of the engines."""


def over_store(dice: Dice, block: int) -> tuple[list[Data], int]:
    """Draw steps of two engines that share a store: one loads what the other has saved.

    Often the first one is still busy then; now and then it asks for what the second one has saved,
    or one of them resets the store.

    Returns (steps, length of the longest request with its output).
    """
    found: list[Data] = []
    lengths: dict[str, int] = {}
    outputs: dict[str, int] = {}
    stored: set[str] = set()  # requests of the producer that ended by themselves since a reset
    live: set[str] = set()
    parts = [("p", "ab"), ("d", "cde")] + [("p", "fg")] * dice.one_in(2)
    for engine, names in parts:
        found += [{"on": engine}] if found else []
        for name in names[: dice.number(1, len(names))]:
            add: Data = {"req": name}
            if not lengths or dice.one_in(4):
                lengths[name] = max(2, dice.number(1, 4) * block + dice.pick([-1, 0, 1, 2]))
                prompt: int | Data = lengths[name]
            else:
                source, more = dice.pick(sorted(lengths)), dice.pick([0, block + 1])
                prompt = {"of": source, "then": more} if more else {"same": source}
                lengths[name] = lengths[source] + more
                if more and dice.one_in(2):  # what was saved of the output so far shows
                    prompt = {**prompt, "outputs": True}
                    lengths[name] += outputs[source]
                if engine == "d" and source in stored:
                    add["reloads"] = source
            outputs[name] = dice.pick([1, 4, 7])
            found.append({"add": {**add, "prompt": prompt, "max_tokens": outputs[name]}})
            live |= {name} if engine == "p" else set()
            found += [{"step": dice.number(1, 3)}] * dice.number(0, 1)
            if dice.one_in(6):
                event = dice.pick(["abort", "preempt"])
                found.append({event: name})
                live -= {name} if event == "abort" else set()
            if dice.one_in(6):
                found += _reset_by(dice, engine)
                stored.clear()
                live.clear()
            ends: list[Data] = dice.pick([[], [{"run": {}}], [{"run": {}}, {"drop-local": {}}]])
            if ends:
                stored, live = stored | live, set()
            found += ends
        found.append({"run": {}})
        stored, live = stored | live, set()
    return found, max(lengths.values()) + 7


def _reset_by(dice: Dice, engine: str) -> list[Data]:
    """Draw a reset of the common store, by either engine; `engine` is driven afterwards."""
    steps: list[Data] = [{"reset": {"running": dice.one_in(4), "connector": True}}]
    other = next(name for name in ENGINES if name != engine)
    return steps if dice.one_in(2) else [{"on": other}, *steps, {"on": engine}]


def pair_steps(dice: Dice, block: int) -> tuple[list[Data], int]:
    """Draw steps of two engines of which one hands KV over to the other.

    Returns (steps, length of the longest request with its output).
    """
    found: list[Data] = []
    count = dice.number(1, 2)
    longest = 0
    identities = [dice.pick(IDENTITIES) for _ in range(count)]
    for number, identity in enumerate(identities, 1):
        length = max(2, dice.number(1, 4) * block + dice.pick([-1, 0, 1, 2]))
        longest = max(longest, length)
        # A producer that generates more than one token offers more than the consumer wants.
        tokens = dice.pick([1] * 7 + [block + 2])
        longest = max(longest, length + tokens)
        add: Data = {"req": f"p{number}", "prompt": length, "max_tokens": tokens, "hand_over": True}
        if number > 1 and identity != identities[0] and dice.one_in(2):
            add["prompt"] = {"same": "p1"}
        if dice.one_in(8):
            add["stop_at"] = 0
        found.append({"add": add | identity})
        found += [{"step": dice.number(1, 2)}] * dice.number(0, 1)
        if dice.one_in(6):
            found.append({dice.pick(["abort", "preempt"]): f"p{number}"})
    if not dice.one_in(8):
        found.append({"run": {"until": f"p{count}"}})
    found += [LEASED] * dice.one_in(12)
    found.append({"on": "d"})
    for number, identity in enumerate(identities, 1):
        source, name = f"p{number}", f"d{number}"
        handed: str | Data = source
        if dice.one_in(8):
            handed = {"of": source, "alter": dice.pick(ALTERED)}
        add = {
            "req": name,
            "prompt": {"same": source},
            "max_tokens": dice.pick([1, 4, 7]),
            "handed": handed,
        }
        found.append({"add": add | identity})
        found += [{"step": dice.number(1, 3)}] * dice.number(0, 1)
        found += [{"on": "p"}, LEASED, {"on": "d"}] * dice.one_in(12)
        found += [{dice.pick(["abort", "preempt"]): name}] * dice.one_in(4)
    if dice.one_in(4):
        again, longer = _replayed(dice, block, identities[0])
        found, longest = found + again, max(longest, longer)
    return [*found, {"run": {}}], longest + 7


def _replayed(dice: Dice, block: int, identity: Data) -> tuple[list[Data], int]:
    """Draw steps that repeat the first transfer's parameters long after it ended.

    `identity`: adapter or salt of its requests. The producer has reused the blocks by then.
    Returns (steps, length of their longest prompt).
    """
    length = dice.number(3, 6) * block
    add: Data = {"req": "d9", "prompt": {"same": "p1"}, "max_tokens": 4, "handed": "p1"}
    return [
        {"run": {}},
        {"drop-local": {}},
        {"on": "p"},
        {"add": {"req": "p9", "prompt": length, "max_tokens": 1}},
        {"run": {"until": "p9"}},
        {"on": "d"},
        {"add": add | identity},
    ], length


THEMES = (
    *["plain"] * 12,
    *["failing"] * 3,
    *["pair"] * 2,
    *["scene"] * 3,
    "groups",
    "groups",
    "ranks",
    "ranks",
    "siblings",
    "restarts",
    "odd",
)
"""Special properties of workloads, one at a time, because two are seldom needed together."""
GROUPS = (
    ["full", "sliding"],
    ["full", "broad"],
    ["full", "wide"],
    ["full", "local"],
    ["full", "state"],
    ["full", "private"],
    ["full", "sliding", "state"],
    ["sliding"],
    ["latent"],
)
EVEN_GROUPS = (*[["latent"]] * 4, *(each for each in GROUPS if EVEN.issuperset(each)))
"""Those that engine reference has, too; half of them are models of one group."""
SLICES = ((2, 2), (4, 4), (4, 2), (3, 1))
"""Tensor parallel ranks, and the ranks that a block's tokens are split over."""
SIBLINGS = (
    ["winner", "self"],
    ["self", "holder"],
    ["self", "winner"],
    ["fetcher", "self"],
    ["self", "fetcher"],
    ["failer", "self"],
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
    {"graphs": True},
    {"cache_dtype": "fp8"},
    {"pooling": True},
)
SMALL: tuple[Data, ...] = (
    {"block_size": 4, "budget": 64, "max_seqs": 8, "num_blocks": 9},
    {"block_size": 4, "budget": 5, "max_seqs": 8, "num_blocks": 12},
    {"block_size": 4, "budget": 64, "max_seqs": 1, "num_blocks": 9},
    {"block_size": 4, "budget": 7, "max_seqs": 2, "num_blocks": 10},
)
"""Configurations of small workloads. Two blocks of prompt and their output fit.

They are few, because building a configuration takes longer than running the workload.
"""
RELATIONS: tuple[list[str], ...] = (*[[]] * 14, ["no-connector"], ["pickled-metadata"])
"""Second runs within the process, for comparison."""

PROCESSES: tuple[list[str], ...] = (*[["second-process"]] * 9, ["hash-seed"])
"""Second runs in a process of their own, which take half a second and eight seconds."""


RESTARTS = (*["process"] * 9, "interpreter")
"""Restarts that end the process; a fresh interpreter takes eight seconds."""

FORMATS: tuple[tuple[Data, Data], ...] = (
    ({"dtype": "float16"}, {"dtype": "bfloat16"}),
    ({"dtype": "bfloat16"}, {"dtype": "float32"}),
    ({"cache_dtype": "float16"}, {"cache_dtype": "bfloat16"}),
    ({"dtype": "float16"}, {"cache_dtype": "bfloat16"}),
    ({"cache_dtype": "bfloat16"}, {"cache_dtype": "fp8"}),
    ({"cache_dtype": "fp8"}, {"cache_dtype": "fp8_e5m2"}),
)
"""What an engine has before and after a restart over the same store."""
BACKENDS: tuple[tuple[Data, Data], ...] = (
    ({"layout": "LBHNC"}, {"layout": "LBNHC"}),
    ({"layout": "LBNHC"}, {"layout": "BLHNC"}),
)
"""The same of an attention backend. Others split blocks (`_formats`)."""
MODELS = ("kvconform/other-model", "somebody-else/tiny-model")
"""Models of the engine after a restart; the store is the same."""


def drawn(
    engines: list[str],
    schedulings: list[str],
    slows: list[str] | None,
    *,
    first_seed: int,
    count: int,
    simple: bool = False,
) -> Iterator[Workload]:
    """Yield `count` workloads, deterministically: the same arguments yield the same workloads.

    `simple`: small ones, with two or three requests of at most two blocks, with at most four tokens
    of output and no special properties.
    """
    prefix = "small/" if simple else ""
    for number in range(count):
        seed = f"{prefix}{first_seed}/{number}"
        yield Workload(one(seed, engines, schedulings, slows, simple=simple), first_seed)


def one(
    seed: str,
    engines: list[str],
    schedulings: list[str],
    slows: list[str] | None,
    *,
    simple: bool = False,
) -> Data:
    """Return the data of a case with one run, which depends only on `seed` and the arguments.

    `simple`: a small workload.
    """
    dice = Dice(seed)
    engine, scheduling = dice.pick(engines), dice.pick(schedulings)
    depth = dice.pick([2, 2, 3, 4])
    relations: list[str] = []
    if simple:
        block, drafts, theme = 4, 0, "plain"
        config = dict(dice.pick(SMALL))
    else:
        block, drafts = dice.pick([4, 4, 4, 16]), dice.pick([0, 0, 0, 2, 3])
        theme = dice.pick(THEMES)
        if theme == "scene":
            drafts = 0
        config = _config(dice, block, drafts)
        relations = list(dice.pick(RELATIONS))
    extra = _special(dice, theme, engine, block)
    needs = None
    scene: Scene | None = None
    if theme == "scene":
        fitting = [each for each in SCENES if engine in each.engines]
        scene = dice.pick(fitting).draw(dice, block)
        steps, longest, relations = scene.steps, scene.longest, []
        needs = scene.needs
        extra |= scene.config
        if not _has_fine_hashes():
            extra.pop("prefix_match_unit", None)
    elif theme == "pair":
        needs = OVER_STORE if dice.one_in(3) else None
        steps, longest = (over_store if needs else pair_steps)(dice, block)
        relations = []
        name = dice.pick(list(ENGINES))
        if dice.one_in(4):
            extra["engines"][name] = {"role": ENGINES[name], "block_size": 2 * block}
        elif engine == "vllm" and dice.one_in(6):
            extra |= {"pipeline_parallel": 2, "layers": list(dice.pick(STAGES))}
        elif dice.one_in(4):
            extra["tensor_parallel"] = 2
            if not drafts and dice.one_in(2):
                extra |= {"groups": ["latent"], "context_parallel": 2}
        elif engine == "vllm" and needs is None and dice.one_in(3):
            other = dice.pick(["sliding", "state"])
            extra |= {"groups": ["full", other], "window": dice.pick([5, 6, 8, 11])}
            _end_at_the_prompt(steps)
        elif dice.one_in(2):
            own: Data = dice.pick([{"num_blocks": 96}] * 2 + OTHERWISE)
            extra["engines"][name] = {"role": ENGINES[name], **own}
        elif dice.one_in(3):
            extra["cache_dtype"] = "fp8"
        elif needs is None and dice.one_in(3):
            extra["engines"] = dict.fromkeys(ENGINES, "kv_both")
        elif dice.one_in(2):
            extra |= dice.pick([{"graphs": True}, {"load_failure_policy": "fail"}])
    else:
        requests = Requests(dice, block, drafts, simple=simple, engine=engine)
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
        if extra.get("pooling"):
            _generate_nothing(config, steps)
        if theme == "siblings" or extra.get("role") or extra.get("groups"):
            _promise_nothing(steps)
    if "state" in extra.get("groups", ()):
        config.pop("prefix_caching", None)
        if drafts and config["budget"] == block:
            # vLLM takes the slot of a draft off the budget, then waits for a whole block for ever.
            config["budget"] += 1
    if not simple:
        # One request alone must fit, with the drafts that steps in flight may compute beyond its
        # end. vLLM stops at max_model_len, for which there is always room. A mutation may set
        # depth 3.
        ahead = max(depth, 3) * (drafts + 1) if drafts else 1
        enough = -(-(longest + ahead) // block) + 2
        sizes = [64, enough, enough + 1, enough + 3, enough + 6]
        if scene is not None:
            sizes = [64]
        config["num_blocks"] = 64 if "groups" in extra else dice.pick(sizes)
    policies: list[str] = []
    if engine == "reference" and not simple and dice.one_in(2):
        policies = [dice.pick(known_policies())]
    elif scheduling == "async" and not simple and dice.one_in(4):
        policies = ["late-workers"]
    # vLLM does not support context parallelism with drafts (50391).
    if theme == "ranks" and "tensor_parallel" in extra and not drafts and dice.one_in(2):
        ranks, degree = dice.pick(SLICES)
        extra |= {"groups": ["latent"], "tensor_parallel": ranks, "context_parallel": degree}
        if block % (2 * ranks) == 0 and dice.one_in(3):
            extra["context_interleave"] = 2
        if ranks > 2 and dice.one_in(2):
            degree = dice.pick([1, 2, 4] if ranks == 4 else [1])
            _restart_with_other_shards(steps, {"context_parallel": degree})
    elif theme == "ranks" and not drafts and dice.one_in(4):
        _restart_with_other_shards(steps, dice.pick(_other_shards(engine, extra)))
    elif _is_split(config, extra) and dice.one_in(8):
        extra["kernel_block_size"] = block // dice.pick([2, 4])
    if not simple and theme in ("plain", "groups"):
        extra |= _layers(dice, engine, drafts, extra.get("groups", []))
        if "drafter" in extra:
            _promise_nothing(steps)
        if engine == "vllm" and _fits_two_ranks(extra) and dice.one_in(4):
            extra["tensor_parallel"] = 2
    if theme == "failing" and not extra and dice.one_in(4):
        extra |= _fail_on_one_rank(dice, engine, steps)
    if theme == "plain" and not simple and not extra and dice.one_in(12):
        extra["narrow_layer"] = dice.pick(["first", "last"])
    restart = next((step for step in steps if step.get("restart") == "engine"), None)
    if restart is not None and dice.one_in(6):
        restart["restart"] = dice.pick(RESTARTS)
    elif restart is not None and dice.one_in(12):
        restart["restart"] = {"model": dice.pick(MODELS)}
    elif restart is not None and dice.one_in(6):
        before, after = dice.pick(_formats(block, extra))
        extra |= before
        restart["restart"] = {**after}
    if extra.get("multi") == ["self"]:
        relations = ["alone"]
    elif theme == "failing" and dice.one_in(4):
        relations = ["no-connector"]
    if theme in ("plain", "failing") and not simple and not relations:
        relations = list(dice.pick(PROCESSES)) if dice.one_in(40) else []
    if not slows and not simple and dice.one_in(4):  # on a CPU, which has no streams
        policies = sorted({*policies, "late-threads"})
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
    # A decoding request is padded to its drafts, and the drafter has a slot. With less budget the
    # request never runs.
    least = 2 + drafts if drafts else 1
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


FINE_HASHES = "0.32"
"""The first release in which hits may end inside blocks."""
STAGES = [[0, 1, 2], [0, 9, 10], [0, 2, 10], [1, 4]]
"""Numbers of the layers with KV of a model that two pipeline stages split, mostly unequally."""
RETENTION = 32
"""Tokens between the states and windows that are kept: a multiple of all sizes of blocks."""


def _special(dice: Dice, theme: str, engine: str, block: int) -> Data:
    """Draw what the theme adds to the configuration."""
    extra: dict[str, Any] = {}
    if theme == "failing" and dice.one_in(3):
        extra["load_failure_policy"] = "fail"
    elif theme == "pair":
        extra["engines"] = dict(ENGINES)
    elif theme == "groups":
        extra["groups"] = list(dice.pick(GROUPS if engine == "vllm" else EVEN_GROUPS))
        if {"sliding", "wide"} & set(extra["groups"]):
            extra["window"] = dice.pick([5, 6, 8, 11])
        if "local" in extra["groups"]:
            extra["window"] = block * dice.pick([2, 3, 5])
        if {"sliding", "wide", "state"} & set(extra["groups"]):
            # The prefix cache keeps few of the windows and states, all of them, or one in so many.
            extra["retention_interval"] = dice.pick([0, 0, None, RETENTION])
        may_be_fine = engine == "vllm" and len(extra["groups"]) > 1
        if dice.one_in(3) and may_be_fine and _has_fine_hashes():
            extra["prefix_match_unit"] = block // 2
    elif theme == "ranks":
        pipeline = engine == "vllm" and dice.one_in(3)
        extra["pipeline_parallel" if pipeline else "tensor_parallel"] = 2
        if pipeline and dice.one_in(2):
            extra["layers"] = list(dice.pick(STAGES))
            if dice.one_in(3):
                extra |= {"groups": ["latent"], "tensor_parallel": 2}
    elif theme == "siblings":
        extra["multi"] = list(dice.pick(SIBLINGS))
        if dice.one_in(4):
            extra["tensor_parallel"] = 2
        elif LOADERS.isdisjoint(extra["multi"]):
            extra |= {"groups": ["full", "sliding"], "window": dice.pick([5, 6, 8, 11])}
    elif theme == "odd":
        extra.update(dice.pick(ODD))
    return extra


def _has_fine_hashes() -> bool:
    """Return whether the installed vLLM may hash parts of blocks (prefix_match_unit)."""
    return installed_since(FINE_HASHES)


def _layers(dice: Dice, engine: str, drafts: int, groups: list[str]) -> Data:
    """Draw which layers have KV: the drafter's too, or not all of the model's."""
    found: Data = {}
    fits = engine == "vllm" and not {"state", "private", "local"} & set(groups)
    if drafts and fits and dice.one_in(3):
        found["drafter"] = True
    if len(groups) < 2 and dice.one_in(8):
        found["layers"] = dice.pick([[0, 2, 3], [1, 4], [2, 10]])
    return found


def _fits_two_ranks(extra: Data) -> bool:
    """Return whether two ranks can split the heads of a model that is not the plain one."""
    groups = extra.get("groups", [])
    is_plain = len(groups) < 2 and not {"layers", "drafter"} & {*extra}
    return not is_plain and LARGE.isdisjoint(groups)


def _formats(block: int, extra: Data) -> list[tuple[Data, Data]]:
    """Return what an engine may have before and after a restart, with blocks of `block` tokens."""
    found = [*FORMATS, ({}, {"block_size": 2 * block}), ({}, {"block_size": 3 * block})]
    if not extra:
        found.append(({}, {"tensor_parallel": 2}))
    if "kernel_block_size" in extra:
        return found
    return [*found, *BACKENDS, ({}, {"kernel_block_size": block // 2})]


def _is_split(config: Data, extra: Data) -> bool:
    """Return whether vLLM can split blocks for the attention: one group, a layer's pages dense."""
    return len(extra.get("groups", [])) <= 1 and "layout" not in extra


def _other_shards(engine: str, extra: Data) -> list[Data]:
    """Return what ranks may split after a restart; one rank splits nothing."""
    if "pipeline_parallel" in extra:
        return [{"pipeline_parallel": 1}, {"tensor_parallel": 2, "pipeline_parallel": 1}]
    stages = [{"tensor_parallel": 1, "pipeline_parallel": 2}] if engine == "vllm" else []
    return [{"tensor_parallel": 1}, *stages]


def _end_at_the_prompt(steps: list[Data]) -> None:
    """Let producers generate one token: behind more, a window, or state, is another one."""
    for step in steps:
        if step.get("add", {}).get("hand_over"):
            step["add"]["max_tokens"] = 1


def _fail_on_one_rank(dice: Dice, engine: str, steps: list[Data]) -> Data:
    """Let loads fail of which one of two ranks has lost its share; return the degrees."""
    for step in steps:
        if "fail-load" in step:
            step["fail-load"]["rank"] = dice.number(0, 1)
    kinds = ["tensor_parallel", "pipeline_parallel"] if engine == "vllm" else ["tensor_parallel"]
    return {dice.pick(kinds): 2}


def _restart_with_other_shards(steps: list[Data], change: Data) -> None:
    """Insert a restart behind the first request, after which the ranks split other things.

    What the requests after it promise is left out: it was stored by ranks with other shards.
    """
    place = next(
        (index for index, step in enumerate(steps) if index and {"run", "drop-local"} & set(step)),
        None,
    )
    if place is not None and "add" not in steps[place]:
        steps.insert(place + 1, {"restart": change})
        _promise_nothing(steps)


def _prioritise(dice: Dice, steps: list[Data]) -> None:
    for step in steps:
        if "add" in step and dice.one_in(2):
            step["add"]["priority"] = dice.pick([-1, 1, 2])


def _generate_nothing(config: Data, steps: list[Data]) -> None:
    """Remove what requests of a pooling model cannot have."""
    config.pop("spec_tokens", None)
    for step in steps:
        for name in OF_GENERATION & step.get("add", {}).keys():
            del step["add"][name]


def _promise_nothing(steps: list[Data]) -> None:
    """Remove the promise that a request reloads what an earlier one stored.

    The connector does not promise it if others influence the store, or after a restart.
    """
    for step in steps:
        if "add" in step:
            step["add"].pop("reloads", None)
