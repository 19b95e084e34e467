# SPDX-License-Identifier: Apache-2.0
"""A worker's KV memory, block by block: what the connector wrote, and whether loaded blocks are what the model computes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from kvconform.contract.trace import Event, Trace
from kvconform.live.book import Book, Finding, poison_value
from kvconform.live.state import Granted, Named, StepNote

WATCHED = 64 << 20
"""Bytes of KV cache up to which all of it is compared with a copy, several times per step."""
_KINDS = (
    "tail",
    "shared",
    "over_computed",
    "null_block",
    "unallocated",
    "other_request",
    "not_transferred",
)


@dataclass
class Load:
    """A load under way. `whole` are the numbers of the blocks that it fills alone; `late` (layer, number) was read before it was there."""

    told: Granted
    size: int
    whole: list[int]
    open: bool = True
    late: set[tuple[int, int]] = field(default_factory=set)
    failed: set[int] = field(default_factory=set)
    given_up: bool = False
    due: Event | None = None

    @property
    def touched(self) -> set[int]:
        """Blocks that it covers, whole or in part."""
        return {
            self.told.table[n]
            for n in range(self.told.start // self.size, -(-self.told.end // self.size))
            if n < len(self.told.table)
        }

    def block(self, number: int) -> int:
        """The block id of one of the request's blocks."""
        return self.told.table[number]


class Blocks:
    """The KV tensors of one rank, by layer: `tensors[layer]` has the blocks along its first axis. Writes nothing but poison."""

    def __init__(self, tensors: list[torch.Tensor], size: int) -> None:
        self.tensors, self.size = tensors, size
        self.bytes = sum(t.numel() * t.element_size() for t in tensors)
        self.shadow = (
            [t.clone() for t in tensors]
            if self.bytes <= WATCHED and all(t.device.type == "cpu" for t in tensors)
            else None
        )
        self.poisoned: dict[int, float] = {}
        self._poisons = 0

    def read(self, block: int) -> torch.Tensor:
        """A copy [layers, elements], on the host."""
        return torch.stack([tensor[block].detach().cpu().reshape(-1) for tensor in self.tensors])

    def changed(self, keep: set[int]) -> list[list[int]]:
        """Per layer, the blocks that differ from the copy; takes them into it. Those in `keep` are the model's to write: only taken."""
        if self.shadow is None:
            return []
        found: list[list[int]] = []
        for tensor, shadow in zip(self.tensors, self.shadow, strict=True):
            if torch.equal(_bits(tensor), _bits(shadow)):
                found.append([])
                continue
            blocks = (_bits(tensor) != _bits(shadow)).flatten(1).any(1).nonzero().flatten().tolist()
            shadow[blocks] = tensor[blocks]
            found.append([block for block in blocks if block not in keep])
        return found

    def poison(self, block: int) -> float:
        """Fill a block that was handed out: what is read from it now, nobody has written. Returns the value."""
        self._poisons += 1
        value = self.poisoned[block] = poison_value(self._poisons)
        for tensors in filter(None, (self.tensors, self.shadow)):
            for tensor in tensors:
                tensor[block] = value
        return value

    def untouched(self, block: int, layer: int | None = None) -> bool:
        """Whether some layer (or this one) of a block has still some of its poison: nobody has written that, or not all of it."""
        value = self.poisoned.get(block)
        if value is None:
            return False
        # A real value may happen to be the same; a token's worth of elements does not.
        layers = self.tensors if layer is None else [self.tensors[layer]]
        return any(
            int((tensor[block] == value).sum()) >= min(16, tensor[block].numel())
            for tensor in layers
        )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """As integers: NaN must equal itself."""
    return tensor.view({1: torch.int8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])


