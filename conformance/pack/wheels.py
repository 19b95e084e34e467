# SPDX-License-Identifier: Apache-2.0
"""Wheels: what they require, vLLM's without its compiled parts, and kvconform's own."""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import os
import tomllib
import zipfile
from collections.abc import Iterable, Iterator
from email.parser import Parser
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import kvconform
from kvconform.errors import UsageError
from kvconform.pack.compiled import STABLE, Capability, is_kept, thinned

NOT_PYTHON = (
    ".so", ".cubin", ".h", ".cuh", ".cu", ".hpp", ".inl", ".cpp", ".jpg", ".js", ".css", "/vllm-rs"
)  # fmt: skip
"""Ends of files of vLLM's wheel that its Python code does not need in a run of kvconform."""

TESTS = "kvconform_tests"
"""Folder of the kernels' tests next to the package kvconform."""
RIGS = ("compiling.py", "drawn.py", "places.py")
"""Files of tests/rigs that the kernels' tests need."""
LARGE = 200_000
"""Bytes of a file that LZMA is worth its time for."""


class Part(NamedTuple):
    """One wheel of a pack."""

    path: Path
    name: str
    version: str
    requires: list[Requirement]
    """All of its requirements, also those of extras and of other platforms."""

    @property
    def size(self) -> int:
        """Bytes of the wheel."""
        return self.path.stat().st_size


def read(path: Path) -> Part:
    """Return a wheel with its name, version and requirements."""
    with zipfile.ZipFile(path) as archive:
        inside = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        fields = Parser().parsestr(archive.read(inside).decode("utf-8"), headersonly=True)
    requires = [Requirement(each) for each in fields.get_all("Requires-Dist") or ()]
    return Part(path, canonicalize_name(fields["Name"]), fields["Version"], requires)


def strip(part: Part, folder: Path, capability: Capability | None = None) -> Part:
    """Write vLLM's wheel without compiled parts, sources in C++ and pictures to `folder`.

    `capability`: of the GPU for which compiled parts are kept. UsageError if there are none.
    """
    with zipfile.ZipFile(part.path) as archive:
        names = archive.namelist()
        if capability is not None and not any(fnmatch(name, f"vllm/{STABLE}") for name in names):
            raise UsageError(
                f"the compiled parts of {part.name} {part.version} need the torch that they were"
                " built with; leave --capability out"
            )

        def entries() -> Iterator[tuple[str, bytes]]:
            for name in names:
                if not name.endswith((*NOT_PYTHON, "/", ".dist-info/RECORD")):
                    yield name, archive.read(name)
                elif capability is not None and is_kept(name):
                    library = thinned(archive.read(name), capability)
                    if library is not None:
                        yield name, library
                    elif fnmatch(name, f"vllm/{STABLE}"):
                        raise UsageError(
                            f"{part.name} {part.version} has no code for a GPU of capability"
                            f" {'.'.join(map(str, capability))}; leave --capability out"
                        )

        return part._replace(path=write(folder, part.name, part.version, entries()))


def copy(part: Part, folder: Path) -> Part:
    """Write a wheel with the same content, compressed as far as zipfile can, to `folder`."""
    path = folder / part.path.name
    with zipfile.ZipFile(part.path) as archive, zipfile.ZipFile(path, "w") as new:
        for name in archive.namelist():
            _add(new, name, archive.read(name))
    return part._replace(path=path)


def own(folder: Path) -> Part:
    """Write kvconform's wheel, from the files that this process imports, to `folder`."""
    version = kvconform.__version__
    information = f"kvconform-{version}.dist-info"

    def entries() -> Iterator[tuple[str, bytes]]:
        for name, path in files(Path(kvconform.__file__).parent):
            yield f"kvconform/{name}", path.read_bytes()
        for name, path in kernel_tests():
            yield f"{TESTS}/{name}", path.read_bytes()
        needs = (f"Requires-Dist: {each}\n" for each in own_requirements())
        metadata = f"Metadata-Version: 2.1\nName: kvconform\nVersion: {version}\n{''.join(needs)}"
        yield f"{information}/METADATA", metadata.encode("utf-8")
        yield f"{information}/entry_points.txt", entry_points().encode("utf-8")

    return read(write(folder, "kvconform", version, entries()))


