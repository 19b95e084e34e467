# SPDX-License-Identifier: Apache-2.0
"""Compares two documents of a snapshot.

It finds fields that changed, blocks saved a step earlier, hooks called in another order, KV that
no longer comes back.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import safetensors.numpy

from kvconform.snapshots.difference import Difference, Entry, Place, merged, spans
from kvconform.snapshots.document import Call, Document, Run, Step
from kvconform.snapshots.value import Value, head, identity, is_leaf, is_plain, parts, text

Values = dict[Place, Value]
Moved = tuple[str, str, str]
"""An element of a list: hook, name of the list, identity of the element's core."""


def differences(old: Document, new: Document) -> list[Difference]:
    """Return the differences between two documents of one kind and case, run by run."""
    before, after = old["runs"], new["runs"]
    found = [Difference("run gone", run=name) for name in before if name not in after]
    found += [Difference("run new", run=name) for name in after if name not in before]
    for name, run in before.items():
        if name in after:
            found += [replace(one, run=name) for one in run_differences(run, after[name])]
    return found


def run_differences(old: Run, new: Run) -> list[Difference]:
    """Return the differences between two runs; `run` is left empty."""
    before, after = _by_step(old), _by_step(new)
    moved, gone, come = _moved(before, after)
    in_steps = (
        replace(one, steps=(number,))
        for number in sorted({*before, *after})
        for one in _step_differences(
            before.get(number, {}), after.get(number, {}), gone[number], come[number]
        )
    )
    ends = _changes(_end(old), _end(new))
    return [*ends, *_stored(old, new), *moved, *merged(in_steps)]


def _by_step(run: Run) -> dict[int, Step]:
    """Return the steps of a run by number."""
    return {
        number: step
        for step in run.get("steps", [])
        for number in range(step["at"][0], step["at"][1] + 1)
    }


def _end(run: Run) -> Values:
    found: Values = {}
    if "ended" in run:
        found[("ended by",)] = {"atom": run["ended"]}
    if "unread" in run:
        found[("nothing was read back",)] = {"atom": run["unread"]}
    return found


def _step_differences(
    old: Step, new: Step, gone: set[Moved], come: set[Moved]
) -> Iterator[Difference]:
    yield from hook_changes(old.get("hooks", []), new.get("hooks", []))
    yield from _changes(_values(old.get("calls", []), gone), _values(new.get("calls", []), come))


def hook_changes(was: Sequence[str], now: Sequence[str]) -> list[Difference]:
    """Return the differences between the hooks of one step.

    The order counts only if the same hooks are called equally often.
    """
    if list(was) == list(now):
        return []
    before, after = Counter(was), Counter(now)
    found = [
        Difference("called", (hook,), now=count)
        for hook, count in after.items()
        if hook not in before
    ]
    found += [
        Difference("not called", (hook,), was=count)
        for hook, count in before.items()
        if hook not in after
    ]
    found += [
        Difference("count", (hook,), count, after[hook])
        for hook, count in before.items()
        if hook in after and after[hook] != count
    ]
    if not found:
        place = next(i for i, (a, b) in enumerate(zip(was, now, strict=True)) if a != b)
        found = [Difference("order", (now[place], was[place]))]
    return found


def _moved(
    before: dict[int, Step], after: dict[int, Step]
) -> tuple[list[Difference], defaultdict[int, set[Moved]], defaultdict[int, set[Moved]]]:
    """Return the elements of lists, such as the saves of a step, that are in another step now.

    Two elements are the same if their cores are; what else differs in them is not reported. The
    dictionaries hold the moved elements by the step in which they were and in which they are.
    """
    cores: dict[Moved, Value] = {}

    def counted(steps: dict[int, Step]) -> Counter[tuple[int, Moved]]:
        count: Counter[tuple[int, Moved]] = Counter()
        for number, step in steps.items():
            for hook, name, core in _elements(step.get("calls", [])):
                item = hook, name, identity(core)
                cores[item] = core
                count[number, item] += 1
        return count

    old, new = counted(before), counted(after)
    come = sorted((new - old).elements())
    found: list[Difference] = []
    left: defaultdict[int, set[Moved]] = defaultdict(set)
    arrived: defaultdict[int, set[Moved]] = defaultdict(set)
    for was, item in sorted((old - new).elements()):
        match = next((other for other in come if other[1] == item), None)
        if match is not None:
            come.remove(match)
            now = match[0]
            found.append(Difference("moved", item[:2], cores[item], steps=(was, now)))
            left[was].add(item)
            arrived[now].add(item)
    return found, left, arrived


def _elements(calls: Sequence[Call]) -> Iterator[tuple[str, str, Value]]:
    """Yield hook, name of the list and core of every record in a list that a hook returned."""
    for call in calls:
        if "returned" in call:
            for name, element in _records("answer", call["returned"]):
                yield call["call"], name, _core(element)


def _records(name: str, value: Value) -> Iterator[tuple[str, Value]]:
    """Yield (name of the list, record) for the records in lists, but not for those in records."""
    for label, part in parts(value):
        if isinstance(label, int) and not is_leaf(part):
            yield name, part
        else:
            yield from _records(str(label), part)


def _core(element: Value) -> Value:
    """Return what identifies an element: its class and plain fields, texts first.

    Data and lists are left out, because they may depend on the step.
    """
    plain = [
        (str(name), part)
        for name, part in parts(element)
        if is_plain(part) and not (isinstance(part, dict) and "data" in part)
    ]
    plain.sort(key=lambda field: not isinstance(field[1], str))
    return {"class": head(element), "fields": dict(plain)}


