# SPDX-License-Identifier: Apache-2.0
"""Random requests: prompts at block boundaries, repeated, extended or cut short, with options."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvconform.compat.installed import vllm_version
from kvconform.contract.requirement import in_force
from kvconform.explore.dice import Dice
from kvconform.explore.workload import Data

IDENTITY = ("salt", "lora", "mm", "embeds")
"""Options that belong to the identity of a prompt's KV."""
NEWEST = "0.32"
"""The first release for which mixed prompts and repetitions are drawn."""
ABOVE = 65536
"""Difference of token ids that are equal in 16 bits."""
LoraData = str | Data
ADAPTERS: tuple[LoraData, ...] = (
    "one",
    "two",
    {"name": "one", "path": "/adapters/1b", "number": 9},
)
"""The last one has the name of the first, and other weights."""
SALTS = ("s", "t", "one", "sone")
"""The last two are the name of an adapter, and a salt with that name behind it."""
ALIKE: dict[str, Data] = {
    "dog": {"alike": {"id": "cat", "first": 32}},
    "cow": {"alike": {"id": "cat", "last": 32}},
}
"""Images whose identifiers agree in part with that of `cat`."""
SAME_NUMBER: tuple[LoraData, ...] = ("l12", "l21")
"""Adapters with the same number, which is free again after a restart of the engine."""


