# SPDX-License-Identifier: Apache-2.0
"""Circumstances of a failure: what had not come up in its run until then.

A usual cause that needs such a circumstance is ruled out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable

from kvconform.contract.events import SIZED
from kvconform.contract.trace import Event


def _most_ranks(event: Event) -> int:
    """Return the most ranks that an engine of the run has, by an event that says so; else 0."""
    if event["kind"] == "run.engines":
        return max((own.get("ranks", 0) for own in event["own"].values()), default=0)
    return event.get("ranks", 0) if event["kind"] in SIZED else 0


_CAME_UP: dict[str, Callable[[Event], bool]] = {
    "preemption": lambda e: e["kind"] == "req.state" and e["to"] == "PREEMPTED",
    "drafts": lambda e: e["kind"] == "req.scheduled" and bool(e.get("drafts")),
    "placeholders": lambda e: (
        e["kind"] in ("req.scheduled", "req.interrupted") and bool(e.get("placeholders"))
    ),
    "reset": lambda e: e["kind"] == "cache.reset",
    "reset of the connector": lambda e: e["kind"] == "cache.reset" and bool(e["connector"]),
    "abort": lambda e: e["kind"] == "req.state" and e["to"] == "FINISHED_ABORTED",
    "write over a hit": lambda e: (
        e["kind"] == "kv.changed" and bool(e["shared"] or e["over_computed"])
    ),
    "write to a lost block": lambda e: (
        e["kind"] == "kv.changed"
        and bool(e["unallocated"] or e["other_request"] or e["over_computed"])
    ),
    "write to block 0": lambda e: e["kind"] == "kv.changed" and bool(e["null_block"]),
    "local hit": lambda e: e["kind"] == "lookup" and e["local"] > 0,
    "kernel blocks": lambda e: e["kind"] == "kv.registered" and e["kernel_blocks"] > 1,
    "hit": lambda e: e["kind"] == "lookup" and e["tokens"] != 0,  # None: it may come from below
    "release before a load": lambda e: e["kind"] == "pair.request" and e["gone"],
    "several ranks": lambda e: _most_ranks(e) > 1,
    "kill": lambda e: e["kind"] == "engine.lifecycle" and e["op"] == "killed",
    "pooling": lambda e: e["kind"] == "run.start" and bool(e.get("pooling")),
}
"""How each circumstance shows in a trace."""

WORDS = {
    "preemption": ("preempt", "resum"),
    "drafts": ("draft",),
    "placeholders": ("placeholder",),
    "reset": ("reset",),
    "reset of the connector": ("reset of its cache",),
    "abort": ("abort",),
    "write over a hit": ("over the local hit",),
    "write to a lost block": ("request go on",),
    "write to block 0": ("null block",),
    "local hit": ("adds to the local hit", "for the local hit"),
    "kernel blocks": ("kernel block",),
    "hit": ("promot",),
    "release before a load": ("gives blocks up before",),
    "several ranks": ("every rank", "several ranks", "two ranks"),
    "kill": ("is killed",),
    "pooling": ("pooling model",),
}
"""Beginnings of words by which a usual cause (`wrong` of a requirement) names a circumstance."""

TELLING = frozenset(WORDS) - {"placeholders", "reset", "hit"}
"""Circumstances that few runs have. The others come up in most runs that could fail at all."""

OWN = frozenset({"local hit"})
"""Circumstances that matter to the request in which they come up."""


def absent(trace: Iterable[Event], failure: Event) -> tuple[str, ...]:
    """Return the circumstances that had not come up until the end of the failure's step.

    What a hook was called with is recorded after the hook, which may already fail by it.
    """
    missing = dict(_CAME_UP)
    req = failure.get("req")
    for event in trace:
        if event["seq"] > failure["seq"] and event["step"] != failure["step"]:
            break
        is_other = req is not None and event.get("req") != req
        for name in [name for name, came_up in missing.items() if came_up(event)]:
            if not (is_other and name in OWN):
                del missing[name]
    return tuple(missing)


def possible(
    wrong: str, ruled_out: Iterable[str], hook: str | None = None, errors: Collection[str] = ()
) -> str:
    """Return the usual causes in `wrong` that need none of the circumstances `ruled_out`.

    Those that need a TELLING one are first: it came up, and most runs do without.
    `wrong` is a sentence of alternatives, separated by semicolons. `hook`: only those that show in
    this hook, or that name none. `errors`, if there are some: only causes that name one of these
    errors, or none.
    """
    out = {*ruled_out}
    wrong = wrong.strip().rstrip(".")
    parts = [
        part.strip().removeprefix("or ") for part in f"{wrong[:1].lower()}{wrong[1:]}".split(";")
    ]
    needs = {part: _circumstances(part) for part in parts if part}
    left = [part for part in needs if not needs[part] & out]
    left.sort(key=lambda part: not needs[part] & TELLING)
    if hook is not None:
        left = [part for part in left if hook in (names := _hooks(part)) or not names]
    if errors:
        left = [part for part in left if not (known := _errors(part)) or known & set(errors)]
    if not left:
        return ""
    text = "; ".join([*left[:-1], "or " + left[-1]]) if len(left) > 1 else left[0]
    return f"{text[0].upper()}{text[1:]}."


def _circumstances(text: str) -> set[str]:
    """Return the circumstances that a usual cause names."""
    return {name for name, words in WORDS.items() if any(_has(text, word) for word in words)}


def _has(text: str, word: str) -> bool:
    """Return whether a word of `text`, other than names of code, begins with `word`."""
    plain = re.sub(r"\w+_\w+", "", text)
    return re.search(rf"\b{re.escape(word)}", plain, re.IGNORECASE) is not None


def _errors(text: str) -> set[str]:
    """Return the names of errors in a text."""
    return set(re.findall(r"\b\w+Error\b", text))


def _hooks(text: str) -> list[str]:
    """Return the hooks of `in first_hook, second_hook or third_hook` in a text."""
    listed = re.search(r"\bin (\w+_\w+(?:(?:,| or) \w+_\w+)*)", text)
    return re.split(r", | or ", listed[1]) if listed is not None else []
