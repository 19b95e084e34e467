# SPDX-License-Identifier: Apache-2.0
"""Content ids, and the registry that maps bytes back to the token and request they came from.

The content id of a position is a hash chained over the token ids up to it and the identity extras
of the request (cache salt, LoRA adapter, multi-modal items). So equal ids mean equal KV. The
*plain* id is the same chain without the extras: two ids that differ while their plain ids agree are
the same tokens under another identity.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from kvconform.contract.events import OF_ANOTHER_RANK
from kvconform.kernels.codes import CodeBook, mix64
from kvconform.kv.rotary import turned


class Memory:
    """Content ids that the engines of one run have computed.

    `ever`: all of them. `plain`: the plain ids of these. `since_reset`: those computed since the
    last reset of the connector's store. `was_reset`: there was one, by this engine or the one that
    a restart has replaced. `failed`: how many loads of the engine up to a content id have failed
    since it was last computed or loaded.
    """

    def __init__(self) -> None:
        self.ever: set[int] = set()
        self.plain: set[int] = set()
        self.since_reset: set[int] = set()
        self.was_reset = False
        self.failed: dict[int, int] = {}

    def restarted(self) -> None:
        """Forget what only the replaced engine knew: which loads had failed."""
        self.failed.clear()

    def computed(self, ids: list[int], plain: list[int]) -> None:
        """Note content ids, and their plain ids, that now exist in an engine's cache."""
        self.ever.update(ids)
        self.plain.update(plain)
        self.since_reset.update(ids)
        self.repaired(ids)

    def repaired(self, ids: Iterable[int]) -> None:
        """Forget that loads of these content ids have failed: they may be stored again."""
        if self.failed:
            for each in ids:
                self.failed.pop(each, None)

    def outdated(self, ids: list[int], plain: list[int]) -> None:
        """Note content that now exists, of a step that was scheduled before the last reset.

        Its request is gone: nothing may save the content again.
        """
        self.ever.update(ids)
        self.plain.update(plain)

    def reset(self, kept: set[int]) -> None:
        """Note that the connector reported its store as empty.

        `kept` are content ids that requests still hold in the engine's own cache.
        """
        self.since_reset = kept
        self.was_reset = True

    def kept(self, ids: Iterable[int]) -> None:
        """Note content ids that the engine still has, and may save again."""
        self.since_reset.update(ids)


class PartMemory(Memory):
    """Content ids that one of several engines computed (`own`).

    `ever` and `plain` are those of all engines; `whole` is their Memory. `since_reset` has what any
    engine has computed, or may have saved again, since this engine reset the connector's store.
    `parts` are the memories of all engines, to which this one is added.
    """

    def __init__(self, whole: Memory, parts: list[PartMemory]) -> None:
        self.ever, self.plain = whole.ever, whole.plain
        self.since_reset: set[int] = set()
        self.was_reset = False
        self.failed = {}
        self.own: set[int] = set()
        self._parts = parts
        parts.append(self)

    def computed(self, ids: list[int], plain: list[int]) -> None:
        """Note them as Memory.computed does, and that they are this engine's."""
        self.ever.update(ids)
        self.plain.update(plain)
        self.own.update(ids)
        self.kept(ids)
        for part in self._parts:
            part.repaired(ids)

    def outdated(self, ids: list[int], plain: list[int]) -> None:
        """Note them as Memory.outdated does; the other engines have not reset the store."""
        super().outdated(ids, plain)
        self.own.update(ids)
        for part in self._parts:
            if part is not self:
                part.since_reset.update(ids)

    def kept(self, ids: Iterable[int]) -> None:
        """Note them as Memory.kept does: every engine may find what this one saves again."""
        known = set(ids)
        for part in self._parts:
            part.since_reset |= known

    def reset(self, kept: set[int]) -> None:
        """Note that this engine's connector reported their common store as empty.

        The other engines do not hear of it, and may save again what they have computed.
        """
        self.since_reset = kept.union(*(part.own for part in self._parts if part is not self))
        self.was_reset = True


_MASK = (1 << 64) - 1
ROOT = 0x9E3779B97F4A7C15
UNSOUND = 0x5BAD0000
"""What the ids of unsound KV are made with."""


