# SPDX-License-Identifier: Apache-2.0
"""The lanes of a timeline: the steps, states and transfers of each request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvconform.contract.trace import Event

PIECES = ("local", "loaded", "computed", "placeholder", "accepted", "rejected", "draft")
"""Parts of a cell, in tokens.

They are hits of the local prefix cache, tokens loaded by the connector, computed tokens,
placeholders of asynchronous scheduling, and drafts.
"""


class Lanes:
    """Lanes, filled from the events of a trace in their order.

    - `names`: name of each lane.
    - `cells`: [lane, step, seq, tokens by PIECES..., C, N, blocks], where C is the number of
      computed tokens of the request, and N the number of its known tokens.
    - `states`: [lane, step, state, reason].
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self.cells: list[list[Any]] = []
        self.states: list[list[Any]] = []
        self._spans: list[list[Any]] = []
        # (lane, kind) -> the transfer that has not ended yet.
        self._open: dict[tuple[int, str], list[Any]] = {}
        # Lane -> (first position, tokens, cell) of what is scheduled and not computed yet.
        self._computing: dict[int, list[tuple[int, int, list[Any]]]] = {}
        # (request, position, engine) -> (lane, step) that computed it last.
        self._writers: dict[tuple[str, int, str | None], tuple[int, int]] = {}
        self._last = 0

    def number(self, event: Event) -> int:
        """Return the lane of the event's request; -1 if it concerns no or several requests.

        Adds a lane for a new request.
        """
        req = event.get("req")
        if not isinstance(req, str):
            return -1
        name = f"{event['on']}: {req}" if event.get("on") else req
        if name not in self.names:
            self.names.append(name)
        return self.names.index(name)

    def take(self, event: Event) -> None:
        """Take the next event of the trace."""
        self._last = max(self._last, event["step"])
        handler = _HANDLERS.get(event["kind"])
        if handler is not None:
            handler(self, event, self.number(event))

    def written(self, req: str, pos: int, on: str | None) -> tuple[int, int]:
        """Return (lane, step) that computed a request's position last; (-1, -1) if none did.

        `on` is the engine, if there are several.
        """
        return self._writers.get((req, pos, on), (-1, -1))

    def ended(self) -> list[list[Any]]:
        """Return the transfers: [lane, first step, last step, kind, seq].

        Those that never ended extend to the last step of the trace.
        """
        return [*self._spans, *([*span[:2], self._last, *span[3:]] for span in self._open.values())]

    def _cell(self, lane: int, event: Event) -> list[Any]:
        """Return the lane's cell of this step; add it if it is new."""
        for cell in reversed(self.cells):
            if cell[1] != event["step"]:
                break
            if cell[0] == lane:
                return cell
        cell = [lane, event["step"], event["seq"], *[0] * len(PIECES), 0, 0, []]
        self.cells.append(cell)
        return cell

    def _add(self, cell: list[Any], piece: str, tokens: int) -> None:
        cell[3 + PIECES.index(piece)] += tokens

    def _alloc(self, event: Event, lane: int) -> None:
        if event["second_call"]:
            return
        cell = self._cell(lane, event)
        self._add(cell, "local", event["local"] or 0)
        self._add(cell, "loaded", event["external"])
        cell[-1] = event["blocks"]
        if event["external"]:
            span = [lane, event["step"], event["step"], "load", event["seq"]]
            if event["is_async"]:
                self._open[lane, "recv"] = span
            else:
                self._spans.append(span)

    def _req_scheduled(self, event: Event, lane: int) -> None:
        cell = self._cell(lane, event)
        beyond = max(0, event["computed"] + event["scheduled"] - event["known"])
        drafts = min(event["drafts"], beyond)
        self._add(cell, "draft", drafts)
        self._add(cell, "placeholder", beyond - drafts)
        self._add(cell, "computed", event["scheduled"] - beyond)
        cell[2] = event["seq"]
        cell[-3:] = [event["computed"], event["known"], event["table"]]
        self._computing.setdefault(lane, []).append((event["computed"], event["scheduled"], cell))

    def _kv_computed(self, event: Event, lane: int) -> None:
        for pos in range(event["start"], event["end"]):
            self._writers[event["req"], pos, event.get("on")] = (lane, event["step"])
        waiting = self._computing.get(lane, [])
        for one in list(waiting):
            start, tokens, cell = one
            if start == event["start"] and tokens == event["end"] - event["start"]:
                waiting.remove(one)
                self._drafted(cell, event["accepted"], event["rejected"])
                return

    def _drafted(self, cell: list[Any], accepted: int, rejected: int) -> None:
        """Replace a cell's drafts by the accepted and rejected ones."""
        self._add(cell, "draft", -min(cell[3 + PIECES.index("draft")], accepted + rejected))
        self._add(cell, "accepted", accepted)
        self._add(cell, "rejected", rejected)

    def _req_state(self, event: Event, lane: int) -> None:
        self.states.append([lane, event["step"], event["to"], event["reason"]])

    def _hold(self, event: Event, lane: int) -> None:
        self._open.setdefault(
            (lane, event["direction"]),
            [lane, event["step"], event["step"], event["direction"], event["seq"]],
        )

    def _release(self, event: Event, lane: int) -> None:
        span = self._open.pop((lane, event["direction"]), None)
        if span is not None:
            self._spans.append([*span[:2], event["step"], *span[3:]])

    def _load_due(self, event: Event, lane: int) -> None:
        span = self._open.pop((lane, "recv"), None)
        if span is not None:
            self._spans.append([*span[:2], event["step"], *span[3:]])

    def _plan(self, event: Event, lane: int) -> None:
        self._spans.append([lane, event["step"], event["step"], event["op"], event["seq"]])


_HANDLERS: dict[str, Callable[[Lanes, Event, int], None]] = {
    "alloc": Lanes._alloc,
    "req.scheduled": Lanes._req_scheduled,
    "kv.computed": Lanes._kv_computed,
    "req.state": Lanes._req_state,
    "hold": Lanes._hold,
    "release": Lanes._release,
    "load.due": Lanes._load_due,
    "plan": Lanes._plan,
}
"""The method that draws an event, per kind of event."""
