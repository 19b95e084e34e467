# SPDX-License-Identifier: Apache-2.0
"""Listeners for the data that a connector exports, and for the data that the engine gives to it.

- `HashBook` compares the engine's block hashes with the contents that the harness knows.
- `Telemetry` checks KV events and handshake metadata: it does what their readers do.
- `Watch` checks the requests that the engine shows, and that hooks do not change their arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from kvconform.compat.block_keys import ExtraKeys, extra_keys_of
from kvconform.compat.step import ENDS
from kvconform.contract.events import ARGUMENTS
from kvconform.contract.trace import Event, Trace
from kvconform.observe.announced import Announced
from kvconform.observe.call import Call
from kvconform.observe.digest import canonical, pickle_round_trip
from kvconform.observe.probe import Probe


@dataclass(frozen=True)
class Stored:
    """A hashed block of a request.

    - `tokens`: all tokens of the request.
    - `end`: end of the block, in tokens.
    - `parents`: the hashes of the blocks before it, by their ends.
    - `lora`: name of the request's LoRA adapter.
    - `extra_keys`: what else the hashes of the request's blocks depend on.
    """

    tokens: list[int]
    end: int
    parents: dict[int, Any]
    lora: str | None
    extra_keys: ExtraKeys


class HashBook:
    """Every block hash that a request had in this run.

    `block_size`: tokens per hash. `identity(req)`: the request's salt, adapter and images.
    """

    def __init__(self, block_size: int, identity: Callable[[str], Any]) -> None:
        self.block_size = block_size
        self.identity = identity
        self.blocks: dict[Any, Stored] = {}
        self._hash_of: dict[int, Any] = {}
        self._content_of: dict[Any, int] = {}
        self._numbers: dict[Any, int] = {}

    def numbers(self, keys: Iterable[Any]) -> list[int]:
        """Return numbers for hashes, in the order of their first use.

        Unlike hashes, they do not depend on the process's hash seed.
        """
        return [self._numbers.setdefault(key, len(self._numbers)) for key in keys]

    def keys(self, request: Any) -> list[Any]:
        """Return the hashes of a request's full blocks, in the form that KV events use."""
        return [maybe_convert_block_hash(key) for key in request.block_hashes]

    def enter(self, request: Any) -> dict[str, Any]:
        """Record a request's hashes, and return the results as fields of the event `hashes`.

        `count` and `full`: how many hashes there are, and should be. `same`: equal contents had
        equal hashes so far. `distinct`: different contents had different ones.
        """
        keys = self.keys(request)
        tokens = list(request.all_token_ids)
        identity = self.identity(request.request_id)
        same = True
        distinct = True
        parents: dict[int, Any] = {}
        lora = None if request.lora_request is None else request.lora_request.lora_name
        extra_keys = extra_keys_of(request)
        for end, content in enumerate(identity.contents(tokens), 1):
            if end % self.block_size or end // self.block_size > len(keys):
                continue
            key = keys[end // self.block_size - 1]
            same = same and self._hash_of.setdefault(content, key) == key
            distinct = distinct and self._content_of.setdefault(key, content) == content
            if key not in self.blocks:
                self.blocks[key] = Stored(tokens, end, dict(parents), lora, extra_keys)
            parents[end] = key
        return {
            "count": len(keys),
            "full": len(tokens) // self.block_size,
            "same": same,
            "distinct": distinct,
        }

    def reach(
        self,
        request: Any,
        announced: dict[Any, int],
        covered: int = 0,
        limit: int | None = None,
    ) -> int:
        """Return how many tokens from a request's start announced blocks cover without a gap.

        `announced`: tokens of the announced block, by its hash. `covered`: tokens from the start
        that need no announcement. Blocks that end after `limit` tokens do not count.
        """
        for number, key in enumerate(self.keys(request), 1):
            end = number * self.block_size
            if limit is not None and end > limit:
                break
            if key in announced and end - announced[key] <= covered < end:
                covered = end
        return covered

    def between(self, request: Any, start: int, end: int | None = None) -> Iterator[Any]:
        """Yield the hashes of the blocks that end within (start, end].

        Without `end`, that is up to the last block.
        """
        for number, key in enumerate(self.keys(request), 1):
            block_end = number * self.block_size
            if start < block_end and (end is None or block_end <= end):
                yield key


def _equal(events: list[Any], others: list[Any]) -> bool:
    """Return whether two lists of events are equal; False if they cannot be compared."""
    try:
        return bool(events == others)
    except Exception:  # of a class of the connector's own
        return False


SAME = 3
"""Equal lists of events in so many idle steps after the first: the list is made again each time."""
_engines: WeakKeyDictionary[Trace, int] = WeakKeyDictionary()
"""Number of engines by trace."""


class Telemetry:
    """Listens to one engine's connector halves. Emits events.

    The engine gets the events of `take_events` as a list, since they can be read once only.

    `shared`: an engine outside of this trace may have stored what the connector finds. `groups`:
    the number of KV cache groups. Of several, lookups are compared with the announcements of the
    first one, which has full attention: what they find must be announced, but an announcement of
    one group does not promise what a lookup needs of the others.
    """

    def __init__(
        self,
        trace: Trace,
        probe: Probe,
        book: HashBook,
        config: Any,
        *,
        shared: bool = False,
        groups: int = 1,
    ) -> None:
        self.trace = trace
        self.book = book
        self.config = config
        self.groups = groups
        switch = getattr(config, "kv_events_config", None)
        self.publishes = switch is not None and switch.enable_kv_cache_events
        """Whether KV events are switched on, or the connector has published some nevertheless."""
        self.has_own_hashes: bool | None = None
        """Whether no announced hash is one of the engine's; None: nothing was announced."""
        self.announced = Announced()
        """What this engine has announced."""
        self.withdrawn_from = [self.announced]
        """Announcements that a withdrawal ends: those of all engines, which may share a store."""
        self._ended = False
        self.taken: list[Any] = []
        """The events of the last call, kept alive so that they can be compared by identity."""
        self._worked = False  # whether tokens were scheduled since the last call
        self._same = 0  # how many calls before had equal events, with nothing to do in between
        self.first = not shared and not any(
            event["kind"] == "request.new" for event in trace.events
        )
        """Whether this is the first engine that can have stored anything."""
        _engines[trace] = _engines.get(trace, 0) + 1
        probe.on("build_connector_meta", after=self._built)
        probe.on("take_events", after=self._events)
        probe.on("get_num_new_matched_tokens", after=self._lookup)
        probe.on("reset_cache", after=self._reset)
        probe.on("shutdown", before=self._shutdown)
        probe.on("get_handshake_metadata", after=self._handshake)

    # -- KV events
    def _built(self, call: Call) -> None:
        scheduled = getattr(call.arg(0, "scheduler_output"), "total_num_scheduled_tokens", 0)
        self._worked = self._worked or bool(scheduled)

    def _events(self, call: Call) -> None:
        if call.error is not None or call.result is None or not hasattr(call.result, "__iter__"):
            return
        events = list(call.result)
        call.result = events  # a generator can be read only once
        self.publishes = self.publishes or bool(events)
        unchanged = bool(events) and not self._worked and _equal(events, self.taken)
        self._same = self._same + 1 if unchanged else 0
        self._worked = False
        for event in events:
            op = _OPERATIONS.get(type(event).__name__, "other")
            hashes = list(getattr(event, "block_hashes", None) or [])
            tokens = list(getattr(event, "token_ids", None) or [])
            size = getattr(event, "block_size", 0)
            problem = ""
            if op == "stored":
                problem = self._false_claim(event, hashes, tokens, size)
            elif op == "removed":
                problem = self._wrong_medium(event, hashes)
            self.trace.emit(
                "kv.event",
                op=op,
                keys=self.book.numbers(hashes),
                tokens=len(tokens),
                problem=problem or _shape(op, event, hashes, tokens, size),
                # One object may stand for every reset. Threads may store the same for several
                # requests, and announce it each time, but not as often when there is nothing to do.
                repeated=op != "cleared"
                and (self._same >= SAME or any(event is other for other in self.taken)),
            )
            ours = getattr(event, "group_idx", None) in (None, 0)
            if op == "stored" and ours:
                self.announced.add(hashes, event.medium, size)
            elif op == "removed" and ours:
                for announced in self.withdrawn_from:
                    announced.withdraw(hashes, event.medium)
            elif op == "cleared":
                self._clear()
        self.taken = events

    def _reset(self, call: Call) -> None:
        if call.result is not False:  # a refused reset leaves everything where it was announced
            self._clear()

    def _clear(self) -> None:
        for announced in self.withdrawn_from:
            announced.clear()

    def _wrong_medium(self, event: Any, hashes: list[Any]) -> str:
        """Return what is wrong with a removal whose medium no announcement has named, or ""."""
        for key in hashes:
            named = {medium for announced in self.withdrawn_from for medium in announced.media(key)}
            if named and event.medium not in named:
                stored_in = " and ".join(sorted(map(repr, named)))
                return f"medium is {event.medium!r}, and the block was stored in {stored_in}"
        return ""

    def _false_claim(self, event: Any, hashes: list[Any], tokens: list[int], size: Any) -> str:
        """Return what an event reports wrongly about blocks whose hashes the engine knows, or "".

        Hashes of the connector's own are not checked. If it has no others, nothing says which
        blocks were announced.
        """
        if hashes and self.has_own_hashes is not False:
            self.has_own_hashes = not any(key in self.book.blocks for key in hashes)
        if not isinstance(size, int) or size <= 0 or len(tokens) != len(hashes) * size:
            return ""
        for number, key in enumerate(hashes):
            block = self.book.blocks.get(key)
            if block is None:
                continue
            own_tokens = tokens[number * size : (number + 1) * size]
            problem = self._differs(block, event, own_tokens, number, hashes, size)
            if problem:
                return problem
        return ""

    def _differs(
        self,
        block: Stored,
        event: Any,
        tokens: list[int],
        number: int,
        hashes: list[Any],
        size: int,
    ) -> str:
        start = block.end - size
        if start < 0 or tokens != block.tokens[start : block.end]:
            return "token_ids are not those of the block"
        parent = hashes[number - 1] if number else event.parent_block_hash
        if start and start in block.parents and parent != block.parents[start]:
            return "parent_block_hash is not the hash of the block before"
        if start == 0 and parent is not None:
            return "the first block has a parent"
        if (block.lora is None) != (getattr(event, "lora_name", block.lora) is None):
            return "lora_name is not that of the request"
        extra = getattr(event, "extra_keys", None)  # a connector may leave them out
        if extra is not None and (
            len(extra) != len(hashes) or extra[number] != block.extra_keys(start, block.end)
        ):
            return "extra_keys are not those of the block"
        return ""

    def _lookup(self, call: Call) -> None:
        """Compare the result of a lookup with the announcements so far."""
        if call.error is not None or not (isinstance(call.result, tuple) and len(call.result) == 2):
            return
        request = call.arg(0, "request")
        local = call.arg(1, "num_computed_tokens")
        tokens = call.result[0]
        if type(tokens) is not int or request.skip_reading_prefix_cache:
            return
        size = self.book.block_size
        # The engine computes the last token, so a block that holds it need not be served.
        due = 0
        if self.groups == 1:
            due = self.book.reach(request, self.announced.tokens, limit=request.num_tokens - 1)
        missing = self.book.between(request, local + tokens, due)
        # A chunk may be announced before the one in front of it, which the engine has itself.
        expected_end = self.book.reach(request, self.announced.tokens, local)
        finds_more = expected_end < (local + tokens) // size * size
        untold: Iterable[Any] = ()
        if self.publishes and not self.has_own_hashes and self.is_alone() and finds_more:
            untold = self.book.between(
                request, expected_end, local + tokens if self.groups > 1 else None
            )
        self.trace.emit(
            "events.lookup",
            req=request.request_id,
            announced=due,
            got=local + tokens,
            local=local,
            tokens=tokens,
            known=request.num_tokens,
            missing=self.book.numbers(missing),
            untold=self.book.numbers(untold),
            own=bool(self.has_own_hashes),
            chain=self.book.numbers(self.book.between(request, 0, due)),
        )

    def _shutdown(self, call: Call) -> None:
        if call.half == "worker" and not self._ended:  # a worker half may be shut down twice
            self._ended = True
            self._never_served()

    def _never_served(self) -> None:
        """Take back what a lookup ought to have announced if its load failed: that was not served.

        What a thread has just stored may be gone again before the step's events are taken.
        """
        latest: dict[str, Event] = {}
        for event in self.trace.events:
            if event["kind"] == "events.lookup":
                latest[event["req"]] = event
            elif event["kind"] == "transfer.failed" and event["req"] in latest:
                self.trace.amend(latest[event["req"]], untold=[])

    def is_alone(self) -> bool:
        """Return whether no other engine of the run can have stored anything."""
        return self.first and _engines[self.trace] == 1

    # -- handshake
    def _handshake(self, call: Call) -> None:
        if call.error is None:
            reason = None if call.result is None else pickle_round_trip(call.result)[1]
            self.trace.emit(
                "handshake", none=call.result is None, pickles=reason is None, detail=reason
            )


_OPERATIONS = {
    "BlockStored": "stored",
    "BlockRemoved": "removed",
    "AllBlocksCleared": "cleared",
}


def _shape(op: str, event: Any, hashes: list[Any], tokens: list[int], size: Any) -> str:
    """Return what is wrong with the form of an event's fields, or ""."""
    if op == "other":
        return f"{type(event).__name__} is no KV cache event"
    if op == "cleared":
        return ""
    if not hashes or not all(isinstance(key, (bytes, int)) for key in hashes):
        return "block_hashes are missing or not hashes"
    # vLLM's placeholder only names hashes.
    describes = op == "stored" and (tokens or event.parent_block_hash is not None)
    if describes and (type(size) is not int or size <= 0 or len(tokens) != len(hashes) * size):
        return f"{len(tokens)} token_ids for {len(hashes)} blocks of {size}"
    if op == "stored" and (type(size) is not int or size < 0):
        return f"block_size is {size}"
    return ""


SHARED = {
    "get_transfer_results": 0,
    "update_connector_output": 0,
    "request_finished": 1,
    "request_finished_all_groups": 1,
}
"""Index of the argument that is read after the hook, which must not change it, by hook."""
READ_BEFORE = ("failed_recving", "invalid_block_ids")
"""Reports of a step that the engine has read when it calls update_connector_output.

It reads the others afterwards: the connector may change those of its own transfers (Observer).
"""
REPORTS = (*ENDS.values(), *READ_BEFORE)


class Watch:
    """Listens to one engine. Changes nothing but the trace.

    `generation(req)` returns the incarnation of a request id.
    """

    def __init__(
        self, trace: Trace, probe: Probe, book: HashBook, generation: Callable[[str], int]
    ) -> None:
        self.trace = trace
        self.book = book
        self.generation = generation
        probe.on("on_new_request", after=self._new)
        probe.on("get_num_new_matched_tokens", after=self._hashes)
        for hook in SHARED:
            probe.on(hook, before=self._before, after=self._after)
        probe.on("update_connector_output", before=self._landed)

    def _new(self, call: Call) -> None:
        request = call.arg(0, "request")
        self.trace.emit(
            "request.new", req=request.request_id, generation=self.generation(request.request_id)
        )

    def _hashes(self, call: Call) -> None:
        request = call.arg(0, "request")
        found = self.book.enter(request)
        self.trace.emit(
            "hashes",
            req=request.request_id,
            generation=self.generation(request.request_id),
            **found,
        )

    def _landed(self, call: Call) -> None:
        """Note which of a step's reports changed before they reached the scheduler half.

        The worker half may have returned those of later steps in the meantime.
        """
        output = call.arg(0, "connector_output")
        reports = {name: getattr(output, name, None) for name in REPORTS}
        changed = [
            name
            for name, ids in reports.items()
            if ids is not None and getattr(ids, "reported", ids) != ids
        ]
        self.trace.emit("report.landed", changed=changed)

    def _before(self, call: Call) -> None:
        call.scratch["argument"] = _picture(call)

    def _after(self, call: Call) -> None:
        if call.result_event is not None and call.error is None:
            mutated = _picture(call) != call.scratch["argument"]
            self.trace.amend(call.result_event, mutated_args=mutated)


def _picture(call: Call) -> str:
    """Return the argument that the hook must not change, as text.

    Of a step's reports that is what the engine has read before the hook.
    """
    value: Any = call.arg(SHARED[call.hook], ARGUMENTS[call.hook])
    if call.hook == "update_connector_output":
        value = [sorted(getattr(value, name, None) or ()) for name in READ_BEFORE]
        if not any(value):  # as in most steps
            return ""
    return repr(canonical(value))