def project() -> dict[str, Any] | None:
    """Return the table `project` of the checkout that this process runs from; None without one.

    An installed checkout has the metadata of the day on which it was installed.
    """
    file = Path(kvconform.__file__).resolve().parent.parent / "pyproject.toml"
    return tomllib.loads(file.read_text(encoding="utf-8"))["project"] if file.is_file() else None


def own_requirements() -> list[str]:
    """Return what kvconform requires; those of an installation include its extras."""
    checkout = project()
    if checkout is not None:
        return list(checkout["dependencies"])
    return importlib.metadata.requires("kvconform") or []


def entry_points() -> str:
    """Return the content of kvconform's `entry_points.txt`."""
    checkout = project()
    if checkout is None:
        return importlib.metadata.distribution("kvconform").read_text("entry_points.txt") or ""
    groups = {"console_scripts": checkout["scripts"], **checkout["entry-points"]}
    return "\n".join(
        f"[{group}]\n" + "".join(f"{name} = {place}\n" for name, place in points.items())
        for group, points in groups.items()
    )


def kernel_tests() -> list[tuple[str, Path]]:
    """Return (path in their folder, file) of the kernels' tests and what they need.

    They are those of the checkout, or those of the pack, that this process runs from. Empty if it
    runs from neither.
    """
    package = Path(kvconform.__file__).resolve().parent
    for folder in (package.parent / "tests", package.parent / TESTS):
        if (folder / "kernels").is_dir():
            rigs = [(f"rigs/{name}", folder / "rigs" / name) for name in RIGS]
            return [*files(folder / "kernels", "kernels/"), *rigs]
    return []


def files(root: Path, inside: str = "") -> Iterator[tuple[str, Path]]:
    """Yield (path in the package, file) of all files below `root`; links are followed."""
    for entry in sorted(root.iterdir()):
        if entry.is_dir():
            if entry.name != "__pycache__":
                yield from files(entry, f"{inside}{entry.name}/")
        else:
            yield f"{inside}{entry.name}", entry


def write(folder: Path, name: str, version: str, entries: Iterable[tuple[str, bytes]]) -> Path:
    """Write a wheel for every platform with these files and its RECORD; return its path."""
    stem = f"{name.replace('-', '_')}-{version}"
    path = folder / f"{stem}-py3-none-any.whl"
    wheel = "Wheel-Version: 1.0\nGenerator: kvconform\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    record = f"{stem}.dist-info/RECORD"
    lines = [f"{record},,"]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for inside, data in entries:
            if inside == f"{stem}.dist-info/WHEEL":
                continue
            _add(archive, inside, data)
            lines.append(_line(inside, data))
        archive.writestr(f"{stem}.dist-info/WHEEL", wheel)
        lines.append(_line(f"{stem}.dist-info/WHEEL", wheel.encode("utf-8")))
        archive.writestr(record, "\n".join(lines) + "\n")
    return path


def _add(archive: zipfile.ZipFile, inside: str, data: bytes) -> None:
    """Write a file; LZMA, which pip reads as well, makes large libraries a third smaller."""
    kind = zipfile.ZIP_LZMA if len(data) > LARGE else zipfile.ZIP_DEFLATED
    archive.writestr(inside, data, kind, 9)


def _line(inside: str, data: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    quoted = f'"{inside}"' if "," in inside else inside
    return f"{quoted},sha256={digest},{len(data)}"


def total(folder: Path) -> int:
    """Return the bytes of all files below `folder`."""
    return sum(
        (Path(top) / name).stat().st_size for top, _, names in os.walk(folder) for name in names
    )
