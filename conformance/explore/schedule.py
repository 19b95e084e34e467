# SPDX-License-Identifier: Apache-2.0
"""Random schedules: what happens to requests, and when, within what engine and clients may do."""

from __future__ import annotations

from kvconform.explore.dice import Dice
from kvconform.explore.requests import Requests
from kvconform.explore.workload import Data

NAMES = "abcdef"
KINDS = (
    "step",
    "step",
    "abort",
    "abort",
    "preempt",
    "preempt",
    "preempt",
    "run",
    "drop-local",
    "reset",
    "idle",
    "reorder",
    "pause",
)
THEN = (
    *["disturb"] * 3,
    *["finish"] * 3,
    *["between"] * 2,
    "leave",
    "step",
    "ask",
    "again",
    "together",
    "partly",
)
"""What follows a request, repeated by weight."""

PLAIN: dict[str, Data] = {
    "drop-local": {"drop-local": {}},
    "idle": {"idle": 1},
    "reorder": {"reorder": {}},
}


class Schedule:
    """The steps of one workload.

    `depth`: steps that may be in flight. `failing`: some loads fail. `restarts`: the engine is
    restarted.
    """

    def __init__(
        self, dice: Dice, requests: Requests, *, depth: int, failing: bool, restarts: bool
    ) -> None:
        self.dice = dice
        self.requests = requests
        self.depth = depth
        self.failing = failing
        self.restarts = restarts
        self.steps: list[Data] = []
        self._vacant: str | None = None  # an id that the next request reuses
        self._partly: tuple[str, int] | None = None  # the request to repeat next, and how often
        requests.restarts = 0 if restarts else None

    def draw(self, most: int) -> list[Data]:
        """Draw two to `most` requests, each with the events that follow it."""
        for name in NAMES[: self.dice.number(2, most)]:
            self._request(name)
        self._run()
        if self.restarts and self.dice.one_in(8):
            self.steps.append({"shutdown": {"again": True} if self.dice.one_in(4) else {}})
        return self.steps

    def _request(self, name: str) -> None:
        dice, requests = self.dice, self.requests
        sources = requests.settled
        failing = self.failing and sources and self._partly is None and not dice.one_in(3)
        if failing:
            self.steps.append({"drop-local": {}})
        add = self._drawn(name, dice.pick(sources) if failing else None)
        if self._vacant is not None or self._reuses(add):
            add["id"] = self._vacant or next(iter(requests.settled))
            self._vacant = None
        self.steps.append({"add": add})
        if failing:
            length = requests.lengths[name]
            positions = dice.pick(["all", [dice.number(0, length - 1)], [0, length // 2]])
            self.steps.append({"fail-load": {"req": name, "positions": positions}})
        then = "finish" if self.restarts and name == NAMES[0] else dice.pick(THEN)
        if self._partly is not None:
            self._run()
        elif failing and dice.one_in(4):  # the next request shares the blocks being loaded
            self._partly = name, 1
        elif then == "disturb":  # events while the request is in progress
            if requests.simple or not dice.one_in(4):
                self.steps.append({"step": dice.number(1, 4)})
            else:
                self.steps.append({"run": {"loaded": name}})
            for kind in dice.some(KINDS, 4):
                self._event(kind, name)
        elif then == "finish":  # the next request finds nothing in the local cache
            self._run()
            self.steps.append({"drop-local": {}})
            if self.restarts and (requests.restarts == 0 or dice.one_in(4)):
                self.steps.append({"restart": "engine"})
                requests.restarted()
        elif then == "leave":  # the next request finds it in the local cache
            self._run()
        elif then == "step":
            self.steps.append({"step": dice.number(1, 6)})
        elif then == "between":
            self._between(name)
        elif then == "ask" and not failing:
            self.steps += [{"lookup-only": name}] * dice.number(1, 2)
            if dice.one_in(2):
                self._event("abort", name)
                if name in requests.aborted and not requests.simple and dice.one_in(2):
                    requests.live.remove(name)
                    self._vacant = name  # it is free at once, because the request got no blocks
        elif then == "again" and isinstance(add["prompt"], int) and not requests.simple:
            self._again(add)
        elif then == "partly" and isinstance(add["prompt"], int):
            self._run()
            self.steps.append({"drop-local": {}})
            self._partly = name, 2
        # together: the next request comes in the same step

    def _drawn(self, name: str, again: str | None) -> Data:
        """Draw one more request.

        After a request whose KV is only in the store: first a part of its prompt, so that the part
        is in the local cache, then the whole prompt. After one whose load fails: the same prompt at
        once.
        """
        source, left = self._partly or (None, 0)
        self._partly = (source, left - 1) if source is not None and left > 1 else None
        if left > 1:
            return self.requests.draw(name, part_of=source)
        return self.requests.draw(name, again if source is None else source)

    def _reuses(self, add: Data) -> bool:
        """Return whether a request reuses the id of the first settled request.

        It does not if another request may be live, so that no two live requests have one id.
        """
        requests = self.requests
        alone = not requests.live[:-1] and not any("id" in each for each in requests.adds.values())
        return (
            not requests.simple
            and alone
            and bool(requests.settled)
            and self.dice.one_in(8)
            and "reloads" not in add
        )

    def _again(self, add: Data) -> None:
        """Abort a request, and let the next one reuse its id before the next step.

        The engine accepts an id again once it has released the first request: there is nothing to
        load for it, it has not finished, and none of its output is in flight.
        """
        add["max_tokens"] = 9
        for name in ("drafts", "stop_at", "repeats_at", "id"):
            add.pop(name, None)
        count = self.dice.number(1, 2)
        self.steps += [{"step": count}, {"land": self.depth}, {"abort": add["req"]}]
        self.requests.aborted.add(add["req"])
        self.requests.live.remove(add["req"])
        self._vacant = add["req"]

    def _run(self) -> None:
        self.steps.append({"run": {}})
        self.requests.finished()

    def _event(self, kind: str, latest: str) -> None:
        dice = self.dice
        live = self.requests.live
        request = dice.pick([latest, latest, *live]) if live else latest
        if kind == "step":
            self.steps.append({"step": dice.number(1, 5)})
        elif kind == "abort":
            self.steps.append({"abort": request})
            self.requests.aborted.add(request)
        elif kind == "preempt":
            self.steps.append({"preempt": request})
        elif kind == "run":
            self._run()
        elif kind == "reset":
            connector = dice.one_in(2)
            self.steps.append({"reset": {"running": dice.one_in(2), "connector": connector}})
            if connector:
                self.requests.forgotten()
        elif kind == "pause":
            if dice.one_in(3):
                self.steps += [{"pause": {}}, {"step": dice.number(1, 3)}, {"resume": {}}]
        else:
            self.steps.append({**PLAIN[kind]})

    def _between(self, name: str) -> None:
        """Add an event while outputs of one to `depth` steps are in flight."""
        count = self.dice.number(1, self.depth)
        self.steps += [{"land": self.depth}, {"schedule": count}]
        kind = "abort" if self.depth == 1 else self.dice.pick(["abort", "preempt", "reorder"])
        self._event(kind, name)
        self.steps.append({"land": self.depth})
