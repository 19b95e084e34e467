# SPDX-License-Identifier: Apache-2.0
"""A strict reader of YAML 1.2, and a writer of its flow style.

Data are maps with unique text keys, lists, text, integers, floats, booleans and null. Scalars are
resolved here, by the core schema of YAML 1.2, from ruamel.yaml's parser events: this avoids the
surprises of YAML 1.1 (`on` as a boolean, octal `010`). Anchors, aliases, tags, several documents
and duplicate keys are errors.
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

from kvconform.errors import BrokenFile, Location, Problem

_INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_WORDS: dict[str, Any] = {
    word: value
    for value in (True, False)
    for word in (str(value), str(value).lower(), str(value).upper())
}
_WORDS |= {word: None for word in ("null", "Null", "NULL", "~", "")}

Lines = dict[tuple[str | int, ...], int]
"""Path of keys and indexes -> line (from 1) on which the value, or its key, begins."""


def parse(text: str, name: str, lines: Lines | None = None) -> Any:
    """Return the data in `text`, and fill `lines`, if given, with the line of each value.

    Raises BrokenFile.
    """
    reader = _Reader(name, lines)
    try:
        return reader.document(YAML(typ="safe", pure=True).parse(text))
    except YAMLError as error:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        where = Location(name, mark.line + 1 if mark else 1)
        raise BrokenFile(Problem(where, f"not valid YAML: {_in_words(problem)}")) from None


_PROBLEMS = (
    (
        "mapping values are not allowed",
        "a second colon in one value (put it into quotes), or a line that is indented too far",
    ),
    ("expected <block end>", "this line is indented differently from those that it belongs to"),
    ("expected ',' or", "a bracket or brace that begins before here is not closed"),
    (r"found character '\t'", "a tab; indent with spaces"),
    ("end of stream", "a quote, bracket or brace is not closed"),
    ("found character", "a text that begins with a special character needs quotes"),
)
"""Beginnings of what the parser says, and the same in words."""


def _in_words(problem: str) -> str:
    """Return the parser's problem in words; its own, if there are none for it."""
    return next((words for known, words in _PROBLEMS if known in problem), problem)


class _Reader:
    """Builds the data of one file from parser events."""

    def __init__(self, name: str, lines: Lines | None) -> None:
        self.name = name
        self.lines = lines

    def error(self, event: Any, sentence: str) -> BrokenFile:
        return BrokenFile(Problem(Location(self.name, event.start_mark.line + 1), sentence))

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
        quoted_or_block = not event.implicit[0]
        if quoted_or_block:
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
    """Return the line of the deepest part of `path` that exists.

    Parts that are neither a key nor an index of the data (pydantic's union tags) are skipped.
    """
    here: tuple[str | int, ...] = ()
    for part in path:
        if (*here, part) in lines:
            here = (*here, part)
    return lines.get(here, 1)


_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_QUOTED = {"true", "false", "null", "yes", "no", "on", "off", "y", "n"}


def flow(value: Any) -> str:
    """Return a value in YAML's flow style, in the short form that the suite's cases use."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{flow(key)}: {flow(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(flow(each) for each in value) + "]"
    if isinstance(value, str) and (not _PLAIN.fullmatch(value) or value.lower() in _QUOTED):
        return json.dumps(value, ensure_ascii=False)
    return value if isinstance(value, str) else json.dumps(value)
