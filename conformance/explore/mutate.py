# SPDX-License-Identifier: Apache-2.0
"""Mutations of workloads that reached something new, and the conditions for a legal workload.

A workload is legal if it reuses a request's id, or an adapter's number, only after the engine has
released it, if sessions end and are not aborted, if no request waits for its grammar for ever, if
images lie within their prompts, and if reloads are promised of requests that have run to their end.
"""

from __future__ import annotations

import copy
from itertools import takewhile

from kvconform.explore.dice import Dice
from kvconform.explore.workload import Data, Workload
from kvconform.kv.provenance import Adapter


def is_legal(data: Data) -> bool:
    """Return whether the steps fit together: an engine and its clients may do all of them."""
    checks = (
        ids_are_free,
        numbers_are_free,
        sessions_go_on,
        grammars_come,
        images_fit,
        sources_have_run,
    )
    return all(check(data) for check in checks)


def grammars_come(data: Data) -> bool:
    """Return whether every grammar is compiled before its request is to end, and not after that."""
    waiting: set[str] = set()
    for step in data["steps"]:
        if step.get("add", {}).get("structured"):
            waiting.add(step["add"]["req"])
        waiting.discard(step.get("abort", ""))
        if "grammar" in step and step["grammar"] not in waiting:
            return False
        waiting.discard(step.get("grammar", ""))
        if waiting and "run" in step:
            return False
    return not waiting


def sessions_go_on(data: Data) -> bool:
    """Return whether all sessions end, and none is aborted, since it could get no more input."""
    steps: list[Data] = data["steps"]
    sessions = {step["add"]["req"] for step in steps if step.get("add", {}).get("session")}
    inputs = [step["continue"] for step in steps if "continue" in step]
    ended = {each["req"] for each in inputs if each["then"] == 0}
    return sessions <= ended and not any(step.get("abort") in sessions for step in steps)


def images_fit(data: Data) -> bool:
    """Return whether all images lie within the prompts of their requests.

    Of a prompt that continues an output, only what is certain counts: the prompt before it.
    """
    lengths: dict[str, int] = {}
    for add in (step["add"] for step in data["steps"] if "add" in step):
        length = lengths[add["req"]] = _least(add["prompt"], lengths)
        if any(item["at"] + item["length"] > length for item in add.get("mm", ())):
            return False
    return True


def _least(prompt: int | Data, lengths: dict[str, int]) -> int:
    """Return the least number of tokens that a prompt has. `lengths`: of earlier ones, by name."""
    if isinstance(prompt, int):
        return prompt
    if "same" in prompt:
        return lengths[prompt["same"]]
    then: int = prompt.get("then", 0)
    if "of" in prompt:
        return min(lengths[prompt["of"]], prompt.get("tokens", lengths[prompt["of"]])) + then
    return then + sum(
        part["new"]
        if "new" in part
        else max(0, min(part["tokens"], lengths[part["of"]] - part.get("from", 0)))
        for part in prompt["parts"]
    )


def sources_have_run(data: Data) -> bool:
    """Return whether a request that another one reloads has run to its end before.

    Until then a connector need not have stored it.
    """
    running: set[str] = set()
    for step in data["steps"]:
        if step.get("run") == {}:
            running.clear()
        add = step.get("add", {})
        if add.get("reloads") in running:
            return False
        if add:
            running.add(add["req"])
    return True


def numbers_are_free(data: Data) -> bool:
    """Return whether no two adapters with the same number are used between two engine restarts."""
    adapters: dict[int, Adapter] = {}
    for step in data["steps"]:
        if "restart" in step:
            adapters.clear()
        lora = step.get("add", {}).get("lora")
        if lora is None:
            continue
        adapter = Adapter.of(lora) if isinstance(lora, str) else Adapter.of(**lora)
        if adapters.setdefault(adapter.number, adapter) != adapter:
            return False
    return True


