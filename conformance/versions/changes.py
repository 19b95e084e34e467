# SPDX-License-Identifier: Apache-2.0
"""What changed from one vLLM release to the next: verdicts, interface, hooks, snapshots, engine."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise, zip_longest
from typing import Any, Protocol

from kvconform.contract.loader import Spec
from kvconform.judge.aggregate import WORST_FIRST
from kvconform.snapshots.compare import hook_changes, run_differences
from kvconform.snapshots.difference import Difference, merged
from kvconform.snapshots.value import shape
from kvconform.versions.matrix import Release
from kvconform.versions.observe import EngineEvent

ASPECTS = {
    "schedule": "what is scheduled",
    "requests": "the states of requests",
    "blocks": "the blocks of requests",
    "tokens": "what is sampled",
}
"""The engine without a connector, in four views."""


class Finding(Protocol):
    """Something that changed. Findings with equal sorts are one Group."""

    def sort(self) -> Hashable:
        """Return what it shares with findings of its sort; the wording plays no part."""

    def sentence(self) -> str:
        """Return it in words."""


@dataclass(frozen=True)
class EngineChange:
    """The first event of a view that differs: `was` in the old release, `now` in the new one."""

    was: EngineEvent | None
    now: EngineEvent | None

    def sort(self) -> Hashable:
        """Return the events without numbers and names of requests."""
        return _event_sort(self.was), _event_sort(self.now)

    def sentence(self) -> str:
        """Return both events in words."""
        if self.was is not None and self.now is not None:
            return f"{_described(self.now)} instead of {_described(self.was)}"
        if self.was is not None:
            return f"{_described(self.was)} is gone"
        return f"{_described(self.now or {})} is new"


def _event_sort(event: EngineEvent | None) -> Hashable:
    if event is None:
        return None
    return tuple(
        (name, bool(value) if isinstance(value, list) else shape(value))
        for name, value in event.items()
        if name not in ("step", "req")
    )


def _described(e: EngineEvent) -> str:
    match e["kind"]:
        case "step.scheduled":
            names = ("new", "cached", "resumed", "preempted", "finished")
            parts = [f"{name} {', '.join(map(str, e[name]))}" for name in names if e[name]]
            said = "; ".join([f"{e['total']} tokens", *parts])
        case "req.scheduled" if "table" in e:
            said = f"{e['req']} has blocks {e['table']}"
        case "req.scheduled":
            names = ("computed", "scheduled", "placeholders", "known", "drafts")
            said = f"{e['req']} {e['listed_as']} {' '.join(f'{n}={e[n]}' for n in names)}"
        case "req.state":
            said = f"{e['req']} {e['from'] or '-'} -> {e['to']} ({e['reason']}) {_counts(e)}"
        case "req.finished":
            said = f"{e['req']} ends as {e['status']}, {_counts(e)}"
        case "cache.reset":
            said = f"prefix cache reset {e['phase']}, returned {e['returned']}"
        case "sample":
            said = f"{e['req']} output {e['index']} = {e['token']}"
        case _:
            said = f"{e['kind']} {e['error']}"
    return f"step {e['step']}: {said}"


def _counts(event: EngineEvent) -> str:
    return f"computed={event['computed']} known={event['known']}"


@dataclass
class Group:
    """Findings of one sort: the first of them, and the runs that have one."""

    finding: Finding
    where: list[str] = field(default_factory=list)

    @property
    def what(self) -> str:
        """The first finding in words."""
        return self.finding.sentence()


@dataclass
class Change:
    """What changed from release `old` to `new`; an empty list or dictionary means nothing.

    `compared`: runs that both releases have; `snapshots`: those with snapshots.
    `flipped`: requirement -> (was, is), over these runs, without verdicts ERROR.
    `runs_flipped`: how many verdicts of single runs differ.
    `begin`, `cease`: requirements that are in force in only one of the releases.
    `order_compared`: runs whose hooks are compared, because the engine does the same in both.
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
    """Return a Change per pair of neighbours among the releases that could be judged."""
    ran = [release for release in releases if release.verdicts]
    return [compare(old, new, spec) for old, new in pairwise(ran)]


