# SPDX-License-Identifier: Apache-2.0
"""What the engines of one run ever computed.

Content ids, and the registry that maps any bytes back to the token and request they came from.

The content id of a position is a hash chained over the token ids before it and over the identity extras of the request (cache salt,
LoRA adapter, multi-modal items), so equal ids mean equal KV. The *plain* id is the same chain without the extras: two ids that differ
while their plain ids agree are the same tokens under another identity.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvconform.kernels.codes import CodeBook, mix64


class Memory:
    """What all engines of one run ever computed (content ids), before and since the last reset of the connector's store."""

    def __init__(self) -> None:
        self.ever: set[int] = set()
        self.plain: set[int] = set()
        self.since_reset: set[int] = set()

    def computed(self, ids: list[int], plain: list[int]) -> None:
        """Note content ids (and the ids of the same tokens without identity) that now exist in an engine's cache."""
        self.ever.update(ids)
        self.plain.update(plain)
        self.since_reset.update(ids)

    def reset(self, kept: set[int]) -> None:
        """The connector said that its store is empty; `kept` are content ids that requests still hold in the engine's own cache."""
        self.since_reset = kept


class PartMemory(Memory):
    """What one of several engines computed (`own`); `ever` and `plain` are those of all of them."""

    def __init__(self, whole: Memory) -> None:
        self.ever, self.plain, self.since_reset = whole.ever, whole.plain, whole.since_reset
        self.own: set[int] = set()

    def computed(self, ids: list[int], plain: list[int]) -> None:
        """As Memory.computed, and note whose it was."""
        super().computed(ids, plain)
        self.own.update(ids)


_MASK = (1 << 64) - 1
ROOT = 0x9E3779B97F4A7C15


def text_id(text: str) -> int:
    """A 64-bit id of a string, the same in every process. Pure."""
    value = ROOT
    for byte in text.encode():
        value = mix64(value * 257 + byte + 1)
    return value


def extend(chain: int, token: int, extra: int = 0) -> int:
    """The content id after `token` at the position that follows `chain`. Pure."""
    return mix64((chain * 0x100000001B3 + token + 1 + (mix64(extra) if extra else 0)) & _MASK)


def adapter_number(name: str) -> int:
    """The number that the engine knows an adapter by, 1 to 1000; two names may have one: then one of them at a time."""
    return 1 + sum(name.encode()) % 1000


@dataclass(frozen=True)
class Identity:
    """What besides the token ids makes two requests' KV differ.

    `base` covers the whole sequence (salt, adapter); `spans` are (start, end, item id) of multi-modal items.
    """

    base: int = 0
    spans: tuple[tuple[int, int, int], ...] = ()

    @staticmethod
    def of(
        salt: str | None = None, lora: str | None = None, items: Sequence[Mapping[str, object]] = ()
    ) -> Identity:
        """Identity of a request from its extras; `items` have `at`, `length` and `id`."""
        base = 0
        if salt:
            base ^= text_id("salt:" + salt)
        if lora:
            base ^= text_id("lora:" + lora)
        spans = tuple(
            (int(str(i["at"])), int(str(i["at"])) + int(str(i["length"])), text_id(f"mm:{i['id']}"))
            for i in items
        )
        return Identity(base, spans)

    def extra(self, position: int) -> int:
        """What `position` adds to the chain."""
        extra = self.base if position == 0 else 0
        for start, end, item in self.spans:
            if start <= position < end:
                extra ^= mix64(item + position - start)
        return extra


@dataclass
class Chain:
    """Content ids of one request incarnation, position by position. `append` changes it; reading does not."""

    req: str
    generation: int
    identity: Identity
    tokens: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    plain: list[int] = field(default_factory=list)

    def append(self, token: int) -> int:
        """Add one accepted token; return its content id."""
        self.tokens.append(token)
        self.ids.append(self.peek(token))
        self.plain.append(extend(self.plain[-1] if self.plain else ROOT, token))
        return self.ids[-1]

    def peek(self, token: int) -> int:
        """Content id that `token` would have as the next one."""
        position = len(self.ids)
        return extend(self.ids[-1] if self.ids else ROOT, token, self.identity.extra(position))

    def truncate(self, length: int) -> None:
        """Forget positions from `length` on (tokens that the engine discarded)."""
        del self.tokens[length:], self.ids[length:], self.plain[length:]

    def array(self, start: int, end: int) -> np.ndarray:
        """Content ids of positions [start, end) as uint64."""
        return np.array(self.ids[start:end], dtype=np.uint64)


@dataclass(frozen=True)
class Origin:
    """Where a content id was first written: kind is `token`, `draft` (rejected) or `poison`."""

    kind: str
    req: str
    generation: int
    pos: int
    plain: int = 0
    token: int = -1

    def __str__(self) -> str:
        if self.kind == "poison":
            return f"poison that the engine put into block {self.pos} when it was handed out (never overwritten)"
        what = "a rejected draft" if self.kind == "draft" else f"token {self.token}"
        return f"{what} at position {self.pos} of request {self.req}" + (
            f" (incarnation {self.generation})" if self.generation else ""
        )


