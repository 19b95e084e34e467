# SPDX-License-Identifier: Apache-2.0
"""The KV that the model computed, block by block, and what the bytes of a loaded block are.

The attention backend decides the order of the bytes within a block (on a CPU, by the instruction
set). So whole blocks are compared, element by element. KV of the same tokens that was computed in
another batch differs in its last bits, due to rounding. So several versions of a block are kept,
and a block that is close to one of them is distinguished from a wrong one. KV of a lossy connector
is close within the tolerance that it declares.

KV of the same tokens behind other tokens is the same in the first layer, if its keys are turned to
their positions. In later layers it differs by the attention to what is before, so it is compared by
distance with the tolerance that a connector declares for its reuse.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save_file

CLOSE = 0.05
"""Largest difference that counts as rounding, as a part of the largest value of a layer's block.

A token that was changed makes a larger difference.
"""
MUCH = 0.5
"""Largest difference that may still be KV of the same tokens, as a part of the largest value."""
VERSIONS = 8
"""Largest number of versions that are kept of one block."""
_MASK = (1 << 64) - 1
LIMIT = 512 << 20
"""Bytes that are kept of all blocks."""


class Finding(NamedTuple):
    """Result of the comparison of a loaded block.

    `verdict`: exact, close, reused (computed behind other tokens), wrong or unknown. `error`: the
    largest difference, as a part of the largest value; of a reused block, its deviation
    (Book._deviation). For a wrong block: the first wrong `layer`, what the bytes are (`found`, one
    of kvconform.contract.events.PROVENANCE; None if the model computed them upon KV that was found
    to be wrong before), and in words where they come from (`origin`).
    """

    verdict: str
    error: float = 0.0
    layer: int = 0
    found: str | None = None
    origin: str = ""


class Poisoned(NamedTuple):
    """A fresh block that was filled with poison.

    `req`: the request that it was handed out to. `content`: the content id of the last token that
    it was to hold; None if the request's known tokens did not fill it.
    """

    req: str
    content: int | None = None


@dataclass
class Record:
    """A block's worth of tokens.

    `req`, `index`: the request that computed it first, and the number of its block. `plain`: the
    id of the same tokens under no identity. `versions`: the KV [layers, elements], each version
    that was computed. `own`: this engine computed one of them. `dropped`: it computed another one,
    which is not kept. `alone`: the id of the block's tokens by themselves; 0 for none.
    """

    req: str
    index: int
    plain: int
    versions: list[torch.Tensor] = field(default_factory=list)
    own: bool = False
    dropped: bool = False
    alone: int = 0


class Book:
    """Records by content id of the last token.

    `tolerance`: that of a lossy connector, as a part of a layer's largest value; else None.
    `reused`: largest deviation of KV that a connector reuses behind other tokens; None if it may
    reuse prefixes only.
    `unseen`: content ids of blocks that this engine also filled without a record of it.
    `computed`: content ids, and plain ids, of all positions that the baseline run computed.
    `poisoners`: by poison value, the fresh blocks that were filled with it, the last one last.
    There are 64 values, so they repeat.
    """

    def __init__(self, tolerance: float | None = None, reused: float | None = None) -> None:
        self.lossy = tolerance is not None
        self.tolerance = CLOSE if tolerance is None else tolerance
        self.reused = reused
        self.records: dict[int, Record] = {}
        self.computed: tuple[set[int], set[int]] = (set(), set())
        self.poisoners: dict[float, list[Poisoned]] = {}
        self.unseen: set[int] = set()
        self._largest = torch.zeros(())
        self._rows: dict[bytes, tuple[int, int]] = {}
        self._spoiled: set[tuple[int, bytes]] = set()
        self._bytes = 0

    def enter(
        self,
        content: int,
        plain: int,
        req: str,
        index: int,
        block: torch.Tensor,
        *,
        own: bool = True,
        alone: int = 0,
    ) -> None:
        """Record a block [layers, elements] that the model computed.

        Keeps no second copy of the same bytes, and none beyond a limit. `own`: this engine did.
        """
        record = self.records.setdefault(content, Record(req, index, plain, alone=alone))
        record.own = record.own or own
        if self.lossy:
            self._largest = torch.maximum(self._largest, block.float().nan_to_num().abs().amax(1))
        if any(torch.equal(block, one) for one in record.versions):
            return
        size = block.numel() * block.element_size()
        if len(record.versions) == VERSIONS or self._bytes + size > LIMIT:
            record.dropped = record.dropped or own
            return
        record.versions.append(block)
        self._bytes += size
        for layer, row in enumerate(block):
            self._rows.setdefault(_print(row), (content, layer))

    def spoil(self, content: int, block: torch.Tensor) -> None:
        """Record a block [layers, elements] that the model computed upon wrong KV."""
        self._spoiled.update((content, _print(row)) for row in block)

    def compare(
        self, block: torch.Tensor, contents: list[tuple[int, int]], index: int, alone: int = 0
    ) -> Finding:
        """Compare bytes that were loaded as block `index` of a request.

        `contents`: (content id, plain id) of each of the request's blocks. `alone`: the id of this
        block's tokens by themselves. Changes nothing.
        """
        record = self.records.get(contents[index][0]) if index < len(contents) else None
        if record is None or not record.versions:
            return Finding("unknown")
        if any(torch.equal(block, version) for version in record.versions):
            return Finding("exact")
        errors = min(
            (self._error(block, version) for version in record.versions),
            key=lambda errors: float(errors.max()),
        )
        worst = float(errors.max())
        allowed = self._allowed(record)
        if worst <= allowed:
            return Finding("close", worst)
        if self.lossy and contents[index][0] in self.unseen:
            return Finding("unknown", worst)
        layer = int((errors > allowed).nonzero()[0])
        if self.reused is not None and layer > 0:
            return self._compare_reused(block, record, contents[index][0])
        found, origin = self._diagnose(block[layer], layer, contents, index, alone)
        if found == "unknown" and worst <= MUCH:
            origin = (
                f"bytes that differ from the KV of these tokens by {worst:.1%} of the layer's "
                f"largest value; {allowed:.1%} is allowed"
            )
        return Finding("wrong", worst, layer, found, origin)

    def _compare_reused(self, block: torch.Tensor, record: Record, content: int) -> Finding:
        """Compare a block whose first layer is right, so its tokens and positions are.

        Nothing is known of a block that the model itself computed upon reused KV.
        """
        assert self.reused is not None
        if all((content, _print(row)) in self._spoiled for row in block[1:]):
            return Finding("unknown")
        deviations = min(
            (self._deviation(block, version) for version in record.versions),
            key=lambda deviations: float(deviations.max()),
        )
        worst = float(deviations.max())
        if worst <= self.reused:
            return Finding("reused", worst)
        layer = int((deviations > self.reused).nonzero()[0])
        origin = (
            f"bytes that deviate by {float(deviations[layer]):.0%} from the KV of these tokens"
            f" behind the tokens before them; {self.reused:.0%} is declared (non_prefix_reuse)"
        )
        return Finding("wrong", worst, layer, "unknown", origin)

    def _deviation(self, block: torch.Tensor, version: torch.Tensor) -> torch.Tensor:
        """Return the root mean square of the difference [layers], as a part of that of the values.

        A layer that holds a NaN has an infinite deviation.
        """
        want = version.float()
        errors = (block.float() - want).norm(dim=1) / want.norm(dim=1).clamp_min(1e-20)
        return torch.nan_to_num(errors, nan=float("inf"))

    def _allowed(self, record: Record) -> float:
        """Return the largest permitted difference of a loaded block.

        If the version that was stored may have come from another engine, or is not kept, rounding
        comes on top of what a lossy connector loses.
        """
        if not self.lossy or (record.own and not record.dropped):
            return self.tolerance
        return max(self.tolerance, CLOSE)

    def _error(self, block: torch.Tensor, version: torch.Tensor) -> torch.Tensor:
        """Return the largest difference [layers], as a part of the layer's largest value.

        That is the largest in this block; for a lossy connector, whose chunks may be larger than a
        block, in all blocks. A layer that holds a NaN has an infinite difference.
        """
        have = block.float()
        want = version.float()
        largest = self._largest if self.lossy else want.abs().amax(1)
        errors = (have - want).abs().amax(1) / largest.clamp_min(1e-20)
        return torch.nan_to_num(errors, nan=float("inf"))

    def _diagnose(
        self,
        row: torch.Tensor,
        layer: int,
        contents: list[tuple[int, int]],
        index: int,
        alone: int,
    ) -> tuple[str | None, str]:
        """Return what the wrong bytes of one layer are, and in words where they come from."""
        if not bool(row.any()):
            return "never_computed", "zeros: this block was never written"
        if (poison := poison_in(row)) is not None:
            return self._poison(self.poisoners.get(poison, []), contents[index][0])
        name = _print(row)
        hit = self._rows.get(name)
        # Of this content only: the first layer does not depend on the KV, so it is right elsewhere.
        if hit is None and (contents[index][0], name) in self._spoiled:
            return None, "bytes that the model computed upon wrong KV"
        hit = hit or self._near(row)
        if hit is None:
            return "unknown", "bytes that the model never computed as a block"
        content, other_layer = hit
        record = self.records[content]
        origin = f"block {record.index} of request {record.req}"
        if content == contents[index][0]:
            return "other_layer", f"the right tokens, but layer {other_layer}'s bytes"
        if content in [mine for mine, _ in contents]:
            return "other_position", origin
        if record.plain in [plain for _, plain in contents]:
            return "other_identity", origin
        if alone and record.alone == alone:
            return ("other_prefix" if record.index == index else "old_position"), origin
        return "other_tokens", origin

    def _poison(self, blocks: list[Poisoned], content: int) -> tuple[str, str]:
        """Return what poison is that was loaded as `content`, and in words where it comes from.

        `blocks`: the fresh blocks that it was put into. If one of them was to hold the content, a
        save read it before that was computed; the request need not be the first that computed it.
        Only the last of them is compared by its request: the others would match by chance.
        """
        if not blocks:
            return "never_computed", "poison that a fresh block held"
        owner = next((one for one in reversed(blocks) if one.content == content), None)
        last = blocks[-1]
        if owner is None and last.req == self.records[content].req:
            owner = last
        found = "poison" if owner is None else "never_computed"
        return found, f"poison that a fresh block of request {(owner or last).req} held"

    def _near(self, row: torch.Tensor) -> tuple[int, int] | None:
        """Return the content id and layer of a recorded row within the tolerance, if any."""
        want = row.float()
        for content, record in self.records.items():
            for version in record.versions:
                errors = (version.float() - want).abs().amax(1) / want.abs().max().clamp_min(1e-20)
                if float(errors.min()) <= self.tolerance:
                    return content, int(errors.argmin())
        return None

    # -- another run
    def save(self, path: Path) -> None:
        """Write the records and `computed` to a file, for another process."""
        ever, plain = self.computed
        tensors = {"ever.": _packed(ever), "plain.": _packed(plain)}
        about: dict[str, str] = {}
        for content, record in self.records.items():
            for number, version in enumerate(record.versions):
                tensors[f"{content:016x}.{number}"] = version
            about[f"{content:016x}"] = json.dumps(
                [record.plain, record.index, record.req, record.alone]
            )
        save_file(tensors, path, metadata=about)

    def load(self, path: Path) -> None:
        """Add the records that another process saved. OSError if the file cannot be read."""
        from safetensors import safe_open

        with safe_open(path, framework="pt") as file:
            about: dict[str, str] = file.metadata() or {}
        for name, block in sorted(load_file(path).items()):
            if name in ("ever.", "plain."):
                self.computed[name == "plain."].update(number & _MASK for number in block.tolist())
                continue
            content = name.partition(".")[0]
            plain, index, req, alone = json.loads(about[content])
            owner = f"{req} of the baseline run"
            self.enter(int(content, 16), plain, owner, index, block, own=False, alone=alone)


def _packed(ids: set[int]) -> torch.Tensor:
    """Return unsigned 64-bit numbers, sorted, as signed ones, which safetensors supports."""
    return torch.tensor(
        [number - (1 << 64) if number >> 63 else number for number in sorted(ids)],
        dtype=torch.int64,
    )


def _print(row: torch.Tensor) -> bytes:
    """Return a hash of the bytes of a row."""
    return hashlib.blake2b(
        row.contiguous().view(torch.uint8).numpy().tobytes(), digest_size=16
    ).digest()


def poison_value(number: int) -> float:
    """Return the value that fills the n-th fresh block; every element type holds it exactly."""
    return 32.0 + (number % 64) * 0.5


def poison_in(row: torch.Tensor) -> float | None:
    """Return the poison value that at least 16 of the elements hold, or None."""
    flat = row.float().flatten()
    marked = flat[(flat >= 32.0) & (flat < 64.0) & (flat * 2 == (flat * 2).round())]
    if len(marked) < min(16, len(flat)):
        return None
    values, counts = marked.unique(return_counts=True)
    if int(counts.max()) < min(16, len(flat)):
        return None
    return float(values[counts.argmax()])
