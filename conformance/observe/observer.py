# SPDX-License-Identifier: Apache-2.0
"""Follows the metadata of each step from build_connector_meta to the worker: is it what was built, and is it left alone afterwards?

A request that stands in its own way: its load failed, and vLLM still keeps blocks free for it.

Turns what the scheduler and its connector half did into events (lookup, alloc, req.scheduled, req.state, hold, release, ...).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvconform.compat.vllm_api import KVConnectorMetadata, RequestStatus
from kvconform.contract.trace import Event, Trace
from kvconform.kv.oracle import Grant, Oracle
from kvconform.kv.provenance import ROOT, Memory, extend
from kvconform.observe.call import Call
from kvconform.observe.digest import digest, pickle_round_trip, scheduler_output_digest
from kvconform.observe.probe import Probe

MULTI = "MultiKVConnectorMetadata"


class MetadataObserver:
    """Emits meta.built, meta.bound and meta.cleared. Changes nothing in the engine."""

    trace: Trace
    built: dict[int, str]
    """Digest of each step's metadata, by the id of the object, until the step is executed."""
    current_digest: str | None = None
    arrived: str | None = None
    arrived_in = -1  # step
    latest: Any = None
    handed: tuple[Any, str | None] | None = None
    """The metadata of the last step and its digest when the worker was done with it."""
    refilled = False
    offered: dict[tuple[str, int, int], int]
    """Block of each boundary state that was offered, by request, group and tokens."""
    private: tuple[str, ...] = ()
    """Where the run keeps its files, and what was made of that: metadata may hold it, and the trace must not depend on it."""

    def _digest(self, meta: Any) -> str:
        return digest(meta, self.private)

    def _building(self, call: Call) -> None:
        output = call.arg(0, "scheduler_output")
        call.scratch["digest"] = scheduler_output_digest(output)
        state: Any = getattr(output, "kv_connector_block_state", None)
        offers = {} if state is None else getattr(state, "boundary_state_offloads", {})
        for req, states in offers.items():
            for group, block, tokens in states:
                table = (state.get_block_ids(req) or [()] * (group + 1))[group]
                key = (req, group, tokens)
                self.trace.emit(
                    "state.offered",
                    req=req,
                    group=group,
                    block=block,
                    tokens=tokens,
                    in_table=block in table,
                    again=self.offered.get(key) == block,
                )
                self.offered[key] = block

    def _built(self, call: Call) -> None:
        if call.error is not None:
            return
        output = call.arg(0, "scheduler_output")
        meta = call.result
        reason = None if meta is None else pickle_round_trip(meta)[1]
        state = getattr(output, "kv_connector_block_state", None)
        kept = (
            state is not None and any(v is state for v in vars(meta).values())
            if meta is not None and hasattr(meta, "__dict__")
            else False
        )
        if self.handed is not None and self._digest(self.handed[0]) != self.handed[1]:
            self.refilled = True  # the step before has not been given this object back: under a deep queue it may still read it
        self.handed, self.latest = None, meta
        mark = self._digest(meta)
        self.built[id(meta)] = mark
        mutated = scheduler_output_digest(output) != call.scratch["digest"]
        if call.result_event is not None:
            self.trace.amend(call.result_event, mutated_args=mutated)
        self.trace.emit(
            "meta.built",
            ok=isinstance(meta, KVConnectorMetadata),
            pickles=meta is not None and reason is None,
            pickle_error=reason,
            digest=mark,
            output_mutated=mutated,
            none=meta is None,
            block_state_kept=kept,
            of_step=self.trace.step,
        )

    def take_digest(self, meta: Any) -> str | None:
        """The digest of a step's metadata when it was built; of the connector's own part where it is the child of a MultiConnector."""
        parts = meta.metadata if type(meta).__name__ == MULTI else (meta,)
        return next((self.built.pop(id(part)) for part in parts if id(part) in self.built), None)

    def _arrived(self, call: Call) -> None:
        # First sight of the worker: a connector may consume its own copy from then on. Until 0.22 the hooks came in another order.
        metadata = call.args[0] if call.args else next(iter(call.kwargs.values()), None)
        if not isinstance(metadata, set) and self.arrived_in != self.trace.step:
            whole = (
                type(metadata).__name__ == MULTI
            )  # shown to a stand-in for the worker half, which is not the child of anything
            self.arrived, self.arrived_in = (
                None if whole else self._digest(metadata),
                self.trace.step,
            )

    def _bound(self, call: Call) -> None:
        built, mark = self.current_digest, self.arrived
        same = built is None or mark is None or built == mark
        self.trace.emit("meta.bound", digest=mark, same_as_built=same and not self.refilled)
        self.refilled = False

    def _cleared(self, call: Call) -> None:
        self.handed = self.latest, self._digest(self.latest)
        self.trace.emit("meta.cleared", digest=None, same_as_built=True)


