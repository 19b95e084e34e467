# SPDX-License-Identifier: Apache-2.0
"""Tests of the wheel: it is complete, requires neither vLLM nor torch, and needs no checkout."""

from __future__ import annotations

import configparser
import email
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from places import ROOT

pytestmark = pytest.mark.e2e

MOUNTS = {
    "conformance": "kvconform",
    "refimpl": "kvconform/refimpl",
    "kernels": "kvconform/kernels",
    "connectors": "kvconform/connectors",
    "fixtures": "kvconform/fixtures",
    "spec": "kvconform/spec",
}


def packaged() -> Iterator[tuple[Path, str]]:
    """Every file of the checkout that belongs in the wheel, with its name there."""
    for folder, mount in MOUNTS.items():
        for path in sorted((ROOT / folder).rglob("*")):
            if (
                path.is_file()
                and not path.is_symlink()
                and "__pycache__" not in path.parts
                and path.name != ".gitkeep"
            ):
                yield path, f"{mount}/{path.relative_to(ROOT / folder).as_posix()}"


def python(*args: str, path: Path | None = None, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run Python outside of the checkout, with only `path` in front of its import path."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if path is not None:
        env["PYTHONPATH"] = str(path)
    ran = subprocess.run(
        [sys.executable, *args], cwd=cwd, env=env, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of the sources.

    setuptools leaves `build/` behind, and would pack what an older build left there.
    """
    tmp = tmp_path_factory.mktemp("wheel")
    ignore = shutil.ignore_patterns("__pycache__", "*.pyc")
    for folder in (*MOUNTS, "src"):
        shutil.copytree(ROOT / folder, tmp / "source" / folder, ignore=ignore, symlinks=True)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp / "source" / name)
    python(
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--quiet",
        "--wheel-dir",
        str(tmp),
        str(tmp / "source"),
        cwd=tmp,
    )
    (built,) = tmp.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with only the wheel's contents."""
    target = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    return target


def metadata(wheel: Path, name: str) -> str:
    """The text of a file in the wheel's dist-info."""
    with zipfile.ZipFile(wheel) as archive:
        (member,) = (
            member for member in archive.namelist() if member.endswith(f".dist-info/{name}")
        )
        return archive.read(member).decode()


def test_everything_is_inside(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        inside = set(archive.namelist())
    missing = [name for _, name in packaged() if name not in inside]
    assert not missing
    kinds = {Path(name).suffix for name in inside if name.startswith("kvconform/")}
    assert {".py", ".yaml", ".json"} <= kinds


def test_contents_are_the_same(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        different = [name for path, name in packaged() if archive.read(name) != path.read_bytes()]
    assert not different


def test_only_our_package_is_inside(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        tops = {name.split("/")[0] for name in archive.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"kvconform"}


def test_asks_for_neither_vllm_nor_torch(wheel: Path) -> None:
    required = email.message_from_string(metadata(wheel, "METADATA")).get_all("Requires-Dist") or []
    assert required
    assert not [
        line
        for line in required
        if line.lower().startswith(("vllm", "torch", "triton", "transformers"))
    ]


def test_entry_points(wheel: Path) -> None:
    points = configparser.ConfigParser()
    points.read_string(metadata(wheel, "entry_points.txt"))
    assert points["console_scripts"]["kvconform"] == "kvconform.cli:main"
    assert points["pytest11"]["kvconform"] == "kvconform.session.plugin"


def test_licence_is_inside(wheel: Path) -> None:
    assert "Apache License" in metadata(wheel, "licenses/LICENSE")


def test_works_without_the_checkout(installed: Path, tmp_path: Path) -> None:
    found = python(
        "-P", "-c", "import kvconform; print(kvconform.__file__)", path=installed, cwd=tmp_path
    ).stdout.strip()
    assert Path(found).is_relative_to(installed)
    assert python("-P", "-m", "kvconform", "version", path=installed, cwd=tmp_path).stdout.strip()
    listed = python("-P", "-m", "kvconform", "list", path=installed, cwd=tmp_path).stdout
    assert "load.only-grant" in listed


def test_command_line_starts_without_vllm(installed: Path, tmp_path: Path) -> None:
    without = (
        "import sys; sys.modules['vllm'] = sys.modules['torch'] = None; "
        "from kvconform.cli import main; main()"
    )
    assert python("-P", "-c", without, "list", path=installed, cwd=tmp_path).stdout


@pytest.mark.parametrize("name", ["kernels", "spec", "fixtures", "refimpl", "conformance"])
def test_no_top_level_package_of_ours(name: str) -> None:
    """transformers looks for a package named `kernels`, and breaks on ours."""
    code = (
        f"import importlib.util as u; s = u.find_spec({name!r}); "
        "print(list(s.submodule_search_locations or [s.origin]) if s else [])"
    )
    found = python("-P", "-c", code, cwd=ROOT).stdout
    assert str(ROOT) not in found


def test_checkout_is_not_on_the_import_path() -> None:
    assert str(ROOT) not in [str(Path(entry or ".").resolve()) for entry in sys.path]


def test_a_shard_made_by_the_wheel_can_be_merged_by_the_checkout(
    installed: Path, tmp_path: Path
) -> None:
    code = "from kvconform.config.selection import suite_digest; print(suite_digest())"
    assert (
        python("-P", "-c", code, path=installed, cwd=tmp_path).stdout
        == python("-P", "-c", code, cwd=tmp_path).stdout
    )
