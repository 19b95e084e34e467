# SPDX-License-Identifier: Apache-2.0
"""Workloads of two engines over one store, drawn at random: what one engine computes is handed over to the other."""

from __future__ import annotations

from kvconform.explore.dice import Dice
from kvconform.explore.workload import Data

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
            found.append({"add": {"req": name, "prompt": prompt, "max_tokens": dice.pick([1, 4, 7])}})
            found += [{"step": dice.number(1, 3)}] * dice.number(0, 1) + [{dice.pick(["abort", "preempt"]): name}] * dice.one_in(6)
            found += dice.pick([[], [{"run": {}}], [{"run": {}}, {"drop-local": {}}]])
        found.append({"run": {}})
    return found, max(lengths.values()) + 7


def steps(dice: Dice, block: int) -> tuple[list[Data], int]:
    """(steps, length of the longest request with its output)."""
    found: list[Data] = []
    count, longest = dice.number(1, 2), 0
    for number in range(1, count + 1):
        length = max(2, dice.number(1, 4) * block + dice.pick([-1, 0, 1, 2]))
        longest = max(longest, length)
        found.append({"add": {"req": f"p{number}", "prompt": length, "max_tokens": 1, "hand_over": True}})
        found += [{"step": dice.number(1, 2)}] * dice.number(0, 1)
        found += [{"abort": f"p{number}"}] * dice.one_in(8)
    if not dice.one_in(8):
        found.append({"run": {"until": f"p{count}"}})
    found.append({"on": "d"})
    for number in range(1, count + 1):
        handed = {"of": f"p{number}", "alter": dice.pick(ALTERED)} if dice.one_in(8) else f"p{number}"
        name = f"d{number}"
        found.append({"add": {"req": name, "prompt": {"same": f"p{number}"}, "max_tokens": dice.pick([1, 4, 7]), "handed": handed}})
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
        {"run": {}}, {"drop-local": {}},
        {"on": "p"}, {"add": {"req": "p9", "prompt": length, "max_tokens": 1}}, {"run": {"until": "p9"}},
        {"on": "d"}, {"add": {"req": "d9", "prompt": {"same": "p1"}, "max_tokens": 4, "handed": "p1"}},
    ], length  # fmt: skip