@lru_cache(maxsize=4096)
def text_id(text: str) -> int:
    """Return a 64-bit id of a string, the same in every process. Pure."""
    value = ROOT
    for byte in text.encode():
        value = mix64(value * 257 + byte + 1)
    return value


@lru_cache(maxsize=4096)
def extend(chain: int, token: int, extra: int = 0) -> int:
    """Return the content id of `token` at the position that follows `chain`. Pure.

    Cached, because all that follow a request ask for the same ones.
    """
    identity = mix64(extra) if extra else 0
    return mix64((chain * 0x100000001B3 + token + 1 + identity) & _MASK)


def adapter_number(name: str) -> int:
    """Return the engine's number of an adapter, 1 to 1000.

    Two names may have the same number; they must not be used at the same time.
    """
    return 1 + sum(name.encode()) % 1000


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter. Name and path identify its weights; `number` is the engine's own."""

    name: str
    path: str
    number: int

    @staticmethod
    def of(name: str, path: str | None = None, number: int | None = None) -> Adapter:
        """Return an adapter with the default path and number of its name where none are given."""
        return Adapter(name, path or f"/adapters/{name}", number or adapter_number(name))

    @property
    def identity(self) -> int:
        """Content id of the weights."""
        plain = self.path == f"/adapters/{self.name}"
        return text_id(f"lora:{self.name}" + ("" if plain else f"\0{self.path}"))


@dataclass(frozen=True)
class Identity:
    """What makes two requests' KV differ, apart from the token ids.

    `base` covers the whole sequence (model, salt, adapter). `spans` are (start, end, item id) of
    multi-modal items, and of a prompt that is given as embeddings.
    """

    base: int = 0
    spans: tuple[tuple[int, int, int], ...] = ()

    @staticmethod
    def of(
        salt: str | None = None,
        adapter: Adapter | None = None,
        items: Sequence[Mapping[str, object]] = (),
        embeds: Sequence[tuple[str, int, int]] = (),
        model: str | None = None,
    ) -> Identity:
        """Return the identity of a request with these extras.

        `items` have `at`, `length` and `id`. `embeds`: (content, first row, end) of the parts of a
        prompt that is given as embeddings. `model`: name of the model, if it is not the run's first
        one.
        """
        base = 0
        if model:
            base ^= text_id("model:" + model)
        if salt:
            base ^= text_id("salt:" + salt)
        if adapter:
            base ^= adapter.identity
        spans = _spans(items)
        for content, start, end in embeds:
            # A row depends on its number in the prompt, not on that in its part.
            spans.append((start, end, text_id(f"embeds:{content}") + start))
        return Identity(base, tuple(spans))

    def and_items(self, items: Sequence[Mapping[str, object]]) -> Identity:
        """Return the identity with further multi-modal items."""
        return Identity(self.base, (*self.spans, *_spans(items)))

    def extra(self, position: int) -> int:
        """Return what `position` adds to the chain."""
        extra = self.base if position == 0 else 0
        return extra ^ self._item(position)

    def contents(self, tokens: Iterable[int]) -> Iterator[int]:
        """Yield the content id of each of a request's tokens, from its first one on."""
        chain = ROOT
        for position, token in enumerate(tokens):
            chain = extend(chain, token, self.extra(position))
            yield chain

    def own(self, position: int) -> int:
        """Return the identity of one token, whatever is before it."""
        return self.base ^ self._item(position)

    def _item(self, position: int) -> int:
        found = 0
        for start, end, item in self.spans:
            if start <= position < end:
                found ^= mix64(item + position - start)
        return found


def _spans(items: Iterable[Mapping[str, object]]) -> list[tuple[int, int, int]]:
    """Return where multi-modal items begin and end, with numbers for their contents."""
    found = []
    for item in items:
        start, length = int(str(item["at"])), int(str(item["length"]))
        found.append((start, start + length, text_id(f"mm:{item['id']}")))
    return found


