# SPDX-License-Identifier: Apache-2.0
"""Tests of the adapter `llvmlite-names`.

With the adapter, vLLM's CPU platform can look through a process that has imported llvmlite.
Without it, or with a defective one, the process fails, as a run would.

Needs llvmlite, which vLLM itself installs on most machines.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from program_rig import forked_python

pytest.importorskip("llvmlite", reason="llvmlite is not installed: pip install llvmlite")
pytest.importorskip(
    "vllm.triton_utils.dispatcher",
    reason="this vLLM does not look through the modules of its process",
)

IMPORT = "import llvmlite.binding\n"
LOOK = """
from vllm.triton_utils.dispatcher import _rebind_kernels
_rebind_kernels([(object(), object())])
print("looked through")
"""
ADAPTER = "from kvconform.adapters.llvmlite_names import ADAPTER\nADAPTER.install()\n"
BROKEN = "from kvconform.adapters import llvmlite_names as broken\n"


@pytest.fixture
def said(tmp_path: Path) -> Callable[[str], str]:
    """Return what a process of its own says: the adapter changes it for good."""
    return lambda program: forked_python(IMPORT + program, tmp_path)[1]


def test_vllm_looks_through_all_modules(said: Callable[[str], str]) -> None:
    assert "looked through" in said(ADAPTER + LOOK)


def test_it_is_needed(said: Callable[[str], str]) -> None:
    """Fails when llvmlite or vLLM repairs it: then the adapter can go."""
    assert "looked through" not in said(LOOK)


def test_one_that_lets_all_names_through_is_noticed(said: Callable[[str], str]) -> None:
    let = "broken._plain = lambda getattr_of: getattr_of\nbroken.ADAPTER.install()\n"
    assert "looked through" not in said(BROKEN + let + LOOK)


SYMBOL = """
import llvmlite.binding as binding
binding.parse_assembly("define i32 @f() { ret i32 7 }").verify()
print("compiled")
"""


def test_real_symbols_are_found_and_one_that_denies_them_is_noticed(
    said: Callable[[str], str],
) -> None:
    assert "compiled" in said(ADAPTER + SYMBOL)
    deny = """
def nothing(getattr_of):
    def denied(self, name):
        raise AttributeError(name)
    return denied
broken._plain = nothing
broken.ADAPTER.install()
"""
    assert "compiled" not in said(BROKEN + deny + SYMBOL)
