# SPDX-License-Identifier: Apache-2.0
"""Test that vLLM is imported in the environment that kvconform.compat.environment sets."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("vllm")

CODE = """
import importlib, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "vllm":
            print("kvconform.compat.environment" in sys.modules)
            raise SystemExit

sys.meta_path.insert(0, Finder())
importlib.import_module(sys.argv[1])
"""


@pytest.mark.parametrize(
    "module",
    ["kvconform.run.case", "kvconform.snapshots.record", "kvconform.compat.vllm_api"],
)
def test_the_environment_is_set_before_vllm_is_imported(module: str) -> None:
    """A CUDA build on a machine without a GPU otherwise has no platform."""
    asked = [sys.executable, "-c", CODE, module]
    said = subprocess.run(asked, check=True, capture_output=True, text=True).stdout
    assert said.split() == ["True"]