@dataclass
class Chain:
    """Content ids of one incarnation of a request, position by position."""

    req: str
    generation: int
    identity: Identity
    tokens: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    plain: list[int] = field(default_factory=list)

    def append(self, token: int) -> int:
        """Add one accepted token and return its content id."""
        self.tokens.append(token)
        self.ids.append(self.peek(token))
        self.plain.append(extend(self.plain[-1] if self.plain else ROOT, token))
        return self.ids[-1]

    def peek(self, token: int) -> int:
        """Return the content id that `token` would have as the next one."""
        position = len(self.ids)
        return extend(self.ids[-1] if self.ids else ROOT, token, self.identity.extra(position))

    def truncate(self, length: int) -> None:
        """Forget positions from `length` on (tokens that the engine discarded)."""
        del self.tokens[length:], self.ids[length:], self.plain[length:]

    def array(self, start: int, end: int) -> np.ndarray:
        """Return the content ids of positions [start, end) as uint64."""
        return np.array(self.ids[start:end], dtype=np.uint64)


@dataclass(frozen=True)
class Origin:
    """Where a content id was first written.

    `kind` is `token`, `draft` (rejected), `unsound` (computed upon a load that failed) or `poison`.
    Of poison, `req` is the owner of the block and `pos` the block. `own`: see Identity.own.
    """

    kind: str
    req: str
    generation: int
    pos: int
    plain: int = 0
    token: int = -1
    own: int = 0

    @property
    def computed_for(self) -> tuple[str, int] | tuple[()]:
        """Request and position; empty for poison, which was never computed."""
        return () if self.kind == "poison" else (self.req, self.pos)

    def __str__(self) -> str:
        if self.kind == "poison":
            return (
                f"poison that the engine put into block {self.pos} when it was handed out"
                " (not overwritten until then)"
            )
        what = "a rejected draft" if self.kind == "draft" else f"token {self.token}"
        which = f" (incarnation {self.generation})" if self.generation else ""
        when = ", as it was computed upon a load that failed" if self.kind == "unsound" else ""
        return f"{what} at position {self.pos} of request {self.req}{which}{when}"


class HandedOut(NamedTuple):
    """A block that a request got.

    `positions`: those of the request whose KV it is for; None for a recurrent state, or if the
    request has the block no longer.
    """

    block: int
    owner: str
    positions: range | None = None


class Registry:
    """All content ids that the engines of one run ever wrote, and the decoder of their bytes."""

    def __init__(self, book: CodeBook) -> None:
        self.book = book
        self.origins: dict[int, Origin] = {}
        self._prints: dict[int, tuple[int, int, int, int]] = {}
        self._indexed = 0
        self._order: list[int] = []
        self._poisons = 0
        self._latest: dict[tuple[str, int | None], int] = {}
        self._pools = 0
        self._owners: dict[tuple[int, int], list[tuple[str, range | None]]] = {}
        self._chains: dict[tuple[str, int], Chain] = {}

    def note(self, content: int, origin: Origin) -> None:
        """Note the origin of a content id. The first one stays, but a draft may become a token."""
        known = self.origins.get(content)
        if known is None:
            self._order.append(content)
            self.origins[content] = origin
        elif known.kind == "draft" and origin.kind == "token":
            self.origins[content] = origin

    def new_pool(self) -> int:
        """Return the number of one more pool of blocks."""
        self._pools += 1
        return self._pools

    def computes(self, chain: Chain) -> None:
        """Note that an incarnation of a request computes KV."""
        self._chains[chain.req, chain.generation] = chain

    def poison(self, block: int, owner: str, pool: int = 0, positions: range | None = None) -> int:
        """Return a new content id for the poison of a block of `pool` handed out to `owner`.

        `positions`: what the block is for; None if that is not known.
        """
        self._owners.setdefault((pool, block), []).append((owner, positions))
        self._poisons += 1
        content = mix64(0xDEAD0000 + self._poisons)
        self.note(content, Origin("poison", owner, 0, block))
        self._latest[owner, block] = content
        return content

    def unsound(self, content: int) -> int:
        """Return the id of what `content` becomes if it is computed upon a load that failed."""
        found = mix64(content ^ UNSOUND)
        self.note(found, replace(self.origins[content], kind="unsound"))
        return found

    def poison_of(self, owner: str, block: int | None) -> int:
        """Return the latest poison of a block that was handed out to `owner`; -1 without one."""
        return self._latest.get((owner, block), -1)

    def changed_hands(self, wanted: int, pos: int, held: int) -> bool:
        """Return whether a block went from a request with `wanted` at `pos` to one with `held`.

        Both must be in the same place of the block: a read that comes too late, or uses an outdated
        table, may find `held` then. It may be the same request, for other positions.
        """
        before = self.having(wanted)
        after = self.having(held)
        found_at = self.origins[held].pos
        for owners in self._owners.values():
            earlier: list[tuple[str, range | None]] = []
            for owner, positions in owners:
                if owner in after and any(
                    (other, old) != (owner, positions)
                    and _same_place(old, pos, positions, found_at)
                    for other, old in earlier
                ):
                    return True
                if owner in before:
                    earlier.append((owner, positions))
        return False

    def having(self, content: int) -> set[str]:
        """Return the requests that have a content id among their tokens, computed yet or not."""
        found = {req for (req, _), chain in self._chains.items() if content in chain.ids}
        if content in self.origins:
            found.add(self.origins[content].req)
        return found

    def is_of(self, content: int, origin: Origin) -> bool:
        """Return whether a content id is KV of the same incarnation of a request as `origin`."""
        chain = self._chains.get((origin.req, origin.generation))
        return chain is not None and content in chain.ids

    def decode(self, fingerprint: int) -> tuple[int, int, int, int] | None:
        """Return (content id, layer, kv, head) of a fingerprint; None if it was never written.

        Indexes the content ids that were noted since the last call.
        """
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


