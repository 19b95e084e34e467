# SPDX-License-Identifier: Apache-2.0
"""Evaluates a case's own expectations and its anti-vacuity list against the run so far.

Requests that repeat earlier content: how much of it was promised, and how much a lookup says that there is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from kvconform.compat.vllm_api import COUNTS_IN_FLIGHT
from kvconform.contract.trace import Event
from kvconform.run.promises import ROOM, crowd_of

if TYPE_CHECKING:
    from kvconform.run.driver import Driver

_STATE = {
    "computed": lambda r: r.num_computed_tokens,
    "placeholders": lambda r: r.num_output_placeholders,
    "tokens": lambda r: r.num_tokens,
    "in_flight": lambda r: r.num_in_flight_tokens,
    "real": lambda r: r.num_computed_tokens - r.num_output_placeholders,
    "status": lambda r: r.status.name.lower(),
}
_FINISH = {
    "length": "FINISHED_LENGTH_CAPPED",
    "stop": "FINISHED_STOPPED",
    "abort": "FINISHED_ABORTED",
    "error": "FINISHED_ERROR",
}


class Expectations:
    """Checks expectations of one driver's case; `check` emits case.expectation events, `unmet` only reports."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver

    @property
    def _events(self) -> list[dict[str, Any]]:
        return self.driver.trace.events

    def at_end(self, expectations: Iterable[Any]) -> None:
        """Check the case's top-level expectations."""
        for expectation in expectations:
            self.check(expectation)

    def check(self, expectation: Any) -> None:
        """Evaluate one expectation and emit what came out; one whose guard does not hold is skipped."""
        if not self._applies(expectation):
            return
        problem = self._problem(expectation)
        self.driver.trace.emit(
            "case.expectation", what=expectation.what, holds=problem is None, detail=problem or ""
        )

    def unmet(self, provokes: Iterable[Any]) -> list[str]:
        """Stimuli that did not happen, one sentence each."""
        found = []
        for expectation in provokes:
            if self._applies(expectation):
                problem = self._problem(expectation)
                if problem is not None:
                    found.append(f"{expectation.what}: {problem}")
        return found

    def _applies(self, expectation: Any) -> bool:
        start = next(e for e in self._events if e["kind"] == "run.start")
        if expectation.what in ("state", "rows") and any(
            e["kind"] == "lookup" and e["tokens"] is None for e in self._events
        ):
            return (
                False  # a connector that answers "not yet" legitimately shifts every step after it
            )
        return bool(expectation.applies(self.driver.caps, start))

    def _problem(self, expectation: Any) -> str | None:
        arg = expectation.at(self.driver.variant.scheduling)
        check: Callable[[Any], str | None] = getattr(self, "_" + expectation.what.replace("-", "_"))
        return check(arg)

    def _id(self, name: str | None) -> str | None:
        return None if name is None else self.driver.ids.get(name)

    def _of(self, kind: str, name: str | None, **where: Any) -> list[dict[str, Any]]:
        req = self._id(name)
        generation = None if req is None else self.generation(name)
        return [
            e
            for e in self._events
            if e["kind"] == kind
            and (
                req is None
                or (e.get("req") == req and e.get("generation", generation) == generation)
            )
            and all(e[k] == v for k, v in where.items())
        ]

    def generation(self, name: str | None) -> int:
        """Incarnation that a case's name stands for: names with the same client id are numbered in the order of the case."""
        same = [n for n in self.driver.adds if self.driver.ids[n] == self._id(name)]
        return same.index(str(name))

    def _state(self, arg: Any) -> str | None:
        request = self.driver.requests[arg.req].live
        if request is None:
            return f"request {arg.req} does not exist any more"
        for field, read in _STATE.items():
            want = getattr(arg, field)
            if (
                field == "in_flight"
                and self.driver.variant.engine == "vllm"
                and not COUNTS_IN_FLIGHT
            ):
                continue
            if want is not None and (have := read(request)) != (
                want.lower() if isinstance(want, str) else want
            ):
                return f"{field} of {arg.req} is {have}, expected {want}"
        return None

    def _rows(self, arg: Any) -> str | None:
        events = self._of("req.scheduled", arg.req)
        have = [[e[f] for f in arg.fields] for e in events]
        if have == arg.values:
            return None
        for index, (got, want) in enumerate(zip(have, arg.values, strict=False)):
            if got != want:
                return f"row {index + 1} of {arg.req} {list(arg.fields)} is {got}, expected {want}"
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
            return (
                f"{arg.req} produced {tokens}, {arg.same_as} produced {self._output(arg.same_as)}"
            )
        if arg.clean is not None:
            clean = all(e["clean"] for e in self._of("sample", arg.req))
            if clean != arg.clean:
                return f"tokens of {arg.req} were sampled from wrong KV"
        return None

    def _output(self, name: str) -> list[int]:
        snapshot = self.driver.requests[name]
        return list(snapshot.all_token_ids[snapshot.num_prompt_tokens :])

    @staticmethod
    def _bounded(arg: Any, count: int, what: str) -> str | None:
        who = f" of {arg.req}" if arg.req else ""
        if arg.equal is not None and count != arg.equal:
            return f"{what}{who}: {count}, expected {arg.equal}"
        least = arg.at_least if arg.at_least is not None else (None if arg.equal is not None else 1)
        return (
            f"{what}{who}: {count}, expected at least {least}"
            if least is not None and count < least
            else None
        )

    def _preempted(self, arg: Any) -> str | None:
        return self._bounded(
            arg,
            len(self._of("req.state", arg.req, to="PREEMPTED", reason="preempt")),
            "preemptions",
        )

    def _resumed(self, arg: Any) -> str | None:
        events = [
            e for e in self._of("req.scheduled", arg.req) if e["listed_as"].startswith("resumed")
        ]
        return self._bounded(arg, len(events), "resumptions")

    def _aborted(self, arg: Any) -> str | None:
        return self._bounded(
            arg, len(self._of("req.finished", arg.req, status="FINISHED_ABORTED")), "aborts"
        )

    def _chunks(self, arg: Any) -> str | None:
        events = [
            e
            for e in self._of("req.scheduled", arg.req)
            if e["output_computed"] < self._prompt_len(e["req"], e["generation"])
        ]
        return self._bounded(arg, len(events), "prefill chunks")

    def _prompt_len(self, req: str, generation: int) -> int:
        names = [name for name in self.driver.adds if self.driver.ids[name] == req]
        return len(self.driver.prompts[names[generation]])

    def _loads(self, arg: Any) -> str | None:
        return self._bounded(
            arg, sum(e["external"] > 0 for e in self._of("alloc", arg.req)), "loads"
        )

    def _rejected(self, arg: Any) -> str | None:
        return self._bounded(
            arg, sum(e["rejected"] for e in self._of("kv.computed", arg.req)), "rejected drafts"
        )

    def _external(self, arg: Any) -> str | None:
        return self._bounded(
            arg, sum(e["external"] for e in self._of("alloc", arg.req)), "external tokens"
        )

    def _failed_loads(self, arg: Any) -> str | None:
        events = [
            e
            for e in self._events
            if e["kind"] == "transfer.failed" and (arg.req is None or e["req"] == self._id(arg.req))
        ]
        return self._bounded(arg, len(events), "failed loads")

    def _repeated_lookups(self, arg: Any) -> str | None:
        return self._bounded(arg, len(self._of("lookup", arg.req, repeat=True)), "repeated lookups")

    def _local_hits(self, arg: Any) -> str | None:
        return self._bounded(
            arg,
            sum(e["local"] for e in self._of("alloc", arg.req) if not e["second_call"]),
            "local hits",
        )

    def _free_blocks(self, arg: Any) -> str | None:
        have = self.driver.engine.pool.get_num_free_blocks()
        return None if have == arg else f"{have} free blocks, expected {arg}"


