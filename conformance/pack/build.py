# SPDX-License-Identifier: Apache-2.0
"""Builds a pack: selects its parts, writes the folder, and keeps it below the limit."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from kvconform import files
from kvconform.compat.installed import NEWEST, OLDEST
from kvconform.contract.requirement import version_key
from kvconform.errors import UsageError
from kvconform.pack import fetch, launch, wheels
from kvconform.pack.compiled import Capability
from kvconform.pack.fetch import Target
from kvconform.pack.wheels import Part

MEGABYTE = 1_000_000
OLDEST_PYTHON = (3, 11)


class Parts(NamedTuple):
    """What `parts.toml` says."""

    imported: list[str]
    """Distributions that vLLM imports when kvconform drives it."""
    left_out: list[str]
    """Distributions that others require and nothing imports."""
    computing: list[str]
    """Distributions that vLLM imports when it computes with its compiled parts."""
    stand_ins: dict[str, str]
    """Modules that are stood in for, with the distribution that has each."""
    there: dict[str, str]
    """Distributions that the target has, with the oldest version of each."""


def parts() -> Parts:
    """Return the content of `parts.toml`."""
    text = (resources.files(__package__) / "parts.toml").read_text(encoding="utf-8")
    return Parts(**tomllib.loads(text))


class Pack(NamedTuple):
    """A finished pack."""

    parts: list[Part]
    size: int
    """Bytes of the folder."""


def build(
    vllm: str,
    folder: Path,
    target: Target,
    *,
    have: Mapping[str, str],
    most: float,
    links: Sequence[str] = (),
    capability: Capability | None = None,
) -> Pack:
    """Write the pack for a vLLM release to `folder`, which must be new, empty, or an older pack.

    `have`: distributions of the target with their versions. `most`: megabytes. `capability`: of the
    GPU for which it has vLLM's compiled parts; None: it has none. UsageError if the pack is larger,
    or if the folder is not its own.
    """
    check(vllm, target, folder, most)
    rules = parts()
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        new, loaded, engine = (scratch / each for each in ("new", "loaded", "engine"))
        for each in (new, loaded, engine):
            each.mkdir()
        wanted = ["--no-deps", *target.options(any_glibc=True)]
        [whole] = fetch.download([f"vllm=={vllm}"], engine, wanted, links)
        chosen = [wheels.own(new), wheels.strip(whole, new, capability)]
        needed = [plain(each) for each in ours() if applies(each, target)]
        needed += requirements(whole, rules.imported, target)
        found = fetch.download(needed, loaded, target.options(), links)
        if capability is not None:
            # Not their requirements: torch, with gigabytes of libraries, is there.
            more = scratch / "more"
            more.mkdir()
            named = requirements(whole, rules.computing, target, always=True)
            found += fetch.download(named, more, ["--no-deps", *target.options()], links)
        absent = lacking(found, [*chosen, *found], have, target)
        for part in absent:
            if part.name not in {*rules.there, *rules.left_out}:
                chosen.append(wheels.copy(part, new))
        packed = {part.name for part in chosen}
        manifest = {
            "kvconform": chosen[0].version,
            "vllm": whole.version,
            "python": target.python,
            "platform": target.platform,
            "capability": ".".join(map(str, capability)) if capability is not None else None,
            "there": rules.there,
            "have": sorted({part.name for part in found} & have.keys() - packed - {*rules.there}),
            "parts": {part.name: part.version for part in chosen},
            "stand_ins": {
                module: distribution
                for module, distribution in rules.stand_ins.items()
                if distribution not in packed
            },
        }
        files.replace(new / launch.MANIFEST, json.dumps(manifest, indent=1) + "\n")
        shutil.copyfile(launch.__file__, new / "__main__.py")
        size = wheels.total(new)
        if size > most * MEGABYTE:
            raise UsageError(too_big(chosen, size, most))
        if folder.exists():
            shutil.rmtree(folder)
        folder.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(new, folder)
    moved = [part._replace(path=folder / part.path.name) for part in chosen]
    return Pack(sorted(moved, key=lambda part: -part.size), size)


def check(vllm: str, target: Target, folder: Path, most: float) -> None:
    """UsageError for what cannot be packed, or if `folder` holds something else."""
    if not re.fullmatch(r"\d+(\.\d+)+\S*", vllm):
        raise UsageError(f"--vllm {vllm} is no release such as 0.32.0")
    if version_key(vllm) < version_key(OLDEST):
        raise UsageError(f"--vllm {vllm} is too old: kvconform supports {OLDEST} to {NEWEST}")
    if not most > 0:
        raise UsageError(f"--max-mb {most:g} is no size")
    if not re.fullmatch(r"3\.\d+", target.python):
        raise UsageError(f"--python {target.python} is no Python such as 3.12")
    if tuple(map(int, target.python.split("."))) < OLDEST_PYTHON:
        oldest = ".".join(map(str, OLDEST_PYTHON))
        raise UsageError(f"--python {target.python} is too old: kvconform needs {oldest} or later")
    target.parts()
    files.check_writable("--out", folder)
    if folder.is_dir() and any(folder.iterdir()) and not (folder / launch.MANIFEST).is_file():
        raise UsageError(f"--out {folder} has files that are no pack; name another folder")


def requirements(
    vllm: Part, names: Sequence[str], target: Target, *, always: bool = False
) -> list[str]:
    """Return the distributions among `names` that vLLM requires, as pip requirements.

    `always`: also those that it does not require, in any version.
    """
    theirs = {
        str(canonicalize_name(each.name)): each for each in vllm.requires if applies(each, target)
    }
    known = [plain(theirs[name]) for name in names if name in theirs]
    return known + [name for name in names if always and name not in theirs]


def ours() -> list[Requirement]:
    """Return what kvconform requires."""
    return [Requirement(each) for each in wheels.own_requirements()]


def plain(requirement: Requirement) -> str:
    """Return a requirement without its extras and its marker."""
    return f"{requirement.name}{requirement.specifier}"


def applies(requirement: Requirement, target: Target) -> bool:
    """Return whether a requirement counts on the target, without extras."""
    return requirement.marker is None or requirement.marker.evaluate(target.environment())


def lacking(
    found: Iterable[Part], requiring: Sequence[Part], have: Mapping[str, str], target: Target
) -> list[Part]:
    """Return the parts that the target has not, or in a version that another part refuses."""
    limits: dict[str, list[Requirement]] = {}
    for part in requiring:
        for each in part.requires:
            if applies(each, target):
                limits.setdefault(canonicalize_name(each.name), []).append(each)
    return [
        part
        for part in found
        if part.name not in have
        or not all(
            each.specifier.contains(have[part.name], prereleases=True)
            for each in limits.get(part.name, ())
        )
    ]


def read_have(path: Path) -> dict[str, str]:
    """Return the distributions of a file with the output of `pip list`, or of `pip freeze`.

    UsageError if there is no such file, or nothing in it.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UsageError(f"--have {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"--have {path} is no text in UTF-8") from None
    rows = (re.fullmatch(r"([A-Za-z0-9][\w.-]*)(?:\s+|==)(\d[^\s]*).*", line) for line in lines)
    found = {str(canonicalize_name(row[1])): row[2] for row in rows if row is not None}
    if not found:
        raise UsageError(f"--have {path} has no lines such as `numpy 2.5.2` (pip list)")
    return found


def too_big(chosen: Iterable[Part], size: int, most: float) -> str:
    """Return the sentence about a pack above its limit, with its five biggest parts."""
    biggest = sorted(chosen, key=lambda part: -part.size)[:5]
    named = ", ".join(f"{part.name} {megabytes(part.size)}" for part in biggest)
    advice = "--have names what the target has, --max-mb allows more"
    return f"the pack has {megabytes(size)}, more than {most:g} MB ({named}); {advice}"


def megabytes(size: int) -> str:
    """Return a number of bytes for people."""
    return f"{size / MEGABYTE:.1f} MB"