class Registry:
    """Every content id that the engines of one run ever wrote, and the decoder from bytes to origins."""

    def __init__(self, book: CodeBook) -> None:
        self.book = book
        self.origins: dict[int, Origin] = {}
        self._prints: dict[int, tuple[int, int, int, int]] = {}
        self._indexed = 0
        self._order: list[int] = []
        self._poisons = 0

    def note(self, content: int, origin: Origin) -> None:
        """Remember the first origin of a content id; a token that was once a rejected draft becomes a token."""
        known = self.origins.get(content)
        if known is None:
            self._order.append(content)
            self.origins[content] = origin
        elif known.kind == "draft" and origin.kind == "token":
            self.origins[content] = origin

    def poison(self, block: int, owner: str) -> int:
        """A fresh content id for the poison of one hand-out of a block."""
        self._poisons += 1
        content = mix64(0xDEAD0000 + self._poisons)
        self.note(content, Origin("poison", owner, 0, block))
        return content

    def decode(self, fingerprint: int) -> tuple[int, int, int, int] | None:
        """Fingerprint to (content id, layer, kv, head), or None if nobody ever wrote it. Indexes lazily."""
        if self._indexed < len(self._order):
            fresh = np.array(self._order[self._indexed :], dtype=np.uint64)
            prints = self.book.fingerprints(fresh)
            for content, per_content in zip(fresh.tolist(), prints.tolist(), strict=True):
                for layer, per_layer in enumerate(per_content):
                    for kv, per_kv in enumerate(per_layer):
                        for head, value in enumerate(per_kv):
                            self._prints[value] = (content, layer, kv, head)
            self._indexed = len(self._order)
        return self._prints.get(fingerprint)


def diagnose(
    registry: Registry,
    row: np.ndarray,
    layer: int,
    reader: Chain,
    pos: int,
    *,
    loading: bool,
    kin: Collection[int] | None = None,
) -> tuple[str, str, str]:
    """Name a wrong slot: (`found`, which of k|v|both, origin text).

    `row` is [heads, 2 * head_dim] as read; `loading` says that the slot belongs to a load that has not written it;
    `kin` are the layers that share a block table with this one (None: all).
    """
    book = registry.book
    expected = reader.ids[pos]
    decoded: list[tuple[int, int, tuple[int, int, int, int] | None]] = []
    wrong_kv: set[int] = set()
    for head in range(len(row)):
        for kv in range(2):
            lanes = row[head, kv * book.head_dim : (kv + 1) * book.head_dim]
            value = book.read_print(lanes)
            hit = None if value is None else registry.decode(value)
            decoded.append((kv, head, hit))
            if hit != (expected, layer, kv, head):
                wrong_kv.add(kv)
    side = "both" if len(wrong_kv) != 1 else ("k", "v")[wrong_kv.pop()]
    if not np.any(row):
        return "never_computed", side, "zeros: nobody ever wrote this slot"
    hits = [hit for _, _, hit in decoded]
    if any(hit is None for hit in hits):
        return "unknown", side, "bytes that no engine of this run ever wrote"
    found = {hit[0] for hit in hits if hit is not None}
    if len(found) > 1:
        names = "; ".join(str(registry.origins[c]) for c in sorted(found)[:3])
        return "torn", side, f"a mixture of {names}"
    content = found.pop()
    origin = registry.origins[content]
    if content == expected:
        for kv, head, hit in decoded:
            assert hit is not None
            if kin is not None and hit[1] not in kin:
                return (
                    "other_group",
                    side,
                    f"the right token, but bytes of layer {hit[1]}, which has another block table",
                )
            if hit[1] != layer:
                return "other_layer", side, f"the right token, but layer {hit[1]}'s bytes"
            if hit[2] != kv:
                return "kv_swapped", side, "the right token, with K and V exchanged"
            if hit[3] != head:
                whose = f"head {hit[3]}'s" if 0 <= hit[3] < book.heads else "another rank's"
                return "head_swapped", side, f"the right token, but {whose} bytes in head {head}"
    if (
        origin.kind == "poison"
        and not loading
        and origin.req in _computed_by(registry, reader, pos)
    ):
        return (
            "never_computed",
            side,
            f"{origin}; it was taken before request {origin.req} had computed the token",
        )
    name = _classify(origin, content, reader, pos, loading)
    return (
        name,
        side,
        f"{origin}, another request that had the same id"
        if name == "stale_generation"
        else str(origin),
    )


def _computed_by(registry: Registry, reader: Chain, pos: int) -> set[str]:
    """Requests that computed this position or the one before it first: poison of theirs is KV that was not there yet."""
    found = {registry.origins.get(content) for content in reader.ids[max(0, pos - 1) : pos + 1]}
    return {origin.req for origin in found if origin is not None}


def _classify(origin: Origin, content: int, reader: Chain, pos: int, loading: bool) -> str:
    if origin.kind == "poison":
        return "not_yet_loaded" if loading else "poison"
    if origin.kind == "draft":
        return "rejected_draft"
    if content in reader.ids:
        return "other_position"
    if origin.plain == reader.plain[pos]:
        return "other_identity"
    if origin.plain in reader.plain:
        return "other_identity"
    if origin.kind == "past_end":
        return "past_end"
    if origin.req == reader.req and origin.generation != reader.generation:
        return "stale_generation"
    if origin.req == reader.req and origin.generation == reader.generation:
        return "past_end"
    return "other_request"