if TYPE_CHECKING:
    from kvconform.run.driver import Driver


class Reloads:
    """Emits profile.expectation at the first lookup of each request of `driver.reloads`, and takes it out of there."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver

    def looked_up(self, request: Any, event: Event) -> None:
        """A lookup was answered; `event` is its event."""
        driver = self.driver
        source = driver.reloads.get(request.request_id)
        if source is None or event["tokens"] is None or driver.promises is None:
            return
        del driver.reloads[request.request_id]
        if self._broke(source):
            return  # whoever tried to load it has seen that it is not there any more
        if self._outlived(source):
            return
        if not driver.promises.declared and (
            driver.adds[source].priority or driver.adds[source].params
        ):
            return  # a connector may store by priority, or as the client asks; the plain runs have neither
        of = (
            driver.requests[source],
            driver.prompts[source],
            request,
            driver.variant.block_size,
            self._final(source),
        )
        config = driver.variant.case.config
        several = tuple(config.groups) if len(config.groups) > 1 else ()
        promise = functools.partial(
            driver.promises.promised,
            *of,
            groups=several,
            window=config.window,
            caching=config.prefix_caching,
        )
        promised, found = promise(), event["local"] + event["tokens"]
        if (
            found < promised and not driver.promises.declared
        ):  # perhaps it does its best, and there was a lot to do
            key = (driver.ids[source], driver.expectations.generation(source))
            promised = min(promised, promise(crowd=crowd_of(driver.trace.events, key, event)))
        if found < promised and not driver.promises.declared:
            promised = min(promised, promise(room=ROOM))
        driver.trace.emit(
            "profile.expectation",
            what=driver.caps["saves"],
            req=request.request_id,
            of=source,
            promised=promised,
            reloadable=found,
        )

    def _broke(self, source: str) -> bool:
        """Whether a load of content that begins like that of `source` has failed in this run, or was made to and is under way."""
        ids, prompts = self.driver.ids, self.driver.prompts
        events, failing = self.driver.trace.events, self.driver.failing
        failed = {e["req"] for e in events if e["kind"] == "transfer.failed"}
        failed |= {
            e["req"]
            for e in events
            if e["kind"] == "alloc" and e["external"] > 0 and e["req"] in failing
        }
        return any(
            ids[name] in failed and tokens[:1] == prompts[source][:1]
            for name, tokens in prompts.items()
        )

    def _outlived(self, source: str) -> bool:
        """Whether some of the KV of `source` is from before the connector was reset: its own, or what the engine's cache still had then.

        The connector was told of it before, and is not told again; the engine's cache is not emptied while blocks are held."""
        key = (self.driver.ids[source], self.driver.expectations.generation(source))
        began, kept, found = False, False, False
        for e in self.driver.trace.events:
            if e["kind"] == "cache.reset":
                if e["phase"] == "returned" and e["returned"] is not False:
                    kept = True
                    found = found or began
                elif e["phase"] == "done":
                    kept = kept and not e["returned"]
            elif e["kind"] == "alloc" and (e["req"], e["generation"]) == key:
                began = True
                found = found or (kept and e["local"] > 0)
        return found

    def _final(self, name: str) -> int | None:
        """Final KV of a finished request that one can save step by step (None: it is not one whose KV a connector must keep).

        Tokens that only became known after the last step was planned belong to those who also save at the end; nobody has to.
        """
        key = (self.driver.ids[name], self.driver.expectations.generation(name))
        kinds = ("req.finished", "req.scheduled")
        mine = [
            e
            for e in self.driver.trace.events
            if e["kind"] in kinds and (e["req"], e["generation"]) == key
        ]
        if not mine or mine[-1].get("status") not in ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED"):
            return None
        planned = max(
            (min(e["computed"] + e["scheduled"], e["known"]) for e in mine[:-1]), default=0
        )
        return min(int(mine[-1]["final"]), planned)
