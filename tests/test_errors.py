# SPDX-License-Identifier: Apache-2.0
"""Tests of locating the origin of an error."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest

from kvconform.errors import numbers_at, place_of

SOURCE = """
import json


def deep(text):
    return json.loads(text)


def hook(text):
    return deep(text)
"""


def raised(module: str, text: str = "{") -> BaseException:
    """Return the error that `hook` of a module of that name raises.

    It is raised on line 6 of conn.py, from within the standard library.
    """
    scope: dict[str, Any] = {"__name__": module}
    exec(compile(textwrap.dedent(SOURCE), "/somewhere/conn.py", "exec"), scope)
    with pytest.raises(json.JSONDecodeError) as caught:
        scope["hook"](text)
    return caught.value


def test_the_innermost_line_of_the_connector_is_told() -> None:
    place = place_of(raised("mypkg.conn"))
    assert place is not None and place[:3] == ("conn.py", 6, "deep")
    assert str(place) == "conn.py:6, in deep"


def test_the_suites_own_lines_and_libraries_are_not() -> None:
    for module in ("kvconform.refimpl.defects.some", "torch.some"):
        place = place_of(raised(module))
        assert place is None or place.file != "conn.py"
    assert place_of(ValueError("never raised")) is None


def through(*modules: tuple[str, str]) -> BaseException:
    """Return an error that passes through functions `f` of the modules at these files.

    The innermost function comes last and raises, on line 2; the others call on line 3.
    """
    scope: dict[str, Any] = {}
    for place, (module, file) in reversed(list(enumerate(modules))):
        last = place == len(modules) - 1
        source = "def f():\n    raise KeyError('a')\n" if last else "def f():\n    1\n    below()\n"
        inner = {"__name__": module, "below": scope.get("f")}
        exec(compile(source, file, "exec"), inner)
        scope = inner
    with pytest.raises(KeyError) as caught:
        scope["f"]()
    assert caught.value.__traceback__ is not None
    # without this file's own place
    return caught.value.with_traceback(caught.value.__traceback__.tb_next)


SITE = "/env/lib/python3.11/site-packages"


@pytest.mark.parametrize(
    "modules, place",
    [
        (
            [("acme.conn", "/src/acme/conn.py"), ("redis.client", f"{SITE}/redis/client.py")],
            "conn.py:3, in f",
        ),
        (
            [("acme.conn", "/src/acme/conn.py"), ("vllm.utils", "/src/vllm/vllm/utils.py")],
            "conn.py:3, in f",
        ),
        (
            [("acme.conn", f"{SITE}/acme/conn.py"), ("acme.client", f"{SITE}/acme/client.py")],
            "client.py:2, in f",
        ),
        (
            [("acme.conn", "/src/acme/conn.py"), ("helper", "/src/helper.py")],
            "helper.py:2, in f",
        ),
        (
            [
                ("vllm.base", f"{SITE}/vllm/base.py"),
                ("redis.client", "/usr/lib/python3/dist-packages/redis/client.py"),
            ],
            "",
        ),
    ],
)
def test_another_packages_lines_are_not_the_connectors(
    modules: list[tuple[str, str]], place: str
) -> None:
    found = place_of(through(*modules), type("Conn", (), {"__module__": "acme.conn"}))
    assert ("" if found is None else str(found)) == place


def test_a_connector_of_vllm_has_no_package_of_its_own() -> None:
    error = through(
        ("vllm.shim", f"{SITE}/vllm/shim.py"), ("lmcache.adapter", f"{SITE}/lmcache/adapter.py")
    )
    place = place_of(error, type("Conn", (), {"__module__": "vllm.shim"}))
    assert place == place_of(error) and str(place) == "adapter.py:2, in f"


def test_integers_that_the_line_names_are_told(tmp_path: Path) -> None:
    """Neither attributes nor other values: these are long, or differ from run to run."""
    file = tmp_path / "conn.py"
    file.write_text(
        "def plan(blocks, first, last, flag):\n    return blocks[first + last.bit_length()]\n"
    )
    scope: dict[str, Any] = {"__name__": "mypkg.conn"}
    exec(compile(file.read_text(), str(file), "exec"), scope)
    with pytest.raises(IndexError) as caught:
        scope["plan"]([1], 7, 4, True)
    assert numbers_at(caught.value) == {"first": 7, "last": 4}
    assert numbers_at(ValueError("never raised")) == {}
