# SPDX-License-Identifier: Apache-2.0
"""Grants: what the engine allowed a connector to load, and where.

The oracle: who may write which slot when, and what every slot must hold when the engine reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Protocol

import numpy as np
import torch

from kvconform.contract.trace import Trace
from kvconform.kv import device
from kvconform.kv.cache import Group, PagedCache
from kvconform.kv.provenance import Chain, Registry, diagnose


@dataclass
class Grant:
    """One load that the engine granted: positions [start, end) of a request go to `slots` [layers, end - start], -1 where a layer wants
    none: its table has the null block there, its group is not transferred, or another rank holds the token (`share`: PagedCache's).

    `tables` are the request's whole block tables at the grant, one per group, `shared` its blocks before the grant. `written[layer]` marks
    positions that the connector wrote, `late` (layer, position) that the engine read before. A grant is open from the allocation until
    the engine relied on it (or it failed); `due` is the load.due event of one that was incomplete then and said nothing. `failed` are the
    blocks that were reported so far, which may be steps before it is due; `given_up` means that the request was reported as a whole.
    """

    transfer: str
    req: str
    generation: int
    start: int
    end: int
    is_async: bool
    tables: Sequence[list[int]]
    groups: Sequence[Group]
    share: tuple[int, int] = (0, 1)
    open: bool = True
    started_step: int = 0
    late: set[tuple[int, int]] = field(default_factory=set)
    due: dict[str, Any] | None = None
    failed: set[int] = field(default_factory=set)
    given_up: bool = False
    written: np.ndarray = field(init=False)
    slots: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.stride = max(group.block_size for group in self.groups)
        self.slots = np.full(
            (sum(len(g.layers) for g in self.groups), max(0, self.end - self.start)),
            -1,
            dtype=np.int64,
        )
        for group, table in zip(self.groups, self.tables, strict=True):
            if group.transfer:
                found = slots_of(table, self.start, self.end, group.block_size, self.stride)
                if group.recurrent:  # the last state is all there is
                    found = np.where(
                        np.arange(self.start, self.end) == self.end - 1,
                        found - found % self.stride,
                        -1,
                    )
                found = np.where(
                    np.arange(self.start, self.end) % self.share[1] == self.share[0], found, -1
                )
                self.slots[list(group.layers)] = (
                    found if group.window is None else np.where(found < self.stride, -1, found)
                )
        self.written = self.slots < 0

    @property
    def key(self) -> tuple[str, int]:
        return self.req, self.generation

    @cached_property
    def table(self) -> set[int]:
        """Block ids of the request, of whatever group."""
        return set().union(*self.tables)

    @cached_property
    def shared(self) -> set[int]:
        """Block ids before the grant: the local prefix-cache hit."""
        return {
            block
            for group, table in zip(self.groups, self.tables, strict=True)
            for block in table[: self.start // group.block_size]
        }

    @cached_property
    def blocks(self) -> set[int]:
        """Block ids that the grant covers, whole or in part."""
        return {int(slot) // self.stride for slot in np.unique(self.slots) if slot >= 0}

    @cached_property
    def kept_back(self) -> set[int]:
        """Block ids of groups that are not transferred."""
        return {
            block
            for group, table in zip(self.groups, self.tables, strict=True)
            if not group.transfer
            for block in table
        }

    def position(self, layer: int, slot: int) -> int | None:
        """Request position of `slot` if the grant covers it in this layer."""
        hit = np.nonzero(self.slots[layer] == slot)[0]
        return self.start + int(hit[0]) if len(hit) else None

    def awaits(self, layer: int, slot: int) -> bool:
        """Whether the connector still owes (or may still write) the bytes of `slot`."""
        pos = self.position(layer, slot)
        return pos is not None and (
            self.open or self.due is not None and pos in self.due["missing"]
        )

    def missing(self) -> list[int]:
        """Positions that some layer wants and never received."""
        return [self.start + int(i) for i in np.nonzero(~self.written.all(0))[0]]

    def missing_by_group(self) -> list[list[Any]]:
        """The same for each of several groups that lacks something: [number, tokens per block, positions, its block table]."""
        found = []
        for number, (group, table) in enumerate(zip(self.groups, self.tables, strict=True)):
            positions = [
                self.start + int(i) for i in np.nonzero(~self.written[list(group.layers)].all(0))[0]
            ]
            if positions and len(self.groups) > 1:
                found.append([number, group.block_size, positions, list(table)])
        return found

    def lacking(self) -> set[int]:
        """Block ids in which something is missing."""
        return {int(slot) // self.stride for slot in self.slots[~self.written]}


def slots_of(
    table: Sequence[int], start: int, end: int, block_size: int, stride: int | None = None
) -> np.ndarray:
    """Slots of positions [start, end) through a block table; raises IndexError when the table is too short."""
    positions = np.arange(max(start, 0), end)
    if len(positions) and positions[-1] // block_size >= len(table):
        raise IndexError(
            f"block table of {len(table)} blocks of {block_size} does not reach position {int(positions[-1])}"
        )
    blocks = np.array(table, dtype=np.int64)
    return blocks[positions // block_size] * (stride or block_size) + positions % block_size


OWN, EXTERNAL = 1, 2
_KINDS = (
    "tail",
    "shared",
    "over_computed",
    "null_block",
    "unallocated",
    "other_request",
    "not_transferred",
)
Tables = Callable[[], dict[str, list[int]]]
"""Blocks that each request holds, of whatever group."""


@dataclass
class Wrong:
    """A wrong slot seen by a reader, kept back until the step's load failures are known."""

    layer: int
    chain: Chain
    pos: int
    slot: int
    found: str
    side: str
    origin: str
    grant: Grant | None

    @property
    def kin(self) -> tuple[object, ...]:
        """What neighbours must share to be reported as one range."""
        return id(self.chain), self.layer, self.found, self.side


class Shape(Protocol):
    """What has to be known of a KV cache to note the loads into it."""

    @property
    def block_size(self) -> int: ...
    @property
    def groups(self) -> tuple[Group, ...]: ...
    @property
    def share(self) -> tuple[int, int]: ...
    @property
    def group_of(self) -> np.ndarray: ...


class Loads:
    """The loads into one KV cache: what the engine granted, and what was reported as failed.

    `failed_blocks` and `failed_reqs` are the failures reported in the current step.
    """

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.grants: list[Grant] = []
        self.failed_blocks: set[int] = set()
        self.failed_reqs: set[str] = set()

    def open_grants(self) -> list[Grant]:
        """Grants that the engine has not relied on yet."""
        return [grant for grant in self.grants if grant.open]


class Oracle(Loads):
    """Judges bytes of one engine's cache. `tables()` returns the blocks that live requests hold.

    It emits kv.changed, load.due and kv.wrong; it never writes the cache.
    """

    def __init__(self, cache: PagedCache, registry: Registry, trace: Trace, tables: Tables) -> None:
        super().__init__(cache)
        self.cache, self.registry, self.trace, self.tables = cache, registry, trace, tables
        self.device = device.current
        slots = cache.num_blocks * cache.stride
        self.fill_kind: np.ndarray = np.zeros(slots, dtype=np.int8)
        self.fill_ref: np.ndarray = np.full(slots, -1, dtype=np.int64)
        self.version: np.ndarray = np.zeros((len(cache.tensors), slots), dtype=np.int64)
        self.refs: list[str] = []
        self.overdue: list[Grant] = []
        self.pending: list[Wrong] = []
        self.reported: dict[tuple[int, int], int] = {}

    # -- what fills a slot -----------------------------------------------------------------------------------------------------
    def _ref(self, name: str) -> int:
        self.refs.append(name)
        return len(self.refs) - 1

    def filled(self, slots: np.ndarray, kind: int, name: str) -> None:
        """Note that `slots` were filled by the engine (OWN: request `name`) or by a transfer (EXTERNAL: transfer id)."""
        self._refilled(slots)
        self.fill_kind[slots] = kind
        self.fill_ref[slots] = self._ref(name)
        self.version[:, slots] += 1

    def emptied(self, slots: np.ndarray) -> None:
        """Note that `slots` hold nothing any more (handed out again)."""
        self._refilled(slots)
        self.fill_kind[slots] = 0
        self.fill_ref[slots] = -1
        self.version[:, slots] += 1

    def _refilled(self, slots: np.ndarray) -> None:
        for grant in [
            g for g in self.overdue if np.isin(g.slots, slots).any()
        ]:  # whatever arrives from now on is a stray write
            grant.due = None
            self.overdue.remove(grant)

    # -- writes by the connector -----------------------------------------------------------------------------------------------
    def check_writes(self, after_hook: str) -> None:
        """Classify whatever the connector wrote since the last call; emits one kv.changed per layer that changed. Where there are
        streams, it looks when the compute stream has come here."""
        if self.device.streamed or not self.cache.untouched:
            self.device.launch(self._changes, partial(self._classify_all, after_hook))

    def _changes(self) -> list[torch.Tensor | None]:
        return (
            []
            if self.cache.untouched
            else [self.cache.changes(layer) for layer in range(len(self.cache.tensors))]
        )

    def _classify_all(self, after_hook: str, changes: list[torch.Tensor | None]) -> None:
        for layer, touched in enumerate(changes):
            slots = self.cache.changed_slots(touched)
            if len(slots):
                self._classify(after_hook, layer, slots)

    def written_by_sibling(self, before_hook: str) -> None:
        """Whatever was written since the last call, another connector wrote, unless a load of this one is to fill it (on a thread)."""
        for layer in range(len(self.cache.tensors)):
            slots = self.cache.foreign(layer)
            own = np.array(
                [any(g.awaits(layer, slot) for g in self.open_grants()) for slot in slots.tolist()],
                dtype=bool,
            )
            if own.any():
                self._classify(before_hook, layer, slots[own])
            if not own.all():
                self.filled(slots[~own], EXTERNAL, "a sibling")

    def _classify(self, after_hook: str, layer: int, slots: np.ndarray) -> None:
        size = self.cache.stride
        grants = self.open_grants()
        owners: dict[int, list[str]] = {}
        for req, table in self.tables().items():
            for block in table:
                owners.setdefault(block, []).append(req)
        kinds: dict[str, list[int]] = {k: [] for k in _KINDS}
        reqs: set[str] = set()
        transfers: set[str] = set()
        for slot in slots.tolist():
            block = slot // size
            if block == 0:
                kinds["null_block"].append(slot)
                continue
            inside = [
                g
                for g in (*grants, *self.overdue)
                if g.awaits(layer, slot) and (g.open or g.req in owners.get(block, ()))
            ]
            if inside:
                for grant in inside:
                    self._granted(grant, layer, slot, after_hook)
                    reqs.add(grant.req)
                    transfers.add(grant.transfer)
                continue
            mine = [g for g in grants if block in g.table] or self._past(block, owners)
            kinds[self._outside(slot, block, mine, owners)].append(slot)
            reqs.update(g.req for g in mine)
            transfers.update(g.transfer for g in mine)
        self.version[layer, slots] += 1
        whose = {"req": sorted(reqs), "transfer": sorted(transfers), "group": self._group(layer)}
        self.trace.emit("kv.changed", after_hook=after_hook, layer=layer, **whose, **kinds)

    def _group(self, layer: int) -> int | None:
        """The number of a layer's group, where there are several."""
        return self.cache.group(layer) if len(self.cache.groups) > 1 else None

    def _past(self, block: int, owners: dict[int, list[str]]) -> list[Grant]:
        """The last grant that put this block into the table of a request which still has it."""
        return next(
            (
                [g]
                for g in reversed(self.grants)
                if block in g.table and g.req in owners.get(block, ())
            ),
            [],
        )

    def _outside(
        self, slot: int, block: int, mine: list[Grant], owners: dict[int, list[str]]
    ) -> str:
        if block not in owners and not mine:
            return "unallocated"
        for grant in mine:
            if block in grant.kept_back:
                return "not_transferred"
            if block in grant.shared:
                return "shared"
        if not mine:
            return "other_request"
        return "over_computed" if self.fill_kind[slot] or not any(g.open for g in mine) else "tail"

    def _granted(self, grant: Grant, layer: int, slot: int, after_hook: str) -> None:
        pos = grant.position(layer, slot)
        assert pos is not None
        if (layer, pos) in grant.late or not grant.open:
            grant.late.discard((layer, pos))
            after = "the layer had been read" if grant.open else "the load had been relied on"
            self.trace.emit(
                "kv.wrong",
                req=grant.req,
                generation=grant.generation,
                layer=layer,
                kv="both",
                pos=pos,
                count=1,
                block=slot // self.cache.stride,
                via="external",
                transfer=grant.transfer,
                transfer_sync=not grant.is_async,
                found="not_yet_loaded",
                origin=f"bytes that arrived in {after_hook}, after {after}",
                group=self._group(layer),
            )
        grant.written[layer, pos - grant.start] = True
        if grant.due is not None and grant.written[:, pos - grant.start].all():
            missing = [other for other in grant.due["missing"] if other != pos]
            self.trace.amend(grant.due, missing=missing)  # it was late, not missing
        self.fill_kind[slot] = EXTERNAL
        self.fill_ref[slot] = self._ref(grant.transfer)

    # -- reads by the engine ---------------------------------------------------------------------------------------------------
    def wrong_read(self, layer: int, chain: Chain, pos: int, slot: int) -> None:
        """The engine read wrong content at `slot` for position `pos` of `chain`; the first reader of a filling is kept."""
        version = int(self.version[layer, slot])
        if self.reported.get((layer, slot)) == version:
            return
        self.reported[(layer, slot)] = version
        grant = next(
            (g for g in (*self.open_grants(), *self.overdue) if g.awaits(layer, slot)), None
        )
        inside = grant is not None and grant.start <= pos < grant.end
        loading = grant is not None and inside and not grant.written[layer, pos - grant.start]
        row = self.cache.read(layer, np.array([slot]))[0].numpy()
        kin = (
            self.cache.groups[self.cache.group(layer)].layers
            if len(self.cache.groups) > 1
            else None
        )
        found, side, origin = diagnose(
            self.registry, row, layer, chain, pos, loading=loading, kin=kin
        )
        if loading and grant is not None:
            grant.late.add((layer, pos))
        self.pending.append(Wrong(layer, chain, pos, slot, found, side, origin, grant))

    def settle_reads(self) -> None:
        """Emit kv.wrong for the wrong slots seen since the last call, except those whose load was reported failed in time."""
        runs: list[tuple[Wrong, int]] = []
        for item in self.pending:
            if (
                item.slot // self.cache.stride in self.failed_blocks
                or item.chain.req in self.failed_reqs
            ):
                continue
            if item.found == "not_yet_loaded" and item.grant is not None:
                continue  # never arrived: load.due.missing has it; arrived late: emitted when it did
            last = runs[-1] if runs else None
            if last and last[0].kin == item.kin and last[0].pos + last[1] == item.pos:
                runs[-1] = (last[0], last[1] + 1)
            else:
                runs.append((item, 1))
        for item, count in runs:
            via, transfer, sync = self._via(item)
            self.trace.emit(
                "kv.wrong",
                req=item.chain.req,
                generation=item.chain.generation,
                layer=item.layer,
                kv=item.side,
                pos=item.pos,
                count=count,
                block=item.slot // self.cache.stride,
                via=via,
                transfer=transfer,
                transfer_sync=sync,
                found=item.found,
                origin=item.origin,
                group=self._group(item.layer),
            )
        self.pending.clear()

    def _via(self, item: Wrong) -> tuple[str, str | None, bool | None]:
        kind, ref = int(self.fill_kind[item.slot]), int(self.fill_ref[item.slot])
        name = self.refs[ref] if ref >= 0 else None
        mine = f"{item.chain.req}#{item.chain.generation}"
        if kind == EXTERNAL and name is not None:
            grant = next((g for g in self.grants if g.transfer == name), None)
            sync = None if grant is None else not grant.is_async
            return ("external" if name.startswith(mine + ".") else "local"), name, sync
        if item.grant is not None and item.grant.key == (item.chain.req, item.chain.generation):
            return "external", item.grant.transfer, not item.grant.is_async
        return ("own" if name == mine else "local"), None, None

    # -- grants become due -----------------------------------------------------------------------------------------------------
    def due(self, grant: Grant, chain: Chain) -> None:
        """The engine is about to rely on `grant`: emit load.due and close it."""
        grant.open = False
        missing = grant.missing()
        wrong: set[int] = set()
        length = min(grant.end, len(chain.ids)) - grant.start
        if length > 0:
            rows = self.cache.book.rows(chain.array(grant.start, grant.start + length))
            for layer in range(len(self.cache.tensors)):
                there = np.nonzero(
                    grant.written[layer, :length] & (grant.slots[layer, :length] >= 0)
                )[0]
                bad = self.cache.mismatches(layer, grant.slots[layer, there], rows[there, layer])
                wrong.update(grant.start + int(there[i]) for i in bad)
        affected = grant.lacking()
        reported = (
            grant.given_up
            or grant.req in self.failed_reqs
            or bool(affected)
            and affected <= self.failed_blocks | grant.failed
        )
        event = self.trace.emit(
            "load.due",
            req=grant.req,
            generation=grant.generation,
            transfer=grant.transfer,
            granted=grant.end - grant.start,
            missing=missing,
            wrong=sorted(wrong),
            reported_failed=bool(reported),
            is_async=grant.is_async,
            local=grant.start,
            by_group=grant.missing_by_group(),
            early_reads=self.device.early_reads,
        )
        if missing and not reported:
            grant.due = event
            self.overdue.append(grant)
