# SPDX-License-Identifier: Apache-2.0
"""Directories of the checkout and of the tests."""

from pathlib import Path

RIGS = Path(__file__).resolve().parent
TESTS = RIGS.parent
ROOT = TESTS.parent
BAD_CONNECTORS = RIGS / "bad_connectors"
