# SPDX-License-Identifier: Apache-2.0
"""Downloads for the target's Python and platform: pip resolves, and says what it cannot find."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from kvconform.errors import EnvironmentProblem, UsageError
from kvconform.pack import wheels
from kvconform.pack.wheels import Part

OLDEST_GLIBC, NEWEST_GLIBC = 5, 39
"""Minor versions of glibc 2 that manylinux tags name."""
OLD_NAMES = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}


class Target(NamedTuple):
    """The Python that the pack is for."""

    python: str
    """Such as `3.12`."""
    platform: str
    """A wheel's platform tag, such as `manylinux_2_28_x86_64`."""

    def options(self, *, any_glibc: bool = False) -> list[str]:
        """Return pip's options for wheels that run there.

        pip takes a tag literally, so older ones are named, with `any_glibc` also newer ones.
        """
        glibc, machine = self.parts()
        newest = NEWEST_GLIBC if any_glibc else glibc
        tags = [f"manylinux_2_{n}_{machine}" for n in range(newest, OLDEST_GLIBC - 1, -1)]
        tags += [f"{old}_{machine}" for n, old in OLD_NAMES.items() if n <= newest]
        python = ["--python-version", self.python, "--implementation", "cp"]
        return [*python, "--only-binary=:all:", *(f"--platform={tag}" for tag in tags)]

    def parts(self) -> tuple[int, str]:
        """Return the minor version of glibc 2, and the machine. UsageError for other platforms."""
        found = re.fullmatch(r"manylinux_2_(\d+)_(\w+)", self.platform)
        if found is None:
            example = "manylinux_2_28_x86_64"
            raise UsageError(f"--platform {self.platform} is no tag such as {example}")
        return int(found[1]), found[2]

    def environment(self) -> dict[str, str]:
        """Return the environment that markers of requirements are evaluated in."""
        return {
            "sys_platform": "linux",
            "platform_system": "Linux",
            "os_name": "posix",
            "platform_machine": self.parts()[1],
            "python_version": self.python,
            "python_full_version": f"{self.python}.0",
            "extra": "",
        }


def download(
    requirements: Iterable[str], folder: Path, options: Sequence[str], links: Sequence[str] = ()
) -> list[Part]:
    """Download wheels into `folder`. EnvironmentProblem if there is no pip, or if it fails.

    `links`: folders or pages with wheels, in addition to the index that pip is set to.
    """
    if importlib.util.find_spec("pip") is None:
        raise EnvironmentProblem(
            "this Python has no pip, which downloads the parts of a pack: python -m ensurepip"
        )
    wanted = list(requirements)
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    command += ["download", "--quiet", "--dest", str(folder), *options]
    command += [f"--find-links={link}" for link in links]
    # pip would take what is on PYTHONPATH for installed.
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run([*command, *wanted], capture_output=True, text=True, env=env, check=False)
    if done.returncode:
        raise _problem(done.stderr, wanted)
    return [wheels.read(path) for path in sorted(folder.glob("*.whl"))]


def _problem(output: str, wanted: Sequence[str]) -> EnvironmentProblem | UsageError:
    """Return what pip's output says, in a sentence."""
    errors = [line for line in output.splitlines() if line.startswith("ERROR: ")]
    if re.search(r"(NewConnection|ConnectTimeout|NameResolution|MaxRetry|ConnectionError)", output):
        sentence = "the package index cannot be reached; --find-links names a folder with wheels"
        return EnvironmentProblem(f"pip cannot download {wanted[0]}: {sentence}", output)
    if found := re.search(r"No matching distribution found for (\S+)", output):
        [*_, newest] = re.findall(r"\(from versions: (?:.*, )?(\S+)\)", output) or ["none"]
        known = (
            "where there is no index, --find-links names a folder with wheels"
            if newest == "none"
            else f"the newest is {newest} (--python and --platform name others)"
        )
        sentence = f"pip finds no wheel of {found[1]} for this Python and platform; {known}"
        return UsageError(sentence, output)
    last = errors[-1].removeprefix("ERROR: ") if errors else "it says nothing"
    return EnvironmentProblem(f"pip cannot download {wanted[0]}: {last}", output)
