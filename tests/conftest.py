# SPDX-License-Identifier: Apache-2.0
"""The order of the tests."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those that run the whole program come first: with several processes, one that begins last is waited for."""
    items.sort(key=lambda item: item.get_closest_marker("e2e") is None)