def ids_are_free(data: Data) -> bool:
    """Return whether a request's id is used again only after that request has ended.

    A request ends by running to its end. It may also be aborted, when there is nothing to load for
    it and none of its output is in flight.
    """
    depth = data["matrix"]["depth"][0] if data["matrix"]["scheduling"] == ["async"] else 1
    steps: list[Data] = data["steps"]
    owners: dict[str, int] = {}
    for index, step in enumerate(steps):
        if "add" not in step:
            continue
        name = step["add"].get("id", step["add"]["req"])
        if name in owners:
            first = steps[owners[name]]["add"]
            between = steps[owners[name] + 1 : index]
            if not any("run" in each for each in between) and not _given_up(first, between, depth):
                return False
        owners[name] = index
    return True


def _given_up(add: Data, between: list[Data], depth: int) -> bool:
    """Return whether a request is aborted before it ends, with nothing in flight.

    `between`: the steps after it. They begin with lookups alone and the abort, so that it never got
    memory. Or the request has a new prompt, and they begin with too few engine steps to finish it,
    a landing of all outputs, and the abort. `depth`: steps in flight.
    """
    abort, lookup = {"abort": add["req"]}, {"lookup-only": add["req"]}
    lookups = len(list(takewhile(lambda step: step == lookup, between)))
    if lookups and between[lookups : lookups + 1] == [abort]:
        return True
    if not isinstance(add["prompt"], int) or {"drafts", "stop_at"} & set(add) or len(between) < 3:
        return False
    stepped, landed, aborted = between[:3]
    short = 0 < stepped.get("step", 0) < add.get("max_tokens", 1)
    return short and landed.get("land", 0) >= depth and aborted == abort


CHANGES = ("axis", "axis", "insert", "insert", "insert", "drop", "tokens", "budget")
"""Kinds of changes, repeated by weight."""
DROPPABLE = ("step", "drop-local", "idle", "reorder", "abort", "preempt")
HARMLESS: tuple[Data, ...] = (
    {"step": 1},
    {"step": 2},
    {"run": {}},
    {"drop-local": {}},
    {"idle": 1},
    {"reorder": {}},
)


def mutated(seed: str, workload: Workload, engines: list[str], schedulings: list[str]) -> Workload:
    """Return the workload with one to three changes that keep it legal, drawn with `seed`."""
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
            if index < len(steps) and next(iter(steps[index])) in DROPPABLE:
                del steps[index]
        elif places:
            index = dice.pick(places)
            in_pairs = bool(data["config"].get("engines"))
            steps.insert(index, _event(dice, steps[:index], in_pairs=in_pairs))


def _axis(dice: Dice, data: Data, engines: list[str], schedulings: list[str]) -> None:
    matrix = data["matrix"]
    # Steps between scheduling and landing were drawn for one depth and one scheduling.
    between = any("schedule" in step for step in data["steps"])
    which = dice.pick(["runner", "depth", "scheduling", "engine"])
    if which == "runner":
        matrix["runner"] = [dice.pick(["v1", "v2"])]
    elif which == "depth" and not between:
        matrix["depth"] = [dice.pick([2, 3])]
    elif which == "scheduling" and not between:
        matrix["scheduling"] = [dice.pick(schedulings)]
    elif which == "engine" and data["engines"] == ["reference"] and not data.get("policies"):
        data["engines"] = [dice.pick(engines)]


def _free(steps: list[Data]) -> list[int]:
    """Return the places where a step may be inserted, or one dropped.

    They lie before an existing step and after a request, where no outputs are held back and the
    scheduler is not paused.
    """
    found: list[int] = []
    held = False
    added = False
    for index, step in enumerate(steps):
        fixed = {"fail-load", "lookup-only", "land", "resume", "shutdown"} & set(step)
        if added and not held and not fixed:
            found.append(index)
        added = added or "add" in step
        held = held or "schedule" in step or "pause" in step
        if "land" in step or "resume" in step:
            held = False
    return found


def _event(dice: Dice, before: list[Data], *, in_pairs: bool) -> Data:
    start = max((index for index, step in enumerate(before) if "on" in step), default=0)
    names = [step["add"]["req"] for step in before[start:] if "add" in step]
    if not names or in_pairs:
        return {"step": dice.number(1, 2)}
    events: list[Data] = [{op: names[-1]} for op in ("abort", "preempt", "abort", "preempt")]
    return {**dice.pick([*HARMLESS, *events])}
