# SPDX-License-Identifier: Apache-2.0
"""Check that all nodes of a cluster have the versions of this machine, before anything runs.

This module imports little: on a node, the packages that kvconform needs may be missing.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import platform
from dataclasses import dataclass

NEEDED = (
    "vllm",
    "torch",
    "jinja2",
    "packaging",
    "psutil",
    "pydantic",
    "pytest",
    "ruamel.yaml",
    "safetensors",
)
"""Modules that a worker imports and that do not travel."""


@dataclass(frozen=True)
class Node:
    """What a node has. `missing`: modules that it lacks; versions are then unknown ("")."""

    python: str
    missing: tuple[str, ...] = ()
    vllm: str = ""
    torch: str = ""


def look() -> Node:
    """Return what this machine has."""
    python = ".".join(platform.python_version_tuple()[:2])
    missing = tuple(name for name in NEEDED if not _exists(name))
    if missing:
        return Node(python, missing)
    installed = importlib.import_module("kvconform.compat.installed")
    return Node(python, (), str(installed.vllm_version()), importlib.metadata.version("torch"))


def _exists(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def difference(here: Node, name: str, node: Node) -> str | None:
    """Return a sentence about how a node differs from this machine, or None."""
    if node.missing:
        return (
            f"node {name} of the Ray cluster lacks {', '.join(node.missing)}: install there"
            " what this machine has (vLLM, and the dependencies of kvconform)"
        )
    pairs = (
        ("Python", here.python, node.python),
        ("vLLM", here.vllm, node.vllm),
        ("torch", here.torch, node.torch),
    )
    for package, own, other in pairs:
        if own != other:
            return (
                f"node {name} of the Ray cluster has {package} {other} and this machine"
                f" {own}: results would differ, so install the same on all"
            )
    return None