def _same_place(old: range | None, pos: int, new: range | None, found_at: int) -> bool:
    """Return whether a block for the positions `old` had `pos` where, for `new`, it has `found_at`.

    It may have if either is not known.
    """
    if old is None or new is None:
        return True
    return pos in old and found_at in new and pos - old.start == found_at - new.start


class Diagnosis(NamedTuple):
    """What a wrong slot holds.

    `found` is one of `contract.events.PROVENANCE`, `side` is k, v or both, `origin` says in words
    where the bytes came from. `req` and `pos` are the request and the position that they were first
    computed for, as far as that is known; of `never_computed` only the request. `block` is then the
    block that they were read from, if the engine had handed it out.
    """

    found: str
    side: str
    origin: str
    req: str | None = None
    pos: int | None = None
    block: int | None = None


def diagnose(
    registry: Registry,
    row: np.ndarray,
    layer: int,
    reader: Chain,
    pos: int,
    *,
    loading: bool,
    kin: Collection[int] | None = None,
    block: int | None = None,
    rotary: bool = True,
) -> Diagnosis:
    """Return what a slot holds that does not hold what position `pos` of `reader` must.

    `row` is [heads, 2 * head_dim] as read. `loading` says that the slot belongs to a load that has
    not written it. `kin` are the layers that share a block table with this one (None: all). `block`
    is the slot's block, for a slot that a load should have filled: poison that was put there when
    the reader got the block is no KV of anybody else, but what the load has not overwritten.
    `rotary` says that the keys depend on their positions (MLA has them in a part of its own).
    """
    book = registry.book
    expected = reader.ids[pos]
    turned_back = _turned_back(registry, row, layer, pos) if rotary else None
    if turned_back is not None:
        row = turned_back
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
        return Diagnosis("never_computed", side, "zeros, as in memory that nothing was written to")
    hits = [hit for _, _, hit in decoded]
    if any(hit is None for hit in hits):
        return Diagnosis("unknown", side, "bytes that no engine of this run ever wrote")
    found = {hit[0] for hit in hits if hit is not None}
    unwritten = registry.poison_of(reader.req, block)
    if unwritten in found:
        part = "a part of the slot" if len(found) > 1 else "the slot"
        words = f"{registry.origins[unwritten]}: the load has not written {part}"
        return Diagnosis("not_yet_loaded", side, words)
    if len(found) > 1:
        mixed = [registry.origins[each] for each in sorted(found)[:3]]
        words = f"a mixture of {'; '.join(map(str, mixed))}"
        first = next((each for each in mixed if each.kind != "poison"), None)
        # Whole chunks that are read back in another shape mix up positions, and nothing else.
        name = "other_position" if found <= set(reader.ids) else "torn"
        return Diagnosis(name, side, words, *(first.computed_for if first else ()))
    content = found.pop()
    origin = registry.origins[content]
    if content == expected:
        for kv, head, hit in decoded:
            assert hit is not None
            if kin is not None and hit[1] not in kin:
                words = (
                    f"the right token, but bytes of layer {hit[1]}, which has another block table"
                )
                return Diagnosis("other_group", side, words)
            if hit[1] != layer:
                words = f"the right token, but layer {hit[1]}'s bytes"
                return Diagnosis("other_layer", side, words)
            if hit[2] != kv:
                return Diagnosis("kv_swapped", side, "the right token, with K and V exchanged")
            if hit[3] != head:
                here = 0 <= hit[3] < book.heads
                whose = f"head {hit[3]}'s bytes" if here else OF_ANOTHER_RANK
                words = f"the right token, but {whose} in head {head}"
                return Diagnosis("head_swapped", side, words)
    if (
        origin.kind == "poison"
        and not loading
        and origin.req in _computed_by(registry, reader, pos)
    ):
        words = f"{origin}; it was taken before request {origin.req} had computed the token"
        if reader.ids[pos] not in registry.origins:
            words += ", which it never did"
        return Diagnosis("never_computed", side, words, origin.req, block=origin.pos)
    name = _classify(registry, content, reader, pos, loading, turned_back is not None)
    if name == "other_prefix" and rotary and turned_back is None and origin.pos != pos:
        name = "old_position"
    words = str(origin)
    if name == "stale_generation":
        words += ", another request that had the same id"
    return Diagnosis(name, side, words, *origin.computed_for)


