# SPDX-License-Identifier: Apache-2.0
"""Evaluation of what a case expects of its run, and of how much stored content comes back."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from kvconform.compat.vllm_api import COUNTS_IN_FLIGHT
from kvconform.contract.events import is_kill, is_restart
from kvconform.contract.expectations import Expectation
from kvconform.contract.steps import DISK_FULL
from kvconform.contract.trace import Event
from kvconform.run.forbidden import may_be_stored
from kvconform.run.promises import ROOM, crowd_of
from kvconform.run.records import RunState

_STATE: dict[str, Callable[[Any], Any]] = {
    "computed": lambda request: request.num_computed_tokens,
    "placeholders": lambda request: request.num_output_placeholders,
    "tokens": lambda request: request.num_tokens,
    "in_flight": lambda request: request.num_in_flight_tokens,
    "real": lambda request: request.num_computed_tokens - request.num_output_placeholders,
    "status": lambda request: request.status.name.lower(),
}
_FINISH = {
    "length": "FINISHED_LENGTH_CAPPED",
    "stop": "FINISHED_STOPPED",
    "abort": "FINISHED_ABORTED",
    "error": "FINISHED_ERROR",
    "repetition": "FINISHED_REPETITION",
}


class Expectations:
    """Expectations of one case. `check` emits case.expectation; `unmet` only returns sentences."""

    def __init__(self, state: RunState, free_blocks: Callable[[], int]) -> None:
        self.state = state
        self._count_free_blocks = free_blocks
        self._checks: dict[str, Callable[[Any], str | None]] = {
            "state": self._state,
            "rows": self._rows,
            "outputs": self._outputs,
            "preempted": self._preempted,
            "resumed": self._resumed,
            "aborted": self._aborted,
            "chunks": self._chunks,
            "loads": self._loads,
            "rejected": self._rejected,
            "external": self._external,
            "failed-loads": self._failed_loads,
            "waits-after-load": self._waits_after_load,
            "repeated-lookups": self._repeated_lookups,
            "local-hits": self._local_hits,
            "copies": self._copies,
            "given-up": self._given_up,
            "killed": self._killed,
            "free_blocks": self._free_blocks,
        }

    @property
    def _events(self) -> list[Event]:
        return self.state.trace.events

    def check(self, expectation: Expectation) -> None:
        """Evaluate one expectation and emit the result; skip it if its guard does not hold."""
        if not self._applies(expectation):
            return
        problem = self._problem(expectation)
        self.state.trace.emit(
            "case.expectation",
            what=expectation.what,
            holds=problem is None,
            detail=problem or "",
        )

    def unmet(self, provokes: Iterable[Expectation]) -> list[str]:
        """Return the stimuli that did not happen, one sentence each."""
        applicable = (
            expectation
            for expectation in provokes
            if self._applies(expectation) and self._can_happen(expectation)
        )
        problems = ((each.what, self._problem(each)) for each in applicable)
        return [
            problem if problem.startswith(what) else f"{what}: {problem}"
            for what, problem in problems
            if problem is not None
        ]

    def _can_happen(self, expectation: Expectation) -> bool:
        """Return whether the connector can bring it about: one engine loads only what it stored."""
        if expectation.what not in ("loads", "external", "failed-loads"):
            return True
        caps, engines = self.state.caps, self.state.variant.case.config.engines
        loaded = any(e["kind"] == "alloc" and e["external"] > 0 for e in self._events)
        return bool(loaded or caps["store"] or caps["synthesises_kv"] or engines)

    def _applies(self, expectation: Expectation) -> bool:
        # KV that is made up is no prompt's: what is sampled from it, and when, is not foreseen.
        if expectation.what in ("outputs", "rejected") and self.state.caps["synthesises_kv"]:
            return False
        arg = expectation.arg
        # Only a load that failed ends a request with an error; a connector may load nothing for it.
        if getattr(arg, "finish", None) == "error" and not self._has_loads(arg.req):
            return False
        # A lookup that is not decided yet legitimately shifts every step after it.
        if expectation.what in ("state", "rows") and self._undecided():
            return False
        start = next(e for e in self._events if e["kind"] == "run.start")
        return bool(expectation.applies(self.state.caps, start))

    def _undecided(self) -> bool:
        return any(e["kind"] == "lookup" and e["tokens"] is None for e in self._events)

    def _problem(self, expectation: Expectation) -> str | None:
        """Return what is wrong, in words, or None."""
        arg = expectation.at(self.state.variant.scheduling)
        return self._checks[expectation.what](arg)

    def _of(self, kind: str, name: str | None, **where: Any) -> list[Event]:
        """Return the events of a kind about a case's request (None: any), with these fields."""
        events = [e for e in self._events if e["kind"] == kind]
        if name is not None:
            if name not in self.state.ids:
                return []
            req, generation = self.state.incarnation(name)
            events = [
                e
                for e in events
                if e.get("req") == req and e.get("generation", generation) == generation
            ]
        return [e for e in events if all(e[field] == value for field, value in where.items())]

    # -- one method for each kind of expectation: returns what is wrong, in words, or None

    def _state(self, arg: Any) -> str | None:
        request = self.state.requests[arg.req].live
        if request is None:
            return f"request {arg.req} does not exist any more"
        for field, read in _STATE.items():
            want = getattr(arg, field)
            uncounted = self.state.variant.engine == "vllm" and not COUNTS_IN_FLIGHT
            if want is None or (field == "in_flight" and uncounted):
                continue
            have = read(request)
            wanted = want.lower() if isinstance(want, str) else want
            if have != wanted:
                return f"{field} of {arg.req} is {have}, expected {want}"
        return None

    def _rows(self, arg: Any) -> str | None:
        have = [[e[field] for field in arg.fields] for e in self._of("req.scheduled", arg.req)]
        if have == arg.values:
            return None
        for number, (got, want) in enumerate(zip(have, arg.values, strict=False), 1):
            if got != want:
                return f"row {number} of {arg.req} {list(arg.fields)} is {got}, expected {want}"
        return f"{arg.req} was scheduled {len(have)} times, expected {len(arg.values)}"

    def _outputs(self, arg: Any) -> str | None:
        tokens = self._output(arg.req)
        if arg.count is not None and len(tokens) != arg.count:
            return f"{arg.req} produced {len(tokens)} tokens, expected {arg.count}"
        if arg.finish is not None:
            last = self._of("req.finished", arg.req)
            have = last[-1]["status"] if last else "not finished"
            if have != _FINISH[arg.finish]:
                return f"{arg.req} ended as {have}, expected {_FINISH[arg.finish]}"
        if arg.same_as is not None and tokens != self._output(arg.same_as):
            other = self._output(arg.same_as)
            return f"{arg.req} produced {tokens}, {arg.same_as} produced {other}"
        if arg.clean is not None:
            clean = all(e["clean"] for e in self._of("sample", arg.req))
            if clean != arg.clean:
                return f"tokens of {arg.req} were sampled from wrong KV"
        return None

    def _output(self, name: str) -> list[int]:
        if self.state.variant.case.config.pooling:
            return [e["token"] for e in self._of("sample", name)]
        snapshot = self.state.requests[name]
        return list(snapshot.all_token_ids[snapshot.num_prompt_tokens :])

    @staticmethod
    def _bounded(arg: Any, count: int, what: str) -> str | None:
        """Compare a count with `equal` or `at_least`; without either it must not be zero."""
        who = f" of {arg.req}" if arg.req else ""
        if arg.equal is not None and count != arg.equal:
            return f"{what}{who}: {count}, expected {arg.equal}"
        least = arg.at_least
        if least is None and arg.equal is None:
            least = 1
        if least is not None and count < least:
            return f"{what}{who}: {count}, expected at least {least}"
        return None

    def _preempted(self, arg: Any) -> str | None:
        events = self._of("req.state", arg.req, to="PREEMPTED", reason="preempt")
        return self._bounded(arg, len(events), "preemptions")

    def _killed(self, wanted: bool) -> str | None:
        killed = any(map(is_kill, self._events))
        was = "was" if killed else "was not"
        return None if killed == wanted else f"the process {was} killed in the midst of a save"

    def _resumed(self, arg: Any) -> str | None:
        events = self._of("req.scheduled", arg.req)
        resumed = [e for e in events if e["listed_as"].startswith("resumed")]
        return self._bounded(arg, len(resumed), "resumptions")

    def _aborted(self, arg: Any) -> str | None:
        events = self._of("req.finished", arg.req, status="FINISHED_ABORTED")
        return self._bounded(arg, len(events), "aborts")

    def _chunks(self, arg: Any) -> str | None:
        events = self._of("req.scheduled", arg.req)
        chunks = 0
        for event in events:
            chunks += event["output_computed"] < self._prompt_len(event["req"], event["generation"])
        return self._bounded(arg, chunks, "prefill chunks")

    def _prompt_len(self, req: str, generation: int) -> int:
        names = [name for name in self.state.adds if self.state.ids[name] == req]
        return len(self.state.prompts[names[generation]])

    def _has_loads(self, name: str) -> bool:
        return any(e["external"] > 0 for e in self._of("alloc", name))

    def _loads(self, arg: Any) -> str | None:
        loads = sum(e["external"] > 0 for e in self._of("alloc", arg.req))
        return self._bounded(arg, loads, "loads")

    def _rejected(self, arg: Any) -> str | None:
        rejected = sum(e["rejected"] for e in self._of("kv.computed", arg.req))
        return self._bounded(arg, rejected, "rejected drafts")

    def _external(self, arg: Any) -> str | None:
        tokens = sum(e["external"] for e in self._of("alloc", arg.req))
        return self._bounded(arg, tokens, "external tokens")

    def _failed_loads(self, arg: Any) -> str | None:
        events = [e for e in self._events if e["kind"] == "transfer.failed"]
        if arg.req is not None:  # the event knows no generation
            events = [e for e in events if e["req"] == self.state.ids.get(arg.req)]
        return self._bounded(arg, len(events), "failed loads")

    def _waits_after_load(self, arg: Any) -> str | None:
        waiting: set[tuple[str, int]] = set()
        steps = 0
        for e in self._events:
            if e["kind"] == "release" and e["direction"] == "recv" and e["cause"] == "reported":
                waiting.add((e["req"], e["generation"]))
            elif e["kind"] == "req.state" and e["to"] not in ("WAITING", "PREEMPTED"):
                waiting.discard((e["req"], e["generation"]))
            elif e["kind"] == "step.scheduled":
                named = None if arg.req is None else self.state.incarnation(arg.req)
                steps += len(waiting) if named is None else named in waiting
        return self._bounded(arg, steps, "steps between a load and its use")

    def _repeated_lookups(self, arg: Any) -> str | None:
        return self._bounded(arg, len(self._of("lookup", arg.req, repeat=True)), "repeated lookups")

    def _local_hits(self, arg: Any) -> str | None:
        events = self._of("alloc", arg.req, second_call=False)
        return self._bounded(arg, sum(e["local"] for e in events), "local hits")

    def _copies(self, arg: Any) -> str | None:
        events = [e for e in self._events if e["kind"] == "block" and e["op"] == "copy"]
        if arg.req is not None:  # the event knows no generation
            events = [e for e in events if e["owner"] == self.state.ids.get(arg.req)]
        return self._bounded(arg, len(events), "copied blocks")

    def _given_up(self, arg: Any) -> str | None:
        sent = self._of("transfer.reported", arg.req, direction="send")
        asked = [e["seq"] for e in self._of("pair.lookup", None) if e["of"] is not None]
        early = [e for e in sent if not asked or e["seq"] < asked[0]]
        return self._bounded(arg, len(early), "releases before a consumer came")

    def _free_blocks(self, arg: Any) -> str | None:
        have = self._count_free_blocks()
        return None if have == arg else f"{have} free blocks, expected {arg}"


