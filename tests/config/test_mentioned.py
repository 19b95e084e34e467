# SPDX-License-Identifier: Apache-2.0
"""Tests that an option which no source of the connector mentions is probably misspelt."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvconform.config.mentioned import unmentioned

BASE = "vllm.distributed.kv_transfer.kv_connector.v1"
SINGLE = 'import beside\nclass C:\n    def f(self): return self.extra.get("store", ""), _["size"]\n'


@pytest.fixture
def folder(tmp_path: Path) -> str:
    package = tmp_path / "mypkg"
    package.mkdir()
    files = {
        "single.py": SINGLE,
        "beside.py": "class Options:\n    timeout: float = 1\n",
        "unrelated.py": "stroe = 1",
        "derived.py": "from elsewhere.base import Base\nclass C(Base): ...",
        "based.py": f"import abc\nfrom {BASE} import KVConnectorBase_V1 as B\n"
        "from elsewhere import Statistics\nclass Own(B): ...\nclass S(Statistics): ...\n"
        "class C(Own, abc.ABC): ...",
        "vague.py": "class C(make()): ...",
        "below.py": "from elsewhere.base import Base\nclass B(Base): ...\nclass C(B): ...",
        "mypkg/__init__.py": "",
        "mypkg/conn.py": "class C: ...",
        "mypkg/options.py": 'path = given["path"]',
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    return str(tmp_path)


@pytest.mark.parametrize(
    ("connector", "option", "said"),
    [
        ("single:C", "stroe", "no source of single mentions 'stroe'; did you mean store?"),
        ("single:C", "sto", "no source of single mentions 'sto'; did you mean store?"),
        ("single:C", "zzzz", "no source of single mentions 'zzzz'"),
        ("mypkg.conn:C", "store", "no source of mypkg mentions 'store'"),
        ("based:C", "store", "no source of based mentions 'store'"),
    ],
)
def test_a_misspelt_option(folder: str, connector: str, option: str, said: str) -> None:
    assert unmentioned(connector, [option], [folder]) == [f"extra_config: {said}"]


@pytest.mark.parametrize(
    ("connector", "option"),
    [
        ("single:C", "store"),
        ("single:C", "timeout"),  # of a module that it imports
        ("mypkg.conn:C", "path"),
        ("mypkg.conn:C", "mypkg.path"),  # of options with a prefix
        ("derived:C", "store"),  # which its base may read
        ("below:C", "store"),
        ("vague:C", "store"),
        ("absent:C", "x"),
        ("vllm.x:C", "x"),
        ("ExampleConnector", "x"),
    ],
)
def test_an_option_that_may_be_read(folder: str, connector: str, option: str) -> None:
    assert unmentioned(connector, [option], [folder]) == []
