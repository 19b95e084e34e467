# SPDX-License-Identifier: Apache-2.0
"""Requests drawn at random: prompts at block boundaries, repeated, extended and cut short, and what clients may ask for besides."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvconform.explore.dice import Dice
from kvconform.explore.workload import Data

IDENTITY = ("salt", "lora", "mm")
ADAPTERS = ("one", "two")
SAME_NUMBER = ("l12", "l21")
"""Adapters that have one number, which is to be had again once the engine is restarted."""


@dataclass
class Requests:
    """The requests of one workload so far. `settled`: those that have finished by themselves since the connector was last reset."""

    dice: Dice
    block: int
    drafts: int
    simple: bool = False
    lengths: dict[str, int] = field(default_factory=dict)
    adds: dict[str, Data] = field(default_factory=dict)
    settled: list[str] = field(default_factory=list)
    live: list[str] = field(default_factory=list)
    aborted: set[str] = field(default_factory=set)
    restarts: int | None = None  # so far; None where there are none
    images: dict[str, int] = field(default_factory=dict)

    @property
    def longest(self) -> int:
        """Tokens of the longest request, with its output."""
        return max(self.lengths[name] + add["max_tokens"] for name, add in self.adds.items())

    def draw(self, name: str, again: str | None = None, part_of: str | None = None) -> Data:
        """The argument of `add` for one more request; `again`: the one whose prompt it has, `part_of`: whose first tokens."""
        dice = self.dice
        add: Data = {
            "req": name,
            "prompt": 1,
            "max_tokens": dice.pick([1, 2, 4] if self.simple else [1, 2, 4, 7, 9]),
        }
        earlier = again or (
            dice.pick(sorted(self.lengths)) if self.lengths and not dice.one_in(4) else None
        )
        if part_of is not None:
            length = dice.number(1, self.lengths[part_of])
            add["prompt"] = {"of": part_of, "tokens": length}
            add.update(
                {name: value for name, value in self.adds[part_of].items() if name == "salt"}
            )
        elif earlier is None:
            add["prompt"] = length = max(
                1, dice.number(1, 2 if self.simple else 4) * self.block + dice.pick([-1, 0, 1, 2])
            )
        elif again or dice.one_in(2):
            add["prompt"], length = {"same": earlier}, self.lengths[earlier]
            self._alike(add, earlier)
        else:
            add["prompt"], length = self._extended(earlier)
        if self.drafts and dice.one_in(2):
            add["drafts"] = [dice.number(0, self.drafts) for _ in range(dice.number(1, 3))]
        if not self.simple:
            self._options(add, length)
        self.lengths[name], self.adds[name] = length, add
        self.live.append(name)
        return add

    def _extended(self, earlier: str) -> tuple[Data, int]:
        dice, length = self.dice, self.lengths[earlier]
        prompt: dict[str, Any] = {"of": earlier}
        if dice.one_in(2):
            length = prompt["tokens"] = dice.number(1, length)
        prompt["then"] = dice.pick([1, 2, self.block, self.block + 1])
        return prompt, length + prompt["then"]

    def _alike(self, add: Data, earlier: str) -> None:
        """Most repetitions are by the same client; then the connector's promises are about them."""
        source = self.adds[earlier]
        if self.dice.one_in(2 if "mm" in source else 5):
            if "mm" in source and not self.simple:
                self._moved(add, source["mm"][0])
            return
        add.update({name: source[name] for name in IDENTITY if name in source})
        if add.get("lora", self.adapters[0]) not in self.adapters:
            add["lora"] = self.adapters[0]  # there is another one of that number now
        elif earlier in self.settled and "reloads" not in source:
            add["reloads"] = earlier

    def _options(self, add: Data, length: int) -> None:
        dice = self.dice
        if "reloads" not in add:
            if dice.one_in(8):
                add["salt"] = dice.pick(["s", "t"])
            if dice.one_in(12 if self.restarts is None else 3):
                add["lora"] = dice.pick(self.adapters)
            if dice.one_in(7) and length > 2:
                self._image(add, length)
        if dice.one_in(12):
            add["stop_at"] = dice.number(0, add["max_tokens"] - 1)
        if dice.one_in(
            12 if isinstance(add["prompt"], int) else 6
        ):  # computed again, although it is known
            add["skip_reading_prefix_cache"] = True
        if dice.one_in(20):
            add["params"] = {"note": "mine"}

    def _image(self, add: Data, length: int) -> None:
        """An image has as many tokens wherever it is: the engine refuses one of the same name with another number of them."""
        dice = self.dice
        at, name = dice.number(0, length - 2), dice.pick(["cat", "dog"])
        tokens = dice.number(1, min(length - at, self.block + 1))
        tokens = self.images.setdefault(name, tokens)
        if at + tokens <= length:
            add["mm"] = [{"at": at, "length": tokens, "id": name}]

    def _moved(self, add: Data, image: Data) -> None:
        """Another, smaller image somewhere behind the placeholders of this one: the same tokens, and only the place tells two apart."""
        name = "dog" if image["id"] == "cat" else "cat"
        room = image["length"] - self.images.setdefault(
            name, max(1, image["length"] - self.dice.number(1, 2))
        )
        if room > 0:
            add["mm"] = [
                {
                    "at": image["at"] + self.dice.number(0, room),
                    "length": self.images[name],
                    "id": name,
                }
            ]

    @property
    def adapters(self) -> tuple[str, ...]:
        """The adapters that the engine has loaded."""
        return ADAPTERS if self.restarts is None else SAME_NUMBER[self.restarts % 2 :][:1]

    def restarted(self) -> None:
        """The engine was restarted: requests are over, numbers are to be had again."""
        self.forgotten()
        self.restarts = (self.restarts or 0) + 1

    def finished(self) -> None:
        """Everything has run to its end."""
        self.settled += [
            name for name in self.live if name not in self.aborted and name not in self.settled
        ]
        self.live.clear()

    def forgotten(self) -> None:
        """The connector was reset: what it stored may be gone."""
        self.settled.clear()
        for name in self.live:
            self.aborted.add(name)
