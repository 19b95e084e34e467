# SPDX-License-Identifier: Apache-2.0
"""Shrinks a failing workload: fewer requests and steps, smaller prompts, defaults for drawn values.

The failure stays the same.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

from pydantic import ValidationError

from kvconform.explore.mutate import is_legal
from kvconform.explore.workload import PLAIN_AXES, Data, Workload

Fails = Callable[[Workload], bool]
SMALLER = (1, 2, 3, 4, 5, 8, 9, 12, 13, 16, 17)
"""Numbers of tokens to try, mostly at the boundaries of small blocks."""


def shrink(workload: Workload, fails: Fails, tries: int = 400) -> tuple[Workload, int]:
    """Return (the smallest workload found, runs that shrinking took).

    `fails`: returns whether a workload still has the failure. `tries`: most runs to spend.
    """
    spent = 0
    legal = is_legal(workload.data)
    better = True
    while better and spent < tries:
        better = False
        for candidate in candidates(workload):
            if candidate.size >= workload.size or not _is_case(candidate):
                continue
            if legal and not is_legal(candidate.data):
                continue
            if spent >= tries:
                break
            spent += 1
            if fails(candidate):
                workload = candidate
                better = True
                break  # start again with the greatest reductions
    return workload, spent


def _is_case(workload: Workload) -> bool:
    try:
        workload.variant()
    except (ValidationError, ValueError):
        return False
    return True


def candidates(workload: Workload) -> Iterator[Workload]:
    """Yield smaller workloads, the greatest reductions first."""
    for make in (_without_requests, _without_steps, _plain, _smaller):
        for data in make(copy.deepcopy(workload.data)):
            yield Workload(data, workload.seed)


def _without_requests(data: Data) -> Iterator[Data]:
    """Yield workloads with one request less; repetitions of its prompt get the prompt itself."""
    names = [step["add"]["req"] for step in data["steps"] if "add" in step]
    for name in reversed(names):
        steps = copy.deepcopy(data["steps"])
        [gone] = [step["add"] for step in steps if "add" in step and step["add"]["req"] == name]
        heir: str | None = None
        for step in steps:
            add = step.get("add")
            prompt = add["prompt"] if add else None
            if isinstance(prompt, dict) and prompt.get("same") == name:
                add["prompt"] = gone["prompt"] if heir is None else {"same": heir}
                heir = heir or add["req"]
            if add and add.get("reloads") == name:
                del add["reloads"]
        yield {**data, "steps": [step for step in steps if not _mentions(step, name)]}


def _mentions(step: Data, name: str) -> bool:
    [(op, argument)] = step.items()
    if op == "add":
        prompt = argument["prompt"] if isinstance(argument["prompt"], dict) else {}
        handed = argument.get("handed")
        given = handed["of"] if isinstance(handed, dict) else handed
        return name in (
            argument["req"],
            argument.get("reloads"),
            prompt.get("same"),
            prompt.get("of"),
            *(part.get("of") for part in prompt.get("parts", ())),
            given,
        )
    return bool(argument == name or (isinstance(argument, dict) and name in argument.values()))


def _without_steps(data: Data) -> Iterator[Data]:
    """Yield workloads without some steps that follow one another and add no request."""
    steps = data["steps"]
    for length in (8, 4, 2, 1):
        for start in range(0, len(steps) - length + 1):
            part = steps[start : start + length]
            if not any("add" in step for step in part):
                yield {**data, "steps": steps[:start] + steps[start + length :]}


def _plain(data: Data) -> Iterator[Data]:
    """Yield workloads with one axis, policy, setting or option of a request at its default."""
    for name, plain in PLAIN_AXES:
        if data["matrix"][name] != [plain]:
            yield {**data, "matrix": {**data["matrix"], name: [plain]}}
    if data.get("relations"):
        yield {**data, "relations": []}
    for policy in data.get("policies", []):
        others = [each for each in data["policies"] if each != policy]
        fewer = {key: value for key, value in data.items() if key != "policies"}
        yield fewer | ({"policies": others} if others else {})
    config = data.get("config", {})
    for name, engine in config.get("engines", {}).items():
        if isinstance(engine, dict):  # one that differs from the others
            engines = {**config["engines"], name: engine["role"]}
            yield {**data, "config": {**config, "engines": engines}}
    for name in config:
        yield {**data, "config": {key: value for key, value in config.items() if key != name}}
    for index, step in enumerate(data["steps"]):
        if "add" in step:
            for name in set(step["add"]) - {"req", "prompt", "max_tokens"}:
                add = {key: value for key, value in step["add"].items() if key != name}
                yield _changed(data, index, add)


def _smaller(data: Data) -> Iterator[Data]:
    """Yield workloads with a shorter prompt or output, or with fewer engine steps at a time."""
    for index, step in enumerate(data["steps"]):
        [(op, argument)] = step.items()
        if op == "add":
            for tokens in _below(argument.get("max_tokens", 4)):
                yield _changed(data, index, {**argument, "max_tokens": tokens})
            prompt = argument["prompt"]
            if isinstance(prompt, int):
                for length in _below(prompt):
                    yield _changed(data, index, {**argument, "prompt": length})
            elif "of" in prompt:
                yield _changed(data, index, {**argument, "prompt": {"same": prompt["of"]}})
                for name in ("then", "tokens"):
                    for length in _below(prompt.get(name, 0)):
                        shorter = {**prompt, name: length}
                        yield _changed(data, index, {**argument, "prompt": shorter})
            elif "parts" in prompt:
                for shorter in _shorter_parts(prompt):
                    yield _changed(data, index, {**argument, "prompt": shorter})
        elif op in ("step", "idle", "schedule", "land") and argument > 1:
            steps = data["steps"]
            yield {**data, "steps": [*steps[:index], {op: argument - 1}, *steps[index + 1 :]]}


def _shorter_parts(prompt: Data) -> Iterator[Data]:
    """Yield the prompt without one of its parts, or with a smaller one."""
    parts = prompt["parts"]
    if "then" in prompt:
        yield {"parts": parts}
    for place, part in enumerate(parts):
        before, after = parts[:place], parts[place + 1 :]
        if before or after:
            yield {**prompt, "parts": [*before, *after]}
        for name in ("new", "tokens"):
            for length in _below(part.get(name, 0)):
                yield {**prompt, "parts": [*before, {**part, name: length}, *after]}


def _below(value: int) -> list[int]:
    return [each for each in (*SMALLER, value // 2, value - 1) if 0 < each < value]


def _changed(data: Data, index: int, argument: Data) -> Data:
    steps = data["steps"]
    return {**data, "steps": [*steps[:index], {"add": argument}, *steps[index + 1 :]]}
