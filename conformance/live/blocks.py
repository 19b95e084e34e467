# SPDX-License-Identifier: Apache-2.0
"""The oracle for one worker's KV memory, block by block.

It finds what the connector wrote outside of its loads, and loaded blocks that do not hold what the
model computes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from kvconform.contract.events import WRITES
from kvconform.contract.trace import Event, Trace
from kvconform.kv.provenance import HandedOut
from kvconform.live.book import Book, Finding, Poisoned, poison_value
from kvconform.live.state import Granted, Named, StepNote

WATCHED = 64 << 20
"""Bytes of KV cache up to which all of it is compared with a copy, several times per step."""


@dataclass
class Load:
    """A load under way.

    `size`: tokens per block. `whole`: numbers of the blocks that the load fills completely; null
    blocks are left out. `open`: the engine does not rely on it yet. `late`: (layer, number) of
    blocks that a layer read before they had arrived. `failed`: blocks reported as failed.
    `given_up`: the whole request was reported as failed. `due`: the load.due event of a load that
    was incomplete when the engine relied on it, without a report of failure.
    """

    grant: Granted
    size: int
    whole: list[int]
    open: bool = True
    late: set[tuple[int, int]] = field(default_factory=set)
    failed: set[int] = field(default_factory=set)
    given_up: bool = False
    due: Event | None = None

    @property
    def touched(self) -> set[int]:
        """Ids of the blocks that it covers, completely or in part."""
        return {
            self.grant.table[n]
            for n in range(self.grant.start // self.size, -(-self.grant.end // self.size))
            if n < len(self.grant.table)
        }

    def block(self, number: int) -> int:
        """Return the id of the request's block with this number."""
        return self.grant.table[number]


class Blocks:
    """The KV tensors of one rank: `tensors[layer]` has the blocks along its first axis.

    Writes only poison. `size`: tokens per block. `shadow`: a copy of the tensors, None if they are
    larger than WATCHED or not in host memory.
    """

    def __init__(self, tensors: list[torch.Tensor], size: int) -> None:
        self.tensors = tensors
        self.size = size
        self.bytes = sum(t.numel() * t.element_size() for t in tensors)
        self.shadow: list[torch.Tensor] | None = None
        if self.bytes <= WATCHED and all(t.device.type == "cpu" for t in tensors):
            self.shadow = [t.clone() for t in tensors]
        self.poisoned: dict[int, float] = {}
        self._poisons = 0

    def read(self, block: int) -> torch.Tensor:
        """Return a copy [layers, elements] of a block, in host memory."""
        return torch.stack([tensor[block].detach().cpu().reshape(-1) for tensor in self.tensors])

    def changed(self, keep: set[int]) -> list[list[int]]:
        """Return, per layer, the blocks that differ from the shadow copy, and update the copy.

        Blocks in `keep`, which the model may write, are updated but not returned. Without a copy,
        the list is empty.
        """
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
        """Fill a newly allocated block with a recognisable value, and return that value."""
        self._poisons += 1
        value = poison_value(self._poisons)
        self.poisoned[block] = value
        for tensors in filter(None, (self.tensors, self.shadow)):
            for tensor in tensors:
                tensor[block] = value
        return value

    def untouched(self, block: int, layer: int | None = None) -> bool:
        """Return whether a block still holds poison in some layer, or in `layer`.

        If so, it was not written, or not completely.
        """
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
    """Return the elements as integers, so that NaN equals itself."""
    return tensor.view({1: torch.int8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])


