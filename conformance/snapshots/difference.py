# SPDX-License-Identifier: Apache-2.0
"""One difference between two snapshots: its kind, place and values.

It has a sentence for people and a sort for grouping. The sort does not depend on the wording.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from kvconform.snapshots.value import Value, identity, shape, text

SENTENCES = {
    "run gone": "there is no such run any more",
    "run new": "a new run",
    "gone": "{where}: gone (was {was})",
    "new": "{where}: new ({now})",
    "changed": "{where}: {was} -> {now}",
    "moved": "{0}: {1} {element} is in step {to}, was in step {at}: {distance}",
    "called": "{steps}: {0} is called{times}",
    "not called": "{steps}: {0} is not called{times}",
    "count": "{steps}: calls of {0}: {was} -> {now}",
    "order": "{steps}: {0} is called before {1}",
    "request gone": "request {0} is not asked for any more ({was} came back)",
    "request changed": "of request {0} {now} come back, it was {was}",
    "block gone": "block {1}, layer {2} of request {0} does not come back any more (it held {was})",
    "block new": "block {1}, layer {2} of request {0} comes back now, with {now}",
    "block changed": "block {1}, layer {2} of request {0} now holds {now}; it was {was}",
    "tokens": "block {1}, layer {2} of request {0} has the tokens {now}; it had {was}",
    "bytes": "block {1}, layer {2} of request {0} holds the same tokens in other bytes"
    " ({was} -> {now})",
}
"""Kind of difference -> its wording; numbers stand for the parts of the place."""
LONGEST = 90
"""Characters that are shown of an element that moved."""


class Entry(NamedTuple):
    """What happens in a step, as part of a place: a call, or a report that transfers are over.

    `request`: the request that a call is about; "" for a call without one, None for a report.
    `number`: position among the step's entries of this name and request, from 1.
    """

    name: str
    request: str | None = ""
    number: int = 1

    def __str__(self) -> str:
        shown = self.name
        if self.request is not None:
            shown += f"(request {self.request})" if self.request else "()"
        return shown if self.number == 1 else f"{shown} (no. {self.number})"


Place = tuple[str | int | Entry, ...]
"""Path to a value in a run: entries of a step, names of fields, positions in lists."""


@dataclass(frozen=True)
class Difference:
    """One difference between two runs. `kind`: a key of SENTENCES.

    `place`, `was` and `now` depend on it: for stored KV they are (request, block, layer) and what
    it holds, for hooks their names and how often they are called.
    `steps`: the steps that differ; of an element that moved, where it was and where it is.
    """

    kind: str
    place: Place = ()
    was: Value = None
    now: Value = None
    steps: tuple[int, ...] = ()
    run: str = ""

    def __str__(self) -> str:
        return f"{self.run}: {self.sentence()}" if self.run else self.sentence()

    def sort(self) -> Hashable:
        """Return what differences of one sort share: all but positions, numbers, request names."""
        names = [
            (part.name, bool(part.request), part.number > 1)
            if isinstance(part, Entry)
            else shape(part)
            for part in self.place
            if not isinstance(part, int)
        ]
        several = len(self.steps) > 1
        later = self.kind == "moved" and self.steps[0] < self.steps[1]
        return self.kind, tuple(names), shape(self.was), shape(self.now), several, later

    def sentence(self) -> str:
        """Return the difference in words, without the name of the run."""
        steps = f"step{'s' if len(self.steps) > 1 else ''} {spans(self.steps)}"
        at, to = self.steps if self.kind == "moved" else (0, 0)
        count = abs(to - at)
        was = text(self.was) or "there"
        return SENTENCES[self.kind].format(
            *self.place,
            where=f"{steps}, {written(self.place)}" if self.steps else written(self.place),
            was=was,
            now=text(self.now) or "there",
            element=was if len(was) <= LONGEST else f"{was[:LONGEST]}...",
            steps=steps,
            times=_times(self.was, self.now),
            at=at,
            to=to,
            distance=f"{count} step{'s' * (count > 1)} {'earlier' if to < at else 'later'}",
        )


def _times(was: Value, now: Value) -> str:
    """Return how often a hook is called, or was called, if that is more than once."""
    if isinstance(was, int) and was > 1:
        return f" (it was {was} times)"
    return f" ({now} times)" if isinstance(now, int) and now > 1 else ""


def written(place: Place) -> str:
    """Return a place as text: `build_connector_meta().answer.saves[0].start`."""
    out = ""
    for part in place:
        out += f"[{part}]" if isinstance(part, int) else f".{part}"
    return out.removeprefix(".")


def merged(found: Iterable[Difference]) -> list[Difference]:
    """Return the differences with those merged that differ in their steps only."""
    out: dict[Hashable, Difference] = {}
    for one in found:
        key = one.kind, one.place, identity(one.was), identity(one.now)
        out[key] = replace(one, steps=(*out[key].steps, *one.steps)) if key in out else one
    return list(out.values())


def spans(numbers: Sequence[int]) -> str:
    """Return `1 to 3, 5` for [1, 2, 3, 5]."""
    out: list[list[int]] = []
    for number in numbers:
        if out and out[-1][1] == number - 1:
            out[-1][1] = number
        else:
            out.append([number, number])
    return ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in out)
