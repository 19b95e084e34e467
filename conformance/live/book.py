# SPDX-License-Identifier: Apache-2.0
"""The KV that the model computed, block by block, and what bytes that were loaded turn out to be.

The order of the bytes within a block is the attention backend's affair (on a CPU it depends on the instruction set), so whole blocks are
compared, element by element. Rounding makes KV of the same tokens differ in its last bits when they were computed in another batch: all
versions are kept, and what equals none of them but is close to one is told apart from what is wrong.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save_file

CLOSE = 0.05
"""A part of the largest value of a layer's block: what differs by less is rounding. A token that was changed differs by more."""
VERSIONS = 8
_MASK = (1 << 64) - 1
LIMIT = 512 << 20
"""Bytes that are kept of all blocks."""


class Finding(NamedTuple):
    """How a loaded block compares: exact, close, wrong or unknown; the largest difference, as a part of the largest value; of a wrong
    block the first layer, and what the bytes are (kvconform.contract.events.PROVENANCE) and where from.
    """

    verdict: str
    error: float = 0.0
    layer: int = 0
    found: str = ""
    origin: str = ""


@dataclass
class Record:
    """A block's worth of tokens: who computed it first (request, number of the block), the versions [layers, elements] of its KV."""

    req: str
    index: int
    plain: int
    versions: list[torch.Tensor] = field(default_factory=list)


class Book:
    """Records by content id of the last token. `tolerance` replaces CLOSE for a lossy connector."""

    def __init__(self, tolerance: float = CLOSE) -> None:
        self.tolerance = max(tolerance, CLOSE)
        self.records: dict[int, Record] = {}
        self.computed: tuple[set[int], set[int]] = (
            set(),
            set(),
        )  # content ids, plain ids, of every position that the other run computed
        self.poisoners: dict[
            float, str
        ] = {}  # the request whose fresh block was filled with a value last
        self._rows: dict[bytes, tuple[int, int]] = {}
        self._bytes = 0

    def enter(self, content: int, plain: int, req: str, index: int, block: torch.Tensor) -> None:
        """The model computed this block [layers, elements]."""
        record = self.records.setdefault(content, Record(req, index, plain))
        size = block.numel() * block.element_size()
        if (
            len(record.versions) == VERSIONS
            or self._bytes + size > LIMIT
            or any(torch.equal(block, one) for one in record.versions)
        ):
            return
        record.versions.append(block)
        self._bytes += size
        for layer, row in enumerate(block):
            self._rows.setdefault(_print(row), (content, layer))

    def compare(self, block: torch.Tensor, contents: list[tuple[int, int]], index: int) -> Finding:
        """What was loaded as block `index` of a request whose blocks have `contents` (content id, plain id). Changes nothing."""
        record = self.records.get(contents[index][0]) if index < len(contents) else None
        if record is None or not record.versions:
            return Finding("unknown")
        if any(torch.equal(block, version) for version in record.versions):
            return Finding("exact")
        best = min(
            ((self._error(block, version), n) for n, version in enumerate(record.versions)),
            key=lambda pair: float(pair[0].max()),
        )
        errors = best[0]
        worst = float(errors.max())
        if worst <= self.tolerance:
            return Finding("close", worst)
        layer = int((errors > self.tolerance).nonzero()[0])
        found, origin = self._diagnose(block[layer], layer, contents, index)
        return Finding("wrong", worst, layer, found, origin)

    @staticmethod
    def _error(block: torch.Tensor, version: torch.Tensor) -> torch.Tensor:
        """Largest difference [layers], as a part of the layer's largest value; infinite where something is no number."""
        have, want = block.float(), version.float()
        errors = (have - want).abs().amax(1) / want.abs().amax(1).clamp_min(1e-20)
        return torch.nan_to_num(errors, nan=float("inf"))

    def _diagnose(
        self, row: torch.Tensor, layer: int, contents: list[tuple[int, int]], index: int
    ) -> tuple[str, str]:
        if not bool(row.any()):
            return "never_computed", "zeros: nobody ever wrote this block"
        if (poison := poison_in(row)) is not None:
            owner = self.poisoners.get(poison)
            mine = owner is None or owner == self.records[contents[index][0]].req
            return (
                "never_computed" if mine else "poison",
                f"poison that a fresh block of request {owner} was filled with",
            )
        hit = self._rows.get(_print(row)) or self._near(row)
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
        return "other_request", origin

    def _near(self, row: torch.Tensor) -> tuple[int, int] | None:
        """The record that bytes are close to."""
        want = row.float()
        for content, record in self.records.items():
            for version in record.versions:
                errors = (version.float() - want).abs().amax(1) / want.abs().max().clamp_min(1e-20)
                if float(errors.min()) <= self.tolerance:
                    return content, int(errors.argmin())
        return None

    # -- another run -----------------------------------------------------------------------------------------------------------
    def save(self, path: Path) -> None:
        """Write the records down, and `computed`, for another process."""
        tensors, about = (
            {
                f"{name}.": _packed(ids)
                for name, ids in zip(("ever", "plain"), self.computed, strict=True)
            },
            {},
        )
        for content, record in self.records.items():
            for number, version in enumerate(record.versions):
                tensors[f"{content:016x}.{number}"] = version
            about[f"{content:016x}"] = f"{record.plain:016x} {record.index} {record.req}"
        save_file(tensors, path, metadata=about)

    def load(self, path: Path) -> None:
        """Take over the records that another process wrote. OSError if there are none."""
        from safetensors import safe_open

        with safe_open(path, framework="pt") as file:
            about: dict[str, str] = file.metadata() or {}
        for name, block in sorted(load_file(path).items()):
            if name in ("ever.", "plain."):
                self.computed[name == "plain."].update(number & _MASK for number in block.tolist())
                continue
            content = name.partition(".")[0]
            plain, index, req = about[content].split(" ", 2)
            self.enter(
                int(content, 16),
                int(plain, 16),
                f"{req} of the run without connector",
                int(index),
                block,
            )


def _packed(ids: set[int]) -> torch.Tensor:
    """Unsigned 64-bit numbers as signed ones, which safetensors knows."""
    return torch.tensor(
        [number - (1 << 64) if number >> 63 else number for number in sorted(ids)],
        dtype=torch.int64,
    )


def _print(row: torch.Tensor) -> bytes:
    return hashlib.blake2b(
        row.contiguous().view(torch.uint8).numpy().tobytes(), digest_size=16
    ).digest()


def poison_value(number: int) -> float:
    """What the n-th fresh block is filled with: a number that every element type holds exactly."""
    return 32.0 + (number % 64) * 0.5


def poison_in(row: torch.Tensor) -> float | None:
    """A value of poison that a noticeable part of the elements has (a token's worth of 64 is enough)."""
    flat = row.float().flatten()
    marked = flat[(flat >= 32.0) & (flat < 64.0) & (flat * 2 == (flat * 2).round())]
    if len(marked) < min(16, len(flat)):
        return None
    values, counts = marked.unique(return_counts=True)
    return float(values[counts.argmax()]) if int(counts.max()) >= min(16, len(flat)) else None
