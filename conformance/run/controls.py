# SPDX-License-Identifier: Apache-2.0
"""Operations of a connector's controller, and what the next lookup of that content finds.

The controller is the object that the scheduler half's `kvconform_controller()` returns
(docs/cache.md). It addresses content by a request that has it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from kvconform.contract.events import loses_entries
from kvconform.contract.steps import Control
from kvconform.contract.trace import Event
from kvconform.errors import KvconformError, UsageError
from kvconform.run.records import RunState, common_prefix


@dataclass(frozen=True)
class Found:
    """Answer of a controller's lookup: tokens from the start, and how many each level has."""

    tokens: int
    at: Mapping[str, int]

    def there(self, level: str) -> int:
        """Return the tokens at a level. UsageError if the answer does not name it."""
        if level not in self.at:
            raise UsageError(
                f"controller: lookup() must name level {level!r} in `at`, also if it has nothing"
            )
        return self.at[level]


NOTHING = Found(0, {})


class Controls:
    """Emits control.done and control.result."""

    def __init__(self, state: RunState) -> None:
        self.state = state
        self._said: dict[str, Event] = {}

    def apply(self, control: Control, request: Any, connector: Any) -> float:
        """Do what a case asks; return the tolerance of what is loaded from now on.

        `request` has the content. The engine does not know it. UsageError if the controller does
        not have the declared form.
        """
        controller = _controller_of(connector, self.state.caps["controller"])
        before = after = NOTHING
        level: str | None = None
        tolerance, error = 0.0, None
        try:
            before = _look_up(controller, request)
            level = control.to and list(before.at)[0 if control.to == "first" else -1]
            tolerance = _operate(controller, control.do, request, level)
            after = _look_up(controller, request)
        except KvconformError:
            raise
        except Exception as problem:
            error = f"{type(problem).__name__}: {problem}".splitlines()[0][:200]
        said = self.state.trace.emit(
            "control.done",
            do=control.do,
            of=control.of,
            to=control.to,
            before=before.tokens,
            after=after.tokens,
            there=None if level is None or error else after.there(level),
            error=error,
        )
        self._said.pop(control.of, None)
        if error is None:
            self._said[control.of] = said
        if control.do == "clear":
            self.state.cleared.add(control.of)
        return tolerance

    def looked_up(self, request: Any, event: Event) -> None:
        """Emit control.result at the first answered lookup of content that was controlled."""
        reload = self.state.reloads.get(request.request_id)
        if reload is None or event["tokens"] is None:
            return
        said = self._said.get(reload.of)
        if said is None or not self._still_holds(said):
            return
        del self._said[reload.of]
        self.state.trace.emit(
            "control.result",
            do=said["do"],
            of=reload.of,
            req=request.request_id,
            said=said["after"],
            usable=self._usable(said["after"], reload.of, request, event.get("on")),
            local=event["local"],
            tokens=event["tokens"],
        )

    def _still_holds(self, said: Event) -> bool:
        """Return whether nothing may have changed what the controller said.

        What is cleared stays away until it is computed again. What is pinned stays whatever else is
        stored, unless it was lost or controlled again.
        """
        since = self.state.trace.events[said["seq"] + 1 :]
        computed = {e["req"] for e in since if e["kind"] == "req.scheduled"}
        if said["do"] == "clear":
            alike = filter(lambda name: self._overlap(name, said["of"]), self.state.prompts)
            return computed.isdisjoint(self.state.ids[name] for name in alike)
        # A restart ends all pins.
        if any(loses_entries(e) or e["kind"] == "engine.lifecycle" for e in since):
            return False
        if any(self._controls(e, said["of"]) for e in since):
            return False
        may_expire = any(e["kind"] == "clock.advanced" for e in since)
        return said["do"] == "pin" or not (computed or may_expire)

    def _controls(self, event: Event, of: str) -> bool:
        """Return whether the controller changed content that request `of` may have, too."""
        if event["kind"] != "control.done" or event["do"] == "lookup":
            return False
        return self._overlap(event["of"], of)

    def _overlap(self, name: str, other: str) -> bool:
        return self.state.start_alike(name, other)

    def _usable(self, said: int, of: str, request: Any, on: str | None) -> int:
        """Return how many of these tokens a request of engine `on` can load, in whole blocks."""
        common = common_prefix(request.all_token_ids, self.state.requests[of].all_token_ids)
        tokens = min(said, common, request.num_tokens - 1)
        return int(tokens - tokens % self.state.variant.of_engine(on).block_size)


def _controller_of(connector: Any, declared: Collection[str]) -> Any:
    """Return the controller. UsageError unless it has a method for each declared operation."""
    make = getattr(connector, "kvconform_controller", None)
    controller = make() if callable(make) else None
    if controller is None:
        raise UsageError(
            "controller: the scheduler half needs a method kvconform_controller() that returns an "
            "object (docs/cache.md)"
        )
    wanted = [*declared, *(["unpin"] if "pin" in declared else [])]
    missing = [name for name in wanted if not callable(getattr(controller, name, None))]
    if missing:
        raise UsageError(
            f"controller: {type(controller).__name__} has no method {', '.join(missing)}; declare "
            "only the operations that there are"
        )
    return controller


def _look_up(controller: Any, request: Any) -> Found:
    answer = controller.lookup(request)
    if not _is_answer(answer):
        raise UsageError(
            "controller: lookup() must return {'found': int, 'at': {level: int}}, with a level at "
            f"least, and not {answer!r}"[:300]
        )
    return Found(answer["found"], answer["at"])


def _is_answer(answer: Any) -> bool:
    if not isinstance(answer, Mapping):
        return False
    at = answer.get("at")
    has_levels = isinstance(at, Mapping) and bool(at) and all(map(_is_count, at.values()))
    return has_levels and _is_count(answer.get("found"))


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _operate(controller: Any, do: str, request: Any, level: str | None) -> float:
    """Do an operation; return the tolerance of what is loaded from now on."""
    if do == "lookup":
        return 0.0
    if do == "move":
        controller.move(request, level)
        return 0.0
    answer = getattr(controller, do)(request)
    if do != "compress":
        return 0.0
    if not isinstance(answer, (int, float)):
        raise UsageError(
            f"controller: compress() must return the tolerance, a number, and not {answer!r}"[:300]
        )
    return float(answer)
