# SPDX-License-Identifier: Apache-2.0
"""Tests of finding a repository's connector from its source alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvconform.errors import UsageError
from kvconform.init.find import connectors, find, named, options

BASE = (
    "from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, "
    "KVConnectorMetadata\n"
)


def put(root: Path, name: str, text: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text, encoding="utf-8")


def names(root: Path) -> list[str]:
    return [one.connector for one in connectors(root)]


def test_a_class_in_a_package_below_src(tmp_path: Path) -> None:
    put(tmp_path, "src/acme/__init__.py", "")
    put(tmp_path, "src/acme/kv/__init__.py", "")
    put(
        tmp_path,
        "src/acme/kv/conn.py",
        BASE + "class Meta(KVConnectorMetadata): ...\nclass Acme(KVConnectorBase_V1): ...\n",
    )
    found = find(tmp_path)
    assert (found.connector, found.root, found.line) == ("acme.kv.conn:Acme", tmp_path / "src", 3)


@pytest.mark.parametrize(
    "text",
    [
        "import vllm.distributed.kv_transfer.kv_connector.v1.base\n"
        "class A(vllm.distributed.kv_transfer.kv_connector.v1.base.KVConnectorBase_V1): ...",
        BASE.replace("KVConnectorBase_V1", "KVConnectorBase_V1 as Base") + "class A(Base): ...",
        (
            "from vllm.distributed.kv_transfer.kv_connector.v1.lmcache_connector import "
            "LMCacheConnectorV1\nclass A(LMCacheConnectorV1): ..."
        ),
        "if True:\n    from vllm.distributed.kv_transfer.kv_connector.v1 import "
        "KVConnectorBase_V1, SupportsHMA\n"
        "class A(KVConnectorBase_V1, SupportsHMA): ...",
        (
            "import vllm.distributed.kv_transfer.kv_connector.v1.base as b\n"
            "class A(b.KVConnectorBase_V1): ..."
        ),
        (
            "from vllm.distributed.kv_transfer.kv_connector.v1 import base\n"
            "class A(base.KVConnectorBase_V1): ..."
        ),
        (
            "from vllm.distributed import kv_transfer as kv\n"
            "class A(kv.kv_connector.v1.base.KVConnectorBase_V1): ..."
        ),
        "try:\n    "
        + BASE
        + "except ImportError:\n    A = None\nelse:\n    class A(KVConnectorBase_V1): ...",
        BASE
        + (
            "try:\n    import fast\n    class A(KVConnectorBase_V1): ...\nexcept ImportError:\n"
            "    class A(KVConnectorBase_V1): ..."
        ),
        BASE + "class A(KVConnectorBase_V1[int]): ...",
        BASE
        + (
            "from .other import Other as Ours\nclass Other(KVConnectorBase_V1): ...\n"
            "class A(Ours): ..."
        ),
    ],
)
def test_ways_to_name_the_base(tmp_path: Path, text: str) -> None:
    put(tmp_path, "a.py", text)
    assert names(tmp_path) == ["a:A"]


def test_what_others_derive_from_is_not_meant_wherever_it_is(tmp_path: Path) -> None:
    put(tmp_path, "acme/__init__.py", "")
    put(tmp_path, "acme/z_base.py", BASE + "class Common(KVConnectorBase_V1): ...\n")
    put(
        tmp_path,
        "acme/conn.py",
        "from acme.z_base import Common\nclass Middle(Common): ...\nclass Last(Middle): ...\n",
    )
    assert names(tmp_path) == ["acme.conn:Last"]


def test_stand_ins_and_tests_count_where_there_is_nothing_else(tmp_path: Path) -> None:
    put(tmp_path, "tests/helper.py", BASE + "class Other(KVConnectorBase_V1): ...\n")
    assert names(tmp_path) == ["helper:Other"]
    put(
        tmp_path,
        "acme.py",
        BASE + "class MockAcme(KVConnectorBase_V1): ...\nclass _Hidden(KVConnectorBase_V1): ...\n",
    )
    assert names(tmp_path) == ["acme:MockAcme"]
    put(
        tmp_path,
        "acme.py",
        BASE + "class MockAcme(KVConnectorBase_V1): ...\nclass Acme(KVConnectorBase_V1): ...\n",
    )
    assert names(tmp_path) == ["acme:Acme"]


def test_what_a_test_or_a_stand_in_derives_from_is_meant_all_the_same(tmp_path: Path) -> None:
    put(tmp_path, "acme/__init__.py", "")
    put(
        tmp_path,
        "acme/conn.py",
        BASE
        + (
            "class Acme(KVConnectorBase_V1): ...\nclass MockAcme(Acme): ...\n"
            "class _Debug(Acme): ...\n"
        ),
    )
    put(
        tmp_path,
        "tests/faults.py",
        "from acme.conn import Acme\nclass FaultyConnector(Acme): ...\n",
    )
    put(
        tmp_path,
        "acme/test_conn.py",
        "from acme.conn import Acme\nclass BrokenConnector(Acme): ...\n",
    )
    assert names(tmp_path) == ["acme.conn:Acme"]


def test_a_stand_in_is_told_by_a_word_of_its_name(tmp_path: Path) -> None:
    real = ("DatabaseConnector", "LatestKVConnector", "Contested", "StubbornConnector")
    fakes = (
        "FakeConnector",
        "AcmeBase",
        "KVTestConnector",
        "AbstractKVConnector",
        "mock_connector",
    )
    put(
        tmp_path,
        "a.py",
        BASE + "".join(f"class {name}(KVConnectorBase_V1): ...\n" for name in real + fakes),
    )
    assert names(tmp_path) == sorted(f"a:{name}" for name in real)


def test_a_folder_that_is_no_repository_is_not_read_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvconform.init.find.MOST_FILES", 2)
    for name in ("a.py", "b.py", "c.txt"):
        put(tmp_path, name, BASE + f"class {name[0].upper()}(KVConnectorBase_V1): ...\n")
    assert names(tmp_path) == ["a:A", "b:B"]
    put(tmp_path, "z/d.py", "")
    with pytest.raises(
        UsageError, match="has more than 2 Python files: is it the connector's repository"
    ):
        find(tmp_path)


def test_a_class_of_the_same_name_that_is_no_connector(tmp_path: Path) -> None:
    put(tmp_path, "a.py", BASE + "class Acme(KVConnectorBase_V1): ...\n")
    put(tmp_path, "sglang.py", "class Acme: ...\nclass OtherConnector: ...\n")
    assert names(tmp_path) == ["a:Acme"]


def test_environments_builds_and_broken_files_are_left_alone(tmp_path: Path) -> None:
    for folder in (".venv", "build", "mine"):
        put(tmp_path, f"{folder}/a.py", BASE + "class Acme(KVConnectorBase_V1): ...\n")
    put(tmp_path, "mine/pyvenv.cfg", "")
    put(tmp_path, "broken.py", "class Acme(\n")
    with pytest.raises(UsageError, match="no class in .* derives from KVConnectorBase_V1"):
        find(tmp_path)


def test_two_that_could_be_meant(tmp_path: Path) -> None:
    put(
        tmp_path,
        "a.py",
        BASE + "class One(KVConnectorBase_V1): ...\nclass Two(KVConnectorBase_V1): ...\n",
    )
    with pytest.raises(
        UsageError, match=r"2 connectors were found: .*a:One \(a.py:2\), a:Two \(a.py:3\)"
    ):
        find(tmp_path)


def test_options_of_the_module_and_its_neighbours(tmp_path: Path) -> None:
    put(tmp_path, "acme/__init__.py", "")
    body = """class Acme(KVConnectorBase_V1):
    def __init__(self, config):
        self.a = self._kv_transfer_config.get_from_extra_config("store_path", "/tmp")
        self.b = config.kv_transfer_config.kv_connector_extra_config.get("port", 9911)
        self.c = config.kv_transfer_config.kv_connector_extra_config["name"]
        self.d = {}.get("unrelated", 1)
