# SPDX-License-Identifier: Apache-2.0
"""Watches the cache behind a connector, if its Inspector shows it.

Such an Inspector has two methods more (docs/cache.md): `cache()` returns the state of the levels,
and `cached(request)` what they have of a request. A third one, `sizes()`, is optional.
"""

from __future__ import annotations

import operator
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, TypeAdapter, ValidationError

from kvconform.contract.events import is_kill
from kvconform.contract.trace import Event, Trace
from kvconform.errors import UsageError
from kvconform.files import sizes_below
from kvconform.observe.call import Call
from kvconform.observe.probe import Probe
from kvconform.process import clock

POLL = 0.01
"""Seconds between two looks at a cache that still has holds."""
PROMOTES = 0.2
"""Seconds that an entry may take to the first level, after the last request has ended."""


class Level(BaseModel):
    """What an Inspector's `cache()` says of a level (docs/cache.md); it may say more."""

    model_config = ConfigDict(strict=True, extra="allow")

    name: str
    entries: int
    bound: int | None
    held: int
    full: bool | None = None
    bytes: int | None = None
    bytes_bound: int | None = None


class State(BaseModel):
    """What an Inspector's `cache()` returns."""

    model_config = ConfigDict(strict=True, extra="allow")

    held: int
    levels: list[Level]


TOKENS = TypeAdapter(list[int])
"""What an Inspector's `cached()` returns: tokens of the first level, the first two, and so on."""


def _whole(value: Any) -> int:
    """Return a whole number of any type, numpy's too, as an int. ValueError for anything else."""
    try:
        return operator.index(value)
    except TypeError:
        raise ValueError("a whole number is expected") from None


class Size(BaseModel):
    """What an Inspector's `sizes()` says of a level."""

    model_config = ConfigDict(strict=True, extra="allow")

    name: str
    bytes: Annotated[int, BeforeValidator(_whole)]
    path: str | os.PathLike[str] | None = None


SIZES = TypeAdapter(Sequence[Size])


