# SPDX-License-Identifier: Apache-2.0
"""Strict YAML 1.2: maps with unique text keys, lists, text, integers, floats, booleans and null. Nothing else.

YAML 1.1 surprises (`on`, `0.30` as a version, octal `010`) are why the scalars are resolved here, by the core schema of YAML 1.2, from
ruamel.yaml's parser events. Anchors, aliases, tags, several documents and duplicate keys are errors.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError
from ruamel.yaml.events import (
    AliasEvent,
    DocumentStartEvent,
    MappingEndEvent,
    MappingStartEvent,
    ScalarEvent,
    SequenceEndEvent,
    SequenceStartEvent,
    StreamEndEvent,
    StreamStartEvent,
)

from kvconform.errors import UsageError

_INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_WORDS: dict[str, Any] = {
    word: value
    for value in (True, False)
    for word in (str(value), str(value).lower(), str(value).upper())
}
_WORDS |= {word: None for word in ("null", "Null", "NULL", "~", "")}

Lines = dict[tuple[str | int, ...], int]
"""Path of keys and indexes -> line (from 1) on which that value, or its key, begins."""


def parse(text: str, name: str, lines: Lines | None = None) -> Any:
    """The data in `text`; `lines`, if given, is filled with where each value is. Raises UsageError `name:line: sentence`."""
    reader = _Reader(name, lines)
    try:
        return reader.document(YAML(typ="safe", pure=True).parse(text))
    except YAMLError as error:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise UsageError(f"{name}:{mark.line + 1 if mark else 1}: {problem}") from None


class _Reader:
    def __init__(self, name: str, lines: Lines | None) -> None:
        self.name = name
        self.lines = lines

    def error(self, event: Any, sentence: str) -> UsageError:
        return UsageError(f"{self.name}:{event.start_mark.line + 1}: {sentence}")

    def document(self, events: Iterator[Any]) -> Any:
        data: Any = None
        seen = False
        for event in events:
            if isinstance(event, DocumentStartEvent):
                if seen:
                    raise self.error(event, "a file holds one document")
                if event.version not in (None, (1, 2)):
                    raise self.error(event, "the file must be YAML 1.2")
                seen = True
                data = self.value(next(events), events, ())
            elif not isinstance(event, (StreamStartEvent, StreamEndEvent)) and not seen:
                raise self.error(event, "unexpected content")
        return data

    def value(self, event: Any, events: Iterator[Any], path: tuple[str | int, ...]) -> Any:
        if self.lines is not None:
            self.lines.setdefault(path, event.start_mark.line + 1)
        if isinstance(event, AliasEvent) or event.anchor is not None:
            raise self.error(event, "anchors and aliases are not used here")
        if isinstance(event, ScalarEvent):
            return self.scalar(event)
        if event.tag is not None:
            raise self.error(event, f"the tag {event.tag} is not used here")
        if isinstance(event, SequenceStartEvent):
            items: list[Any] = []
            while not isinstance(event := next(events), SequenceEndEvent):
                items.append(self.value(event, events, (*path, len(items))))
            return items
        assert isinstance(event, MappingStartEvent)
        pairs: dict[str, Any] = {}
        while not isinstance(event := next(events), MappingEndEvent):
            key = self.key(event, pairs)
            if self.lines is not None:
                self.lines[(*path, key)] = event.start_mark.line + 1
            pairs[key] = self.value(next(events), events, (*path, key))
        return pairs

    def key(self, event: Any, pairs: dict[str, Any]) -> str:
        if not isinstance(event, ScalarEvent):
            raise self.error(event, "a key must be plain text")
        key = self.scalar(event)
        if not isinstance(key, str):
            raise self.error(event, f"the key {event.value} is not text; quote it")
        if key in pairs:
            raise self.error(event, f"the key {key!r} appears twice")
        return key

    def scalar(self, event: Any) -> Any:
        if event.tag is not None or event.anchor is not None:
            raise self.error(event, "tags and anchors are not used here")
        text: str = event.value
        if not event.implicit[0]:  # quoted or a block: text, whatever it looks like
            return text
        if text in _WORDS:
            return _WORDS[text]
        if text[0] in "0123456789+-.":
            if _INT.fullmatch(text):
                return int(text, 0) if text[:2] in ("0o", "0x") else int(text)
            if _FLOAT.fullmatch(text):
                return float(text)
            if text.lstrip("+-").lower() in (".inf", ".nan"):
                raise self.error(event, f"{text} is not a finite number")
        return text


def line_of(lines: Lines, path: Sequence[str | int]) -> int:
    """The line of the deepest part of `path` that exists. Parts that are no key or index of the data (union tags) are skipped."""
    here: tuple[str | int, ...] = ()
    for part in path:
        if (*here, part) in lines:
            here = (*here, part)
    return lines.get(here, 1)


_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_QUOTED = {"true", "false", "null", "yes", "no", "on", "off", "y", "n"}


def flow(value: Any) -> str:
    """A value in YAML's flow style, as short as the suite's own cases have it."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{flow(key)}: {flow(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(flow(each) for each in value) + "]"
    if isinstance(value, str) and (not _PLAIN.fullmatch(value) or value.lower() in _QUOTED):
        return json.dumps(value, ensure_ascii=False)
    return value if isinstance(value, str) else json.dumps(value)
