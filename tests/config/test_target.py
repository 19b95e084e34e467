# SPDX-License-Identifier: Apache-2.0
"""Tests of how a connector is named, found and configured, with one sentence for every mistake."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvconform.config.target import Target
from kvconform.errors import UsageError
from kvconform.refimpl.connector import ReferenceConnector

REFERENCE = "kvconform.refimpl.connector:ReferenceConnector"


class NotOne:
    """No connector."""


class Declares(ReferenceConnector):
    """Declares by a dict."""

    kvconform_capabilities = {"saves": "prompt", "store": True}  # type: ignore[assignment]


def test_a_class_and_a_registered_name_are_found() -> None:
    assert Target(REFERENCE).resolve() is ReferenceConnector
    assert Target("ExampleConnector").resolve().__name__ == "ExampleConnector"
    assert (Target(REFERENCE).name, Target(REFERENCE).module) == (
        "ReferenceConnector",
        "kvconform.refimpl.connector",
    )
    assert (Target("X").name, Target("X").module, Target(None).name) == ("X", None, "none")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("NoSuchConnector", "vLLM knows no connector named 'NoSuchConnector'"),
        ("NixlConector", "give it as package.module:Class; did you mean NixlConnector"),
        (
            "no.such.module:X",
            (
                "Module no.such.module of connector no.such.module:X cannot be imported: "
                "ModuleNotFoundError"
            ),
        ),
        ("kvconform.refimpl.connector:Nobody", "has no attribute 'Nobody'"),
        (f"{__name__}:NotOne", "is not a KV connector: it must be a subclass"),
        (f"{__name__}:REFERENCE", "is not a KV connector"),
    ],
)
def test_what_cannot_be_found_is_said_in_one_sentence(name: str, text: str) -> None:
    with pytest.raises(UsageError) as caught:
        Target(name).resolve()
    said = str(caught.value)
    assert text in said and "\n" not in said and said.endswith(".")


def test_the_runs_directory_is_put_into_every_string(tmp_path: Path) -> None:
    extra: dict[str, Any] = {
        "a": "{tmp}/x",
        "b": [{"c": "{tmp}{tmp}"}, 3],
        "n": None,
        "plain": "{other}",
    }
    target = Target(None, extra)
    assert target.options(tmp_path, 16) == {
        "a": f"{tmp_path}/x",
        "b": [{"c": f"{tmp_path}{tmp_path}"}, 3],
        "n": None,
        "plain": "{other}",
    }
    assert target.extra_config["a"] == "{tmp}/x"


def test_configuration_overrides_what_the_class_declares() -> None:
    target = Target(REFERENCE, {"chunk_tokens": 8}, capabilities={"saves": "none"})
    assert (
        target.declared(ReferenceConnector).items()
        >= {"chunk_tokens": 8, "saves": "none", "kv_events": False}.items()
    )
    assert target.declared(Declares) == {"saves": "none", "store": True}
    assert target.declared(None) == target.declared(NotOne) == {"saves": "none"}


@pytest.mark.parametrize(
    ("offered", "sentence"),
    [
        (lambda extra: extra["key"], "kvconform_capabilities raised KeyError: 'key'"),
        (lambda extra: None, "kvconform_capabilities gives None; it must be a dict"),
        (["store"], r"kvconform_capabilities gives \['store'\]; it must be a dict"),
    ],
)
def test_capabilities_that_are_no_declaration(offered: object, sentence: str) -> None:
    given = staticmethod(offered) if callable(offered) else offered
    cls = type("Conn", (), {"kvconform_capabilities": given})
    with pytest.raises(UsageError, match=f"^{sentence}"):
        Target(connector="own:Conn").declared(cls)