class BlockOracle:
    """Judges the writes of one rank's connector half, and its loads. Emits kv.changed, load.due, kv.wrong and live.load.

    The same events as kvconform.kv.oracle's, of whole blocks: a slot is the first of its block, and a load's partial blocks are not judged.
    """

    def __init__(self, trace: Trace, blocks: Blocks, book: Book, *, poison: bool) -> None:
        self.trace, self.blocks, self.book, self.poisoning = trace, blocks, book, poison
        self.loads: list[Load] = []
        self.note = StepNote(0)
        self.fresh: list[tuple[int, str]] = []
        self.failed_blocks: set[int] = set()
        self.failed_reqs: set[str] = set()
        self.reported: set[str] = set()
        self.bad: set[int] = set()

    # -- a step ----------------------------------------------------------------------------------------------------------------
    def begin(self, note: StepNote) -> None:
        """A step begins: what is final goes into the book, and its loads are known."""
        self.check("no hook")
        self.enter(note.named)  # before anything of this step writes
        self._overdue()
        self.note, self.fresh = note, [one for one in note.fresh if one[0] not in set(note.zeroed)]
        handed_out = {block for block, _ in note.fresh}
        self.bad -= handed_out
        for block in handed_out:
            self.blocks.poisoned.pop(block, None)
        self.failed_blocks, self.failed_reqs, self.reported = set(), set(), set()
        for told in note.granted:
            size = self.blocks.size
            whole = range(-(-told.start // size), min(told.end // size, len(told.table)))
            self.loads.append(Load(told, size, [n for n in whole if told.table[n]]))
        self.loads = [load for load in self.loads if load.open or load.due is not None]

    def enter(self, named: list[Named]) -> None:
        """Blocks that the model has filled, upon KV that is right, go into the book."""
        for one in named:
            if not self.bad & {one.block, *one.upon}:
                self.book.enter(
                    one.content, one.plain, one.req, one.index, self.blocks.read(one.block)
                )

    def poison_fresh(self) -> None:
        """Fill the blocks that were handed out. After handle_preemptions, before any load."""
        self.check(
            "handle_preemptions", also={*self.note.zeroed, *(block for block, _ in self.fresh)}
        )
        for block, owner in self.fresh if self.poisoning else ():
            self.book.poisoners[self.blocks.poison(block)] = owner
        self.fresh = []

    def read(self, layer: int) -> None:
        """The attention of a layer is about to read."""
        for load in self.loads:
            if load.open and not load.told.is_async and load.told.req in self.note.scheduled:
                load.late.update(
                    (layer, n) for n in load.whole if self.blocks.untouched(load.block(n), layer)
                )

    def end(self) -> None:
        """The step is over: the engine relies on the loads of what it computed, and on those that were reported."""
        self.check("wait_for_save", also=self.note.written)
        self._overdue()
        for load in self.loads:
            if not load.open:
                continue
            told = load.told
            if told.is_async and told.req not in self.note.tables:
                load.open = False  # given back: nobody relies on it
            elif told.req in (self.reported if told.is_async else self.note.scheduled):
                self._due(load)

    # -- what the connector wrote ----------------------------------------------------------------------------------------------
    def check(self, after_hook: str, also: set[int] | None = None) -> None:
        """Say which blocks were written outside of loads since the last call; those in `also` may be the engine's own writes."""
        for layer, blocks in enumerate(self.blocks.changed(also or set())):
            if blocks:
                self._classify(after_hook, layer, blocks)

    def _classify(self, after_hook: str, layer: int, blocks: list[int]) -> None:
        kinds: dict[str, list[int]] = {kind: [] for kind in _KINDS}
        reqs, transfers = set[str](), set[str]()
        for block in blocks:
            mine = [load for load in self.loads if block in load.told.table]
            inside = [
                load
                for load in mine
                if (load.open or load.due is not None) and block in load.touched
            ]
            for load in inside or mine:
                reqs.add(load.told.req)
                transfers.add(load.told.transfer)
            if not inside or block == 0:
                kinds[self._outside(block, mine)].append(block * self.blocks.size)
        whose = {"req": sorted(reqs), "transfer": sorted(transfers), "group": None}
        self.trace.emit("kv.changed", after_hook=after_hook, layer=layer, **whose, **kinds)

    def _outside(self, block: int, mine: list[Load]) -> str:
        if block == 0:
            return "null_block"
        held = [req for req, table in self.note.tables.items() if block in table]
        if not held and not any(load.open for load in mine):
            return "unallocated"
        for load in mine:
            if block in load.told.table[: load.told.start // self.blocks.size]:
                return "shared"
        if any(load.open for load in mine):
            return "tail"
        return "over_computed" if any(load.told.req in held for load in mine) else "other_request"

    # -- loads -----------------------------------------------------------------------------------------------------------------
    def _due(self, load: Load) -> None:
        load.open, told = False, load.told
        mine = [n for n in load.whole if load.block(n) not in self.note.written or told.is_async]
        missing = [n for n in mine if self.blocks.untouched(load.block(n))]
        found: dict[int, Finding] = {}
        for number in mine:
            if number not in missing:
                found[number] = self.book.compare(
                    self.blocks.read(load.block(number)), told.contents, number
                )
        lists = {
            v: [n for n, f in found.items() if f.verdict == v]
            for v in ("exact", "close", "wrong", "unknown")
        }
        affected = {load.block(n) for n in (*missing, *lists["wrong"])}
        reported = self._reported(load, affected)
        self.bad |= affected | (load.touched if reported else set())
        if missing or len(lists["unknown"]) < len(
            found
        ):  # else there is nothing to compare with: it is not judged
            self._judge(load, missing, found)
        self.trace.emit(
            "live.load",
            req=told.req,
            generation=told.generation,
            transfer=told.transfer,
            is_async=told.is_async,
            missing=missing,
            **lists,
            granted=told.end - told.start,
            blocks=len(load.whole),
            reported_failed=reported,
            rank=0,
            error=max(
                (f.error for f in found.values() if f.verdict in ("close", "wrong")), default=0.0
            ),
        )

    def _reported(self, load: Load, affected: set[int]) -> bool:
        """Whether the load was reported as failed, in all of these blocks."""
        whole = load.given_up or load.told.req in self.failed_reqs
        return whole or bool(affected) and affected <= self.failed_blocks | load.failed

    def _judge(self, load: Load, missing: list[int], found: dict[int, Finding]) -> None:
        """What is wrong with a load that the engine relies on."""
        reported = self._reported(load, {load.block(n) for n in missing})
        told, size, failed = load.told, self.blocks.size, self.failed_blocks | load.failed
        wrong = [number for number, finding in found.items() if finding.verdict == "wrong"]
        positions = _positions(missing, size)
        event = self.trace.emit(
            "load.due",
            req=told.req,
            generation=told.generation,
            transfer=told.transfer,
            granted=told.end - told.start,
            missing=positions,
            wrong=_positions(wrong, size),
            reported_failed=reported,
            is_async=told.is_async,
            local=told.start,
            by_group=[],
            early_reads=[],
        )
        if missing and not reported:
            load.due = event
        for number in wrong:
            if (
                load.block(number) not in failed
                and not load.given_up
                and told.req not in self.failed_reqs
            ):
                self._wrong(
                    load, number, found[number].layer, found[number].found, found[number].origin
                )
        for layer, number in sorted(load.late):
            if number not in missing:
                self._wrong(
                    load,
                    number,
                    layer,
                    "not_yet_loaded",
                    "bytes that arrived after the layer had been read",
                )

    def _wrong(self, load: Load, number: int, layer: int, found: str, origin: str) -> None:
        told, size = load.told, self.blocks.size
        self.trace.emit(
            "kv.wrong",
            req=told.req,
            generation=told.generation,
            layer=layer,
            kv="both",
            pos=number * size,
            count=size,
            block=load.block(number),
            via="external",
            transfer=told.transfer,
            transfer_sync=not told.is_async,
            found=found,
            origin=origin,
            group=None,
        )

    def _overdue(self) -> None:
        """What was missing when the engine relied on it may have arrived since, while the request still has the block: then it was late."""
        for load in self.loads:
            if load.due is None:
                continue
            late = [
                n
                for n in load.whole
                if n * load.size in load.due["missing"] and not self.blocks.untouched(load.block(n))
            ]
            for number in late:
                load.due["missing"] = [p for p in load.due["missing"] if p // load.size != number]
                self._wrong(
                    load,
                    number,
                    0,
                    "not_yet_loaded",
                    "bytes that arrived after the load had been relied on",
                )
            if not load.due["missing"] or load.told.req not in self.note.tables:
                load.due = None

    # -- reports ---------------------------------------------------------------------------------------------------------------
    def reports(self, results: Any) -> None:
        """get_transfer_results answered."""
        self.reported |= set(results.finished_recving or ())
        for load in self.loads:
            if load.open and load.told.req in (getattr(results, "failed_recving", None) or ()):
                load.given_up = True
                self.failed_reqs.add(load.told.req)

    def errors(self, blocks: set[int]) -> None:
        """get_block_ids_with_load_errors answered."""
        self.failed_blocks |= blocks
        for load in self.loads:
            if load.open:
                load.failed |= blocks & load.touched


def _positions(numbers: list[int], size: int) -> list[int]:
    return [
        position for number in numbers for position in range(number * size, (number + 1) * size)
    ]
