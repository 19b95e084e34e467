# SPDX-License-Identifier: Apache-2.0
"""Where an error came from."""

from __future__ import annotations

import json
import textwrap
from typing import Any

import pytest

from kvconform.errors import place_of

SOURCE = """
import json


def deep(text):
    return json.loads(text)


def hook(text):
    return deep(text)
"""


def raised(module: str, text: str = "{") -> BaseException:
    """What `hook` of a module of that name raises, line 6 of conn.py, from within the standard library."""
    scope: dict[str, Any] = {"__name__": module}
    exec(compile(textwrap.dedent(SOURCE), "/somewhere/conn.py", "exec"), scope)
    with pytest.raises(json.JSONDecodeError) as caught:
        scope["hook"](text)
    return caught.value


def test_the_innermost_line_of_the_connector_is_told() -> None:
    assert place_of(raised("mypkg.conn")) == " (conn.py:6, in deep)"


def test_the_suites_own_lines_and_libraries_are_not() -> None:
    assert "conn.py" not in place_of(raised("kvconform.refimpl.defects.some"))
    assert "conn.py" not in place_of(raised("torch.some"))
    assert place_of(ValueError("never raised")) == ""
