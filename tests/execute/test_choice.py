# SPDX-License-Identifier: Apache-2.0
"""Tests of the option `--executor`."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import pytest

from kvconform.errors import UsageError
from kvconform.execute.choice import LOCAL, Choice, crew_of, parse
from pieces import Built


@pytest.mark.parametrize(
    ("text", "choice"),
    [
        (None, LOCAL),
        ("processes", LOCAL),
        ("here", Choice("here")),
        ("ray", Choice("ray")),
        ("ray://head:10001", Choice("ray", "ray://head:10001")),
        ("10.0.0.1:6379", Choice("ray", "10.0.0.1:6379")),
        ("[fe80::1]:6379", Choice("ray", "[fe80::1]:6379")),
    ],
)
def test_a_text_stands_for_an_executor(text: str | None, choice: Choice) -> None:
    assert parse(text) == choice


@pytest.mark.parametrize("text", ["rya", "", "ray:/head", "head:port", "a b:1"])
def test_other_texts_are_refused_in_a_sentence(text: str) -> None:
    with pytest.raises(UsageError, match=r"there is no executor .*ray://HOST:10001") as raised:
        parse(text)
    assert ("did you mean ray?" in raised.value.message or text != "rya") and (
        "\n" not in raised.value.message
    )


def test_a_missing_ray_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    known = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name == "ray":
            raise ImportError(name)
        return known(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UsageError, match=r"needs the package ray: pip install 'kvconform\[ray\]'"):
        crew_of(Choice("ray"), Built(), "test", tmp_path, None)