"""
    put(tmp_path, "acme/conn.py", BASE + body)
    put(
        tmp_path,
        "acme/worker.py",
        "def f(extra_config):\n    return extra_config.get('chunk', f())\n",
    )
    assert options(find(tmp_path)) == {
        "store_path": "/tmp",
        "port": 9911,
        "name": None,
        "chunk": None,
    }


def test_capabilities_of_its_own(tmp_path: Path) -> None:
    put(tmp_path, "a.py", BASE + "class A(KVConnectorBase_V1):\n    kvconform_capabilities = {}\n")
    assert find(tmp_path).declares


def test_options_by_way_of_a_name(tmp_path: Path) -> None:
    body = """class Acme(KVConnectorBase_V1):
    def __init__(self, config):
        extra = self._kv_transfer_config.kv_connector_extra_config or {}
        self._extra_config = config.kv_transfer_config.kv_connector_extra_config
        self.url, self.chunk = extra["acme_url"], extra.get("chunk", 16)
        self.dir = self._extra_config.get("dir")
        nested = extra["nested"]
        self.other = nested["not-an-option"]
"""
    put(tmp_path, "acme.py", BASE + body)
    assert options(find(tmp_path)) == {"acme_url": None, "chunk": 16, "dir": None, "nested": None}


def test_a_connector_that_is_named_is_found_with_its_root(tmp_path: Path) -> None:
    put(tmp_path, "src/acme/__init__.py", BASE + "class Top(KVConnectorBase_V1): ...\n")
    put(
        tmp_path,
        "src/acme/conn.py",
        BASE + "class One(KVConnectorBase_V1): ...\nclass Two(KVConnectorBase_V1): ...\n",
    )
    found = named(tmp_path, "acme.conn:Two")
    assert found is not None and (found.root, found.line) == (tmp_path / "src", 3)
    top = named(tmp_path, "acme:Top")
    assert top is not None and top.root == tmp_path / "src"
    assert named(tmp_path, "conn:Two") is None and named(tmp_path, "elsewhere:Two") is None
