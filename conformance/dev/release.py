# SPDX-License-Identifier: Apache-2.0
"""Checks of a release: contents of the source distribution and the wheel, version, changelog.

`python -m kvconform.dev.release DIST --source TREE [--direct DIR] [--tag v1.2.3]` checks the only
sdist and the only wheel in DIST, which were built from TREE. With --direct, DIR has a wheel that
was built from TREE without the sdist in between: it must hold the same files. With --tag, the
version is that of the tag, and CHANGELOG.md has a dated section for it. `nox -s build` runs this.
"""

from __future__ import annotations

import argparse
import configparser
import email
import re
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

PACKAGE = "kvconform"
MOUNTS = {
    "conformance": PACKAGE,
    "refimpl": f"{PACKAGE}/refimpl",
    "kernels": f"{PACKAGE}/kernels",
    "connectors": f"{PACKAGE}/connectors",
    "fixtures": f"{PACKAGE}/fixtures",
    "spec": f"{PACKAGE}/spec",
}
"""Folders of the checkout, and where their files are in the wheel."""
BESIDE = ("CHANGELOG.md", "LICENSE", "MANIFEST.in", "PKG-INFO", "README.md", "pyproject.toml")
"""Files of the source distribution beside the package; setuptools adds setup.cfg."""
DIST_INFO = {
    "METADATA",
    "RECORD",
    "WHEEL",
    "entry_points.txt",
    "licenses/LICENSE",
    "top_level.txt",
}
NEVER_REQUIRED = ("vllm", "torch", "triton", "transformers")
"""kvconform judges the vLLM that is installed, and must not replace it."""
ENTRY_POINTS = {
    ("console_scripts", PACKAGE): "kvconform.cli:main",
    ("pytest11", PACKAGE): "kvconform.session.plugin",
    ("vllm.general_plugins", PACKAGE): "kvconform.live.plugin:register",
}

Files = dict[str, bytes]


def packaged(source: Path) -> Iterator[tuple[Path, str]]:
    """Yield every file of a checkout that belongs in the wheel, with its name there."""
    for folder, mount in MOUNTS.items():
        for path in sorted((source / folder).rglob("*")):
            if (
                path.is_file()
                and not path.is_symlink()
                and "__pycache__" not in path.parts
                and path.name != ".gitkeep"
            ):
                yield path, f"{mount}/{path.relative_to(source / folder).as_posix()}"


