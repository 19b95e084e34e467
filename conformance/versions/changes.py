# SPDX-License-Identifier: Apache-2.0
"""What changed from one release to the next: verdicts, the interface, the order of hooks, metadata, stored KV, and the engine itself."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from kvconform.contract.loader import Spec
from kvconform.judge.aggregate import WORST_FIRST
from kvconform.versions.matrix import Release

ASPECTS = {
    "schedule": "what is scheduled",
    "requests": "the states of requests",
    "blocks": "the blocks of requests",
    "tokens": "what is sampled",
}
"""The engine without a connector, in four views."""


@dataclass
class Group:
    """Changes of one sort. `what`: the first of them in words; `where`: the runs that have it."""

    what: str
    where: list[str] = field(default_factory=list)


@dataclass
class Change:
    """From release `old` to `new`. Empty lists: nothing of that sort. `compared`: runs that both have; `snapshots`: those with snapshots.

    `flipped`: requirement -> (was, is), over these runs, without those in which the harness failed; `runs_flipped`: how many verdicts of
    single runs differ. `begin`, `cease`: requirements that are in force in only one of them. `order_compared`: runs whose hooks are
    compared: where the engine goes another way, so do its calls.
    """

    old: str
    new: str
    compared: int = 0
    snapshots: int = 0
    flipped: dict[str, tuple[str, str]] = field(default_factory=dict)
    runs_flipped: dict[str, int] = field(default_factory=dict)
    begin: list[str] = field(default_factory=list)
    cease: list[str] = field(default_factory=list)
    hooks_new: dict[str, str] = field(default_factory=dict)
    hooks_gone: dict[str, str] = field(default_factory=dict)
    signatures: dict[str, tuple[str, str]] = field(default_factory=dict)
    fields_new: list[str] = field(default_factory=list)
    fields_gone: list[str] = field(default_factory=list)
    order: list[Group] = field(default_factory=list)
    order_compared: int = 0
    metadata: list[Group] = field(default_factory=list)
    answers: list[Group] = field(default_factory=list)
    stored: list[Group] = field(default_factory=list)
    engine: dict[str, list[Group]] = field(default_factory=dict)
    engine_same: int = 0
    engine_compared: int = 0


def neighbours(releases: Iterable[Release], spec: Spec) -> list[Change]:
    """A Change per pair of neighbours among those that could be judged; what lies between is not skipped silently: see the report."""
    ran = [release for release in releases if release.verdicts]
    return [compare(old, new, spec) for old, new in pairwise(ran)]


def compare(old: Release, new: Release, spec: Spec) -> Change:
    """All that changed."""
    change = Change(old.release, new.release)
    _verdicts(change, old, new, spec)
    change.hooks_new = {
        name: text for name, text in new.signatures.items() if name not in old.signatures
    }
    change.hooks_gone = {
        name: text for name, text in old.signatures.items() if name not in new.signatures
    }
    both = [name for name in old.signatures if name in new.signatures]
    change.signatures = {
        n: (old.signatures[n], new.signatures[n])
        for n in both
        if old.signatures[n] != new.signatures[n]
    }
    change.fields_new = [name for name in new.fields if name not in old.fields]
    change.fields_gone = [name for name in old.fields if name not in new.fields]
    runs = [
        name
        for name in old.hooks
        if name in new.hooks and old.engine.get(name) == new.engine.get(name)
    ]
    change.order_compared = len(runs)
    change.order = grouped(
        (name, sentence) for name in runs for sentence in order(old.hooks[name], new.hooks[name])
    )
    change.snapshots = sum(name in new.snapshots for name in old.snapshots)
    change.metadata, change.answers, change.stored = (
        _texts(kind, old, new) for kind in ("metadata", "answers", "stored")
    )
    _engine(change, old, new)
    return change


def _verdicts(change: Change, old: Release, new: Release, spec: Spec) -> None:
    assert old.found is not None and new.found is not None
    was, now = old.found.status, new.found.status
    change.begin, change.cease = (
        [n for n in now if n not in was and n in spec.requirements],
        [n for n in was if n not in now],
    )
    runs = [name for name in old.verdicts if name in new.verdicts]
    change.compared = len(runs)
    before: dict[str, set[str]] = {}
    after: dict[str, set[str]] = {}
    for run in runs:
        for name, verdict in old.verdicts[run].items():
            is_now = new.verdicts[run].get(name)
            if is_now is None or "ERROR" in (verdict, is_now):
                continue
            before.setdefault(name, set()).add(verdict)
            after.setdefault(name, set()).add(is_now)
            if is_now != verdict:
                change.runs_flipped[name] = change.runs_flipped.get(name, 0) + 1
    for name in before:
        pair = worst(before[name]), worst(after[name])
        if pair[0] != pair[1]:
            change.flipped[name] = pair


def worst(verdicts: set[str]) -> str:
    """What a requirement comes to with these verdicts of its runs."""
    return next(verdict.value for verdict in WORST_FIRST if verdict.value in verdicts)


def order(old: list[list[Any]], new: list[list[Any]]) -> list[str]:
    """Sentences about the hooks of one run, each once: `get_finished is called before wait_for_save now`."""
    before, after = {step: names for step, names in old}, {step: names for step, names in new}
    found: dict[str, list[int]] = {}
    for step in sorted({*before, *after}):
        was, now = before.get(step, []), after.get(step, [])
        for sentence in _order(was, now) if was != now else ():
            found.setdefault(sentence, []).append(step)
    return [f"step {steps[0]}: {sentence}" for sentence, steps in found.items()]


def _order(was: list[str], now: list[str]) -> list[str]:
    parts = [f"{name} is called" for name in dict.fromkeys(now) if name not in was]
    parts += [f"{name} is not called" for name in dict.fromkeys(was) if name not in now]
    both = [
        name for name in dict.fromkeys(was) if name in now and was.count(name) != now.count(name)
    ]
    parts += [
        f"{name} is called {now.count(name)} times instead of {was.count(name)}" for name in both
    ]
    if not parts:
        place = next(i for i, (a, b) in enumerate(zip(was, now, strict=True)) if a != b)
        parts = [f"{now[place]} is called before {was[place]}"]
    return parts


def _texts(kind: str, old: Release, new: Release) -> list[Group]:
    from kvconform.snapshots.compare import differences

    both = [name for name in old.snapshots if name in new.snapshots]
    pairs = (
        (name, differences(old.snapshots[name][kind], new.snapshots[name][kind])) for name in both
    )
    return grouped(
        (name, sentence.partition(": ")[2] or sentence)
        for name, sentences in pairs
        for sentence in sentences
    )


def _engine(change: Change, old: Release, new: Release) -> None:
    runs = [name for name in old.engine if old.engine[name] and new.engine.get(name)]
    change.engine_compared = len(runs)
    change.engine_same = sum(old.engine[name] == new.engine[name] for name in runs)
    for aspect in ASPECTS:
        found = [
            (name, text)
            for name in runs
            if (text := first_difference(old.engine[name][aspect], new.engine[name][aspect]))
        ]
        if found:
            change.engine[aspect] = grouped(found)


def first_difference(old: list[str], new: list[str]) -> str | None:
    """`step 3: a RUNNING -> ... instead of step 3: ...`: the first line that differs; None if none does."""
    for was, now in zip(old, new, strict=False):
        if was != now:
            return f"{now} instead of {was}"
    if len(old) == len(new):
        return None
    longer, word = (old, "is gone") if len(old) > len(new) else (new, "is new")
    return f"{longer[min(len(old), len(new))]} {word}"


def grouped(found: Iterable[tuple[str, str]]) -> list[Group]:
    """(run, sentence) by sort: those that differ in numbers and names of requests only are of one sort. The most frequent first."""
    groups: dict[str, Group] = {}
    for run, sentence in found:
        group = groups.setdefault(sort_of(sentence), Group(sentence))
        if run not in group.where:
            group.where.append(run)
    return sorted(groups.values(), key=lambda group: -len(group.where))


def sort_of(sentence: str) -> str:
    """A sentence without what differs from run to run: numbers, lists of them, digests, one-letter names of requests."""
    text = re.sub(r"\[[^\[\]]*\]", "[]", sentence)
    text = re.sub(r"\b[0-9a-f]{12,}\b|\b[a-z]\d*\b|\d+", "*", text)
    return re.sub(r"\*(?:, \*)+", "*", text)


def as_data(change: Change) -> Mapping[str, Any]:
    """JSON-able; groups as {what, runs}."""

    def plain(value: Any) -> Any:
        if isinstance(value, Group):
            return {"what": value.what, "runs": value.where}
        if isinstance(value, Mapping):
            return {key: plain(item) for key, item in value.items()}
        return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value

    return {key: plain(value) for key, value in vars(change).items()}
