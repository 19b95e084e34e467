# SPDX-License-Identifier: Apache-2.0
"""Tests of the wheel: it is complete, requires neither vLLM nor torch, and needs no checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from kvconform.dev import release
from places import ROOT

pytestmark = pytest.mark.e2e


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
    for folder in (*release.MOUNTS, "src"):
        shutil.copytree(ROOT / folder, tmp / "source" / folder, ignore=ignore, symlinks=True)
    for name in ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in", "CHANGELOG.md"):
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


@pytest.fixture(scope="module")
def files(wheel: Path) -> release.Files:
    """The wheel's files."""
    return release.of_wheel(wheel)


def test_it_is_complete_with_nothing_else_inside(files: release.Files) -> None:
    assert list(release.wheel_problems(files, ROOT)) == []
    kinds = {Path(name).suffix for name in files if name.startswith("kvconform/")}
    assert {".py", ".yaml", ".json", ".toml", ".j2"} <= kinds
    folders = {name.split("/")[1] for name in files if name.startswith("kvconform/")}
    assert {"spec", "refimpl", "kernels", "connectors", "fixtures"} <= folders


@pytest.mark.parametrize(
    "name",
    [
        "kvconform/spec/requirements/load.yaml",
        "kvconform/fixtures/template/.gitignore",
        "kvconform/report/html/assets/report.html.j2",
        "kvconform/kernels/__init__.py",
        "INFO/licenses/LICENSE",
    ],
)
def test_a_file_that_is_missing_or_too_many_is_named(files: release.Files, name: str) -> None:
    (info,) = {name.split("/")[0] for name in files if ".dist-info/" in name}
    name = name.replace("INFO", info)
    without = {key: value for key, value in files.items() if key != name}
    assert len(without) == len(files) - 1
    assert list(release.wheel_problems(without, ROOT)) == [f"the wheel lacks {name}"]
    more = {**files, "tests/test_it.py": b"", "kvconform/__pycache__/cli.pyc": b""}
    assert list(release.wheel_problems(more, ROOT)) == [
        "the wheel has kvconform/__pycache__/cli.pyc, which does not belong there",
        "the wheel has tests/test_it.py, which does not belong there",
    ]


def test_other_bytes_a_requirement_of_vllm_and_a_lost_entry_point_are_named(
    files: release.Files,
) -> None:
    (info,) = {name.split("/")[0] for name in files if ".dist-info/" in name}
    metadata, points = f"{info}/METADATA", f"{info}/entry_points.txt"
    wrong = {
        **files,
        "kvconform/cli.py": b"",
        metadata: files[metadata].replace(b"\nRequires-Dist:", b"\nRequires-Dist: vllm\nX:", 1),
        points: files[points].replace(b"kvconform.session.plugin", b"kvconform.plugin"),
    }
    assert list(release.wheel_problems(wrong, ROOT)) == [
        "kvconform/cli.py of the wheel is not that of the checkout",
        "the wheel requires vllm, but must work with the vLLM that is installed",
        "the wheel lacks the entry point kvconform = kvconform.session.plugin of pytest11",
    ]


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