class Reloads:
    """Check of promises: emits profile.expectation at lookups of repeated content.

    That is at a request's first answered lookup, and at the first one after each preemption: a
    resumed request gets what a new one gets. The ids of requests whose load must arrive, as nothing
    excuses it, are added to `to_arrive`.
    """

    def __init__(self, state: RunState, to_arrive: set[str]) -> None:
        self.state = state
        self.to_arrive = to_arrive
        steps = state.variant.case.steps
        self._undisturbed = not any(step.op in ("fail-load", "damage") for step in steps)

    def looked_up(self, request: Any, event: Event) -> None:
        """Handle a lookup event. Counts the lookup in `state.reloads` if it was answered."""
        state = self.state
        reload = state.reloads.get(request.request_id)
        if reload is None or event["tokens"] is None or state.promises is None:
            return
        if request.num_preemptions < reload.due:
            return
        reload.due = request.num_preemptions + 1
        source = reload.of
        self.to_arrive.discard(request.request_id)
        if self._is_of_an_unlike_engine(source, event):
            return
        if getattr(request, "skip_reading_prefix_cache", False):
            return  # vLLM drops its hits, so it is promised nothing
        if not self._is_promised(source):
            self._repaired(source, request, event)
            return
        promised, found = self._promised(source, request, event)
        if self._undisturbed and state.promises.declared and found >= promised > 0:
            self.to_arrive.add(request.request_id)
        state.trace.emit(
            "profile.expectation",
            what=state.caps["saves"],
            req=request.request_id,
            of=source,
            resumed=request.num_preemptions > 0,
            declared=state.promises.declared,
            promised=promised,
            reloadable=found,
            restarted=self._restarted(source),
            across=self._is_of_another_engine(source, event),
        )

    def _is_promised(self, source: str) -> bool:
        """Return whether the connector can promise anything of the content of `source`."""
        if self._broke(source) or self._may_be_gone(source):
            return False
        if any(self.state.start_alike(name, source) for name in self.state.cleared):
            return False
        add, promises = self.state.adds[source], self.state.promises
        if not may_be_stored(add, self.state.caps):
            return False
        # A connector may store by priority, or as the client asks; baseline runs have neither.
        return bool(promises and promises.declared) or not (add.priority or add.params)

    def _repaired(self, source: str, request: Any, event: Event) -> None:
        """Emit profile.repaired if `source` computed again what a load of its own had lost."""
        state = self.state
        ended = [
            e for e in self._of_source("req.finished", source) if e["status"] != "FINISHED_ERROR"
        ]
        failed = [e for e in state.trace.events if e["kind"] == "transfer.failed"]
        own = [e for e in failed if e["req"] == state.ids[source]]
        over = bool(ended and own) and failed[-1]["seq"] < ended[-1]["seq"]
        if not over or not self._is_declared or self._may_be_gone(source) or self._is_failing():
            return
        promised, found = self._promised(source, request, event)
        state.trace.emit(
            "profile.repaired",
            req=request.request_id,
            of=source,
            promised=promised,
            reloadable=found,
        )

    def _is_failing(self) -> bool:
        """Return whether a load is under way that fails; the connector may know of it already."""
        under_way: set[str] = set()
        for e in self.state.trace.events:
            if e["kind"] == "alloc" and e["external"]:
                under_way.add(e["req"])
            elif e["kind"] == "load.due":
                under_way.discard(e["req"])
        return not under_way.isdisjoint(self.state.failing)

    def _may_be_gone(self, source: str) -> bool:
        """Return whether some KV of `source` was reset, or met a full disk."""
        return self._outlived(source) or self._found_no_room(source)

    def _found_no_room(self, source: str) -> bool:
        """Return whether the disk got full before `source` ended."""
        damage = [e for e in self.state.trace.events if e["kind"] == "store.damaged"]
        full = next((e["seq"] for e in damage if e["what"] == DISK_FULL), None)
        ends = [e["seq"] for e in self._of_source("req.finished", source)]
        return full is not None and (not ends or full < ends[0])

    @property
    def _is_declared(self) -> bool:
        promises = self.state.promises
        return promises is not None and promises.declared

    def _of_source(self, kind: str, source: str) -> list[Event]:
        key = self.state.incarnation(source)
        events = (e for e in self.state.trace.events if e["kind"] == kind)
        return [e for e in events if (e["req"], e["generation"]) == key]

    def _promised(self, source: str, request: Any, event: Event) -> tuple[int, int]:
        """Return (tokens promised, tokens found) at a lookup of content that `source` computed."""
        state = self.state
        config = state.variant.case.config
        assert state.promises is not None
        found = event["local"] + event["tokens"]
        promise = functools.partial(
            state.promises.promised,
            state.requests[source],
            state.prompts[source],
            request,
            state.variant.of_engine(event.get("on")).block_size,
            self._final(source),
            identities=(state.identities[source], state.info(request.request_id).identity),
            groups=tuple(config.groups) if config.groups != ["latent"] else (),
            window=config.window,
            caching=config.prefix_caching,
            layout=config.layout,
            prefix_match_unit=config.prefix_match_unit,
            context_parallel=config.context_parallel,
            pooling=config.pooling,
            found=found,
        )
        promised = promise()
        # A best-effort connector may save less of a request when it has much to do.
        if found < promised and not state.promises.declared:
            resumed = request.num_preemptions > 0
            crowd = crowd_of(state.trace.events, state.incarnation(source), event, resumed)
            promised = min(promised, promise(crowd=crowd))
        # A connector may save only what is about to be evicted.
        if found < promised and not state.promises.declared:
            promised = min(promised, promise(room=ROOM))
        return promised, found

    def _is_of_another_engine(self, source: str, lookup: Event) -> bool:
        """Return whether another engine of the run has computed `source`."""
        mine = self._of_source("req.finished", source)
        return any(e.get("on") != lookup.get("on") for e in mine)

    def _is_of_an_unlike_engine(self, source: str, lookup: Event) -> bool:
        """Return whether an engine of other sizes has computed `source`: it may keep its own KV."""
        ends = self._of_source("req.finished", source)
        return not all(self.state.variant.are_alike(e.get("on"), lookup.get("on")) for e in ends)

    def _restarted(self, source: str) -> bool:
        """Return whether the engine was restarted after `source` had ended."""
        ended = False
        for e in self.state.trace.events:
            if e["kind"] == "req.finished":
                ended = ended or (e["req"], e["generation"]) == self.state.incarnation(source)
            elif ended and is_restart(e):
                return True
        return False

    def _broke(self, source: str) -> bool:
        """Return whether a load of content that begins like that of `source` has failed.

        A load in progress counts if it was made to fail: the connector has seen that it is gone.
        """
        state = self.state
        events = state.trace.events
        failed = {e["req"] for e in events if e["kind"] == "transfer.failed"}
        failed |= {
            e["req"]
            for e in events
            if e["kind"] == "alloc" and e["external"] > 0 and e["req"] in state.failing
        }
        return any(
            state.ids[name] in failed and state.start_alike(name, source) for name in state.prompts
        )

    def _outlived(self, source: str) -> bool:
        """Return whether some KV of `source` is from before a reset of the connector.

        It is the request's own KV, or KV that the engine's cache still had then. The connector saw
        such KV before the reset, and does not see it again. The engine's cache is not emptied while
        blocks are held. The connector is not told whether it was: after any reset, it may leave
        local hits alone, which the request that computed them has saved. That one may have left out
        its last block (`skip_last`), its last tokens (they fill no chunk), or its output.
        """
        caps = self.state.caps
        saves_all = caps["saves"] == "all" and not caps["skip_last"]
        key = self.state.incarnation(source)
        events = self.state.trace.events
        began = False  # the request has an allocation
        kept: set[str | None] = set()  # engines whose caches survived a reset of a connector
        found = was_reset = False
        for e in events:
            if e["kind"] == "cache.reset":
                if e["phase"] == "returned" and e["returned"] is not False:
                    was_reset = True
                    kept = {each.get("on") for each in events}
                    found = found or began
                elif e["phase"] == "done" and e["returned"]:
                    kept.discard(e.get("on"))
            elif e["kind"] == "alloc" and (e["req"], e["generation"]) == key:
                began = True
                is_whole = saves_all and not e["local"] % max(caps["chunk_tokens"], 1)
                is_doubtful = e.get("on") in kept or (was_reset and not is_whole)
                found = found or bool(is_doubtful and e["local"] > 0)
        return found

    def _final(self, name: str) -> int | None:
        """Return the final KV of a finished request that can be saved step by step, in tokens.

        None if a connector need not save its KV. Tokens that became known only after the last step
        was planned do not count: only a save at the end could have them.
        """
        key = self.state.incarnation(name)
        mine = [
            e
            for e in self.state.trace.events
            if e["kind"] in ("req.finished", "req.scheduled") and (e["req"], e["generation"]) == key
        ]
        ended = mine[-1].get("status") if mine else None
        if ended not in ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED"):
            return None
        planned = (min(e["computed"] + e["scheduled"], e["known"]) for e in mine[:-1])
        return min(int(mine[-1]["final"]), max(planned, default=0))
