# SPDX-License-Identifier: Apache-2.0
"""What differs between two snapshots, in sentences: a field that changed, a block saved a step earlier, a hook called before another.

What differs between two files of stored KV, in sentences: which elements of which tokens and heads.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import safetensors.numpy

from kvconform.snapshots.texts import FORMAT


def tensor_differences(old: bytes, new: bytes) -> list[str]:
    """Sentences about two safetensors files; empty if they are equal."""
    if old == new:
        return []
    try:
        before, after = safetensors.numpy.load(old), safetensors.numpy.load(new)
    except (
        Exception
    ) as error:  # the library's own error type is not exported by all of its versions
        return [f"the file with the stored KV cannot be read: {error}"]
    out = [f"{name}: is not stored any more" for name in before if name not in after]
    out += [f"{name}: is stored now" for name in after if name not in before]
    for name in sorted(before):
        if name in after:
            out += [f"{name}: {text}" for text in _arrays(before[name], after[name])]
    return out or ["the files with the stored KV differ in their form only"]


def _arrays(old: np.ndarray, new: np.ndarray) -> Iterator[str]:
    if old.dtype != new.dtype and old.shape == new.shape:  # whole numbers became others
        yield f"was {old.dtype}, is {new.dtype}"
    elif old.shape != new.shape:
        yield f"was {old.dtype} {list(old.shape)}, is {new.dtype} {list(new.shape)}"
        return
    places = np.argwhere(old != new)
    if not len(places):
        return
    token, head, lane = map(int, places[0])
    side = "K" if lane < old.shape[2] // 2 else "V"
    heads = sorted(set(places[:, 1].tolist()))
    yield (
        f"{len(places)} of {old.size} elements differ, in tokens {spans(sorted(set(places[:, 0].tolist())))}, head"
        f"{'s' if len(heads) > 1 else ''} {', '.join(map(str, heads))}; the first: token {token}, head {head}, {side} element"
        f" {lane % (old.shape[2] // 2)}: {old[token, head, lane]:g} -> {new[token, head, lane]:g}"
    )


def spans(numbers: Sequence[int]) -> str:
    """`1 to 3, 5` of [1, 2, 3, 5]."""
    out: list[list[int]] = []
    for number in numbers:
        if out and out[-1][1] == number - 1:
            out[-1][1] = number
        else:
            out.append([number, number])
    return ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in out)


_STEPS = re.compile(r"steps? (\d+)(?: to (\d+))?")
_BLOCK = re.compile(r"(?P<digest>[0-9a-f]{16}) \[(?P<start>\d+), (?P<end>\d+)\) (?P<holds>.*)")


@dataclass
class Line:
    """A line of a snapshot with what is indented below it. `label` and `value`: before and after the first colon."""

    label: str
    value: str = ""
    below: list[Line] = field(default_factory=list)

    def text(self) -> tuple[str, str, tuple[object, ...]]:
        """All of it, without the position in a list: two are the same if their texts are."""
        return (
            ("" if self.label.startswith("[") else self.label),
            self.value,
            tuple(child.text() for child in self.below),
        )


def differences(old: str, new: str) -> list[str]:
    """Sentences about two texts of one kind and case; empty if they are equal."""
    if old == new:
        return []
    kind = old.removeprefix(f"{FORMAT}: ").partition(" ")[0]
    before, after = _cells(old), _cells(new)
    out = [f"{cell}: there is no such run any more" for cell in before if cell not in after]
    out += [f"{cell}: a new run" for cell in after if cell not in before]
    compare = {"hooks": _hooks, "stored": _stored}.get(kind, _metadata)
    for cell in before:
        if cell in after:
            found = list(compare(before[cell], after[cell]))
            out += [f"{cell}: {sentence}" for sentence in found]
    return out or ["the texts differ in their form only"]


def _cells(text: str) -> dict[str, list[Line]]:
    """The runs of a snapshot: name -> its lines as a tree."""
    found: dict[str, list[Line]] = {}
    chunks = re.split(r"^== (.+)\n", text, flags=re.MULTILINE)[1:]
    for name, body in zip(chunks[::2], chunks[1::2], strict=True):
        found[name] = _tree(body.split("\n"))
    return found


def _tree(rows: Sequence[str]) -> list[Line]:
    top = Line("")
    stack: list[tuple[int, Line]] = [(-1, top)]
    joining: tuple[int, Line] | None = None
    for row in rows:
        if not row.strip():
            continue
        depth, text = len(row) - len(row.lstrip()), row.strip()
        if joining is not None:  # a long list on several lines
            joining[1].value += (
                " " if not joining[1].value.endswith("[") and text != "]" else ""
            ) + text
            joining = None if depth == joining[0] and text == "]" else joining
            continue
        label, colon, value = text.partition(": ")
        line = Line(label if colon else text.removesuffix(":"), value)
        while stack[-1][0] >= depth:
            stack.pop()
        stack[-1][1].below.append(line)
        stack.append((depth, line))
        if value.endswith("["):
            joining = depth, line
    return top.below


def _by_step(lines: list[Line]) -> dict[int, list[Line]]:
    """Step -> what is said about it; a range of steps says it about each."""
    found: dict[int, list[Line]] = {}
    for line in lines:
        match = _STEPS.fullmatch(line.label)
        if match:
            for step in range(int(match[1]), int(match[2] or match[1]) + 1):
                found[step] = line.below or [line]
    return found


# -- metadata and answers ---------------------------------------------------------------------------------------------------------
def _metadata(old: list[Line], new: list[Line]) -> Iterator[str]:
    yield from _flat_changes(
        "",
        [x for x in old if not _STEPS.fullmatch(x.label)],
        [x for x in new if not _STEPS.fullmatch(x.label)],
    )
    before, after = _by_step(old), _by_step(new)
    moved = _moved(before, after)
    yield from (sentence for sentence, _, _ in moved)
    gone, come = {(s, t) for _, (s, t), _ in moved}, {(s, t) for _, _, (s, t) in moved}
    said: dict[str, list[int]] = {}
    for step in sorted({*before, *after}):
        mine = _without(before.get(step, []), {t for s, t in gone if s == step})
        theirs = _without(after.get(step, []), {t for s, t in come if s == step})
        for sentence in _flat_changes("", mine, theirs):
            said.setdefault(sentence, []).append(step)
    for sentence, steps in said.items():
        yield f"step{'s' if len(steps) > 1 else ''} {spans(steps)}, {sentence}"


Core = tuple[str, tuple[tuple[str, str], ...]]
Item = tuple[str, Core]


def _moved(
    before: dict[int, list[Line]], after: dict[int, list[Line]]
) -> list[tuple[str, tuple[int, Item], tuple[int, Item]]]:
    """Elements of lists (such as the saves of a step) that are in another step now: (sentence, where and what it was, is). Two are the
    same if their plain fields are; what else differs in them is not told."""
    old = Counter((step, item) for step, lines in before.items() for item in _elements(lines))
    new = Counter((step, item) for step, lines in after.items() for item in _elements(lines))
    gone, come = sorted((old - new).elements(), key=repr), sorted((new - old).elements(), key=repr)
    out = []
    for step, item in gone:
        match = next(((s, i) for s, i in come if i == item), None)
        if match is not None:
            come.remove(match)
            earlier = f"{abs(match[0] - step)} step{'s' if abs(match[0] - step) > 1 else ''} {'earlier' if match[0] < step else 'later'}"
            out.append(
                (
                    f"{item[0]} {_short(item[1])} is in step {match[0]}, was in step {step}: {earlier}",
                    (step, item),
                    match,
                )
            )
    return out


def _elements(lines: list[Line]) -> Iterator[Item]:
    """The elements of lists of records in what hooks answered, the outermost ones: (hook and name of the list, the element)."""
    for call in lines:
        for named, child in _records(call):
            yield f"{call.label.partition('(')[0]}: {named.label}", _core(child)


def _records(line: Line) -> Iterator[tuple[Line, Line]]:
    """(list, element) of the records in lists below a line, those within a record left out."""
    for child in line.below:
        if child.label.startswith("[") and child.below:
            yield line, child
        else:
            yield from _records(child)


def _core(line: Line) -> Core:
    """What an element is: its plain fields. What it is made of, and lists, may depend on the step."""
    return line.value, tuple(
        (child.label, child.value)
        for child in line.below
        if not child.below and "[" not in child.value
    )


def _without(lines: list[Line], items: set[Item]) -> list[Line]:
    """The lines without the elements that are dealt with."""
    return [_bare(call, call.label.partition("(")[0], items) for call in lines] if items else lines


def _bare(line: Line, hook: str, items: set[Item]) -> Line:
    kept = [
        c
        for c in line.below
        if not (
            c.label.startswith("[") and c.below and (f"{hook}: {line.label}", _core(c)) in items
        )
    ]
    empty = line.below and not kept
    below = [child if child.label.startswith("[") else _bare(child, hook, items) for child in kept]
    return Line(line.label, line.value + "[]" if empty else line.value, _renumbered(below))


def _renumbered(lines: list[Line]) -> list[Line]:
    numbers = iter(range(len(lines)))
    return [
        Line(
            f"[{next(numbers)}]" if line.label.startswith("[") else line.label,
            line.value,
            line.below,
        )
        for line in lines
    ]


def _short(item: Core) -> str:
    """The first few words of an element."""
    name, parts = item
    fields = ", ".join(f"{label} {value}" for label, value in parts)
    return f"{name}({fields[:80]})"


def _flat_changes(place: str, old: list[Line], new: list[Line]) -> Iterator[str]:
    before, after = dict(_flat(old)), dict(_flat(new))
    whole = ""  # what is gone or new as a whole: its parts are not told one by one
    for path in [*before, *(p for p in after if p not in before)]:
        if whole and path.startswith((f"{whole}.", f"{whole}[")):
            continue
        if path not in after:
            whole = path
            yield f"{place}{path}: gone (was {before[path] or 'there'})"
        elif path not in before:
            whole = path
            yield f"{place}{path}: new ({after[path] or 'there'})"
        elif before[path] != after[path]:
            yield f"{place}{path}: {before[path]} -> {after[path]}"


def _flat(lines: list[Line], above: str = "") -> Iterator[tuple[str, str]]:
    """(path, value) of every line; calls of one hook in a step are numbered from the second on."""
    seen: Counter[str] = Counter()
    for line in lines:
        seen[line.label] += 1
        name = line.label if seen[line.label] == 1 else f"{line.label} (no. {seen[line.label]})"
        path = f"{above}{name}" if not above or name.startswith("[") else f"{above}.{name}"
        yield path, line.value
        yield from _flat(line.below, path)


# -- hooks ------------------------------------------------------------------------------------------------------------------------
def _hooks(old: list[Line], new: list[Line]) -> Iterator[str]:
    before, after = _by_step(old), _by_step(new)
    said: dict[str, list[int]] = {}
    for step in sorted({*before, *after}):
        was, now = [
            line[0].value.split(", ") if line else []
            for line in (before.get(step, []), after.get(step, []))
        ]
        if was != now:
            said.setdefault(_order(was, now), []).append(step)
    for sentence, steps in said.items():
        yield f"step{'s' if len(steps) > 1 else ''} {spans(steps)}: {sentence}"


def _order(was: list[str], now: list[str]) -> str:
    gone, come = Counter(was) - Counter(now), Counter(now) - Counter(was)
    parts = [
        f"{name} is not called any more" + (f" ({n} times)" if n > 1 else "")
        for name, n in gone.items()
        if name not in now
    ]
    parts += [f"{name} is called {n} times less" for name, n in gone.items() if name in now]
    parts += [
        f"{name} is called, too" + (f" ({n} times)" if n > 1 else "") for name, n in come.items()
    ]
    if not parts:
        place = next(i for i, (a, b) in enumerate(zip(was, now, strict=True)) if a != b)
        parts = [f"{now[place]} is called before {was[place]} now"]
    return ", ".join(parts)


# -- stored KV --------------------------------------------------------------------------------------------------------------------
def _stored(old: list[Line], new: list[Line]) -> Iterator[str]:
    outside = [
        [line for line in lines if not line.label.startswith("request ")] for lines in (old, new)
    ]
    yield from _flat_changes("", *outside)  # how the run ended, why nothing was read back
    before, after = dict(_blocks(old)), dict(_blocks(new))
    for (req, block), was in before.items():
        now = after.get((req, block))
        if now is None and block == "came back":
            yield f"request {req} is not asked for any more ({was} came back)"
        elif now is None:
            yield f"{block} of request {req} does not come back any more (it held {_holds(was)})"
        elif now != was:
            yield _block(req, block, was, now)
    for (req, block), now in after.items():
        if (req, block) not in before and block != "came back":
            yield f"{block} of request {req} comes back now, with {_holds(now)}"


def _block(req: str, block: str, was: str, now: str) -> str:
    if block == "came back":
        return f"of request {req} {now} come back, it was {was}"
    if _holds(was) != _holds(now):
        return f"{block} of request {req} now holds {_holds(now)}; it was {_holds(was)}"
    return f"{block} of request {req} holds the same tokens in other bytes ({was.partition(' ')[0]} -> {now.partition(' ')[0]})"


def _holds(value: str) -> str:
    match = _BLOCK.fullmatch(value)
    return match["holds"] if match else value


def _blocks(lines: list[Line]) -> Iterator[tuple[tuple[str, str], str]]:
    for line in lines:
        if line.label.startswith("request "):
            for child in line.below:
                yield (line.label.removeprefix("request "), child.label), child.value