def _turned_back(registry: Registry, row: np.ndarray, layer: int, pos: int) -> np.ndarray | None:
    """Return a row whose keys were moved to `pos`, with the keys as they were computed.

    The values say what was computed where. None for any other row.
    """
    dim = registry.book.head_dim

    def read(lanes: np.ndarray) -> tuple[int, int, int, int] | None:
        value = registry.book.read_print(lanes)
        return None if value is None else registry.decode(value)

    hit = read(row[0, dim:])
    if hit is None or registry.origins[hit[0]].kind != "token":
        return None
    content, by = hit[0], pos - registry.origins[hit[0]].pos
    if not by:
        return None
    keys = np.rint(turned(row[:, :dim], -by))
    heads = range(len(row))
    if any(read(keys[head]) != (content, layer, 0, head) for head in heads):
        return None
    return np.concatenate([keys, row[:, dim:]], axis=1)


def _computed_by(registry: Registry, reader: Chain, pos: int) -> set[str]:
    """Return the requests that have this position, and those with the last known one before it.

    Poison of their blocks was read before they had computed the KV, if they ever did.
    """
    before = map(registry.having, reversed(reader.ids[:pos]))
    last = next((requests for requests in before if requests), set[str]())
    return registry.having(reader.ids[pos]) | last


def _classify(
    registry: Registry, content: int, reader: Chain, pos: int, loading: bool, is_moved: bool
) -> str:
    origin = registry.origins[content]
    if origin.kind == "poison":
        return "not_yet_loaded" if loading else "poison"
    if origin.kind == "draft":
        return "rejected_draft"
    if origin.kind == "unsound":
        return "on_failed_load"
    same_token = origin.kind == "token" and origin.token == reader.tokens[pos]
    if content in reader.ids:
        return "other_prefix" if is_moved and same_token else "other_position"
    if origin.plain in reader.plain:
        return "other_identity"
    if same_token and origin.own != reader.identity.own(pos):
        return "other_identity"
    if (origin.req, origin.generation) == (reader.req, reader.generation) and not same_token:
        return "past_end"
    if same_token:
        return "other_prefix"
    if origin.req == reader.req:
        return "stale_generation"
    if registry.changed_hands(reader.ids[pos], pos, content):
        return "other_request"
    # The request whose KV was wanted, too, has this at another position: behind the prompt, maybe.
    return "other_position" if registry.is_of(reader.ids[pos], origin) else "other_tokens"
