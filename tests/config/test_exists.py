# SPDX-License-Identifier: Apache-2.0
"""Tests that a connector that does not exist is refused before anything is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvconform.config.catalogue import check_connector_exists
from kvconform.errors import UsageError

SOURCE = """
from elsewhere import Imported as Renamed
Made = type("Made", (), {})
if True:
    class Inner: ...
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    package = tmp_path / "some_package"
    package.mkdir()
    files = {
        "__init__.py": "raise SystemExit('imported')",
        "conn.py": SOURCE,
        "broken.py": "class C(:\n",
        "star.py": "from os import *",
        "lazy.py": "def __getattr__(name): ...",
        "dynamic.py": "globals().update(x=1)",
    }
    for name, text in files.items():
        (package / name).write_text(text, encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize(
    "name", ["conn:Renamed", "conn:Made", "conn:Inner", "star:Any", "lazy:Any", "dynamic:Any"]
)
def test_what_may_exist_is_left_to_the_workers(folder: Path, name: str) -> None:
    check_connector_exists(f"some_package.{name}", [str(folder)])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("some_package.conn:Innner", "has no class 'Innner'; did you mean Inner"),
        ("some_package.conn:Imported", "has no class 'Imported'"),
        ("some_package.con:Inner", "there is no module 'some_package.con'"),
        ("some_package.conn.deeper:Inner", "there is no module 'some_package.conn.deeper'"),
        ("some_package.broken:C", r"broken\.py:1: .*so some_package\.broken cannot run"),
    ],
)
def test_what_does_not_exist_is_refused(folder: Path, name: str, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        check_connector_exists(name, [str(folder)])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("kvdir", "did you mean kvdir:DirConnector\\?$"),
        ("two", "did you mean two:A or two:B\\?$"),
        ("reexports", "did you mean reexports:DirConnector\\?$"),
    ],
)
def test_a_module_is_answered_with_its_connectors(tmp_path: Path, name: str, text: str) -> None:
    pytest.importorskip("vllm")
    base = "from vllm.x.base import KVConnectorBase_V1, KVConnectorMetadata\n"
    files = {
        "kvdir.py": f"{base}class Meta(KVConnectorMetadata): ...\n"
        "class DirConnector(KVConnectorBase_V1): ...\nclass Other: ...\n",
        "two.py": f"{base}class A(KVConnectorBase_V1): ...\nclass B(KVConnectorBase_V1): ...\n",
        "reexports.py": f"{base}from kvdir import DirConnector\n",
    }
    for file, source in files.items():
        (tmp_path / file).write_text(source, encoding="utf-8")
    with pytest.raises(UsageError, match=text):
        check_connector_exists(name, [str(tmp_path)])


def test_names_that_vllm_registers() -> None:
    pytest.importorskip("vllm")
    check_connector_exists("NixlConnector")
    with pytest.raises(UsageError, match="'NixConnector'.*did you mean NixlConnector"):
        check_connector_exists("NixConnector")