class CacheObserver:
    """Emits the events cache.lookup, .loaded, .reached, .state, .ended and .size. Changes nothing.

    `requests`: the engine's requests by id. `block_size`: in tokens. `kv_bytes` returns how large
    the KV is that the engines of the run have computed. `quantised`: it has one byte per value.
    """

    def __init__(
        self,
        trace: Trace,
        inspector: Any,
        requests: Mapping[str, Any],
        block_size: int,
        kv_bytes: Callable[[], int],
        *,
        quantised: bool = False,
    ) -> None:
        self.trace = trace
        self._inspector = inspector
        self._requests = requests
        self._block_size = block_size
        self._last: dict[str, Any] | None = None
        self.left: int | None = None
        """How many entries had to leave a level for others; None: their keys are not shown."""
        self.levels = 0
        """How many levels there are."""
        self._keys: list[set[str]] = []
        # Loads that have arrived and may still be promoted: request, and the loaded positions.
        self._unpromoted: list[tuple[Any, int, int]] = []
        # Of each level the lookups that it had more for than the faster ones; see cache.reached.
        self._chances: dict[int, list[dict[str, Any]]] = {}
        self._kv_bytes = kv_bytes
        self._quantised = quantised
        # Levels that had something when the engine started.
        self._used = {size["name"] for size in self._sizes() if size["bytes"]}
        # A process that was killed has left what it was writing.
        self._leftovers = any(map(is_kill, trace.events))

    def listen(self, probe: Probe) -> None:
        """Look at the cache after every lookup."""
        probe.on("get_num_new_matched_tokens", after=self._looked_up)

    def _looked_up(self, call: Call) -> None:
        if call.error is not None or not call.legal:
            return
        request = call.arg(0, "request")
        if request.skip_reading_prefix_cache:
            return  # vLLM drops the answer
        if self.trace.damaged:
            return  # what the levels have may not be what can be read
        cached = self._cached(request)
        local, tokens = call.arg(1, "num_computed_tokens"), call.result[0]
        usable = [min(end, request.num_tokens - 1) for end in cached]
        self.trace.emit(
            "cache.lookup",
            req=request.request_id,
            local=local,
            tokens=tokens,
            usable=usable[-1] - usable[-1] % self._block_size,
            cached=cached,
        )
        if tokens is None:
            return  # the connector is asked again
        for level, (faster, end) in enumerate(pairwise(usable), 1):
            known = max(faster, local)
            if end > known:
                self._chances.setdefault(level, []).append(
                    {
                        "req": request.request_id,
                        "known": known,
                        "usable": end - end % self._block_size,
                        "claimed": local + tokens,
                    }
                )

    def after_step(self, events: list[Event]) -> None:
        """Look at the cache after a step, of which these are the events so far."""
        state = self._look()
        for event in events:
            arrived = event["kind"] == "load.due" and not event["missing"]
            if arrived and not event["reported_failed"] and event["req"] in self._requests:
                request, local = self._requests[event["req"]], event["local"]
                loaded = self._loaded(request, local, local + event["granted"], state)
                if _waits_for_promotion(loaded):
                    self._unpromoted.append((request, local, loaded["end"]))
                else:
                    self.trace.emit("cache.loaded", **loaded)
        if state != self._last:
            self._last = state
            self.trace.emit("cache.state", **state)

    def _look(self) -> dict[str, Any]:
        """Return the state without the keys of entries, and count those that had to leave."""
        state = dict(self._ask("cache", _as_it_is))
        levels = state["levels"]
        if all("keys" in level for level in levels):
            now = [set(level["keys"]) for level in levels]
            bounds = [level["bound"] for level in levels]
            self.left = (self.left or 0) + evicted(self._keys or [set() for _ in now], now, bounds)
            self._keys = now
        self.levels = len(levels)
        state["levels"] = [
            {name: value for name, value in level.items() if name != "keys"} for level in levels
        ]
        return state

    def at_rest(self, patience: float) -> None:
        """Emit the state at the end, when the engine has nothing left to do, and what led to it.

        Threads may still write entries that they hold to a lower level, or copy what was loaded to
        the first one: wait up to `patience` seconds for the former, and up to PROMOTES for the
        latter, which a connector need not do.
        """
        waiting = waits(patience)
        while (state := self._look())["held"] and next(waiting, False):
            pass
        waiting = waits(min(patience, PROMOTES))
        for request, local, end in self._unpromoted:
            loaded = self._loaded(request, local, end, self._look())
            while _waits_for_promotion(loaded) and next(waiting, False):
                loaded = self._loaded(request, local, end, self._look())
            self.trace.emit("cache.loaded", **loaded)
        self.release()
        for level, lookups in self._chances.items():
            name = state["levels"][level]["name"]
            self.trace.emit("cache.reached", level=name, lookups=lookups)
        self.trace.emit("cache.ended", **state)

    def release(self) -> None:
        """Keep no request any longer, also if the engine does not come to rest."""
        self._unpromoted.clear()

    def _loaded(
        self, request: Any, local: int, end: int, state: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the fields of cache.loaded. `state`: what `_look` has just returned."""
        cached, room = self._cached(request), _has_room(state)
        return {
            "req": request.request_id,
            "local": local,
            "end": end,
            "cached": cached,
            "room": room,
        }

    def _cached(self, request: Any) -> list[int]:
        """Return the tokens that the levels have. UsageError if there is none per level."""
        cached: list[int] = self._ask("cached", TOKENS.validate_python, request)
        if not cached or len(cached) != (self.levels or len(cached)):
            raise UsageError(
                f"kvconform_inspector().cached() returned {cached}: it must be one number per level"
                f" of cache(), which has {self.levels} (docs/cache.md)"
            )
        return cached

    def _ask(self, method: str, check: Callable[[Any], Any], *arguments: Any) -> Any:
        """Return an answer of the Inspector, as `check` returns it.

        UsageError if it raises, or if its answer has another form than docs/cache.md says.
        """
        asked = f"kvconform_inspector().{method}()"
        try:
            return check(getattr(self._inspector, method)(*arguments))
        except ValidationError as error:
            first = error.errors()[0]
            place = "".join(f"[{part!r}]" for part in first["loc"])
            raise UsageError(
                f"{asked} returned what docs/cache.md does not allow: {place or 'the answer'}:"
                f" {first['msg']}"
            ) from None
        except Exception as error:
            raise UsageError(f"{asked} raised {type(error).__name__}: {error}") from error

    def measure(self, patience: float) -> None:
        """Emit the sizes of the levels, which are compared with the KV of this engine.

        Threads may still move entries: wait up to `patience` seconds until two looks agree.
        """
        waiting = waits(patience)
        before, sizes = None, self._measured()
        while bool(sizes) and sizes != before and next(waiting, False):
            before, sizes = sizes, self._measured()
        for size, on_disk in sizes:
            self.trace.emit(
                "cache.size",
                level=size["name"],
                bytes=size["bytes"],
                on_disk=on_disk,
                kv=self._kv_bytes(),
                fresh=size["name"] not in self._used,
                block=self._block_size,
                quantised=self._quantised,
            )

    def _measured(self) -> list[tuple[Mapping[str, Any], int | None]]:
        """Return the sizes of the levels, each with the bytes of its files, if it has a path.

        None where a killed process may have left other files.
        """
        found = []
        for size in self._sizes():
            folder = None if self._leftovers else size.get("path")
            found.append((size, sum(sizes_below(Path(folder), links=True)) if folder else None))
        return found

    def _sizes(self) -> Sequence[Mapping[str, Any]]:
        """Return the sizes of the levels, if the Inspector shows them."""
        if not callable(getattr(self._inspector, "sizes", None)):
            return ()
        return [each.model_dump() for each in self._ask("sizes", SIZES.validate_python)]


def waits(patience: float) -> Iterator[bool]:
    """Sleep for POLL before each True, for `patience` seconds in all.

    On a busy machine a sleep takes longer; little of that counts, because the threads that are
    waited for have as little of the processor.
    """
    while patience > 0:
        before = clock.monotonic()
        time.sleep(POLL)
        patience -= min(clock.monotonic() - before, 2 * POLL)
        yield True


def evicted(
    before: Sequence[Set[str]], now: Sequence[Set[str]], bounds: Sequence[int | None]
) -> int:
    """Return how many entries at least made room for others, between two looks at the levels.

    Entries that only vanish may have expired, and those that are in a faster level now may have
    moved there.
    """
    count = 0
    faster: set[str] = set()
    for old, new, bound in zip(before, now, bounds, strict=False):
        gone = old - new
        moved_up = len(gone & faster)
        surplus = 0 if bound is None else len(old | new) - bound
        count += max(0, min(len(gone), surplus) - moved_up)
        faster |= new
    return count


def _as_it_is(state: Any) -> Any:
    """Return the answer of `cache()` unchanged. ValidationError if it has another form."""
    State.model_validate(state)
    return state


def _waits_for_promotion(loaded: Mapping[str, Any]) -> bool:
    """Return whether the first level has room, and not yet what was loaded. See cache.loaded."""
    cached = loaded["cached"]
    return bool(loaded["local"] <= cached[0] < loaded["end"] <= cached[-1] and loaded["room"])


def _has_room(state: Mapping[str, Any]) -> bool:
    """Return whether the first level could take one more entry without an eviction.

    A level whose bound is not one of entries says itself whether it is `full`.
    """
    top = state["levels"][0]
    if "full" in top:
        return not top["full"]
    return top["bound"] is None or top["entries"] < top["bound"]
