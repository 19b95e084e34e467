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
    return [*found, {"run": {}}], longest + 7
