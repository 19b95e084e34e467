# SPDX-License-Identifier: Apache-2.0
"""Tests of the checks of a release, with a small source tree and archives made by hand.

tests/project/test_wheel.py builds the wheel itself.
"""

from __future__ import annotations

import io
import tarfile
import zipfile
from pathlib import Path

import pytest

from kvconform.dev import release

POINTS = "\n".join(
    f"[{group}]\n{name} = {target}" for (group, name), target in release.ENTRY_POINTS.items()
)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A checkout with one file per packaged folder."""
    tree = tmp_path / "source"
    for folder in release.MOUNTS:
        (tree / folder).mkdir(parents=True)
        (tree / folder / "__init__.py").write_text('__version__ = "1.2.3"\n')
    (tree / "spec" / "rules.yaml").write_text("- R001\n")
    for name in release.BESIDE:
        (tree / name).write_text("")
    (tree / "pyproject.toml").write_text('[project]\nversion = "1.2.3"\n')
    (tree / "CHANGELOG.md").write_text("## 1.2.3 (2026-11-24)\n")
    return tree


def build(source: Path, dist: Path, *, without: str = "", more: str = "") -> Path:
    """Make a wheel and an sdist of a tree by hand."""
    dist.mkdir()
    files = {name: path.read_bytes() for path, name in release.packaged(source)}
    beside = {name: (source / name).read_bytes() for name in release.BESIDE}
    with tarfile.open(dist / "kvconform-1.2.3.tar.gz", "w:gz") as archive:
        for name, content in {f"src/{n}": c for n, c in files.items()}.items() | beside.items():
            if name != without:
                entry = tarfile.TarInfo(f"kvconform-1.2.3/{name}")
                entry.size = len(content)
                archive.addfile(entry, io.BytesIO(content))
        if more:
            archive.addfile(tarfile.TarInfo(f"kvconform-1.2.3/{more}"), io.BytesIO())
    with zipfile.ZipFile(dist / "kvconform-1.2.3-py3-none-any.whl", "w") as wheel:
        for name, content in files.items():
            if name != without:
                wheel.writestr(name, content)
        for name in release.DIST_INFO:
            text = POINTS if name == "entry_points.txt" else ""
            wheel.writestr(f"kvconform-1.2.3.dist-info/{name}", text)
    return dist


def problems(
    source: Path, dist: Path, *, direct: Path | None = None, tag: str | None = None
) -> list[str]:
    return list(release.problems(dist, source, direct, tag))


def test_a_good_release(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dist, direct = build(source, tmp_path / "dist"), build(source, tmp_path / "direct")
    given = [str(dist), "--source", str(source), "--direct", str(direct), "--tag", "v1.2.3"]
    assert release.main(given) == 0
    assert "complete" in capsys.readouterr().out
    (dist / "kvconform-1.2.2.tar.gz").touch()
    assert release.main(given) == 1
    assert "has 1 wheels and 2 sdists" in capsys.readouterr().out


def test_the_sdist_has_what_the_wheel_has_and_no_tests(source: Path, tmp_path: Path) -> None:
    lacking = build(source, tmp_path / "a", without="src/kvconform/spec/rules.yaml")
    assert problems(source, lacking) == ["the sdist lacks src/kvconform/spec/rules.yaml"]
    lacking = build(source, tmp_path / "b", without="LICENSE")
    assert problems(source, lacking) == ["the sdist lacks LICENSE"]
    for count, name in enumerate(("tests/test_it.py", ".nox/x", "kvconform-report/report.jsonl")):
        full = build(source, tmp_path / f"more{count}", more=name)
        assert problems(source, full) == [f"the sdist has {name}, which does not belong there"]


def test_a_wheel_from_the_sdist_is_that_of_the_checkout(source: Path, tmp_path: Path) -> None:
    name = "kvconform/spec/rules.yaml"
    dist, direct = build(source, tmp_path / "a"), build(source, tmp_path / "b", without=name)
    assert problems(source, dist, direct=direct) == [
        f"{name} differs between the wheels built from the sdist and from the checkout"
    ]


def test_the_version_is_that_of_the_tag_and_the_changelog(source: Path, tmp_path: Path) -> None:
    dist = build(source, tmp_path / "dist")
    assert problems(source, dist, tag="v1.2.3") == []
    assert problems(source, dist, tag="v1.3.0") == [
        "the tag is v1.3.0, and the version is 1.2.3: the tag must be v1.2.3"
    ]
    (source / "CHANGELOG.md").write_text("## 1.2.3 (unreleased)\n")
    # the sdist still has the former one
    (former,) = problems(source, dist)
    assert former == "CHANGELOG.md of the sdist is not that of the checkout"
    assert problems(source, dist, tag="v1.2.3")[1:] == [
        "CHANGELOG.md says 'unreleased' of 1.2.3: a release needs its date, YYYY-MM-DD"
    ]
    (source / "CHANGELOG.md").write_text("## 1.2.2 (2026-11-01)\n")
    assert "CHANGELOG.md has no section '## 1.2.3 (DATE)'" in problems(source, dist)
    init = source / "conformance" / "__init__.py"
    init.write_text('__version__ = "1.2.4"\n')
    said = "the distributions have version 1.2.3, and conformance/__init__.py says 1.2.4"
    assert said in problems(source, dist)
