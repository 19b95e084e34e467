# SPDX-License-Identifier: Apache-2.0
"""What a changed workload must not lose: an id, or the number of an adapter, is taken again only when the engine has let it go."""

from __future__ import annotations

from kvconform.explore.workload import Data
from kvconform.provenance import adapter_number


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