def starved(scheduler: Any, request: Any, end: int, block_size: int) -> bool:
    """Whether an asynchronous load of positions up to `end` fits, but for what the engine has reserved for this request's failed load.

    vLLM's scheduler leaves a request whose load failed completely among the prefills in flight. Reads only; False where the engine
    reserves nothing, has several KV cache groups, or lacks blocks for another reason.
    """
    inflight = getattr(scheduler, "_inflight_prefills", ())
    manager = scheduler.kv_cache_manager
    if (
        request not in inflight
        or any(tables := manager.get_block_ids(request.request_id))
        or len(tables) != 1
    ):
        return False
    remaining = scheduler._request_remaining_blocks
    verifying = getattr(scheduler, "_spec_decode_step_blocks", 0)
    verifying = verifying() if callable(verifying) else verifying  # a method until 0.31
    others = sum(remaining(other) for other in inflight if other is not request) + verifying
    spare = manager.block_pool.get_num_free_blocks() - others - -(-end // block_size)
    return bool(0 <= spare < remaining(request))


_WAITING = {RequestStatus.WAITING: "waiting", RequestStatus.PREEMPTED: "preempted"}


class Observer(MetadataObserver):
    """Watches one engine. `generation(req_id)` and `identity(req_id)` come from the harness; nothing here changes engine state."""

    def __init__(
        self,
        trace: Trace,
        probe: Probe,
        oracle: Oracle,
        memory: Memory,
        scheduler: Any,
        generation: Callable[[str], int],
        identity: Callable[[str], Any],
        valid_end: Callable[[str], int],
        held_contents: Callable[[], set[int]],
    ) -> None:
        self.trace, self.probe, self.oracle, self.memory, self.scheduler = (
            trace,
            probe,
            oracle,
            memory,
            scheduler,
        )
        self.generation, self.identity, self.valid_end, self.held_contents = (
            generation,
            identity,
            valid_end,
            held_contents,
        )
        self.lookups: dict[tuple[str, int], dict[str, Any]] = {}
        self.failed_claims: dict[tuple[str, int, int], int] = {}
        self.transfers = 0
        self.held: dict[str, set[str]] = {}
        self.reported: dict[
            str, set[str]
        ] = {}  # since the engine began to wait, by request: directions
        self.both: set[str] = (
            set()
        )  # requests whose load and send the engine waits for at once, or did when the first was reported
        self.activity = (
            0  # counts whatever may make the store smaller: forward passes, failed loads, resets
        )
        self.reset_seen = False
        self.outage = False  # what a lookup finds may be gone at any time, and we would not know
        self.last_so_c: dict[tuple[str, int], int] = {}
        self.scheduled: dict[str, Event] = {}
        self.on_lookup: Callable[[Any, Event], None] | None = None
        self.built: dict[int, str] = {}
        self.offered = {}
        for hook, listener in (
            ("get_num_new_matched_tokens", self._lookup),
            ("update_state_after_alloc", self._alloc),
            ("request_finished", self._finished),
            ("request_finished_all_groups", self._finished),
            ("build_connector_meta", self._built),
            ("get_transfer_results", self._reported),
            ("get_block_ids_with_load_errors", self._errors),
            ("bind_connector_metadata", self._bound),
            ("clear_connector_metadata", self._cleared),
            ("reset_cache", self._reset),
        ):
            probe.on(hook, after=listener)
        probe.on("build_connector_meta", before=self._building)
        for hook in ("handle_preemptions", "bind_connector_metadata"):
            probe.on(hook, before=self._arrived)
        probe.on("reset_cache", before=lambda call: self._cache_reset("called", None))
        self.failed: list[Event] = []
        self.errors: set[int] = set()

    # -- lookups and allocations -----------------------------------------------------------------------------------------------
    def _prefix(self, request: Any) -> tuple[int, int, int]:
        """Longest prefix of the request computed (ever, since the last reset, ever under whatever identity)."""
        identity, chain, plain = self.identity(request.request_id), ROOT, ROOT
        ever = since = anyhow = 0
        for position, token in enumerate(request.all_token_ids):
            chain, plain = extend(chain, token, identity.extra(position)), extend(plain, token)
            if plain not in self.memory.plain:
                break
            anyhow += 1
            ever += ever == position and chain in self.memory.ever
            since += since == position and chain in self.memory.since_reset
        return ever, since, anyhow

    def _lookup(self, call: Call) -> None:
        if call.error is not None:
            return
        request, local = call.arg(0, "request"), call.arg(1, "num_computed_tokens")
        tokens, is_async, type_ok = _answer(call.result)
        key = (request.request_id, self.generation(request.request_id))
        previous = self.lookups.get(key)
        ever, since, anyhow = self._prefix(request)
        end = local + tokens if isinstance(tokens, int) else 0
        event = self.trace.emit(
            "lookup",
            req=key[0],
            generation=key[1],
            local=local,
            tokens=tokens,
            is_async=is_async,
            type_ok=type_ok,
            known=request.num_tokens,
            status=_WAITING.get(request.status, request.status.name.lower()),
            repeat=previous is not None and not previous["allocated"],
            prev_tokens=None if previous is None else previous["tokens"],
            store_may_have_shrunk=self.outage
            or previous is None
            or previous["activity"] != self.activity
            or previous["local"] != local,
            same_claim_failed=self.failed_claims.get(
                (*key, tokens if isinstance(tokens, int) else -1), 0
            ),
            ever_computed=ever,
            ever_plain=anyhow,
            computed_before_reset=max(0, min(end, ever) - max(since, local))
            if self.reset_seen and end > local
            else 0,
            after_reset=self.reset_seen,
            computed=request.num_computed_tokens,
            starved=is_async
            and end > local
            and starved(self.scheduler, request, int(end), self.oracle.cache.block_size),
        )
        self.lookups[key] = {
            "tokens": tokens,
            "local": local,
            "allocated": False,
            "activity": self.activity,
            "is_async": is_async,
        }
        if self.on_lookup:
            self.on_lookup(request, event)

    def _alloc(self, call: Call) -> None:
        if call.error is not None:
            return
        request, blocks, external = (
            call.arg(0, "request"),
            call.arg(1, "blocks"),
            call.arg(2, "num_external_tokens"),
        )
        key = (request.request_id, self.generation(request.request_id))
        last = self.lookups.get(key)
        tables = [list(table) for table in blocks.get_block_ids()]
        table = tables[0]
        second = last is None or last["allocated"]
        local = request.num_computed_tokens if second or last is None else last["local"]
        is_async = bool(last and last["is_async"]) and external > 0
        transfer = None
        if external > 0:
            self.transfers += 1
            transfer = f"{key[0]}#{key[1]}.{self.transfers}"
        if last:
            last["allocated"] = True
        self.offered = {
            at: block for at, block in self.offered.items() if at[0] != key[0]
        }  # it begins anew
        if self.reset_seen and not second:
            self._still_local(request, local)
        size = self.oracle.cache.block_size
        self.trace.emit(
            "alloc",
            req=key[0],
            generation=key[1],
            transfer=transfer,
            local=local,
            claimed=last["tokens"] if last and not second else None,
            external=external,
            is_async=is_async,
            blocks=table,
            shared_blocks=self._held_before(request, local // size),
            second_call=second,
            computed=request.num_computed_tokens,
            tables=self._tables(tables),
        )
        if transfer is not None:
            grant = Grant(
                transfer,
                key[0],
                key[1],
                local,
                local + external,
                is_async,
                tables,
                self.oracle.cache.groups,
                self.oracle.cache.share,
            )
            grant.started_step = self.trace.step
            self.oracle.grants.append(grant)
            for oracle in self.others:  # each rank is owed its own shard
                oracle.grants.append(
                    replace(
                        grant,
                        late=set(),
                        failed=set(),
                        groups=oracle.cache.groups,
                        share=oracle.cache.share,
                    )
                )
        if is_async:
            self.hold(key[0], "recv", transfer, "async load")

    def _held_before(self, request: Any, count: int) -> list[int]:
        """The first `count` blocks that the engine holds for a request: its local hit."""
        return list(self.scheduler.kv_cache_manager.get_block_ids(request.request_id)[0][:count])

    def _tables(self, tables: Iterable[Sequence[int]]) -> list[list[Any]]:
        """Per group: tokens per block, tokens in the window (0: unlimited), block ids."""
        return [
            [g.block_size, g.window or 0, list(table)]
            for g, table in zip(self.oracle.cache.groups, tables, strict=False)
        ]

    def _still_local(self, request: Any, local: int) -> None:
        """What the engine's own cache kept over a reset of the connector's may be saved again."""
        identity, chain = self.identity(request.request_id), ROOT
        for position in range(local):
            chain = extend(chain, request.all_token_ids[position], identity.extra(position))
            self.memory.since_reset.add(chain)

    # -- holds -----------------------------------------------------------------------------------------------------------------
    def hold(self, req: str, direction: str, transfer: str | None, cause: str) -> None:
        """The engine waits for a completion report of this request."""
        held = self.held.setdefault(req, set())
        if not held:
            self.reported[req] = set()
            self.both.discard(req)
        held.add(direction)
        if len(held) > 1:
            self.both.add(req)
        self.trace.emit(
            "hold",
            req=req,
            generation=self.generation(req),
            direction=direction,
            transfer=transfer,
            cause=cause,
        )

    def release(self, req: str, direction: str, cause: str) -> None:
        """The engine took note of a completion report."""
        if direction in self.held.get(req, set()):
            self.held[req].discard(direction)
            self.trace.emit(
                "release",
                req=req,
                generation=self.generation(req),
                direction=direction,
                transfer=None,
                cause=cause,
            )

    def _finished(self, call: Call) -> None:
        request = call.arg(0, "request")
        blocks = call.arg(1, "block_ids")
        tables = list(blocks) if isinstance(blocks, tuple) else [list(blocks or [])]
        delayed = (
            call.error is None
            and isinstance(call.result, tuple)
            and bool(call.result)
            and call.result[0] is True
        )
        final = min(self.valid_end(request.request_id), request.num_tokens)
        self.trace.emit(
            "req.finished",
            req=request.request_id,
            generation=self.generation(request.request_id),
            status=request.status.name,
            computed=request.num_computed_tokens,
            placeholders=request.num_output_placeholders,
            known=request.num_tokens,
            in_flight=request.num_in_flight_tokens,
            blocks=list(tables[0]) if tables else [],
            delayed=delayed,
            final=final,
            tables=self._tables(tables),
            hook=call.hook,
        )
        if delayed:
            self.hold(request.request_id, "send", None, "request_finished returned True")

    # -- worker reports --------------------------------------------------------------------------------------------------------
    def _reported(self, call: Call) -> None:
        if not call.legal:
            return
        sending, recving = call.result.finished_sending or (), call.result.finished_recving or ()
        failed = set(getattr(call.result, "failed_recving", ()) or ())
        for direction, ids in (("send", sending), ("recv", recving)):
            for req in sorted(ids):
                grant = (
                    (self._open_async(req) or self._last_async(req))
                    if direction == "recv"
                    else None
                )
                seen = self.reported.setdefault(req, set())
                self.trace.emit(
                    "transfer.reported",
                    req=req,
                    generation=self.generation(req),
                    transfer=grant.transfer if grant else None,
                    rank=0,
                    direction=direction,
                    held=direction in self.held.get(req, set()),
                    second=req in self.both and bool(seen - {direction}),
                )
                seen.add(direction)
        for req in sorted(failed):
            grant = self._open_async(req)
            self._fail(req, grant, sorted(grant.blocks) if grant else [], [])
            if grant:
                grant.given_up = True
        self.oracle.failed_reqs = {
            req for req in failed if self._open_async(req)
        }  # of a synchronous load the engine hears nothing here
        self.recved = list(recving)

    def _open_async(self, req: str) -> Grant | None:
        return next((g for g in self.oracle.open_grants() if g.req == req and g.is_async), None)

    def _last_async(self, req: str) -> Grant | None:
        generation = self.generation(req)
        return next(
            (g for g in reversed(self.oracle.grants) if g.key == (req, generation) and g.is_async),
            None,
        )

    def _fail(
        self, req: str | None, grant: Grant | None, blocks: list[int], outside: list[int]
    ) -> None:
        event = self.trace.emit(
            "transfer.failed",
            req=req,
            transfer=grant.transfer if grant else None,
            rank=0,
            blocks=blocks,
            outside_grant=outside,
            groups=len(self.oracle.cache.groups),
            is_async=bool(grant and grant.is_async),
        )
        self.failed.append(event)
        self.activity += 1  # what a load did not find is gone for others, too
        if grant and not grant.failed and not grant.given_up:  # the first report of it
            key = (grant.req, grant.generation, grant.end - grant.start)
            self.failed_claims[key] = self.failed_claims.get(key, 0) + 1

    def _errors(self, call: Call) -> None:
        if not call.legal:
            return
        self.errors = set(call.result or ())
        self.oracle.failed_blocks = self.errors
        if self.errors and len(self.oracle.cache.groups) > 1:  # whose they are, nobody can tell
            self._fail(None, None, sorted(self.errors), [])
            return
        left = set(self.errors)
        for grant in self.oracle.open_grants():
            hit = self.errors & grant.blocks
            if hit and grant.req not in self.oracle.failed_reqs:
                self._fail(grant.req, grant, sorted(hit), [])
                grant.failed |= hit
            left -= hit
        if left:
            self._fail(None, None, sorted(self.errors), sorted(left))

    others: Sequence[Oracle] = ()
    """Oracles of the other ranks."""
    recved: list[str] = []

    # -- reset -----------------------------------------------------------------------------------------------------------------
    def _cache_reset(self, phase: str, returned: Any) -> None:
        self.trace.emit(
            "cache.reset",
            phase=phase,
            returned=returned,
            running=bool(self.scheduler.running),
            connector=True,
        )

    def _reset(self, call: Call) -> None:
        if call.error is None:
            self._cache_reset("returned", call.result)
            if call.result is not False:
                self.memory.reset(self.held_contents())
                self.reset_seen = True
                self.activity += 1


def emit_layer(trace: Trace, call: Call, registered: Mapping[str, Any]) -> None:
    """Emit layer.wait or layer.save for a call of that hook. `registered`: KV tensors by layer name."""
    name = call.arg(0, "layer_name")
    bound = bool(call.event and call.event["bound"])
    if call.hook == "wait_for_layer_load":
        trace.emit("layer.wait", layer=name, bound=bound)
        return
    tensor, given = registered.get(name), call.arg(1, "kv_layer")
    whole = tensor is None or (
        given.data_ptr() == tensor.data_ptr() and given.shape == tensor.shape
    )
    trace.emit("layer.save", layer=name, bound=bound, whole=whole)


def _answer(result: Any) -> tuple[Any, bool, bool]:
    """(tokens, is_async, type_ok) of a lookup's answer; a malformed answer gives (None, False, False)."""
    if not isinstance(result, tuple) or len(result) != 2:
        return None, False, False
    tokens, is_async = result
    ok = (tokens is None or type(tokens) is int) and isinstance(is_async, bool)
    if not (tokens is None or isinstance(tokens, (int, float))) or isinstance(tokens, bool):
        return None, False, False
    return tokens, bool(is_async), ok
