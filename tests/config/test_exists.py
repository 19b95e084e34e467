# SPDX-License-Identifier: Apache-2.0
"""Tests that a connector that does not exist is refused before anything is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvconform.config.exists import check_connector_exists
from kvconform.config.target import Target
from kvconform.errors import UsageError

SOURCE = """
import json
from elsewhere import Imported as Renamed
Made = type("Made", (), {})
if True:
    class Inner: ...
def helper(): ...
"""
MANY = """
from base import KVConnectorBase_V1
class Stored: ...
class StoreMetadata: ...
class Stores(KVConnectorBase_V1):
    def store(self, metadata): meta_data = metadata
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    package = tmp_path / "some_package"
    package.mkdir()
    files = {
        "__init__.py": "raise SystemExit('imported')",
        "conn.py": SOURCE,
        "broken.py": "class C(:\n",
        "many.py": MANY,
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
        ("some_package.conn.deeper:Inner", r"\(some_package\.conn is no package\), which"),
        ("some_package.conn:helper", "has no class 'helper'$"),
        ("some_package.conn:json", "has no class 'json'$"),
        ("some_package.many:Metadata", r"'Metadata'; did you mean StoreMetadata\?$"),
        ("some_package.many:Store", r"'Store'; did you mean Stores\?$"),
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
        ("DirConnector", "did you mean kvdir:DirConnector or pack.conn:DirConnector\\?$"),
        ("DirConectr", "did you mean kvdir:DirConnector or pack.conn:DirConnector\\?$"),
        ("Other", "'Other': give it as package.module:Class; it knows "),
    ],
)
def test_a_module_or_class_alone_is_answered_with_both(
    tmp_path: Path, name: str, text: str
) -> None:
    pytest.importorskip("vllm")
    base = "from vllm.x.base import KVConnectorBase_V1, KVConnectorMetadata\n"
    files = {
        "kvdir.py": f"{base}class Meta(KVConnectorMetadata): ...\n"
        "class DirConnector(KVConnectorBase_V1): ...\nclass Other: ...\n",
        "two.py": f"{base}class A(KVConnectorBase_V1): ...\nclass B(KVConnectorBase_V1): ...\n",
        "reexports.py": f"{base}from kvdir import DirConnector\n",
        "pack/__init__.py": "",
        "pack/conn.py": f"{base}class DirConnector(KVConnectorBase_V1): ...\n",
        "no_package/conn.py": f"{base}class DirConnector(KVConnectorBase_V1): ...\n",
        "no-module.py": f"{base}class DirConnector(KVConnectorBase_V1): ...\n",
        "__init__.py": f"{base}class DirConnector(KVConnectorBase_V1): ...\n",
    }
    for file, source in files.items():
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(source, encoding="utf-8")
    with pytest.raises(UsageError, match=text):
        check_connector_exists(name, [str(tmp_path)])


CLASS = "class C: ..."
MISSING = "import no_such_package_1"


@pytest.mark.parametrize(
    ("source", "line"),
    [
        (f"{MISSING}\n{CLASS}", 1),
        (f'"""About it."""\nimport os, vllm.config\nfrom no_such_package_1.x import y\n{CLASS}', 3),
        (
            "from typing import TYPE_CHECKING\n"
            f"if TYPE_CHECKING:\n    import no_such_package_2\n{MISSING}\n{CLASS}",
            4,
        ),
    ],
)
def test_a_missing_package_is_named_as_its_import_would(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, line: int
) -> None:
    pytest.importorskip("vllm")
    (tmp_path / "needy.py").write_text(source, encoding="utf-8")
    with pytest.raises(UsageError) as refused:
        check_connector_exists("needy:C", [str(tmp_path)])
    assert str(refused.value) == (
        "Module needy of connector needy:C cannot be imported: "
        f"ModuleNotFoundError: No module named 'no_such_package_1' (needy.py:{line})."
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UsageError) as raised:
        Target("needy:C").resolve()
    assert str(raised.value) == str(refused.value)
    check_connector_exists("needy:C", [str(tmp_path)], stand_ins=True)


@pytest.mark.parametrize(
    "source",
    [
        f"try:\n    {MISSING}\nexcept ImportError: pass",
        f"import helpful\n{MISSING}",
        f"sys.modules['no_such_package_1'] = sys\n{MISSING}",
        "import nixl",  # which vLLM may stand in for
        "import helpful",
    ],
)
def test_a_package_that_may_be_there_is_left_to_the_workers(tmp_path: Path, source: str) -> None:
    (tmp_path / "needy.py").write_text(f"{source}\n{CLASS}", encoding="utf-8")
    (tmp_path / "helpful.py").write_text("raise SystemExit('imported')", encoding="utf-8")
    check_connector_exists("needy:C", [str(tmp_path)])


def test_names_that_vllm_registers() -> None:
    pytest.importorskip("vllm")
    check_connector_exists("NixlConnector")
    with pytest.raises(UsageError, match="'NixConnector'.*did you mean NixlConnector"):
        check_connector_exists("NixConnector")
