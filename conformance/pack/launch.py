# SPDX-License-Identifier: Apache-2.0
"""The pack's own program: unpack it for this Python, and run kvconform from it.

A pack has a copy of this file as `__main__.py`, so `python3 PACK run` works where nothing is
installed but torch. It must run alone, with the standard library only.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shlex
import shutil
import sys
import zipfile
import zlib
from pathlib import Path

MANIFEST = "pack.json"
SITE = "site"
TORCH = "torch"
"""What a target must have; builds of it for the CPU have no Triton."""
DAMAGED: tuple[type[Exception], ...] = (zipfile.BadZipFile, zlib.error)
"""What reading a damaged archive may raise."""
with contextlib.suppress(ImportError):
    import lzma

    DAMAGED += (lzma.LZMAError,)
ENVIRONMENT = 3
"""kvconform's exit status for a fault of the environment."""
STAND_IN = """\
from kvconform.pack.stand_in import install

install(__name__)
"""


class CannotUnpack(Exception):
    """The pack does not fit this Python; the message is a sentence."""


def main(pack: Path, words: list[str]) -> None:
    """Unpack `pack` unless that is done, and pass `words` on to kvconform.

    `unpack [DIR]` or `unpack --into DIR` only unpacks. Replaces this process, or ends it; status 3
    if it cannot unpack.
    """
    try:
        if words[:1] == ["unpack"]:
            into = words[2:] if words[1:2] == ["--into"] else words[1:]
            if len(into) != (len(words) > 1) or any(word.startswith("-") for word in into):
                raise CannotUnpack("write: unpack --into DIR")
            print(said(unpack(pack, Path(into[0]) if into else None)))
            return
        site = unpack(pack)
    except CannotUnpack as problem:
        print(f"kvconform: {problem}", file=sys.stderr)
        sys.exit(ENVIRONMENT)
    through = shlex.join([Path(sys.executable).name, str(pack), "run"])
    paths = [str(site), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {
        # Python may keep what it compiles of the pack: each new process would compile it again.
        **{name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"},
        "KVCONFORM_THROUGH": os.environ.get("KVCONFORM_THROUGH", through),
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONSAFEPATH": "1",
    }
    os.execve(sys.executable, [sys.executable, "-m", "kvconform", *words], env)


def said(site: Path) -> str:
    """Return what a person does with an unpacked pack, and what it has only the names of."""
    names = ", ".join(stand_ins(site)) or "none"
    return f"export PYTHONPATH={shlex.quote(str(site))}\n# stand-ins: {names}"


def stand_ins(site: Path) -> list[str]:
    """Return the packages of `site` that are stand-ins, sorted."""
    return sorted(path.parent.name for path in site.glob("*/__init__.py") if is_stand_in(path))


def is_stand_in(path: Path) -> bool:
    """Return whether a package's `__init__.py` was written by `unpack`."""
    return path.stat().st_size == len(STAND_IN) and path.read_text(encoding="utf-8") == STAND_IN


def unpack(pack: Path, site: Path | None = None) -> Path:
    """Unpack the wheels of `pack` into `site` [its folder `site`], unless that is done.

    Returns the folder. CannotUnpack if the pack is not for this Python and its torch.
    """
    pack = pack.resolve()
    site = (site or pack / SITE).resolve()
    if not (pack / MANIFEST).is_file():
        raise CannotUnpack(f"{pack} is no pack: it has no {MANIFEST}")
    text = (pack / MANIFEST).read_text(encoding="utf-8")
    try:
        manifest = json.loads(text)
    except ValueError:
        raise CannotUnpack(f"{pack / MANIFEST} is damaged; copy it again") from None
    check(manifest)
    if has(site, text):
        return site
    wheels = sorted(pack.glob("*.whl"))
    if len(wheels) != len(manifest["parts"]):
        fewer = len(wheels) < len(manifest["parts"])
        advice = "copy it again" if fewer else "copy it to a folder without those of another pack"
        raise CannotUnpack(f"{pack} has not the wheels that its {MANIFEST} names; {advice}")
    new = site.with_name(f".{site.name}.{os.getpid()}.new")
    try:
        for wheel in wheels:
            extract(wheel, new)
        for module in manifest["stand_ins"]:
            if not (new / module).exists() and importlib.util.find_spec(module) is None:
                (new / module).mkdir()
                (new / module / "__init__.py").write_text(STAND_IN, encoding="utf-8")
        (new / MANIFEST).write_text(text, encoding="utf-8")
        if (site / MANIFEST).is_file() and not has(site, text):
            shutil.rmtree(site)
        os.rename(new, site)
    except DAMAGED as error:
        raise CannotUnpack(f"{pack} is damaged ({error}); copy it again") from None
    except OSError as error:
        another_was_faster = has(site, text)
        if not another_was_faster:
            advice = f"name another folder: python3 {pack} unpack --into DIR"
            raise CannotUnpack(f"{site} cannot be written ({error.strerror}); {advice}") from None
    finally:
        shutil.rmtree(new, ignore_errors=True)
    return site


def has(site: Path, manifest: str) -> bool:
    """Return whether the pack with this manifest is unpacked in `site`."""
    stamp = site / MANIFEST
    return stamp.is_file() and stamp.read_text(encoding="utf-8") == manifest


def check(manifest: dict) -> None:
    """CannotUnpack if this Python is not the pack's, lacks lzma, or has no torch or an old one."""
    here = "{}.{}".format(*sys.version_info)
    if here != manifest["python"]:
        raise CannotUnpack(f"the pack is for Python {manifest['python']}, and this is {here}")
    if importlib.util.find_spec("_lzma") is None:
        raise CannotUnpack(f"{sys.executable} was built without lzma, which unpacking needs")
    for name, oldest in manifest["there"].items():
        version = version_of(name)
        if version is None and name == TORCH:
            raise CannotUnpack(f"{sys.executable} has no {name}, and no pack has it")
        if version is not None and numbers(version) < numbers(oldest):
            raise CannotUnpack(f"{name} {version} is too old: the pack needs {oldest} or later")
    for name in manifest["have"]:
        if version_of(name) is None:
            raise CannotUnpack(
                f"{sys.executable} has no {name}, which the pack leaves out;"
                " make the pack with --have and the pip list of this Python"
            )


def version_of(name: str) -> str | None:
    """Return the version of a distribution that this Python has, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def numbers(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def extract(wheel: Path, site: Path) -> None:
    """Put the packages of a wheel into `site`; its scripts and headers are left out."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            data, _, rest = name.partition(".data/")
            kind, _, inside = rest.partition("/")
            if not rest or "/" in data:
                archive.extract(name, site)
            elif kind in ("purelib", "platlib") and inside and not name.endswith("/"):
                target = site / inside
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(archive.read(name))


if __name__ == "__main__":
    main(Path(__file__).resolve().parent, sys.argv[1:])
