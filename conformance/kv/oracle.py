# SPDX-License-Identifier: Apache-2.0
"""Grants of loads, and the oracle that judges a connector's writes to the KV cache.

A grant is what the engine allowed a connector to load, and where. The oracle knows which slots may
be written when, and what every slot must hold when the engine reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from kvconform.contract.events import WRITES
from kvconform.contract.trace import Trace
from kvconform.kv import device
from kvconform.kv.cache import WHOLE, Group, PagedCache, Slice
from kvconform.kv.content import Content
from kvconform.kv.provenance import Chain, Diagnosis, Registry, diagnose


class Fill(NamedTuple):
    """The origin of a slot's content: a request's own forward pass, or a transfer.

    `key`: the request (id, generation); None for what another connector wrote.
    """

    key: tuple[str, int] | None
    transfer: str | None = None


SIBLING = Fill(None, "a sibling")


@dataclass
class Grant:
    """One load that the engine granted: positions [start, end) of a request.

    They go to `slots` [layers, end - start], which is -1 where a layer wants no KV: its table has
    the null block there, its group is not transferred, or another rank holds the token (`share`:
    PagedCache's). `tables` are the request's whole block tables at the grant, one per group.

    `written[layer]` marks positions that the connector wrote, and `times[layer]` counts how often;
    `late` are (layer, position) that the engine read before. A grant is open from the allocation
    until the engine relied on it, or it failed. `due` is the load.due event of a grant that was
    incomplete then although no failure was reported, and `chain` its request's. `failed` are the
    blocks reported as failed so far, which may be steps before the load is due. `given_up` means
    that the request was reported as a whole; `reported`, that this rank has reported the end of the
    load, which is due when the ranks that report have.
    """

    transfer: str
    req: str
    generation: int
    start: int
    end: int
    is_async: bool
    tables: Sequence[list[int]]
    groups: Sequence[Group]
    share: Slice = WHOLE
    open: bool = True
    started_step: int = 0
    late: set[tuple[int, int]] = field(default_factory=set)
    due: dict[str, Any] | None = None
    chain: Chain | None = None
    failed: set[int] = field(default_factory=set)
    given_up: bool = False
    reported: bool = False
    written: np.ndarray = field(init=False)
    times: np.ndarray = field(init=False)
    slots: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.stride = max(group.block_size for group in self.groups)
        layers = sum(len(group.layers) for group in self.groups)
        self.slots = np.full((layers, max(0, self.end - self.start)), -1, dtype=np.int64)
        for group, table in zip(self.groups, self.tables, strict=True):
            if group.transfer:
                self.slots[list(group.layers)] = self._slots_in(group, table)
        self.written = self.slots < 0
        self.times = np.zeros_like(self.slots)

    def _slots_in(self, group: Group, table: list[int]) -> np.ndarray:
        """Return the slots [end - start] that a layer of a group wants on this rank."""
        positions = np.arange(self.start, self.end)
        return np.where(self.share.has(positions), self._all_slots_in(group, table), -1)

    def _all_slots_in(self, group: Group, table: list[int]) -> np.ndarray:
        """Return the slots [end - start] that a layer of a group wants on all ranks together."""
        found = slots_of(table, self.start, self.end, group.block_size, self.stride)
        if group.recurrent:  # only the last state exists
            positions = np.arange(self.start, self.end)
            found = np.where(positions == self.end - 1, found - found % self.stride, -1)
        if group.window is not None:  # without those in the null block
            found = np.where(found < self.stride, -1, found)
        return found

    @property
    def key(self) -> tuple[str, int]:
        """Incarnation of the request."""
        return self.req, self.generation

    @cached_property
    def table(self) -> set[int]:
        """Block ids of the request, of all groups."""
        return set().union(*self.tables)

    @cached_property
    def shared(self) -> set[int]:
        """Block ids of the request before the grant: the local prefix-cache hit."""
        return {
            block
            for group, table in zip(self.groups, self.tables, strict=True)
            for block in table[: self.start // group.block_size]
        }

    @property
    def behind(self) -> set[int]:
        """Blocks of the request behind those of the grant, of one group; none if there are several.

        The engine throws them away with the first block that failed.
        """
        if len(self.groups) > 1:
            return set()
        table = self.tables[0]
        granted = [at for at, block in enumerate(table) if block in self.blocks]
        return set(table[max(granted, default=len(table)) + 1 :])

    @cached_property
    def blocks(self) -> set[int]:
        """Block ids that the grant covers, completely or in part, on any rank.

        A rank may report a block as failed of which other ranks have the granted tokens: the id is
        the scheduler's.
        """
        found: set[int] = set()
        for group, table in zip(self.groups, self.tables, strict=True):
            if group.transfer:
                slots = self._all_slots_in(group, table)
                found |= {int(block) for block in np.unique(slots[slots >= 0] // self.stride)}
        return found

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
        """Return the request position of `slot` in this layer; None if it is not in the grant."""
        hit = np.nonzero(self.slots[layer] == slot)[0]
        return self.start + int(hit[0]) if len(hit) else None

    def awaits(self, layer: int, slot: int) -> bool:
        """Return whether the connector still owes, or may still write, the bytes of `slot`."""
        pos = self.position(layer, slot)
        if pos is None:
            return False
        return self.open or (self.due is not None and pos in self.due["missing"])

    def received(self, layer: int) -> int:
        """Return how many slots of a layer were written, of those that it wants."""
        return int(np.count_nonzero(self.written[layer] & (self.slots[layer] >= 0)))

    def received_in_blocks(self, layer: int) -> int:
        """Return what `received` does, of a connector that moves whole blocks.

        Each block that was written counts completely, as often as one of its slots was written.
        """
        group = next(each for each in self.groups if layer in each.layers)
        there = np.nonzero(self.times[layer])[0]
        blocks, number = np.unique(self.slots[layer, there] // self.stride, return_inverse=True)
        times = np.zeros(len(blocks), dtype=np.int64)
        np.maximum.at(times, number, self.times[layer, there])
        slots = 1 if group.recurrent else group.block_size // self.share.ranks
        return int(times.sum()) * slots

    def missing(self) -> list[int]:
        """Return the positions that some layer wants and never received."""
        return self._not_in_all(self.written)

    def _not_in_all(self, written: np.ndarray) -> list[int]:
        """Return the positions that not all rows of `written` mark."""
        return [self.start + int(i) for i in np.nonzero(~written.all(0))[0]]

    def missing_by_group(self) -> list[list[Any]]:
        """Return what each group lacks, if there are several groups.

        An entry is [number of the group, tokens per block, positions, block table].
        """
        found: list[list[Any]] = []
        if len(self.groups) == 1:
            return found
        for number, (group, table) in enumerate(zip(self.groups, self.tables, strict=True)):
            positions = self._not_in_all(self.written[list(group.layers)])
            if positions:
                found.append([number, group.block_size, positions, list(table)])
        return found

    def lacking_layers(self) -> list[int]:
        """Return the layers that lack something, if others of the only group do not."""
        found = np.nonzero(~self.written.all(1))[0].tolist() if len(self.groups) == 1 else []
        return found if len(found) < len(self.written) else []

    def lacking(self) -> set[int]:
        """Return the ids of blocks in which KV is missing."""
        return {int(slot) // self.stride for slot in self.slots[~self.written]}

    def named(self, failed: Set[int]) -> list[int]:
        """Return the positions that these blocks hold in some layer."""
        if not failed:
            return []
        held = np.isin(self.slots // self.stride, list(failed)) & (self.slots >= 0)
        return [self.start + int(i) for i in np.nonzero(held.any(0))[0]]

    def covered_by(self, failed: Set[int]) -> bool:
        """Return whether all that is missing is computed again if these blocks are reported.

        With one group, vLLM does so from the first of them on
        (Scheduler._update_requests_with_invalid_blocks). False if nothing is missing.
        """
        lacking = self.lacking()
        if len(self.groups) > 1 or not lacking:
            return bool(lacking) and lacking <= failed
        named = self.named(failed)
        return bool(named) and named[0] <= self.missing()[0]


def slots_of(
    table: Sequence[int], start: int, end: int, block_size: int, stride: int | None = None
) -> np.ndarray:
    """Return the slots of positions [start, end) through a block table.

    IndexError if the table is too short.
    """
    positions = np.arange(max(start, 0), end)
    if len(positions) and positions[-1] // block_size >= len(table):
        raise IndexError(
            f"block table of {len(table)} blocks of {block_size}"
            f" does not reach position {int(positions[-1])}"
        )
    blocks = np.array(table, dtype=np.int64)
    return blocks[positions // block_size] * (stride or block_size) + positions % block_size


OWN, EXTERNAL = 1, 2
Tables = Callable[[], dict[str, list[int]]]
"""Blocks of all groups that each request holds."""


@dataclass
class Wrong:
    """A wrong slot that was read; it is kept until the step's load failures are known.

    `via`, `transfer` and `sync` are the fields of kv.wrong that say what the slot had been filled
    by when it was read. A recurrent layer overwrites the slot later in the same step.
    """

    layer: int
    chain: Chain
    pos: int
    slot: int
    held: Diagnosis
    via: str
    transfer: str | None
    sync: bool | None


class Shape(Protocol):
    """The properties of a KV cache that are needed to note the loads into it (see PagedCache)."""

    @property
    def block_size(self) -> int:
        """Tokens per block of the scheduler."""

    @property
    def groups(self) -> tuple[Group, ...]:
        """KV cache groups."""

    @property
    def share(self) -> Slice:
        """The tokens of a block that the cache holds."""

    @property
    def group_of(self) -> np.ndarray:
        """Number of the group [blocks] that each block belongs to now."""

    @property
    def drafts(self) -> int:
        """Blocks of recurrent layers for the states after drafts."""


class Loads:
    """The loads into one KV cache: those that the engine granted, and the reported failures.

    `failed_blocks` and `failed_reqs` are the failures reported in the current step. `undisturbed`:
    nothing in the case takes away what the connector has stored.
    """

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.grants: list[Grant] = []
        self.failed_blocks: set[int] = set()
        self.failed_reqs: set[str] = set()
        self.promised: set[str] = set()
        self.undisturbed = True

    def open_grants(self) -> list[Grant]:
        """Return the grants that the engine has not relied on yet."""
        return [grant for grant in self.grants if grant.open]


class Oracle(Loads):
    """Judge of the bytes in one engine's cache. `tables()` returns the blocks of live requests.

    Emits kv.changed, load.due and kv.wrong; never writes to the cache.
    """

    def __init__(self, cache: PagedCache, registry: Registry, trace: Trace, tables: Tables) -> None:
        super().__init__(cache)
        self.cache, self.registry, self.trace, self.tables = cache, registry, trace, tables
        self.device = device.current
        slots = cache.num_blocks * cache.stride
        self.fill_kind: np.ndarray = np.zeros(slots, dtype=np.int8)
        self.fill_ref: np.ndarray = np.full(slots, -1, dtype=np.int64)
        self.version: np.ndarray = np.zeros((len(cache.tensors), slots), dtype=np.int64)
        self.refs: list[Fill] = []
        self.overdue: list[Grant] = []
        self.pending: list[Wrong] = []
        self.reported: dict[tuple[int, int], int] = {}

    # -- content of slots
    def _ref(self, fill: Fill) -> int:
        self.refs.append(fill)
        return len(self.refs) - 1

    def filled(self, slots: np.ndarray, kind: int, fill: Fill) -> None:
        """Note that `slots` were filled: OWN (by the engine) or EXTERNAL (by a transfer)."""
        self._refilled(slots)
        self.fill_kind[slots] = kind
        self.fill_ref[slots] = self._ref(fill)
        self.version[:, slots] += 1

    def copied(self, source: np.ndarray, target: np.ndarray) -> None:
        """Note that the engine copied the content of slots to others."""
        self._refilled(target)
        self.fill_kind[target] = self.fill_kind[source]
        self.fill_ref[target] = self.fill_ref[source]
        self.version[:, target] += 1

    def emptied(self, slots: np.ndarray) -> None:
        """Note that `slots` no longer hold anything: their blocks were handed out again."""
        self._refilled(slots)
        self.fill_kind[slots] = 0
        self.fill_ref[slots] = -1
        self.version[:, slots] += 1

    def _refilled(self, slots: np.ndarray) -> None:
        for grant in [each for each in self.overdue if np.isin(each.slots, slots).any()]:
            grant.due = None  # all that arrives from now on is a stray write
            self.overdue.remove(grant)

    # -- writes by the connector
    def check_writes(self, after_hook: str) -> None:
        """Classify the connector's writes since the last call; emit kv.changed per changed layer.

        On a device with streams, that is done when the compute stream gets here.
        """
        if self.device.streamed or not self.cache.untouched:
            self.device.launch(self._changes, partial(self._classify_all, after_hook))

    def _changes(self) -> list[torch.Tensor | None]:
        if self.cache.untouched:
            return []
        return self.cache.changes()

    def _classify_all(self, after_hook: str, changes: list[torch.Tensor | None]) -> None:
        for layer, touched in enumerate(changes):
            slots = self.cache.changed_slots(touched)
            if len(slots):
                self._classify(after_hook, layer, slots)

    def written_by_sibling(self, in_hook: str) -> None:
        """Note the writes since the last check as those of another connector in its hook.

        Except where a load of this connector is to fill a slot: it may do that on a thread.
        """
        if self.device.streamed or not self.cache.untouched:
            self.device.launch(self._changes, partial(self._sort_out, in_hook))

    def _sort_out(self, in_hook: str, changes: list[torch.Tensor | None]) -> None:
        """Tell changes by a sibling from what a load of this connector has brought meanwhile."""
        for layer, touched in enumerate(changes):
            slots = self.cache.changed_slots(touched)
            awaited = [
                any(grant.awaits(layer, slot) for grant in self.open_grants())
                for slot in slots.tolist()
            ]
            own = np.array(awaited, dtype=bool)
            if own.any():
                self._classify(in_hook, layer, slots[own])
            if not own.all():
                self.filled(slots[~own], EXTERNAL, SIBLING)

    def _classify(self, after_hook: str, layer: int, slots: np.ndarray) -> None:
        size = self.cache.stride
        grants = self.open_grants()
        owners: dict[int, list[str]] = {}
        for req, table in self.tables().items():
            for block in table:
                owners.setdefault(block, []).append(req)
        kinds: dict[str, list[int]] = {k: [] for k in WRITES}
        reqs: set[str] = set()
        for slot in slots.tolist():
            block = slot // size
            if block == 0:
                kinds["null_block"].append(slot)
                continue
            inside = [
                grant
                for grant in (*grants, *self.overdue)
                if grant.awaits(layer, slot)
                and (
                    grant.open
                    or (grant.req in owners.get(block, ()) and self._arrived(grant, layer, slot))
                )
            ]
            for grant in inside:
                self._granted(grant, layer, slot, after_hook)
            mine = inside
            if not inside:
                mine = [grant for grant in grants if block in grant.table]
                mine = mine or self._past(block, owners)
                if (kind := self._outside(slot, block, mine, owners)) is not None:
                    kinds[kind].append(slot)
            reqs.update(grant.req for grant in mine)
        self.version[layer, slots] += 1
        whose = {"req": sorted(reqs), "group": self._group(layer)}
        self.trace.emit("kv.changed", after_hook=after_hook, layer=layer, **whose, **kinds)

    def _arrived(self, grant: Grant, layer: int, slot: int) -> bool:
        """Return whether `slot` holds what an overdue load was to bring, at least in part."""
        pos = grant.position(layer, slot)
        assert pos is not None and grant.chain is not None
        wanted = Content.of(self.cache.book, grant.chain.array(pos, pos + 1))
        if not len(self.cache.mismatches(layer, np.array([slot]), wanted)):
            return True
        return self._diagnosed(layer, grant.chain, pos, slot).found == "not_yet_loaded"

    def _group(self, layer: int) -> int | None:
        """Return the number of a layer's group; None if there is only one group."""
        return self.cache.group(layer) if len(self.cache.groups) > 1 else None

    def _past(self, block: int, owners: dict[int, list[str]]) -> list[Grant]:
        """Return the last grant with this block whose request still holds it, if there is one."""
        for grant in reversed(self.grants):
            if block in grant.table and grant.req in owners.get(block, ()):
                return [grant]
        return []

    def _outside(
        self, slot: int, block: int, mine: list[Grant], owners: dict[int, list[str]]
    ) -> str | None:
        """Return the kind of a write outside of loads; None for the tail of a block being loaded.

        `mine`: loads whose table contains the block.
        """
        if block not in owners and not mine:
            return "unallocated"
        if any(block in grant.kept_back for grant in mine):
            return "not_transferred"
        if not self.fill_kind[slot] and any(grant.open and block in grant.blocks for grant in mine):
            return None  # though another request may have it as a local hit, since this step
        if any(block in grant.shared for grant in mine):
            return "shared"
        if not mine:
            return "other_request"
        if self.fill_kind[slot] or not any(grant.open for grant in mine):
            return "over_computed"
        return None

    def _granted(self, grant: Grant, layer: int, slot: int, after_hook: str) -> None:
        pos = grant.position(layer, slot)
        assert pos is not None
        if (layer, pos) in grant.late or grant.reported or not grant.open:
            grant.late.discard((layer, pos))
            after = "the layer had been read"
            if not grant.open:
                after = "the load had been relied on"
            elif grant.reported:
                after = "this rank had reported the load"
            origin = f"bytes that arrived in {after_hook}, after {after}"
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
                origin=origin,
                origin_req=None,
                origin_pos=None,
                origin_block=None,
                group=self._group(layer),
                damaged=self.trace.damaged,
            )
        grant.written[layer, pos - grant.start] = True
        grant.times[layer, pos - grant.start] += 1
        if grant.due is not None and grant.written[:, pos - grant.start].all():
            # The position was late, not missing.
            missing = [other for other in grant.due["missing"] if other != pos]
            self.trace.amend(grant.due, missing=missing)
        self.fill_kind[slot] = EXTERNAL
        self.fill_ref[slot] = self._ref(Fill(grant.key, grant.transfer))

    def reached(self, layer: int) -> None:
        """Emit load.ahead: which later layers' loads the compute stream has waited for here.

        To be called on a device that shows waits, when the compute stream gets to a layer. Only for
        the synchronous loads of this step, if later layers have any. Loads may be queued one behind
        the other: this layer of the last one is then behind all layers of the others. So nothing is
        ahead as long as one of the loads has brought nothing for later layers.
        """
        names = self.cache.names
        later: set[int] = set()
        ahead: list[set[int]] = []
        for grant in self.open_grants():
            wanted = grant.slots[layer + 1 :] >= 0
            if grant.is_async or not wanted.any():
                continue
            arrived = wanted & grant.written[layer + 1 :]
            later.update((layer + 1 + np.flatnonzero(wanted.any(1))).tolist())
            ahead.append(set((layer + 1 + np.flatnonzero(arrived.any(1))).tolist()))
        if later:
            self.trace.emit(
                "load.ahead",
                layer=names[layer],
                later=[names[each] for each in sorted(later)],
                ahead=[names[each] for each in sorted(set().union(*ahead))] if all(ahead) else [],
            )

    # -- reads by the engine
    def wrong_read(self, layer: int, chain: Chain, pos: int, slot: int) -> None:
        """Note that the engine read wrong content at `slot` for position `pos` of `chain`.

        Only the first reader of the same content of a slot is noted.
        """
        version = int(self.version[layer, slot])
        if self.reported.get((layer, slot)) == version:
            return
        self.reported[(layer, slot)] = version
        awaited = (*self.open_grants(), *self.overdue)
        grant = next((each for each in awaited if each.awaits(layer, slot)), None)
        inside = grant is not None and grant.start <= pos < grant.end
        loading = grant is not None and inside and not grant.written[layer, pos - grant.start]
        held = self._diagnosed(layer, chain, pos, slot, loading)
        if grant is not None and inside and (loading or held.found == "not_yet_loaded"):
            grant.late.add((layer, pos))
        if held.found == "on_failed_load" and self.fill_kind[slot] != EXTERNAL:
            return  # a step that was in flight when the load failed; the engine drops its output
        self.pending.append(Wrong(layer, chain, pos, slot, held, *self._via(chain, slot, grant)))

    def _diagnosed(
        self, layer: int, chain: Chain, pos: int, slot: int, loading: bool = False
    ) -> Diagnosis:
        """Diagnose the content of `slot`, which is wrong for position `pos` of `chain`."""
        group = self._group(layer)
        loaded = self.fill_kind[slot] == EXTERNAL
        return diagnose(
            self.registry,
            self.cache.read(layer, np.array([slot]))[0].numpy(),
            layer,
            chain,
            pos,
            loading=loading,
            kin=None if group is None else self.cache.groups[group].layers,
            block=slot // self.cache.stride if loaded else None,
            rotary=self.cache.groups[self.cache.group(layer)].rotary,
        )

    def settle_reads(self) -> None:
        """Emit kv.wrong for the wrong slots that were read since the last call.

        Except those whose load was reported as failed in time.
        """
        runs: list[tuple[Wrong, int]] = []
        for item in self.pending:
            block = item.slot // self.cache.stride
            if block in self.failed_blocks or item.chain.req in self.failed_reqs:
                continue
            if item.held.found == "not_yet_loaded":
                # If it never arrived, load.due.missing has it. If it was late, `_granted` emits.
                continue
            last = runs[-1] if runs else None
            if last and self._kin(last[0]) == self._kin(item) and last[0].pos + last[1] == item.pos:
                runs[-1] = (last[0], last[1] + 1)
            else:
                runs.append((item, 1))
        for item, count in runs:
            self.trace.emit(
                "kv.wrong",
                req=item.chain.req,
                generation=item.chain.generation,
                layer=item.layer,
                kv=item.held.side,
                pos=item.pos,
                count=count,
                block=item.slot // self.cache.stride,
                via=item.via,
                transfer=item.transfer,
                transfer_sync=item.sync,
                found=item.held.found,
                origin=item.held.origin,
                origin_req=item.held.req,
                origin_pos=item.held.pos,
                origin_block=item.held.block,
                group=self._group(item.layer),
                damaged=self.trace.damaged,
            )
        self.pending.clear()

    def _kin(self, item: Wrong) -> tuple[object, ...]:
        """Key that neighbours must share to be reported as one range.

        The null block is apart: a connector is not to blame for what is read there.
        """
        return (
            id(item.chain),
            item.layer,
            item.held.found,
            item.held.side,
            item.slot < self.cache.stride,
        )

    def _via(
        self, chain: Chain, slot: int, grant: Grant | None
    ) -> tuple[str, str | None, bool | None]:
        """Return the fields `via`, `transfer` and `transfer_sync` of a kv.wrong.

        `grant`: the one that the slot awaits, if any.
        """
        kind, ref = int(self.fill_kind[slot]), int(self.fill_ref[slot])
        fill = self.refs[ref] if ref >= 0 else None
        mine = (chain.req, chain.generation)
        if kind == EXTERNAL and fill is not None:
            found = next((g for g in self.grants if g.transfer == fill.transfer), None)
            sync = None if found is None else not found.is_async
            return ("external" if fill.key == mine else "local"), fill.transfer, sync
        if grant is not None and grant.key == mine:
            return "external", grant.transfer, not grant.is_async
        return ("own" if fill is not None and fill.key == mine else "local"), None, None

    # -- due grants
    def _bytes(self, received: Callable[[int], int]) -> int:
        """Return the bytes of all layers, of which `received(layer)` slots were received."""
        layers = range(len(self.cache.tensors))
        return sum(received(layer) * self.cache.slot_bytes(layer) for layer in layers)

    def due(self, grant: Grant, chain: Chain, *, needed: bool = True) -> None:
        """Close a grant that the engine is about to rely on, and emit load.due.

        Not `needed`: the request was aborted, so the engine will not read what was loaded.
        Right bytes of a token that no engine of the run has computed can only be another run's:
        then load.foreign comes first.
        """
        grant.open = False
        wrong: set[int] = set()
        partial: set[int] = set()
        foreign: set[int] = set()
        reused: set[int] = set()
        length = min(grant.end, len(chain.ids)) - grant.start
        unknown = {
            index
            for index in range(max(0, length))
            if chain.ids[grant.start + index] not in self.registry.origins
        }
        if length > 0:
            ids = chain.array(grant.start, grant.start + length)
            wanted = Content.of(self.cache.book, ids)
            for layer in range(len(self.cache.tensors)):
                slots = grant.slots[layer, :length]
                there = np.nonzero(grant.written[layer, :length] & (slots >= 0))[0]
                bad = self.cache.mismatches(layer, slots[there], wanted, there)
                if unknown:
                    foreign |= unknown.intersection(np.delete(there, bad).tolist())
                for index in (int(there[i]) for i in bad):
                    held = self._diagnosed(layer, chain, grant.start + index, int(slots[index]))
                    if held.found == "not_yet_loaded":
                        grant.written[layer, index] = False
                        partial.add(grant.start + index)
                    else:
                        wrong.add(grant.start + index)
                    if held.found in ("other_prefix", "old_position"):
                        reused.add(grant.start + index)
        if foreign:
            self.trace.emit(
                "load.foreign",
                req=grant.req,
                generation=grant.generation,
                transfer=grant.transfer,
                tokens=len(foreign),
            )
        if reused:
            self.trace.emit(
                "load.blended",
                req=grant.req,
                generation=grant.generation,
                transfer=grant.transfer,
                reused=len(reused),
                again=len(chain.ids) - min(reused) - len(reused),
            )
        missing = grant.missing()
        failed = self.failed_blocks | grant.failed
        given_up = grant.given_up or grant.req in self.failed_reqs
        reported = given_up or grant.covered_by(failed)
        event = self.trace.emit(
            "load.due",
            req=grant.req,
            generation=grant.generation,
            transfer=grant.transfer,
            granted=grant.end - grant.start,
            missing=missing,
            partial=sorted(partial),
            wrong=sorted(wrong),
            reported_failed=reported,
            reported=grant.named(failed) if missing else [],
            promised=grant.req in self.promised,
            undisturbed=self.undisturbed,
            is_async=grant.is_async,
            needed=needed,
            local=grant.start,
            by_group=grant.missing_by_group(),
            layers=grant.lacking_layers(),
            early_reads=self.device.early_reads,
            bytes=self._bytes(grant.received),
            most_bytes=self._bytes(grant.received_in_blocks),
        )
        if missing and needed and not reported:
            grant.due = event
            grant.chain = chain
            self.overdue.append(grant)