def of_wheel(wheel: Path) -> Files:
    """Return the files of a wheel by name."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if name[-1] != "/"}


def of_sdist(sdist: Path) -> Files:
    """Return the files of a source distribution by name, without its top folder."""
    found: Files = {}
    with tarfile.open(sdist) as archive:
        for member in archive:
            if not member.isdir():
                content = archive.extractfile(member)
                assert content is not None
                found[member.name.partition("/")[2]] = content.read()
    return found


def contents_problems(wanted: Files, found: Files, allowed: set[str], what: str) -> Iterator[str]:
    """Yield a sentence for each file that is missing, differs, or is too many."""
    for name in sorted(wanted.keys() - found.keys()):
        yield f"the {what} lacks {name}"
    for name in sorted(wanted.keys() & found.keys()):
        if wanted[name] != found[name]:
            yield f"{name} of the {what} is not that of the checkout"
    for name in sorted(found.keys() - wanted.keys() - allowed):
        yield f"the {what} has {name}, which does not belong there"


def wheel_problems(files: Files, source: Path) -> Iterator[str]:
    """Yield what is wrong with the contents and the metadata of a wheel."""
    (info,) = {name.split("/")[0] for name in files if ".dist-info/" in name}
    allowed = {f"{info}/{name}" for name in DIST_INFO}
    for name in sorted(allowed - files.keys()):
        yield f"the wheel lacks {name}"
    wanted = {name: path.read_bytes() for path, name in packaged(source)}
    yield from contents_problems(wanted, files, allowed, "wheel")
    metadata = email.message_from_bytes(files.get(f"{info}/METADATA", b""))
    for line in metadata.get_all("Requires-Dist") or []:
        if line.lower().startswith(NEVER_REQUIRED):
            yield f"the wheel requires {line}, but must work with the vLLM that is installed"
    points = configparser.ConfigParser()
    points.read_string(files.get(f"{info}/entry_points.txt", b"").decode())
    for (group, name), target in ENTRY_POINTS.items():
        if points.get(group, name, fallback=None) != target:
            yield f"the wheel lacks the entry point {name} = {target} of {group}"


def sdist_problems(files: Files, source: Path) -> Iterator[str]:
    """Yield what is wrong with the contents of a source distribution."""
    wanted = {f"src/{name}": path.read_bytes() for path, name in packaged(source)}
    for name in BESIDE:
        if name != "PKG-INFO":
            wanted[name] = (source / name).read_bytes()
    egg = {name for name in files if name.startswith(f"src/{PACKAGE}.egg-info/")}
    yield from contents_problems(wanted, files, {*egg, "PKG-INFO", "setup.cfg"}, "sdist")


def version_problems(source: Path, version: str, tag: str | None) -> Iterator[str]:
    """Yield where the version of the distributions is not the one that the files or a tag say."""
    project = tomllib.loads((source / "pyproject.toml").read_text(encoding="utf-8"))
    init = (source / "conformance" / "__init__.py").read_text(encoding="utf-8")
    code = re.search(r'^__version__ = "(.+)"$', init, re.M)
    for where, said in (
        ("pyproject.toml", project["project"]["version"]),
        ("conformance/__init__.py", code and code[1]),
    ):
        if said != version:
            yield f"the distributions have version {version}, and {where} says {said}"
    changes = (source / "CHANGELOG.md").read_text(encoding="utf-8")
    section = re.search(rf"^## {re.escape(version)} \((.+)\)$", changes, re.M)
    if section is None:
        yield f"CHANGELOG.md has no section '## {version} (DATE)'"
    if tag is None:
        return
    if tag != f"v{version}":
        yield f"the tag is {tag}, and the version is {version}: the tag must be v{version}"
    if section is not None and not re.fullmatch(r"\d{4}-\d\d-\d\d", section[1]):
        yield f"CHANGELOG.md says '{section[1]}' of {version}: a release needs its date, YYYY-MM-DD"


def same_problems(files: Files, direct: Files) -> Iterator[str]:
    """Yield how a wheel that was built from the sdist differs from one built from the checkout."""
    for name in sorted(files.keys() | direct.keys()):
        if files.get(name) != direct.get(name):
            yield f"{name} differs between the wheels built from the sdist and from the checkout"


def problems(dist: Path, source: Path, direct: Path | None, tag: str | None) -> Iterator[str]:
    """Yield what is wrong with the distributions in `dist`."""
    wheels, sdists = list(dist.glob("*.whl")), list(dist.glob("*.tar.gz"))
    if len(wheels) != 1 or len(sdists) != 1:
        yield f"{dist} has {len(wheels)} wheels and {len(sdists)} sdists; it must have one of each"
        return
    files = of_wheel(wheels[0])
    yield from wheel_problems(files, source)
    yield from sdist_problems(of_sdist(sdists[0]), source)
    if direct is not None:
        (other,) = direct.glob("*.whl")
        yield from same_problems(files, of_wheel(other))
    yield from version_problems(source, wheels[0].name.split("-")[1], tag)


def main(arguments: list[str] | None = None) -> int:
    """Print each problem; return 1 if there are any."""
    parser = argparse.ArgumentParser(prog="python -m kvconform.dev.release")
    parser.add_argument("dist", type=Path, metavar="DIST")
    parser.add_argument("--source", type=Path, required=True, metavar="TREE")
    parser.add_argument("--direct", type=Path, metavar="DIR")
    parser.add_argument("--tag")
    given = parser.parse_args(arguments)
    found = list(problems(given.dist, given.source, given.direct, given.tag))
    for sentence in found:
        print(sentence)
    if not found:
        print(f"{given.dist}: the sdist and the wheel are complete, with nothing else in them")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
