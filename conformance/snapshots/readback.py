# SPDX-License-Identifier: Apache-2.0
"""Reads back the KV that a connector has stored.

A new request with the same tokens looks it up, and the slots that the connector fills for it are
read. That works with every connector, however it stores KV.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

from kvconform.contract.steps import Add, OfPrompt
from kvconform.kernels.codes import FINGERPRINT_LANES, MIN_HEAD_DIM
from kvconform.kv.provenance import diagnose
from kvconform.run.stall import Stalled

if TYPE_CHECKING:
    from kvconform.kv.oracle import Grant, Oracle
    from kvconform.kv.provenance import Chain
    from kvconform.run.driver import Driver

READER = "kvconform_reader"


@dataclass
class Block:
    """The tokens [start, end) of one block in one layer.

    `holds`: whose tokens the bytes are. `digest`: of the bytes, with the nonces zeroed.
    """

    index: int
    layer: int
    start: int
    end: int
    digest: str
    holds: str


@dataclass
class Stored:
    """What came back of one request: the tokens [0, end) of `tokens`.

    `rows`: per layer the bytes, [end, heads, 2 * head_dim], with the nonces zeroed.
    """

    req: str
    tokens: int
    end: int = 0
    blocks: list[Block] = field(default_factory=list)
    rows: dict[int, np.ndarray] = field(default_factory=dict)


def read_back(driver: Driver) -> list[Stored]:
    """Look up the tokens of every request of the case, each with an empty local cache.

    Runs the engine, so its state and the trace change.
    """
    found = []
    for name in list(driver.state.adds):
        add, tokens = driver.state.adds[name], len(driver.state.requests[name].all_token_ids)
        item = Stored(name, tokens)
        found.append(item)
        too_long = tokens + 2 > driver.variant.case.config.max_model_len
        # Output cannot be appended to a prompt that is given as embeddings.
        if too_long or add.skip_reading_prefix_cache or add.embeds:
            continue
        driver.engine.reset(running=False, connector=False)
        reader = Add(
            req=f"{READER}_{name}",
            prompt=OfPrompt(of=name, outputs=True, then=1),
            max_tokens=1,
            salt=add.salt,
            lora=add.lora,
            mm=add.mm,
        )
        with _Reading(driver.engine.oracle, reader.req) as reading:
            driver.add(reader)
            try:
                driver.run_dry()
            except Stalled:
                return found  # a stalled engine cannot look up the others
        for grant, chain, parts in reading.parts:
            _take(item, driver.engine.oracle, grant, chain, parts)
    return found


class _Reading:
    """Context that copies the rows of a request's grants when the engine first relies on them."""

    def __init__(self, oracle: Oracle, req: str) -> None:
        self.oracle, self.req = oracle, req
        self.parts: list[tuple[Grant, Chain, dict[int, np.ndarray]]] = []
        self._due = oracle.due

    def __enter__(self) -> _Reading:
        self.oracle.due = self._note  # type: ignore[method-assign]
        return self

    def __exit__(self, *exc: object) -> None:
        self.oracle.due = self._due  # type: ignore[method-assign]

    def _note(self, grant: Grant, chain: Chain, *, needed: bool = True) -> None:
        if grant.req == self.req:
            cache = self.oracle.cache
            rows = {
                layer: cache.read(layer, grant.slots[layer]).float().numpy().copy()
                for layer in range(len(cache.tensors))
            }
            self.parts.append((grant, chain, rows))
        self._due(grant, chain, needed=needed)


def _take(
    item: Stored, oracle: Oracle, grant: Grant, chain: Chain, rows: dict[int, np.ndarray]
) -> None:
    """Add the blocks that a grant filled. `rows`: per layer [tokens, heads, 2 * head_dim]."""
    cache = oracle.cache
    size, dim = cache.block_size, cache.book.head_dim
    end = min(grant.end, item.tokens)
    expected = cache.book.rows(chain.array(0, end))
    for layer, values in rows.items():
        bare = values.reshape(*values.shape[:2], 2, dim)
        bare[..., FINGERPRINT_LANES:MIN_HEAD_DIM] = 0
        bare = bare.reshape(values.shape)[: end - grant.start]
        whole = bool(np.all((bare == np.floor(bare)) & (bare >= 0) & (bare <= 255)))
        kept = np.ascontiguousarray(bare, dtype=np.uint8 if whole else np.float32)
        item.rows[layer] = np.concatenate([item.rows[layer], kept]) if layer in item.rows else kept
        mask = cache.book.content_mask()
        for index in range(grant.start // size, -(-end // size)):
            low, high = max(grant.start, index * size), min(end, (index + 1) * size)
            words = []
            for pos in range(low, high):
                row = np.asarray(values[pos - grant.start])
                right = bool(np.all(row[:, mask] == expected[pos, layer][:, mask]))
                arrived = bool(grant.written[layer, pos - grant.start])
                words.append(_word(oracle, row, layer, chain, pos, right=right, arrived=arrived))
            content = np.ascontiguousarray(bare[low - grant.start : high - grant.start]).tobytes()
            digest = hashlib.sha256(content).hexdigest()[:16]
            item.blocks.append(Block(index, layer, low, high, digest, _joined(words)))
    item.end = max(item.end, end)


Word = tuple[str, int | None]
"""What a slot holds: the request and position of a token, or a description and None."""


def _word(
    oracle: Oracle,
    row: np.ndarray,
    layer: int,
    chain: Chain,
    pos: int,
    *,
    right: bool,
    arrived: bool,
) -> Word:
    if not arrived:
        return "nothing (never written)", None
    if right:
        origin = oracle.registry.origins[chain.ids[pos]]
        again = f" (incarnation {origin.generation})" if origin.generation else ""
        return f"{origin.req}{again}", origin.pos
    held = diagnose(oracle.registry, row, layer, chain, pos, loading=False)
    return f"WRONG {held.found} ({held.side}): {held.origin}", None


def _joined(words: list[Word]) -> str:
    """Return `a[4, 8)` for consecutive tokens of one request, `2 x ...` for other slots."""

    def sequence(item: tuple[int, Word]) -> tuple[str, int | None]:
        index, (name, pos) = item
        return name, None if pos is None else pos - index

    texts: list[str] = []
    for _, group in groupby(enumerate(words), key=sequence):
        run = list(group)
        name, first = run[0][1]
        if first is None:
            texts.append(f"{len(run)} x {name}")
        else:
            texts.append(f"{name}[{first}, {first + len(run)})")
    return "; ".join(texts)