def _without(value: Value, hook: str, name: str, moved: set[Moved]) -> Value:
    """Return a value, which is in `name`, without the elements of lists that moved."""
    if isinstance(value, list):
        return [
            element
            for element in value
            if is_leaf(element) or (hook, name, identity(_core(element))) not in moved
        ]
    if not isinstance(value, dict):
        return value
    found = dict(value)
    if "items" in value:
        found["items"] = _without(value["items"], hook, name, moved)
    if "pairs" in value:
        found["pairs"] = [
            [key, _without(part, hook, text(key), moved)] for key, part in value["pairs"]
        ]
    if "fields" in value:
        found["fields"] = {
            label: _without(part, hook, label, moved) for label, part in value["fields"].items()
        }
    return found


def _values(calls: Sequence[Call], moved: set[Moved]) -> Values:
    """Return every value of a step by its place, without the elements that moved."""
    found: Values = {}
    seen: Counter[Entry] = Counter()
    for call in calls:
        finished = call.get("finished")
        if finished is None:
            entry = Entry(call["call"], call.get("of", ""))
        else:
            entry = Entry(f"finished {finished}", None)
        seen[entry] += 1
        place = (entry._replace(number=seen[entry]),)
        found[place] = {"atom": ", ".join(call.get("requests", []))}
        for name, value in call.get("given", {}).items():
            found |= _flat((*place, name), value)
        if "returned" in call:
            answer = _without(call["returned"], call["call"], "answer", moved)
            found |= _flat((*place, "answer"), answer)
        if "raised" in call:
            found[(*place, "raised")] = {"atom": call["raised"]}
    return found


def _flat(place: Place, value: Value) -> Values:
    """Return the leaves of a value by their places, and before them each container as its class."""
    if is_leaf(value):
        return {place: value}
    found: Values = {place: {"class": head(value)}}
    for name, part in parts(value):
        found |= _flat((*place, name), part)
    return found


def _changes(old: Values, new: Values) -> Iterator[Difference]:
    """Yield what differs at each place, without the parts of what is gone or new as a whole."""
    whole: Place | None = None
    for place in dict.fromkeys([*old, *new]):
        if whole is not None and place[: len(whole)] == whole:
            continue
        if place not in new:
            whole = place
            yield Difference("gone", place, was=old[place])
        elif place not in old:
            whole = place
            yield Difference("new", place, now=new[place])
        elif identity(old[place]) != identity(new[place]):
            yield Difference("changed", place, old[place], new[place])


def _stored(old: Run, new: Run) -> Iterator[Difference]:
    for one in _changes(_counts(old), _counts(new)):
        if one.kind != "new":  # of a new request, the blocks are reported
            yield replace(one, kind=f"request {one.kind}")
    before, after = _blocks(old), _blocks(new)
    for one in _changes(_holds(before), _holds(after)):
        yield replace(one, kind=f"block {one.kind}")
    for place, was in before.items():
        now = after.get(place)
        if now is None or was["holds"] != now["holds"]:
            continue
        if was["digest"] != now["digest"]:
            yield Difference("bytes", place, {"atom": was["digest"]}, {"atom": now["digest"]})
        if _tokens(was) != _tokens(now):
            yield Difference("tokens", place, _tokens(was), _tokens(now))


def _counts(run: Run) -> Values:
    return {
        (name,): {"atom": f"{stored['came_back']} of {stored['tokens']} tokens"}
        for name, stored in run.get("requests", {}).items()
    }


def _blocks(run: Run) -> dict[Place, dict[str, Any]]:
    """Return the blocks of all requests by request, index and layer."""
    return {
        (name, block["index"], block["layer"]): block
        for name, stored in run.get("requests", {}).items()
        for block in stored["blocks"]
    }


def _tokens(block: dict[str, Any]) -> Value:
    return {"atom": f"[{block['start']}, {block['end']})"}


def _holds(blocks: dict[Place, dict[str, Any]]) -> Values:
    return {place: {"atom": block["holds"]} for place, block in blocks.items()}


def tensor_differences(old: bytes, new: bytes) -> list[str]:
    """Return the differences between two safetensors files as sentences."""
    if old == new:
        return []
    try:
        before, after = safetensors.numpy.load(old), safetensors.numpy.load(new)
    except Exception as error:  # some versions of the library do not export its error type
        return [f"the file with the stored KV cannot be read: {error}"]
    out = [f"{name}: is not stored any more" for name in before if name not in after]
    out += [f"{name}: is stored now" for name in after if name not in before]
    for name in sorted(before):
        if name in after:
            out += [f"{name}: {text}" for text in _arrays(before[name], after[name])]
    return out or ["the files with the stored KV differ in their form only"]


def _arrays(old: np.ndarray, new: np.ndarray) -> Iterator[str]:
    if old.shape != new.shape:
        yield f"was {old.dtype} {list(old.shape)}, is {new.dtype} {list(new.shape)}"
        return
    if old.dtype != new.dtype:  # whole numbers became others
        yield f"was {old.dtype}, is {new.dtype}"
    places = np.argwhere(old != new)
    if not len(places):
        return
    token, head, lane = map(int, places[0])
    half = old.shape[2] // 2
    side = "K" if lane < half else "V"
    tokens = spans(sorted(set(places[:, 0].tolist())))
    heads = sorted(set(places[:, 1].tolist()))
    yield (
        f"{len(places)} of {old.size} elements differ, in tokens {tokens},"
        f" head{'s' if len(heads) > 1 else ''} {', '.join(map(str, heads))};"
        f" the first: token {token}, head {head}, {side} element {lane % half}:"
        f" {old[token, head, lane]:g} -> {new[token, head, lane]:g}"
    )
