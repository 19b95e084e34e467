# SPDX-License-Identifier: Apache-2.0
"""Rules that replace what differs from run to run: addresses, times, random ids, host names."""

from __future__ import annotations

import importlib.resources
import re
import socket
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationError, model_validator

from kvconform.contract.requirement import Id, Model
from kvconform.contract.yaml12 import parse
from kvconform.errors import UsageError

FILE = "spec/normalise.yaml"
TYPES: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (float,),
    "str": (str,),
    "bytes": (bytes,),
}


def _compiles(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"is no regular expression: {error}") from None
    return text


Regex = Annotated[str, AfterValidator(_compiles)]


class Rule(Model):
    """A rule: `becomes` replaces every match of `pattern` in a text, or the value of a field.

    `field` matches the whole name of the field; `types` restricts its value.
    """

    id: Id
    text: str
    pattern: Regex | None = None
    field: Regex | None = None
    types: list[Literal["int", "float", "str", "bytes"]] | None = Field(
        default=None, min_length=1, description="default: of any type"
    )
    becomes: Annotated[str, Field(min_length=1)]

    @model_validator(mode="after")
    def _one_of_both(self) -> Rule:
        if (self.pattern is None) == (self.field is None):
            raise ValueError(
                "has either `pattern` (searched in texts) or `field` (the name of a field)"
            )
        return self

    @cached_property
    def regex(self) -> re.Pattern[str]:
        """Return the compiled `pattern` or `field`."""
        return re.compile(self.pattern or self.field or "")


class Rules:
    """The rules of a run, and two built-in ones: for its directory `tmp`, and for the host."""

    def __init__(self, rules: Iterable[Rule], tmp: str | None = None) -> None:
        self._patterns = [rule for rule in rules if rule.pattern is not None]
        self._fields = [rule for rule in rules if rule.field is not None]
        self._tmp = tmp
        names = {socket.gethostname(), *_own_addresses()} - {"", "localhost", "127.0.0.1"}
        self._host = re.compile(
            "|".join(
                rf"(?<![\w.-]){re.escape(name)}(?![\w-])"
                for name in sorted(names, key=len, reverse=True)
            )
            or r"(?!)"
        )

    def string(self, text: str) -> str:
        """Return the text with what differs from run to run replaced."""
        text = self._host.sub("{host}", text.replace(self._tmp, "{tmp}") if self._tmp else text)
        for rule in self._patterns:
            text = rule.becomes.join(_between(rule.regex, text))
        return text

    def value(self, field: str, value: Any) -> str | None:
        """Return the placeholder for a field's value; None if no rule is about it."""
        for rule in self._fields:
            if rule.types is not None:
                kinds = tuple(kind for name in rule.types for kind in TYPES[name])
                if not isinstance(value, kinds) or isinstance(value, bool):
                    continue
            if rule.regex.fullmatch(field):
                return rule.becomes
        return None


def _own_addresses() -> list[str]:
    """Return the addresses that the host's name resolves to."""
    try:
        return sorted({str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None)})
    except OSError:
        return []


def _between(regex: re.Pattern[str], text: str) -> list[str]:
    """Return the pieces of the text before, between and after the matches."""
    places = [0, *(place for match in regex.finditer(text) for place in match.span()), len(text)]
    return [text[low:high] for low, high in zip(places[::2], places[1::2], strict=True)]


def built_in() -> list[Rule]:
    """Return the rules of spec/normalise.yaml. UsageError for a malformed file."""
    text = (importlib.resources.files("kvconform.spec") / "normalise.yaml").read_text(
        encoding="utf-8"
    )
    return validated(parse(text, FILE), FILE)


def validated(raw: Sequence[Any], place: str) -> list[Rule]:
    """Return the rules in `raw`, which come from `place`. UsageError for an invalid rule."""
    rules = []
    for number, entry in enumerate(raw, 1):
        try:
            rules.append(Rule.model_validate(entry))
        except ValidationError as error:
            problem = error.errors(include_url=False)[0]
            where = ".".join(map(str, problem["loc"]))
            what = problem["msg"].removeprefix("Value error, ")
            raise UsageError(
                f"{place}: rule {number}: {where + ': ' if where else ''}{what}"
            ) from None
    return rules