@dataclass
class Requests:
    """The requests of one workload so far.

    `lengths`: tokens of each prompt; it may have up to `beyond` more, if it continues an output.
    `settled`: requests that finished by themselves since the connector was last reset. `restarts`:
    of the engine so far; None in a workload without restarts. `images`: tokens of each image.
    `engine`: the one that runs them.
    """

    dice: Dice
    block: int
    drafts: int
    simple: bool = False
    lengths: dict[str, int] = field(default_factory=dict)
    beyond: dict[str, int] = field(default_factory=dict)
    adds: dict[str, Data] = field(default_factory=dict)
    settled: list[str] = field(default_factory=list)
    live: list[str] = field(default_factory=list)
    aborted: set[str] = field(default_factory=set)
    restarts: int | None = None
    images: dict[str, int] = field(default_factory=dict)
    engine: str = "reference"

    @property
    def longest(self) -> int:
        """Tokens of the longest request, including its output."""
        return max(
            self.lengths[name] + self.beyond[name] + add["max_tokens"]
            for name, add in self.adds.items()
        )

    def draw(self, name: str, again: str | None = None, part_of: str | None = None) -> Data:
        """Draw the argument of `add` for one more request.

        `again`: the request whose prompt it repeats. `part_of`: the request whose first tokens it
        has.
        """
        dice = self.dice
        add: Data = {
            "req": name,
            "prompt": 1,
            "max_tokens": dice.pick([1, 2, 4] if self.simple else [1, 2, 4, 7, 9]),
        }
        earlier = again or (
            dice.pick(sorted(self.lengths)) if self.lengths and not dice.one_in(4) else None
        )
        beyond = 0
        if part_of is not None:
            length = dice.number(1, self.lengths[part_of])
            add["prompt"] = {"of": part_of, "tokens": length}
            self._identify(add, part_of, length)
        elif earlier is None:
            blocks = dice.number(1, 2 if self.simple else 4)
            add["prompt"] = length = max(1, blocks * self.block + dice.pick([-1, 0, 1, 2]))
        elif not again and not self.simple and dice.one_in(24):
            add["prompt"], length = {"same": earlier, "above": ABOVE}, self.lengths[earlier]
            beyond = self.beyond[earlier]
        elif again or dice.one_in(2):
            add["prompt"], length = {"same": earlier}, self.lengths[earlier]
            beyond = self.beyond[earlier]
            self._alike(add, earlier)
        elif dice.one_in(2):
            length, beyond = self._extend(add, earlier)
        else:
            length = self._join(add, earlier)
        if self.drafts and dice.one_in(2):
            add["drafts"] = [dice.number(0, self.drafts) for _ in range(dice.number(1, 3))]
        if not self.simple:
            self._options(add, length)
        self.lengths[name], self.beyond[name], self.adds[name] = length, beyond, add
        self.live.append(name)
        return add

    def _extend(self, add: Data, earlier: str) -> tuple[int, int]:
        """Give `add` a prompt that continues the prompt of `earlier`, or its output, or a part.

        Returns (tokens that the prompt has, tokens that it may have in addition).
        """
        dice = self.dice
        source, length = self.adds[earlier], self.lengths[earlier]
        most = length + self.beyond[earlier]
        prompt: dict[str, Any] = {"of": earlier}
        is_short = not self.simple or isinstance(source["prompt"], int)
        if earlier in self.settled and "embeds" not in source and is_short and dice.one_in(2):
            prompt["outputs"] = True
            most += source["max_tokens"]
        if dice.one_in(2):
            most = prompt["tokens"] = dice.number(1, most)
            length = min(length, most)
        prompt["then"] = dice.pick([1, 2, self.block, self.block + 1])
        add["prompt"] = prompt
        if not dice.one_in(4):
            self._identify(add, earlier, length)
        return length + prompt["then"], most - length

    def _join(self, add: Data, earlier: str) -> int:
        """Give `add` a prompt that agrees with `earlier` in later blocks, and not before these.

        At the same place, behind the start of another prompt or new tokens; or at the very start.
        Returns the tokens of the prompt.
        """
        dice, block, length = self.dice, self.block, self.lengths[earlier]
        others = sorted(
            name for name, known in self.lengths.items() if name != earlier and known >= block
        )
        later = max(1, (length - 1) // block)  # blocks of `earlier` behind its first one
        start = dice.number(1, later) * block if length > block else 0
        parts: list[Data] = []
        first = earlier
        if others and dice.one_in(2):
            other = dice.pick(others)
            start = min(start, self.lengths[other] // block * block)
            if start:
                parts, first = [{"of": other, "tokens": start}], other
        elif start and dice.one_in(4):
            parts = [{"new": start}]
        before = start if parts else 0
        shared = length - start
        if dice.one_in(2):
            shared = min(shared, dice.number(1, 2) * block)
        parts.append({"of": earlier, "from": start, "tokens": shared})
        prompt: Data = {"parts": parts, "then": dice.pick([1, 1, 2, block + 1])}
        add["prompt"] = prompt
        if (first != earlier or not start) and dice.one_in(2):
            self._identify(add, first, start or shared)
        return before + shared + int(prompt["then"])

    def _alike(self, add: Data, earlier: str) -> None:
        """Give most repetitions the identity of the earlier request, which makes a reload due."""
        source = self.adds[earlier]
        if self.dice.one_in(2 if "mm" in source else 5):
            if "mm" in source and not self.simple:
                self._moved(add, source["mm"][0])
            if "embeds" in source and not self.simple and self.dice.one_in(2):
                add["embeds"] = self._embeds_like(source["embeds"], self.lengths[earlier])
            return
        self._identify(add, earlier, self.lengths[earlier])

    def _identify(self, add: Data, earlier: str, tokens: int) -> None:
        """Give `add` the identity that the first `tokens` tokens of an earlier request have.

        If that has finished, a reload of what is common is due. An image that is cut off is left
        out. An adapter is another one if a restart has given its number to another one.
        """
        source = self.adds[earlier]
        add.update({name: source[name] for name in IDENTITY if name in source and name != "mm"})
        images = [each for each in source.get("mm", ()) if each["at"] + each["length"] <= tokens]
        if images:
            add["mm"] = images
        if add.get("lora", self.adapters[0]) not in self.adapters:
            add["lora"] = self.adapters[0]
        elif earlier in self.settled:
            add["reloads"] = earlier

    def _embeds(self, length: int) -> str | Data:
        """Draw embeddings for a prompt, or for its beginning."""
        content = self.dice.pick(["speech", "song"])
        if length < 2 or not installed_since(NEWEST) or self.dice.one_in(2):
            return content
        return {"of": content, "rows": self.dice.number(1, length - 1)}

    def _embeds_like(self, embeds: str | Data, length: int) -> str | Data:
        """Draw embeddings of another content, or of the same one up to some row."""
        first = embeds if isinstance(embeds, str) else embeds["of"]
        rows = {} if isinstance(embeds, str) or "rows" not in embeds else {"rows": embeds["rows"]}
        if length < 2 or self.dice.one_in(3):
            return {"of": "other", **rows}
        # Most often it is the last row of a block.
        row = max(1, self.dice.number(1, length) // self.block * self.block - 1)
        return {"of": first, "until": row, "then": "other", **rows}

    def _options(self, add: Data, length: int) -> None:
        dice = self.dice
        if "reloads" not in add:
            if dice.one_in(8):
                add["salt"] = dice.pick(SALTS)
            if dice.one_in(12 if self.restarts is None else 3):
                add["lora"] = dice.pick(self.adapters)
            if dice.one_in(7) and length > 2 and "embeds" not in add:
                self._image(add, length)
            if dice.one_in(16) and not {"mm", "embeds"} & set(add):
                add["embeds"] = self._embeds(length)
        if dice.one_in(12):
            add["stop_at"] = dice.number(0, add["max_tokens"] - 1)
        elif self.engine == "vllm" and installed_since(NEWEST) and dice.one_in(24):
            add["repeats_at"] = dice.number(0, add["max_tokens"])
        if dice.one_in(12 if isinstance(add["prompt"], int) else 6):
            add["skip_reading_prefix_cache"] = True
        if dice.one_in(20):
            add["params"] = {"note": "mine"}

    def _image(self, add: Data, length: int) -> None:
        """Add an image.

        An image has the same number of tokens in every request, because the engine refuses the same
        name with another number.
        """
        dice = self.dice
        at, name = dice.number(0, length - 2), dice.pick(["cat", "dog", "cow"])
        tokens = dice.number(1, min(length - at, self.block + 1))
        tokens = self.images.setdefault(name, tokens)
        if at + tokens <= length:
            add["mm"] = [{"at": at, "length": tokens, "id": name} | ALIKE.get(name, {})]

    def _moved(self, add: Data, image: Data) -> None:
        """Add another, smaller image somewhere within the placeholders of `image`.

        The tokens are the same, so only the image's place distinguishes two such requests.
        """
        name = "dog" if image["id"] == "cat" else "cat"
        smaller = max(1, image["length"] - self.dice.number(1, 2))
        room = image["length"] - self.images.setdefault(name, smaller)
        if room > 0:
            place = image["at"] + self.dice.number(0, room)
            item = {"at": place, "length": self.images[name], "id": name}
            add["mm"] = [item | ALIKE.get(name, {})]

    @property
    def adapters(self) -> tuple[LoraData, ...]:
        """The adapters that the engine has loaded."""
        return ADAPTERS if self.restarts is None else SAME_NUMBER[self.restarts % 2 :][:1]

    def restarted(self) -> None:
        """Record a restart of the engine: all requests are over, numbers of adapters are free."""
        self.forgotten()
        self.restarts = (self.restarts or 0) + 1

    def finished(self) -> None:
        """Record that all requests have run to their end."""
        self.settled += [
            name for name in self.live if name not in self.aborted and name not in self.settled
        ]
        self.live.clear()

    def forgotten(self) -> None:
        """Record a reset of the connector: what it stored may be gone."""
        self.settled.clear()
        for name in self.live:
            self.aborted.add(name)


def installed_since(release: str) -> bool:
    """Return whether the installed vLLM is this release or a later one."""
    return in_force(release, None, vllm_version() or "0")
