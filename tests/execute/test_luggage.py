# SPDX-License-Identifier: Apache-2.0
"""Tests of what travels to a cluster."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from kvconform.errors import UsageError
from kvconform.execute import luggage
from kvconform.execute.nodes import NEEDED, Node, difference, look
from places import ROOT


def names(path: Path) -> set[str]:
    with zipfile.ZipFile(path) as archive:
        return set(archive.namelist())


@pytest.fixture
def connector(tmp_path: Path) -> Path:
    """Return an import folder as a repository has it: with an environment, and a git folder."""
    folder = tmp_path / "repo"
    for place in ("mypkg/data", ".git", ".nox/env", "env", "mypkg/__pycache__"):
        (folder / place).mkdir(parents=True)
    (folder / "mypkg" / "__init__.py").write_text("")
    (folder / "mypkg" / ".gitignore").write_text("*")
    (folder / "mypkg" / "data" / "table.bin").write_bytes(bytes(1000))
    (folder / "env" / "pyvenv.cfg").write_text("")
    (folder / "env" / "lib.py").write_text("")
    (folder / ".nox" / "env" / "big.bin").write_bytes(bytes(1000))
    (folder / ".git" / "config").write_text("")
    (folder / "mypkg" / "__pycache__" / "x.cpython-311.pyc").write_text("")
    (folder / "mypkg" / "again").symlink_to(folder, target_is_directory=True)
    return folder


def test_sources_travel_and_environments_do_not(connector: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.zip"
    size = luggage.pack(path, [str(connector)], ["mypkg", "pieces", "vllm", "os", "no_such"])
    found = names(path)
    assert {name for name in found if not name.startswith("kvconform/")} == {
        "kvconform-folders/0/mypkg/__init__.py",
        "kvconform-folders/0/mypkg/.gitignore",
        "kvconform-folders/0/mypkg/data/table.bin",
        "pieces.py",  # installed elsewhere, as far as it is concerned
    }
    # The folders of the repository that are linked into the package, and data, are part of it.
    assert {
        "kvconform/cli.py",
        "kvconform/refimpl/connector.py",
        "kvconform/spec/defects.yaml",
        "kvconform/connectors/example.toml",
    } <= found
    assert not any("__pycache__" in name for name in found) and size < 20 * 2**20


def test_the_same_sources_are_the_same_bytes(connector: Path, tmp_path: Path) -> None:
    one, two = tmp_path / "a.zip", tmp_path / "b.zip"
    luggage.pack(one, [str(connector)], [])
    (connector / "mypkg" / "__init__.py").touch()
    luggage.pack(two, [str(connector)], [])
    assert one.read_bytes() == two.read_bytes()
    (connector / "mypkg" / "__init__.py").write_text("x = 1\n")
    luggage.pack(two, [str(connector)], [])
    assert one.read_bytes() != two.read_bytes()


def test_too_much_is_a_sentence(
    connector: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(luggage, "MOST", 2**20)
    with pytest.raises(UsageError, match="more than 1 MB: --pythonpath must name a folder"):
        luggage.pack(tmp_path / "a.zip", [str(connector)], [])


def test_versions_that_differ_are_a_sentence() -> None:
    here = look()
    assert here.missing == () and difference(here, "n1", here) is None
    lacks = difference(here, "n1", Node(here.python, ("ruamel.yaml", "vllm")))
    assert lacks is not None and "node n1 of the Ray cluster lacks ruamel.yaml, vllm" in lacks
    other = difference(here, "n1", Node(here.python, (), here.vllm, "0.1"))
    assert other is not None and f"has torch 0.1 and this machine {here.torch}" in other


IMPORTED = """
import json, sys
import kvconform.dev.defects, kvconform.dev.explore_correct, kvconform.dev.own
import kvconform.explore.judging, kvconform.observe.probe, kvconform.run.case, kvconform.run.smoke
print(json.dumps([name for name in sys.argv[1:] if name in sys.modules]))
"""


def test_all_that_a_worker_imports_travels_or_is_looked_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    requirements = [re.split(r"[<>=]", each)[0] for each in project["dependencies"]]
    modules = ["xdist" if each == "pytest-xdist" else each for each in requirements]
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED, *modules], capture_output=True, text=True, check=True
    )
    imported = set(json.loads(done.stdout.splitlines()[-1]))
    assert imported and imported <= set(NEEDED)