class BlockOracle:
    """Judges the writes of one rank's connector half, and its loads.

    Emits kv.changed, load.due, kv.wrong and live.load. The first three are those of
    kvconform.kv.oracle, for whole blocks: a kv.changed lists a block as its first slot, and blocks
    that a load fills in part are not judged.
    """

    def __init__(self, trace: Trace, blocks: Blocks, book: Book, *, poison: bool) -> None:
        self.trace = trace
        self.blocks = blocks
        self.book = book
        self.poisoning = poison
        self.loads: list[Load] = []
        self.note = StepNote(0)
        self.fresh: list[HandedOut] = []
        self.failed_blocks: set[int] = set()
        self.failed_reqs: set[str] = set()
        self.reported: set[str] = set()
        self.bad: set[int] = set()

    # -- a step
    def begin(self, note: StepNote) -> None:
        """Begin a step: enter blocks that are final into the book, and take its loads over."""
        self.check("no hook")
        self.enter(note.named)  # before anything of this step writes
        self.book.unseen.update(note.unseen)
        self._overdue()
        self.note = note
        zeroed = set(note.zeroed)
        self.fresh = [one for one in note.fresh if one.block not in zeroed]
        handed_out = {each.block for each in note.fresh}
        self.bad -= handed_out
        for block in handed_out:
            self.blocks.poisoned.pop(block, None)
        self.failed_blocks = set()
        self.failed_reqs = set()
        self.reported = set()
        for grant in note.granted:
            size = self.blocks.size
            whole = range(-(-grant.start // size), min(grant.end // size, len(grant.table)))
            self.loads.append(Load(grant, size, [n for n in whole if grant.table[n]]))
        self.loads = [load for load in self.loads if load.open or load.due is not None]

    def enter(self, named: list[Named]) -> None:
        """Enter blocks that the model has filled into the book: apart, if wrong KV led to them."""
        for one in named:
            block = self.blocks.read(one.block)
            if self.bad & {one.block, *one.upon}:
                self.book.spoil(one.content, block)
            else:
                self.book.enter(one.content, one.plain, one.req, one.index, block, alone=one.alone)

    def poison_fresh(self) -> None:
        """Poison the newly allocated blocks. Call after handle_preemptions, before any load."""
        engine_writes = {*self.note.zeroed, *(each.block for each in self.fresh)}
        self.check("handle_preemptions", also=engine_writes)
        if self.poisoning:
            for block, owner, _ in self.fresh:
                poisoned = Poisoned(owner, self.note.wanted.get(block))
                self.book.poisoners.setdefault(self.blocks.poison(block), []).append(poisoned)
        self.fresh = []

    def read(self, layer: int) -> None:
        """Note blocks of synchronous loads that are missing when a layer's attention reads them."""
        for load in self.loads:
            if load.open and not load.grant.is_async and load.grant.req in self.note.scheduled:
                load.late.update(
                    (layer, n) for n in load.whole if self.blocks.untouched(load.block(n), layer)
                )

    def end(self) -> None:
        """End a step, and judge the loads that the engine relies on.

        These are the synchronous loads of requests that computed, and reported asynchronous loads.
        """
        self.check("wait_for_save", also=self.note.written)
        self._overdue()
        for load in self.loads:
            if not load.open:
                continue
            grant = load.grant
            if grant.is_async and grant.req not in self.note.tables:
                load.open = False  # its blocks were freed: nothing relies on the load
            elif grant.req in (self.reported if grant.is_async else self.note.scheduled):
                self._due(load)

    # -- what the connector wrote
    def check(self, after_hook: str, also: set[int] | None = None) -> None:
        """Emit kv.changed for blocks that were written outside of loads since the last call.

        Blocks in `also` are not reported: the engine itself may have written them.
        """
        for layer, blocks in enumerate(self.blocks.changed(also or set())):
            if blocks:
                self._classify(after_hook, layer, blocks)

    def _classify(self, after_hook: str, layer: int, blocks: list[int]) -> None:
        """Emit one kv.changed for the changed blocks of a layer, sorted by kind."""
        kinds: dict[str, list[int]] = {kind: [] for kind in WRITES}
        reqs = set[str]()
        for block in blocks:
            mine = [load for load in self.loads if block in load.grant.table]
            inside = [
                load
                for load in mine
                if (load.open or load.due is not None) and block in load.touched
            ]
            for load in inside or mine:
                reqs.add(load.grant.req)
            kind = self._outside(block, mine) if not inside or block == 0 else None
            if kind is not None:
                kinds[kind].append(block * self.blocks.size)
        whose = {"req": sorted(reqs), "group": None}
        self.trace.emit("kv.changed", after_hook=after_hook, layer=layer, **whose, **kinds)

    def _outside(self, block: int, mine: list[Load]) -> str | None:
        """Return the kind of a block outside of loads; None for one that is being loaded.

        `mine`: loads whose table contains it.
        """
        if block == 0:
            return "null_block"
        held = [req for req, table in self.note.tables.items() if block in table]
        loading = any(load.open for load in mine)
        if not held and not loading:
            return "unallocated"
        for load in mine:
            if block in load.grant.table[: load.grant.start // self.blocks.size]:
                return "shared"
        if loading:
            return None
        return "over_computed" if any(load.grant.req in held for load in mine) else "other_request"

    # -- loads
    def _due(self, load: Load) -> None:
        """Compare the blocks of a load that the engine relies on, and emit the result."""
        load.open = False
        grant = load.grant
        mine = [n for n in load.whole if load.block(n) not in self.note.written or grant.is_async]
        missing = [n for n in mine if self.blocks.untouched(load.block(n))]
        found: dict[int, Finding] = {}
        for number in mine:
            if number not in missing:
                block = self.blocks.read(load.block(number))
                alone = grant.alone[number] if number < len(grant.alone) else 0
                found[number] = self.book.compare(block, grant.contents, number, alone)
        lists = {
            verdict: [n for n, finding in found.items() if finding.verdict == verdict]
            for verdict in ("exact", "close", "reused", "wrong", "unknown")
        }
        affected = [*missing, *lists["wrong"]]
        reported = self._reported(load, affected)
        self.bad |= {load.block(n) for n in affected} | (load.touched if reported else set())
        self.bad |= {load.block(n) for n in lists["reused"]}
        nothing_known = len(lists["unknown"]) == len(found)
        self._blended(load, found)
        if missing or not nothing_known:
            self._judge(load, missing, found)
        errors = [f.error for f in found.values() if f.verdict in ("close", "reused", "wrong")]
        self.trace.emit(
            "live.load",
            req=grant.req,
            generation=grant.generation,
            transfer=grant.transfer,
            is_async=grant.is_async,
            missing=missing,
            **lists,
            granted=grant.end - grant.start,
            blocks=len(load.whole),
            reported_failed=reported,
            rank=0,
            error=max(errors, default=0.0),
        )

    def _blended(self, load: Load, found: dict[int, Finding]) -> None:
        """Emit load.blended if some blocks of a load were computed behind other tokens."""
        other = ("other_prefix", "old_position")
        blended = [n for n, f in found.items() if f.verdict == "reused" or f.found in other]
        if not blended:
            return
        grant = load.grant
        reused = len(blended) * self.blocks.size
        self.trace.emit(
            "load.blended",
            req=grant.req,
            generation=grant.generation,
            transfer=grant.transfer,
            reused=reused,
            again=grant.known - min(blended) * self.blocks.size - reused,
        )

    def _reported(self, load: Load, affected: list[int]) -> bool:
        """Return whether the load was reported as failed, so that these blocks are not relied on.

        vLLM computes everything again from the first block on that is reported.
        """
        if load.given_up or load.grant.req in self.failed_reqs:
            return True
        failed = self.failed_blocks | load.failed
        upto = range(load.grant.start // load.size, min(affected, default=-1) + 1)
        return any(load.block(n) in failed for n in upto)

    def _judge(self, load: Load, missing: list[int], found: dict[int, Finding]) -> None:
        """Emit load.due, and kv.wrong for wrong blocks not reported as failed and late blocks."""
        reported = self._reported(load, missing)
        grant = load.grant
        size = self.blocks.size
        wrong = [number for number, finding in found.items() if finding.verdict == "wrong"]
        event = self.trace.emit(
            "load.due",
            req=grant.req,
            generation=grant.generation,
            transfer=grant.transfer,
            granted=grant.end - grant.start,
            missing=_positions(missing, size),
            partial=[],
            wrong=_positions(wrong, size),
            reported_failed=reported,
            reported=[],
            promised=False,
            undisturbed=False,
            is_async=grant.is_async,
            needed=True,
            local=grant.start,
            by_group=[],
            layers=[],
            early_reads=[],
            bytes=None,
            most_bytes=None,
        )
        if missing and not reported:
            load.due = event
        for number in wrong:
            if not self._reported(load, [number]):
                finding = found[number]
                if finding.found is not None:  # else an earlier kv.wrong led to it
                    self._wrong(load, number, finding.layer, finding.found, finding.origin)
        origin = "bytes that arrived after the layer had been read"
        for layer, number in sorted(load.late):
            if number not in missing:
                self._wrong(load, number, layer, "not_yet_loaded", origin)

    def _wrong(self, load: Load, number: int, layer: int, found: str, origin: str) -> None:
        """Emit kv.wrong for one block of a load."""
        grant = load.grant
        size = self.blocks.size
        self.trace.emit(
            "kv.wrong",
            req=grant.req,
            generation=grant.generation,
            layer=layer,
            kv="both",
            pos=number * size,
            count=size,
            block=load.block(number),
            via="external",
            transfer=grant.transfer,
            transfer_sync=not grant.is_async,
            found=found,
            origin=origin,
            origin_req=None,
            origin_pos=None,
            origin_block=None,
            group=None,
            damaged=self.trace.damaged,
        )

    def _overdue(self) -> None:
        """Report blocks as late that arrived after the engine relied on them.

        Removes them from the `missing` of their load.due event. Ends when the request no longer
        has its blocks.
        """
        origin = "bytes that arrived after the load had been relied on"
        for load in self.loads:
            if load.due is None:
                continue
            late = [
                n
                for n in load.whole
                if n * load.size in load.due["missing"] and not self.blocks.untouched(load.block(n))
            ]
            for number in late:
                missing = [p for p in load.due["missing"] if p // load.size != number]
                self.trace.amend(load.due, missing=missing)
                self._wrong(load, number, 0, "not_yet_loaded", origin)
            if not load.due["missing"] or load.grant.req not in self.note.tables:
                load.due = None

    # -- reports
    def reports(self, results: Any) -> None:
        """Take note of what get_transfer_results returned."""
        self.reported |= set(results.finished_recving or ())
        for load in self.loads:
            if load.open and load.grant.req in (getattr(results, "failed_recving", None) or ()):
                load.given_up = True
                self.failed_reqs.add(load.grant.req)

    def errors(self, blocks: set[int]) -> None:
        """Take note of what get_block_ids_with_load_errors returned."""
        self.failed_blocks |= blocks
        for load in self.loads:
            if load.open:
                load.failed |= blocks & load.touched


def _positions(numbers: list[int], size: int) -> list[int]:
    """Return the token positions of blocks, given by their numbers."""
    return [
        position for number in numbers for position in range(number * size, (number + 1) * size)
    ]
