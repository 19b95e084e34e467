# SPDX-License-Identifier: Apache-2.0
"""Operations of a connector's controller, and what the next lookup of that content finds.

The controller is the object that the scheduler half's `kvconform_controller()` returns
(docs/cache.md). It addresses content by a request that has it.
"""

from __future__ import annotations

from typing import Any

from kvconform.contract.steps import Control
from kvconform.contract.trace import Event
from kvconform.run.records import RunState


class Controls:
    """Emits control.done and control.result."""

    def __init__(self, state: RunState) -> None:
        self.state = state
        self._said: dict[str, Event] = {}

    def apply(self, control: Control, request: Any, connector: Any) -> float:
        """Do what a case asks; return the tolerance of what is loaded from now on.

        `request` has the content. The engine does not know it.
        """
        controller = connector.kvconform_controller()
        before = controller.lookup(request)
        levels = list(before["at"])
        level = None if control.to is None else levels[0 if control.to == "first" else -1]
        tolerance, error = 0.0, None
        try:
            if control.do == "move":
                controller.move(request, level)
            elif control.do == "compress":
                tolerance = float(controller.compress(request))
            elif control.do != "lookup":
                getattr(controller, control.do)(request)
        except Exception as problem:
            error = f"{type(problem).__name__}: {problem}".splitlines()[0][:200]
        after = controller.lookup(request)
        self._said[control.of] = self.state.trace.emit(
            "control.done",
            do=control.do,
            of=control.of,
            to=control.to,
            before=before["found"],
            after=after["found"],
            there=None if level is None else after["at"][level],
            error=error,
        )
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
            usable=self._usable(said["after"], reload.of, request),
            local=event["local"],
            tokens=event["tokens"],
        )

    def _still_holds(self, said: Event) -> bool:
        """Return whether nothing may have changed what the controller said.

        What is pinned stays whatever else is stored, and what is cleared stays away until it is
        computed again.
        """
        if said["do"] == "pin":
            return True
        since = self.state.trace.events[said["seq"] + 1 :]
        computed = {e["req"] for e in since if e["kind"] == "req.scheduled"}
        if said["do"] != "clear":
            return not computed
        alike = (name for name in self.state.prompts if self.state.start_alike(name, said["of"]))
        return computed.isdisjoint(self.state.ids[name] for name in alike)

    def _usable(self, said: int, of: str, request: Any) -> int:
        """Return how many of these tokens a request can load, in whole blocks."""
        common = 0
        for mine, theirs in zip(
            request.all_token_ids, self.state.requests[of].all_token_ids, strict=False
        ):
            if mine != theirs:
                break
            common += 1
        tokens = min(said, common, request.num_tokens - 1)
        return int(tokens - tokens % self.state.variant.block_size)