def compare(old: Release, new: Release, spec: Spec) -> Change:
    """Return all that changed."""
    change = Change(old.release, new.release)
    _verdicts(change, old, new, spec)
    _interface(change, old, new)
    runs = [
        name
        for name in old.hooks
        if name in new.hooks and old.engine.get(name) == new.engine.get(name)
    ]
    change.order_compared = len(runs)
    change.order = grouped(
        (name, finding) for name in runs for finding in order(old.hooks[name], new.hooks[name])
    )
    change.snapshots = sum(name in new.snapshots for name in old.snapshots)
    change.metadata = _snapshots("metadata", old, new)
    change.answers = _snapshots("answers", old, new)
    change.stored = _snapshots("stored", old, new)
    _engine(change, old, new)
    return change


def _interface(change: Change, old: Release, new: Release) -> None:
    was, now = old.signatures, new.signatures
    change.hooks_new = {name: text for name, text in now.items() if name not in was}
    change.hooks_gone = {name: text for name, text in was.items() if name not in now}
    change.signatures = {
        name: (text, now[name]) for name, text in was.items() if name in now and text != now[name]
    }
    change.fields_new = [name for name in new.fields if name not in old.fields]
    change.fields_gone = [name for name in old.fields if name not in new.fields]


def _verdicts(change: Change, old: Release, new: Release, spec: Spec) -> None:
    assert old.found is not None and new.found is not None
    was, now = old.found.status, new.found.status
    change.begin = [name for name in now if name not in was and name in spec.requirements]
    change.cease = [name for name in was if name not in now]
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
    """Return the verdict of a requirement from those of its runs."""
    return next(verdict.value for verdict in WORST_FIRST if verdict.value in verdicts)


def order(old: list[list[Any]], new: list[list[Any]]) -> list[Difference]:
    """Return the differences between the hooks of one run, each in the first step that has it."""
    before, after = dict(old), dict(new)
    found = merged(
        replace(one, steps=(step,))
        for step in sorted({*before, *after})
        for one in hook_changes(before.get(step, []), after.get(step, []))
    )
    return [replace(one, steps=one.steps[:1]) for one in found]


def _snapshots(kind: str, old: Release, new: Release) -> list[Group]:
    return grouped(
        (name, finding)
        for name in old.snapshots
        if name in new.snapshots
        for finding in run_differences(old.snapshots[name][kind], new.snapshots[name][kind])
    )


def _engine(change: Change, old: Release, new: Release) -> None:
    runs = [name for name in old.engine if old.engine[name] and new.engine.get(name)]
    change.engine_compared = len(runs)
    change.engine_same = sum(old.engine[name] == new.engine[name] for name in runs)
    for aspect in ASPECTS:
        found = [
            (name, finding)
            for name in runs
            if (finding := first_difference(old.engine[name][aspect], new.engine[name][aspect]))
        ]
        if found:
            change.engine[aspect] = grouped(found)


def first_difference(old: list[EngineEvent], new: list[EngineEvent]) -> EngineChange | None:
    """Return the first events that differ; None if none do."""
    for was, now in zip_longest(old, new):
        if was != now:
            return EngineChange(was, now)
    return None


def grouped(found: Iterable[tuple[str, Finding]]) -> list[Group]:
    """Return the findings by sort, each with its run; the sorts in most runs come first."""
    groups: dict[Hashable, Group] = {}
    for run, finding in found:
        group = groups.setdefault(finding.sort(), Group(finding))
        if run not in group.where:
            group.where.append(run)
    return sorted(groups.values(), key=lambda group: -len(group.where))


def as_data(change: Change) -> Mapping[str, Any]:
    """Return a Change as JSON data; groups as {what, runs}."""

    def plain(value: Any) -> Any:
        if isinstance(value, Group):
            return {"what": value.what, "runs": value.where}
        if isinstance(value, Mapping):
            return {key: plain(item) for key, item in value.items()}
        return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value

    return {key: plain(value) for key, value in vars(change).items()}
