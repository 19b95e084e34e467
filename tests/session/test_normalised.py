# SPDX-License-Identifier: Apache-2.0
"""Tests of a connector's text in reports: always writable, and without terminal commands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvconform.session.worker import normalised


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        ("no file caf\udce9", r"no file caf\xe9"),
        ("\x1b[31mred\x00", r"\x1b[31mred\x00"),
        ("line\nand\ttab", "line\nand\ttab"),
        (r"a path C:\u001b", r"a path C:\u001b"),
        ("ÿ 📦", "ÿ 📦"),
        ("/tmp/run/gw0-1/case/no-connector/x at 0x7fb9d758db00", "{tmp}/x at 0x…"),
    ],
)
def test_words_of_a_connector(said: str, kept: str) -> None:
    text = normalised(json.dumps({"message": said}, ensure_ascii=False), Path("/tmp/run/gw0-1"))
    assert json.loads(text) == {"message": kept}
    text.encode("utf-8")
