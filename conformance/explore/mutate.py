# SPDX-License-Identifier: Apache-2.0
"""What a changed workload must not lose: an id, or the number of an adapter, is taken again only when the engine has let it go.

A workload like another one: what reached something new is worth a look around.
"""

from __future__ import annotations

import copy

from kvconform.explore.dice import Dice
from kvconform.explore.workload import Data, Workload
from kvconform.kv.provenance import adapter_number


def is_legal(data: Data) -> bool:
    """Whether ids and the numbers of adapters are free when they are taken."""
    return ids_are_free(data) and numbers_are_free(data)


def numbers_are_free(data: Data) -> bool:
    """Whether no two adapters of one number come to one start of the engine."""
    names: dict[int, str] = {}
    for step in data["steps"]:
        if "restart" in step:
            names.clear()
        name = step.get("add", {}).get("lora")
        if name is not None and names.setdefault(adapter_number(name), name) != name:
            return False
    return True


def ids_are_free(data: Data) -> bool:
    """Whether of two requests with one id, the first is over when the second comes: it has run to its end, or its client gave up when there
    was nothing to load for it, and no output of it was under way."""
    depth = data["matrix"]["depth"][0] if data["matrix"]["scheduling"] == ["async"] else 1
    steps: list[Data] = data["steps"]
    owners: dict[str, int] = {}
    for index, step in enumerate(steps):
        if "add" not in step:
            continue
        name = step["add"].get("id", step["add"]["req"])
        if name in owners:
            first, between = steps[owners[name]]["add"], steps[owners[name] + 1 : index]
            if not any("run" in each for each in between) and not _given_up(first, between, depth):
                return False
        owners[name] = index
    return True


def _given_up(add: Data, between: list[Data], depth: int) -> bool:
    """A new prompt, fewer steps than it would take to finish, everything landed, and aborted."""
    if not isinstance(add["prompt"], int) or {"drafts", "stop_at"} & set(add) or len(between) < 3:
        return False
    stepped, landed, aborted = between[:3]
    short = 0 < stepped.get("step", 0) < add.get("max_tokens", 1)
    return short and landed.get("land", 0) >= depth and aborted == {"abort": add["req"]}


CHANGES = ("axis", "axis", "insert", "insert", "insert", "drop", "tokens", "budget")
HARMLESS: tuple[Data, ...] = (
    {"step": 1},
    {"step": 2},
    {"run": {}},
    {"drop-local": {}},
    {"idle": 1},
    {"reorder": {}},
)


def mutated(seed: str, workload: Workload, engines: list[str], schedulings: list[str]) -> Workload:
    """The workload with one to three changes that keep it legal; `seed` decides which."""
    dice, data = Dice(seed), copy.deepcopy(workload.data)
    for kind in dice.some(CHANGES, 3):
        before = copy.deepcopy(data)
        _change(dice, data, kind, engines, schedulings)
        if not is_legal(data):
            data = before
    return Workload({**data, "id": f"drawn.{seed.replace('/', '.')}"}, workload.seed)


def _change(dice: Dice, data: Data, kind: str, engines: list[str], schedulings: list[str]) -> None:
    steps: list[Data] = data["steps"]
    if kind == "axis":
        _axis(dice, data, engines, schedulings)
    elif kind == "tokens":
        add = dice.pick([step["add"] for step in steps if "add" in step])
        if "stop_at" not in add and not data["config"].get("engines"):
            add["max_tokens"] = dice.number(1, add["max_tokens"])  # never more: it has to fit
    elif kind == "budget":
        data["config"]["max_seqs"] = dice.pick([1, 2, 3, 8])
    else:
        places = _free(steps)
        if places and kind == "drop":
            index = dice.pick(places)
            if index < len(steps) and next(iter(steps[index])) in (
                "step",
                "drop-local",
                "idle",
                "reorder",
                "abort",
                "preempt",
            ):
                del steps[index]
        elif places:
            index = dice.pick(places)
            steps.insert(
                index, _event(dice, steps[:index], in_pairs=bool(data["config"].get("engines")))
            )


def _axis(dice: Dice, data: Data, engines: list[str], schedulings: list[str]) -> None:
    matrix, between = data["matrix"], any("schedule" in step for step in data["steps"])
    which = dice.pick(["runner", "depth", "scheduling", "engine"])
    if which == "runner":
        matrix["runner"] = [dice.pick(["v1", "v2"])]
    elif which == "depth" and not between:
        matrix["depth"] = [dice.pick([2, 3])]
    elif (
        which == "scheduling" and not between
    ):  # how much may be in flight, and what may come meanwhile, was drawn for the one it has
        matrix["scheduling"] = [dice.pick(schedulings)]
    elif which == "engine" and data["engines"] == ["reference"] and not data.get("policies"):
        data["engines"] = [dice.pick(engines)]


def _free(steps: list[Data]) -> list[int]:
    """Places where something may be put in: behind a request, not while outputs are held back or the scheduler pauses, not in the end."""
    found: list[int] = []
    open_, added = False, False
    for index, step in enumerate(steps):
        if (
            added
            and not open_
            and not ({"fail-load", "lookup-only", "land", "resume", "shutdown"} & set(step))
        ):
            found.append(index)
        added = added or "add" in step
        open_ = (open_ or "schedule" in step or "pause" in step) and not (
            "land" in step or "resume" in step
        )
    return found


def _event(dice: Dice, before: list[Data], *, in_pairs: bool) -> Data:
    start = max((index for index, step in enumerate(before) if "on" in step), default=0)
    names = [step["add"]["req"] for step in before[start:] if "add" in step]
    if not names or in_pairs:
        return {"step": dice.number(1, 2)}
    theirs: list[Data] = [{op: names[-1]} for op in ("abort", "preempt", "abort", "preempt")]
    return {**dice.pick([*HARMLESS, *theirs])}
