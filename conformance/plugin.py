# SPDX-License-Identifier: Apache-2.0
"""The pytest plugin (entry point `pytest11`). Loaded by every pytest run where kvconform is installed, so it imports nothing heavy and does
nothing until `--connector` is given."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--connector` switches the plugin on."""
    group = parser.getgroup("kvconform", "conformance of vLLM KV connectors (pytest --pyargs kvconform --connector ...)")
    group.addoption("--connector", metavar="PKG.MOD:CLASS", help="judge this KV connector (or a name registered in vLLM's factory)")
